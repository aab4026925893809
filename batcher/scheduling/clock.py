"""The engine's clocks: the index of the step, and its start time.

A step lasts 1.0 seconds, as long as a formula computes, or as long as it takes on the wall.  An
idle engine's clock jumps to the next arrival; a jump is not a step.
"""

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

from batcher.errors import InvariantError
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

STEP_SECONDS = 1.0
MAX_LINGER, LINGER_SHARE = 0.003, 0.3  # seconds, and the share of the previous step


class BatchStats(NamedTuple):
    """What a step computes; see StepTime for the first four fields."""

    num_tokens: int
    num_sequences: int
    kv_read: int
    prefill_work: int


def one_second(stats: BatchStats) -> float:  # noqa: ARG001 - as other clocks need it
    return STEP_SECONDS


class Clock:
    """Counts steps and keeps their start times, 8 bytes a step.

    step: the index of the current step.  now: its start time in seconds.
    settings: reproduce the times; ready for JSON; {} if every step lasts 1.0 seconds.
    max_kept: keep at least the last max_kept / 2 and at most max_kept starts; None keeps all.
    Older steps and times cannot be looked up then.
    """

    step: int
    now: float
    settings: dict[str, Any]

    def __init__(self, max_kept: int | None = None) -> None:
        self.step = 0
        self.now = 0.0
        self._starts = array("d", [0.0])
        self._first, self._max_kept = 0, max_kept  # the first step that is kept

    def estimate(self, stats: BatchStats) -> float:
        """Return the expected seconds of a step that computes `stats`."""
        raise NotImplementedError

    def advance(self, stats: BatchStats | None) -> None:
        """Move to the next step, after one that computed `stats` (None if not measured)."""
        raise NotImplementedError

    def jump(self, time: float) -> None:
        """Start the current step at `time`, or at the next possible time after it.

        Raises:
            InvariantError: `time` is not later than now.
        """
        raise NotImplementedError

    def start_of(self, step: int) -> float:
        """Return the start time of `step`, which is at most the current one."""
        return self._starts[step - self._first]

    def step_at(self, time: float) -> int:
        """Return the first step that starts at or after `time`, which is at most now."""
        return self._first + bisect_left(self._starts, time)

    def start_at(self, step: int, time: float) -> None:
        """Start with `step` at `time`, after steps of another engine.  Call it first.

        The earlier steps count as equally long.
        """
        self.step, self.now = step, time
        self._starts = array("d", (time * number / step for number in range(step)))
        self._starts.append(time)

    def _begin_step(self, now: float) -> None:
        self.step += 1
        self.now = now
        self._starts.append(now)
        if len(self._starts) == self._max_kept:
            num_forgotten = self._max_kept // 2
            del self._starts[:num_forgotten]
            self._first += num_forgotten

    def _move(self, now: float) -> None:
        if now <= self.now:
            raise InvariantError(f"the clock cannot jump from {self.now} to {now}")
        self.now = self._starts[-1] = now


