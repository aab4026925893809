"""The choice of a view for a run: a picture, plain lines of progress, or messages only."""

import sys

from .terminal import (
    ColorChoice,
    Pace,
    Terminal,
    can_animate,
    encoding_of,
    is_dumb,
    keyboard_of,
    wants_color,
)
from .view import Gauges, LiveChoice, RunPlan, View


def open_view(
    plan: RunPlan,
    gauges: Gauges,
    *,
    live: LiveChoice,
    is_quiet: bool,
    color: ColorChoice,
    pace: Pace | None = None,
    is_piped: bool = False,
    has_others: bool = False,
    has_stdin: bool = False,
) -> View:
    """Return the view of a run that stderr allows and `live` asks for.

    is_piped: the results go to another program, which may also write to the terminal.  has_others:
    something else writes to it.  has_stdin: stdin is free for keys.  pace: of the run, for keys;
    None if the run cannot be paused.
    """
    fd = sys.stderr.fileno()
    terminal = Terminal(fd, encoding_of(sys.stderr.encoding), wants_color(color, fd))
    if is_quiet or live == "never":
        return View(terminal)
    is_plain = live == "auto" and (is_piped or not can_animate(fd))
    if live == "plain" or is_plain or is_dumb():
        from .live_state import ProgressLines  # noqa: PLC0415 - not for a quiet run

        return ProgressLines(plan, gauges, terminal)
    from .live import InlineLive, LiveView, ScreenLive  # noqa: PLC0415 - imports rich

    display = InlineLive(terminal) if has_others else ScreenLive(terminal)
    keyboard = keyboard_of(terminal) if has_stdin else None
    return LiveView(plan, gauges, terminal, display, pace=pace, keyboard=keyboard)
