"""How far a comparison is: a bar on a terminal, else a plain line now and then, on stderr.

Rule: what is over soon says nothing.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from .run.problems import say
from .screen.terminal import can_animate, counted, unfinished_percent

LARGE_GRID = 100  # cells: more are announced
LINE_INTERVAL = 5.0  # seconds

P = ParamSpec("P")
OnDone = Callable[[float], object]
"""Called with how many are done, a part of one counted as such."""


def seldom(text: Callable[P, str], interval: float | None = None) -> Callable[P, None]:
    """Return what says the `text` of how far it is, at most every `interval` seconds.

    interval: None for LINE_INTERVAL.
    """
    pause = LINE_INTERVAL if interval is None else interval
    due = time.monotonic() + pause

    def show(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + pause
            say(f"{text(*args, **kwargs)}\n")

    return show


@contextmanager
def progress_of(total: int, num_jobs: int, *, quiet: bool) -> Iterator[OnDone]:
    """Give what shows how many of `total` cells are done; a large grid is announced."""
    if quiet:
        yield lambda _: None
        return
    if total > LARGE_GRID:
        say(f"{counted(total, 'cell')}, {num_jobs} at a time\n")
    if not can_animate(2, os.environ):
        cells = counted(total, "cell")
        yield seldom(
            lambda done: f"{int(done):,} of {cells}, {unfinished_percent(done / total)} of the work"
        )
        return
    from rich import progress  # noqa: PLC0415 - only on a terminal
    from rich.console import Console  # noqa: PLC0415 - as above

    with progress.Progress(
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        "cells",
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
