"""What a view learns of a run between two steps."""

from types import SimpleNamespace

from batcher.engine.outcome import StepOutcome
from cli.running.answers import Answers
from cli.running.loop import Loop


def test_a_line_that_was_read_ahead_is_next():
    queue = SimpleNamespace(peek=lambda _now: None)
    engine = SimpleNamespace(
        now=0.0,
        wants_request=False,
        num_pending=0,
        has_work=True,
        step=lambda: StepOutcome([], [], []),
        scheduler=SimpleNamespace(queue=queue),
    )
    line = SimpleNamespace(id="a")
    source = SimpleNamespace(upcoming="b", has_ended=False, input_index=0, next=lambda: line)
    loop = Loop(engine, source, Answers(None))
    next(iter(loop))
    assert loop.next_up == "a"
