"""Which view of a run suits the terminal and the person."""

import os
import sys
from typing import Literal

from cli.screen.terminal import ColorChoice, Terminal, can_animate, wants_color
from cli.screen.view import ProgressLines, View

LiveChoice = Literal["auto", "always", "never"]


def open_view(
    *,
    live: LiveChoice,
    is_quiet: bool,
    color: ColorChoice,
    title: str,
    batch_size: int,
    total: int | None,
    every_step: bool,
    is_piped: bool,
) -> View:
    """Return the view of a run that stderr allows and `live` asks for.

    title: what is being run; total: how many requests there are, None if nobody knows;
    every_step: the run is slowed down so that each step can be seen; is_piped: results go to
    another program, which may well write to the same terminal, across a picture.
    """
    fd, environ = sys.stderr.fileno(), os.environ
    terminal = Terminal(fd, sys.stderr.encoding, wants_color(color, fd, environ), environ)
    if is_quiet or live == "never":
        return View(terminal)
    if live == "auto" and (is_piped or not can_animate(fd, environ)):
        return ProgressLines(title=title, batch_size=batch_size, total=total, terminal=terminal)
    from cli.screen.live import LiveView  # noqa: PLC0415 - other views start faster

    return LiveView(
        title=title,
        batch_size=batch_size,
        total=total,
        terminal=terminal,
        every_step=every_step,
    )
