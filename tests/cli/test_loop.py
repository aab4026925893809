"""What a view learns of a run between two steps, and what is handed out without one."""

from types import SimpleNamespace

from batcher.engine import StepOutcome
from batcher.request import Request
from batcher.requests.lines import BadLine, ParsedLine
from cli.run import loop
from cli.run.loop import Loop
from cli.run.results import Answers


def test_a_line_that_was_read_ahead_is_next():
    engine = SimpleNamespace(
        now=0.0,
        wants_request=False,
        num_pending=0,
        has_work=True,
        step=lambda: StepOutcome([], [], []),
        first_waiting=None,
        last_start=0.0,
    )
    line = ParsedLine(Request(id="a", prompt="x", arrival_time=1))
    source = SimpleNamespace(has_ended=False, input_index=0, next=lambda: line)
    run = Loop(engine, source, Answers("m", bytes))
    next(iter(run))
    assert run.next_up is None, "it has not arrived"
    engine.last_start = 1.0
    assert run.next_up == "a"


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
