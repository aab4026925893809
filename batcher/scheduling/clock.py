"""The engine's clock: which step it is, and what time that step starts.

A step lasts 1.0 seconds.  When the engine is idle the clock jumps to the next arrival; a jump is
not a step.
"""

from array import array
from bisect import bisect_right
from math import ceil

from batcher.errors import InvariantError

STEP_SECONDS = 1.0


class Clock:
    """Counts steps and knows when each of them started.

    step: the current one.  now: when it starts, in seconds.

    Between two jumps start times are an arithmetic progression, so one (time, step) pair a jump
    holds them all.
    """

    __slots__ = ("_first_steps", "_first_times", "now", "step")

    def __init__(self) -> None:
        self.step = 0
        self.now = 0.0
        self._first_times = array("d", [0.0])
        self._first_steps = array("q", [0])

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1
        self.now = self.start_of(self.step)

    def start_of(self, step: int) -> float:
        """Return when `step`, which is not later than the current one, started."""
        run = -1  # nearly always: the steps since the last jump
        if step < self._first_steps[-1]:
            run = bisect_right(self._first_steps, step) - 1
        return self._first_times[run] + (step - self._first_steps[run]) * STEP_SECONDS

    def jump(self, time: float) -> None:
        """Let the current step start at `time`.

        Raises:
            InvariantError: `time` is not later than now.
        """
        if time <= self.now:
            raise InvariantError(f"the clock cannot jump from {self.now} to {time}")
        self.now = time
        self._first_times.append(time)
        self._first_steps.append(self.step)

    def step_at(self, time: float) -> int:
        """Return the first step that starts at or after `time`, which is not later than now."""
        if time <= self._first_times[0]:
            return 0
        run = bisect_right(self._first_times, time) - 1
        start, first = self._first_times[run], self._first_steps[run]
        step = first + ceil((time - start) / STEP_SECONDS)
        if start + (step - first) * STEP_SECONDS < time:  # the division was rounded down,
            step += 1
        elif start + (step - 1 - first) * STEP_SECONDS >= time:  # or up
            step -= 1
        is_last_run = run + 1 == len(self._first_steps)
        return step if is_last_run else min(step, self._first_steps[run + 1])
