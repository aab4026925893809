"""The view of a run that a terminal allows: a picture, or a plain line of progress now and then."""

import os
import sys
import time
from collections.abc import Callable

from .live_state import Moment, RunState, long_step, plain_line
from .terminal import (
    ColorChoice,
    Pace,
    Terminal,
    can_animate,
    encoding_of,
    is_dumb,
    keyboard_of,
    printable,
    wants_color,
)
from .view import Gauges, LiveChoice, RunPlan, View

PLAIN_INTERVAL = 5.0
"""Seconds from one plain progress line to the next."""


class ProgressLines(View):
    """A plain line of progress every few seconds, for a log or a screen reader.

    None for a short run.
    """

    def __init__(
        self,
        plan: RunPlan,
        gauges: Gauges,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._plan = plan._replace(title=printable(plan.title))
        self._gauges, self._clock = gauges, clock
        self._run = RunState(plan.batch_size, plan.num_workers)
        self.fold = self._run.fold
        self.paces = self._run.paces
        self._started = clock()
        self._next_line = self._next_long_line = self._started + PLAIN_INTERVAL
        self._long_step, self._long_since = -1, self._started
        self._last = (-1, 0, self._started)  # step, tokens and time of the line before

    def after_step(self, step: int) -> None:
        """Write a line, if it is time to."""
        now = self._clock()
        if now >= self._next_line:
            self._next_line = now + PLAIN_INTERVAL
            self._run.catch_up()
            self._write_line(step, now)
        else:
            self._run.keep_up()

    def keep_up(self) -> None:
        """Take in what is known by now, if it is much; see View."""
        self._run.keep_up()

    def still_computing(self, step: int) -> None:
        """Write a line about a step that takes longer than from one line to the next."""
        now = self._clock()
        if step != self._long_step:
            self._long_step, self._long_since = step, now
            self._next_long_line = now + PLAIN_INTERVAL
        if now >= self._next_long_line:
            self._next_long_line = now + PLAIN_INTERVAL
            taken, total = long_step(step, now - self._long_since), self._plan.total
            of_total = "" if total is None else f" of {total:,}"
            done = f"{self._run.num_done:,}{of_total} done"
            self.write_message(f"{self._plan.title}, {taken}, {done}\n")

    def _write_line(self, step: int, now: float) -> None:
        num_tokens = self._run.num_tokens(step)
        last_step, last_tokens, last_time = self._last
        self._last = (step, num_tokens, now)
        num_new = num_tokens - last_tokens
        rate, speed = num_new / max(1, step - last_step), num_new / max(now - last_time, 1e-9)
        moment = Moment(step, num_tokens, rate, speed, now - self._started)
        line = plain_line(self._run, self._plan, self._gauges.read_gauges(), moment)
        self.write_message(f"{printable(line)}\n")


def open_view(
    plan: RunPlan,
    gauges: Gauges,
    *,
    live: LiveChoice,
    is_quiet: bool,
    color: ColorChoice,
    pace: Pace | None,
    is_piped: bool,
    has_others: bool,
    has_stdin: bool,
) -> View:
    """Return the view of a run that stderr allows and `live` asks for.

    pace: what keys may change; None if nobody may hold the run.  is_piped: results go to another
    program, which may well write to the same terminal, across a picture; has_others: somebody else
    writes to the terminal that shows the picture, results or a model; has_stdin: nobody else reads
    from stdin, so it is there for keys.
    """
    fd, environ = sys.stderr.fileno(), os.environ
    encoding = encoding_of(sys.stderr.encoding, environ)
    terminal = Terminal(fd, encoding, wants_color(color, fd, environ), environ)
    if is_quiet or live == "never":
        return View(terminal)
    is_plain = live == "auto" and (is_piped or not can_animate(fd, environ))
    if live == "plain" or is_plain or is_dumb(environ):
        return ProgressLines(plan, gauges, terminal)
    from .live import InlineLive, LiveView, ScreenLive  # noqa: PLC0415 - with it comes rich

    display = InlineLive(terminal) if has_others else ScreenLive(terminal)
    keyboard = keyboard_of(terminal) if has_stdin else None
    return LiveView(plan, gauges, terminal, display, pace=pace, keyboard=keyboard)
