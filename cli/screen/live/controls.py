"""What a person does to a run that is shown: looks around in it, holds it, ends it."""

from collections.abc import Sequence

from ...run.signals import stop_by_key
from ..keyboard import Keyboard, Pasted
from ..pace import Pace
from ..view import Gauges
from .browser import BROWSING_KEYS, Browser, help_lines
from .facts import GAP
from .scene import Scene
from .theme import LABEL, Line, line_width

PACE_KEYS = (
    ("space", "pause, or go on"),
    (".", "one step, and pause"),
    ("-, +", "slower, faster"),
)
QUIT_KEYS = (("q", "end the run, as Ctrl-C does"),)
TYPING_HINTS = ("enter find  escape cancel",)
HINTS = ("space pause  . step  / find  ? keys  q end", "/ find  ? keys  q end", "? keys")
ROOM_FOR_HINT = 16
"""In fewer lines there is no line that says which keys there are."""


class Controls:
    """The keys of a run: they change where one looks, and its pace.

    pace: None for a run that nobody may hold.
    """

    def __init__(self, keyboard: Keyboard, pace: Pace | None, gauges: Gauges) -> None:
        self.keyboard, self.browser = keyboard, Browser(gauges.find_upcoming, gauges.knows_upcoming)
        self._pace = pace

    def obey(self, scene: Scene) -> bool:
        """Do what keys ask for that were pressed since; return whether there were any."""
        keys = self.keyboard.pressed()
        for key in keys:
            if isinstance(key, Pasted):
                self.browser.paste(key.text)
                continue
            is_known = self.browser.press(key, scene)
            if not is_known and self._pace is not None:
                is_known = self._pace.press(key)
            if key == "q" and not is_known:
                stop_by_key()
        return bool(keys)

    def overlay(self, width: int) -> Sequence[Line]:
        """Return what the keys do, if somebody wants to know."""
        if not self.browser.has_help:
            return ()
        return help_lines([PACE_KEYS if self._pace else (), BROWSING_KEYS, QUIT_KEYS], width)

    def has_footer(self, height: int) -> bool:
        """Return whether a picture of so many lines is to have one that is `footer`."""
        is_held = self._pace is not None and self._pace.is_slow
        return is_held or self.browser.is_used or height >= ROOM_FOR_HINT

    def footer(self, scene: Scene, width: int) -> Line:
        """Return a line on where one looks, how the run is held and which keys there are."""
        line, pace = self.browser.line(scene, width), self._pace
        if pace is not None and pace.is_slow:
            style = "paused" if pace.is_paused else ""
            _add(line, [str(pace), "paused"] if pace.is_paused else [str(pace)], style, width)
        hints: Sequence[str] = HINTS if pace is not None else HINTS[1:]
        if self.browser.is_typing:
            hints = TYPING_HINTS
        _add(line, hints, LABEL, width, is_right=True)
        return line


def _add(
    line: Line, texts: Sequence[str], style: str, width: int, *, is_right: bool = False
) -> None:
    """Add the first of `texts` that `line` has room for, at the end of `width` if `is_right`."""
    for text in texts:
        gap = len(GAP) if line else 0
        spare = width - line_width(line) - len(text)
        if spare >= gap:
            line += [(" " * (spare if is_right else gap), ""), (text, style)]
            return
