"""What may be shown of a run while it runs, and which view suits the terminal and the person."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Literal, Self

from .terminal import (
    ColorChoice,
    Terminal,
    can_animate,
    encoding_of,
    is_dumb,
    wants_color,
)

if TYPE_CHECKING:
    from batcher.events import RequestEvent
    from batcher.timeline.fold import RequestFold

    from .live.facts import LiveGauges, RunPlan

LiveChoice = Literal["auto", "always", "plain", "never"]


class View:
    """Shows nothing of a run but messages; other views show more.

    A view is closed when it is left as a context.
    is_watched: whether it has to be told of events and steps.
    lock: keeps what is drawn in another thread apart from what feeds the fold.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.is_watched = type(self) is not View
        self.lock: AbstractContextManager[object] = nullcontext()

    def share_fold(self) -> "RequestFold | None":
        """Return what this view reads the sequences of the run from; None if it reads none.

        Others may read it, too, and then feed it: under `lock`, and before `observe`.
        """
        return None

    def observe(self, events: "Sequence[RequestEvent]") -> None:
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


def open_view(
    plan: "RunPlan",
    gauges: "LiveGauges",
    *,
    live: LiveChoice,
    is_quiet: bool,
    color: ColorChoice,
    every_step: bool,
    is_piped: bool,
    has_others: bool,
) -> View:
    """Return the view of a run that stderr allows and `live` asks for.

    every_step: the run is slowed down so that each step can be seen; is_piped: results go to
    another program, which may well write to the same terminal, across a picture; has_others:
    somebody else writes to the terminal that shows the picture, results or a model.
    """
    fd, environ = sys.stderr.fileno(), os.environ
    encoding = encoding_of(sys.stderr.encoding, environ)
    terminal = Terminal(fd, encoding, wants_color(color, fd, environ), environ)
    if is_quiet or live == "never":
        return View(terminal)
    is_plain = live == "auto" and (is_piped or not can_animate(fd, environ))
    if live == "plain" or is_plain or is_dumb(environ):
        from .progress_lines import ProgressLines  # noqa: PLC0415 - a quiet run does without

        return ProgressLines(plan, gauges, terminal)
    from .live.display import InlineLive, ScreenLive  # noqa: PLC0415 - with them rich
    from .live.driver import LiveView  # noqa: PLC0415 - as above

    display = InlineLive(terminal) if has_others else ScreenLive(terminal)
    return LiveView(plan, gauges, terminal, display, every_step=every_step)
