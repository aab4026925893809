"""How far a comparison is: a bar on a terminal, else a plain line now and then, on stderr.

Rule: what is over soon says nothing.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from ..running.problems import say
from ..screen.cells import counted
from ..screen.terminal import can_animate

if TYPE_CHECKING:
    from rich.progress import Progress

LARGE_GRID = 100  # cells: more are announced
LINE_INTERVAL = 5.0  # seconds


class Silence:
    """A context in which it is shown how many cells are done; here, nothing is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, num_done: float) -> None:
        """Do nothing."""


class Lines(Silence):
    """Writes a line at most every `interval` seconds, LINE_INTERVAL if None.

    text: makes it of how many are done.
    """

    def __init__(self, text: Callable[[float], str], interval: float | None = None) -> None:
        self._text, self._interval = text, LINE_INTERVAL if interval is None else interval
        self._next = time.monotonic() + self._interval

    def show(self, num_done: float) -> None:
        """Write a line if it is time for one."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            say(f"{self._text(num_done)}\n")


class Bar(Silence):
    """Draws a bar, and takes it away at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        from rich.console import Console  # noqa: PLC0415 - only on a terminal
        from rich.progress import (  # noqa: PLC0415 - as above
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            "cells",
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.add_task("", total=self._total)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, num_done: float) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=num_done)


def progress_of(total: int, num_jobs: int, *, quiet: bool) -> Silence:
    """Return what shows the progress of `total` cells; a large grid is announced."""
    if quiet:
        return Silence()
    if total > LARGE_GRID:
        say(f"{counted(total, 'cell')}, {num_jobs} at a time\n")
    return (
        Bar(total)
        if can_animate(2, os.environ)
        else Lines(
            lambda done: (
                f"{int(done):,} of {counted(total, 'cell')}, {done / total:.0%} of the work"
            )
        )
    )