class ConstantClock(Clock):
    """A clock whose steps last 1.0 seconds.

    Start times between two jumps are an arithmetic progression, so one (time, step) pair per jump
    is enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings = {}
        self._first_times = array("d", [0.0])
        self._first_steps = array("q", [0])
        self._jumped_to, self._jumped_at = 0.0, 0  # time and step of the last jump

    def estimate(self, stats: BatchStats) -> float:
        return one_second(stats)

    def advance(self, stats: BatchStats | None) -> None:  # noqa: ARG002 - see Clock
        self.step = step = self.step + 1
        self.now = self._jumped_to + (step - self._jumped_at) * STEP_SECONDS

    def start_of(self, step: int) -> float:
        run = -1  # usually the steps since the last jump
        if step < self._first_steps[-1]:
            run = bisect_right(self._first_steps, step) - 1
        return self._first_times[run] + (step - self._first_steps[run]) * STEP_SECONDS

    def jump(self, time: float) -> None:
        self._move(time)
        self._set_off(self.step, time)

    def step_at(self, time: float) -> int:
        if time <= self._first_times[0]:
            return 0
        run = bisect_right(self._first_times, time) - 1
        start, first = self._first_times[run], self._first_steps[run]
        step = first + ceil((time - start) / STEP_SECONDS)
        if start + (step - first) * STEP_SECONDS < time:  # the division rounded down
            step += 1
        elif start + (step - 1 - first) * STEP_SECONDS >= time:  # or rounded up
            step -= 1
        is_last_run = run + 1 == len(self._first_steps)
        return step if is_last_run else min(step, self._first_steps[run + 1])

    def start_at(self, step: int, time: float) -> None:
        self.step, self.now = step, time
        self._set_off(step, time)

    def _set_off(self, step: int, time: float) -> None:
        self._jumped_to, self._jumped_at = time, step
        self._first_times.append(time)
        self._first_steps.append(step)


class FormulaClock(Clock):
    """A clock whose steps last as long as a StepTime computes, in whole ticks.

    ticks: now, exactly.
    """

    def __init__(self, step_time: StepTime, max_kept: int | None = None) -> None:
        super().__init__(max_kept)
        self.ticks = 0
        self.settings = {"name": step_time.name, **step_time.settings}
        self._step_ticks = step_time.ticks

    def estimate(self, stats: BatchStats) -> float:
        return self._step_ticks(*stats) / TICKS_PER_SECOND

    def advance(self, stats: BatchStats | None) -> None:
        if stats is None:
            raise InvariantError("nobody has measured what the step computed")
        self.ticks += self._step_ticks(*stats)
        self._begin_step(self.ticks / TICKS_PER_SECOND)

    def start_at(self, step: int, time: float) -> None:
        super().start_at(step, time)
        self.ticks = ticks_until(time)

    def jump(self, time: float) -> None:
        self.ticks = ticks_until(time)
        self._move(self.ticks / TICKS_PER_SECOND)


class PacedClock(FormulaClock):
    """A FormulaClock in real time: each step ends when its time has come on the wall.

    After a computation that takes longer, the next steps are shorter until the clock has caught up.

    measure, sleep: as time.monotonic and time.sleep.
    """

    def __init__(
        self,
        step_time: StepTime,
        max_kept: int | None = None,
        measure: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(step_time, max_kept)
        self._measure, self._sleep = measure, sleep
        self._started = measure()

    def start_at(self, step: int, time: float) -> None:
        super().start_at(step, time)
        self._started = self._measure() - time

    def elapsed(self) -> float:
        return self._measure() - self._started

    def advance(self, stats: BatchStats | None) -> None:
        super().advance(stats)
        self._wait(self.now)

    def jump(self, time: float) -> None:
        super().jump(time)
        self._wait(self.now)

    def linger(self) -> None:
        """Pause to let readers see the last step, without delaying the end of this one."""
        step_seconds = self.now - self._starts[-2] if len(self._starts) > 1 else 0.0
        self._wait(self.now + min(MAX_LINGER, step_seconds * LINGER_SHARE))

    def _wait(self, until: float) -> None:
        while (left := until - self.elapsed()) > 0:
            self._sleep(left)


class WallClock(Clock):
    """A clock of the wall time since the first arrival; it sleeps until later ones.

    measure, sleep: as time.monotonic and time.sleep.
    """

    def __init__(
        self,
        measure: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        max_kept: int | None = None,
    ) -> None:
        super().__init__(max_kept)
        self.settings = {"name": "wall"}
        self._measure, self._sleep = measure, sleep
        self._started: float | None = None
        self._last_seconds = 0.0

    def start_at(self, step: int, time: float) -> None:
        super().start_at(step, time)
        self._started = self._measure() - time

    def estimate(self, stats: BatchStats) -> float:  # noqa: ARG002 - see Clock
        return self._last_seconds

    def advance(self, stats: BatchStats | None) -> None:  # noqa: ARG002 - see Clock
        began = self.now
        self._begin_step(max(self.elapsed(), began))
        self._last_seconds = self.now - began

    def jump(self, time: float) -> None:
        while (left := time - self.elapsed()) > 0:
            self._sleep(left)
        self._move(max(self.elapsed(), time))

    def catch_up(self) -> None:
        """Start the current step now, since nothing has run in it."""
        elapsed = self.elapsed()
        if elapsed > self.now:
            self._move(elapsed)

    def step_at(self, time: float) -> int:
        self.elapsed()  # start to count at the first arrival
        return super().step_at(time)

    def elapsed(self) -> float:
        """Return the seconds since the first call."""
        measured = self._measure()
        if self._started is None:
            self._started = measured
        return measured - self._started


def ticks_until(time: float) -> int:
    """Return the number of whole ticks until `time`, rounded up."""
    numerator, denominator = time.as_integer_ratio()
    return -(-numerator * TICKS_PER_SECOND // denominator)  # rounded up
