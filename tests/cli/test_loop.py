"""What a view learns of a run between two steps, and what is handed out without one."""

from types import SimpleNamespace

from batcher.requests.lines import BadLine
from cli.run import loop
from cli.run.loop import Loop


def test_bad_lines_are_handed_out_before_too_many_wait():
    num_lines = 3 * loop.MAX_HELD + 5
    lines = iter([BadLine("x", [SimpleNamespace(code="no", line=i)]) for i in range(num_lines)])
    source = SimpleNamespace(
        has_ended=True, input_index=0, next=lambda: next(lines, None), took=bool
    )
    engine = SimpleNamespace(
        now=0.0, num_steps=0, wants_request=True, num_pending=0, has_work=False
    )
    answers = SimpleNamespace(reject=lambda line, index: None)
    outcomes = [*Loop(engine, source, answers, keep_going=True)]
    assert [len(outcome.events) for outcome in outcomes] == [*[loop.MAX_HELD] * 3, 5]
