"""What may be shown of a run while it runs: nothing but messages, or a line now and then."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from batcher.events import RequestEvent

from .cells import printable
from .live.facts import Gauges, Moment, Plan, long_step, plain_line
from .live.state import RunState
from .terminal import Terminal

PLAIN_INTERVAL = 5.0
"""Seconds from one plain progress line to the next."""


class View:
    """Shows nothing of a run but messages; other views show more.

    A view is closed when it is left as a context.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def observe(self, events: Sequence[RequestEvent]) -> None:
        """Take in what happened in the step that is being made."""

    def after_step(self, step: int, num_queued: int | None) -> None:
        """Show how things stand after `step`, if it is time to.

        num_queued: how many requests wait, None if nobody knows.
        """

    def still_computing(self, step: int) -> None:
        """Show that the run still computes `step`; another thread than the run's may call this."""

    def refresh(self) -> float:
        """Show what is not shown yet, for the run is about to wait or waits.

        Return the seconds after which there will be something more to show, 0 for never.
        """
        return 0.0

    def step_aside(self) -> None:
        """Leave the terminal to somebody else; a signal handler may call this."""

    def write_message(self, text: str) -> None:
        """Write whole lines for people, where they spoil nothing; if nobody can read them, none."""
        with suppress(OSError):
            self._terminal.write(text)

    def close(self) -> None:
        """Show the end and let go of the terminal.

        More calls do nothing, and a signal handler may make one.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProgressLines(View):
    """A plain line of progress every few seconds, for a log or a screen reader.

    None for a short run.
    """

    def __init__(
        self,
        plan: Plan,
        gauges: Gauges,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._plan = plan._replace(title=printable(plan.title))
        self._gauges, self._clock = gauges, clock
        self._run = RunState(plan.batch_size)
        self._started = clock()
        self._next_line = self._started + PLAIN_INTERVAL
        self._long_step, self._long_since = -1, self._started
        self._last = (-1, 0, self._started)  # step, tokens and time of the line before

    def observe(self, events: Sequence[RequestEvent]) -> None:
        """Take in what happened in the step that is being made."""
        self._run.observe(events)

    def after_step(self, step: int, num_queued: int | None) -> None:
        """Write a line, if it is time to."""
        now = self._clock()
        if now >= self._next_line:
            self._next_line = now + PLAIN_INTERVAL
            self._write_line(step, num_queued, now)

    def still_computing(self, step: int) -> None:
        """Write a line about a step that takes long, if it is time to."""
        now = self._clock()
        if step != self._long_step:
            self._long_step, self._long_since = step, now
        if now >= self._next_line:
            self._next_line = now + PLAIN_INTERVAL
            taken = long_step(step, now - self._long_since)
            self.write_message(f"{self._plan.title}, {taken}\n")

    def _write_line(self, step: int, num_queued: int | None, now: float) -> None:
        num_tokens = self._run.num_tokens(step)
        last_step, last_tokens, last_time = self._last
        self._last = (step, num_tokens, now)
        num_new = num_tokens - last_tokens
        rate, speed = num_new / max(1, step - last_step), num_new / max(now - last_time, 1e-9)
        moment = Moment(step, num_queued, num_tokens, rate, speed, now - self._started)
        line = plain_line(self._run, self._plan, self._gauges, moment)
        self.write_message(f"{printable(line)}\n")
