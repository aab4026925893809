"""What may be shown of a run while it runs: nothing but messages, or a line now and then."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from batcher.events import RequestEvent
from cli.screen.cells import printable
from cli.screen.live_header import Moment, facts, progress_line
from cli.screen.live_state import RunState
from cli.screen.terminal import Terminal

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
    """A plain line of progress every few seconds, for a log; none for a short run."""

    def __init__(
        self,
        *,
        title: str,
        batch_size: int,
        total: int | None,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._title, self._total, self._clock = printable(title), total, clock
        self._run = RunState(batch_size)
        self._started = clock()
        self._next_line = self._started + PLAIN_INTERVAL
        self._last = (-1, 0)  # the step of the line before, and the tokens after it

    def observe(self, events: Sequence[RequestEvent]) -> None:
        """Take in what happened in the step that is being made."""
        self._run.observe(events)

    def after_step(self, step: int, num_queued: int | None) -> None:
        """Write a line, if it is time to."""
        now = self._clock()
        if now >= self._next_line:
            self._next_line = now + PLAIN_INTERVAL
            self._write_line(step, num_queued, now)

    def _write_line(self, step: int, num_queued: int | None, now: float) -> None:
        num_tokens = self._run.num_tokens(step)
        last_step, last_tokens = self._last
        self._last = (step, num_tokens)
        rate = (num_tokens - last_tokens) / max(1, step - last_step)
        moment = Moment(step, self._total, num_queued, rate, now - self._started)
        self.write_message(progress_line(self._title, facts(self._run, moment)) + "\n")
