"""The trace of a run with times on the wall is a log of its steps."""

import json

import msgspec
import numpy as np
import pytest
from engine_runs import drained
from numpy.testing import assert_allclose

from batcher import BatchdecodeError, Engine, Request, SimulatedModel
from batcher.events import StepsEvent
from batcher.scheduling.clock import ConstantClock, WallClock
from batcher.settings import SchedulingSettings
from batcher.timing.calibration import read_step_log, read_traced_steps


def traced(clock: object) -> list[tuple[int, bytes]]:
    """Return the numbered lines of a trace of four requests, two of which arrive late."""
    settings = SchedulingSettings(max_batch_tokens=6)
    engine = Engine(SimulatedModel(), 3, settings=settings, clock=clock)
    for number, size in enumerate([9, 2, 4, 5]):
        arrival = 40.0 if number > 1 else 0.0
        engine.add(Request(prompt=[5] * size, max_tokens=4, ignore_eos=True, arrival_time=arrival))
    events = [engine.run_event(), *drained(engine).events]
    return [*enumerate(map(msgspec.json.encode, events), 1)]


class Timer:
    """A clock that goes on by another bit each time that it is looked at."""

    now, num_looks = 0.0, 0

    def measure(self) -> float:
        self.num_looks += 1
        self.now += 0.25 * self.num_looks
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_steps_are_those_of_a_log_of_the_same_run() -> None:
    timer = Timer()
    lines = traced(WallClock(timer.measure, timer.sleep))
    log = read_traced_steps(lines, "t")
    told = [json.loads(text) for _, text in lines if b'"event":"steps"' in text]
    ends = [end for steps in told for end in steps["ends"]]
    gap = max(range(1, len(ends)), key=lambda step: ends[step] - ends[step - 1] - log.seconds[step])
    starts = [0.0, *ends[:-1]]
    starts[gap] = ends[gap] - log.seconds[gap]  # nothing was there to compute before
    assert starts[gap] >= 40
    assert_allclose(log.seconds, np.subtract(ends, starts))
    # Prompts of 9 and 2 tokens, 6 tokens a step, then those of 4 and 5; 4 tokens are generated.
    assert log.num_tokens.tolist() == [6, 5, 2, 2, 2, 6, 4, 2, 2, 1]
    assert log.prefill_work.tolist()[:2] == [36, 81 - 36 + 4]
    assert log.kv_read.tolist()[2:5] == [9 + 2, 10 + 3, 11 + 4]
    rows = zip(*(getattr(log, name).tolist() for name in log.__struct_fields__), strict=True)
    written = [
        (
            number,
            msgspec.json.encode(dict(zip(log.__struct_fields__, map(whole, row), strict=True))),
        )
        for number, row in enumerate(rows, 1)
    ]
    again = read_step_log(written, "again")
    for name in log.__struct_fields__:
        assert (getattr(again, name) == getattr(log, name)).all()


def whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"seconds"', b'"other"'), "its steps were not timed"),
        (
            lambda text: text.replace(b'"rows"', b'"x":' + b"[" * 5000 + b"]" * 5000 + b',"rows"'),
            "no line of a trace: maximum recursion depth exceeded",
        ),
        (lambda text: text.replace(b'"rows":[', b'"rows":[1,'), "lists of steps differ in length"),
        (lambda text: text[:-9], "no line of a trace"),
        (lambda text: text.replace(b'"steps"', b'"step"'), "no steps; a run with --profile wall"),
    ],
)
def test_a_trace_that_tells_no_times_is_an_error_of_one_line(change, message) -> None:
    timer = Timer()
    lines = [(n, change(text)) for n, text in traced(WallClock(timer.measure, timer.sleep))]
    with pytest.raises(BatchdecodeError, match=message) as caught:
        read_traced_steps(lines, "t")
    assert "\n" not in str(caught.value)


def test_other_clocks_tell_nothing_of_seconds() -> None:
    for _, text in traced(ConstantClock()):
        if b'"event":"steps"' in text:
            assert msgspec.json.decode(text, type=StepsEvent).seconds is None
            assert b"kv_read" not in text
