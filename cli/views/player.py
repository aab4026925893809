"""The player of `batchdecode trace --play`: keys in, a frame out, steps at a person's pace.

Rule: a frame is of the step that time and keys say; frames may be left out, and steps never wait
for them.
"""

import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, floor
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.trace.timeline import MAX_STEPS

from ..screen.live import ScreenLive
from ..screen.live_picture import Browser, help_lines, picture, prompt_line
from ..screen.terminal import (
    ColorChoice,
    InputLine,
    Keyboard,
    Pasted,
    Terminal,
    can_print,
    cut_middle,
    encoding_of,
    is_same_terminal,
    number,
    printable,
    wants_color,
)
from ..screen.theme import ASCII, LABEL, UNICODE, Glyphs, Line, bar, line_width
from .recording import Playback, Recording

READING_SECONDS = 0.3
"""An input that takes longer to read says how far it is, and again after as long."""
DEFAULT_SPEED = 10.0
SPEEDS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4)
"""Steps a second, that `-` and `+` choose from."""
FRAME_SECONDS = 0.05  # from one frame to the next, at least
MAX_SHARE = 0.5  # how much of the time frames take at most
MIN_BAR, MAX_BAR = 10, 40
WIDEST = 1000  # a line that is cut to what there is
MIN_HEIGHT = 4  # in fewer lines there is nothing below the picture
MAX_SECONDS = 1.0  # no more time passes at once: while the process was stopped, nobody has looked
IDLE_SECONDS = 0.1
"""After so long it is looked whether the terminal has another size, or is ours again."""
JUMP, PAGE = 10, 100
MOVES = {
    ".": 1,
    "right": 1,
    ",": -1,
    "left": -1,
    ">": JUMP,
    "<": -JUMP,
    "page-down": PAGE,
    "page-up": -PAGE,
    "home": -MAX_STEPS,
    "end": MAX_STEPS,
}
"""How many steps on keys go."""

KEYS = (
    ("space", "pause, or play on"),
    (". or right", "one step on, and pause"),
    (", or left", "one step back, and pause"),
    ("< and >", f"{JUMP} steps back, on"),
    ("page up, down", f"{PAGE} steps back, on"),
    ("home, end", "the first step, the last one"),
    ("g", "go to a step"),
    ("- and +", "slower, faster: steps a second, however long each took"),
    ("r", "play the other way"),
    ("[ and ]", "the preemption, failure or worst bubble before, after this"),
    ("/", "find where a request is admitted, by its id or a part of it"),
    ("N and n", "the admission found before, after this"),
    ("up, down", "scroll through the slots, a row each; escape shows all"),
    ("?", "these keys, or the run again"),
    ("q", "quit"),
)
HINTS = ("space pause  , . step  / find  ? keys  q quit", "? keys  q quit", "? keys", "?")


class TerminalGone(Exception):  # noqa: N818 - nobody is left to call it an error
    """There is no keyboard any more, or nothing to draw on."""


class StepRange(NamedTuple):
    """The steps that are played, from the first to the last of them."""

    first: int
    last: int

    def clip(self, step: float) -> float:
        return min(max(step, self.first), self.last)


class Player:
    """Shows a recording in a terminal that is all its own, as keys and time say.

    title: the name of the run.  span: the steps that are played.  step: the first one shown.
    speed: in steps per second.  found: the admissions that were looked for, label by step.
    """

    def __init__(
        self,
        recording: Recording,
        title: str,
        terminal: Terminal,
        keyboard: Keyboard,
        display: ScreenLive,
        glyphs: Glyphs,
        *,
        span: StepRange,
        step: int,
        speed: float = DEFAULT_SPEED,
        found: Mapping[int, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recording, self._terminal, self._keyboard = recording, terminal, keyboard
        self._display, self._glyphs, self._span, self._clock = display, glyphs, span, clock
        self._playback = Playback(recording, title, glyphs)
        self._browser = Browser()
        self._position = float(span.clip(step))
        self._speed, self._direction, self._is_paused = speed, 1, False
        self._found = found
        self._wanted = found.get(self.step)  # the label that is shown among the slots
        self._prompt: InputLine | None = None
        self._message = ""
        self._has_help = self.is_over = False
        self._shown: object = None  # what the last frame was of
        self._now = self._next_frame = clock()

    @property
    def step(self) -> int:
        return floor(self._position) if self._direction > 0 else ceil(self._position)

    def look(self) -> float:
        """Do what keys and time ask for; return the seconds after which to look again."""
        now = self._clock()
        self._play(min(now - self._now, MAX_SECONDS))
        self._now = now
        for key in self._keyboard.pressed():
            if not isinstance(key, Pasted):
                self._press(key)
            elif self._prompt is not None:
                self._prompt.paste(key.text)
            self._shown = None
        if self._keyboard.is_gone:
            raise TerminalGone
        size = self._terminal.size
        if self._terminal.is_ours and now >= self._next_frame:
            shown = size, self.step
            if shown != self._shown:
                self._draw(size.columns - 1, size.lines - 1)
                self._shown = shown
                end = self._clock()
                self._next_frame = end + max(FRAME_SECONDS, (end - now) * (1 / MAX_SHARE - 1))
        return IDLE_SECONDS if self._is_paused else FRAME_SECONDS

    def wait(self, seconds: float) -> None:
        self._keyboard.wait(seconds)

    def step_aside(self) -> None:
        self._display.step_aside()
        self._keyboard.release()
        self._shown = None

    def _play(self, seconds: float) -> None:
        if self._is_paused or self._prompt is not None:
            return
        self._position += self._direction * self._speed * seconds
        end = self._span.last if self._direction > 0 else self._span.first
        if (self._position - end) * self._direction >= 0:
            self._go_to(end)

    def _go_to(self, step: float) -> None:
        self._position, self._is_paused = float(self._span.clip(step)), True

    def _press(self, key: str) -> None:
        prompt = self._prompt
        if prompt is not None:
            if not prompt.press(key):
                self._prompt = None
            return
        self._message = ""
        match key:
            case " ":
                self._is_paused = not self._is_paused
                end = self._span.last if self._direction > 0 else self._span.first
                if not self._is_paused and self.step == end:  # from the other end
                    self._position = float(sum(self._span) - end)
            case "+" | "=":  # which is one key, with shift and without
                self._speed = next((more for more in SPEEDS if more > self._speed), self._speed)
            case "-":
                less = (less for less in reversed(SPEEDS) if less < self._speed)
                self._speed = next(less, self._speed)
            case "r":
                self._position, self._direction = float(self.step), -self._direction
            case "[" | "]":
                nothing = "no preemption, failure or bubble"
                self._go_along(self._recording.points, nothing, is_on=key == "]")
            case "/":
                self._prompt = InputLine("find ", self._find)
            case "n" | "N":
                steps, nothing = sorted(self._found), "no admission that was found"
                if self._go_along(steps, nothing, is_on=key == "n"):
                    self._wanted = self._found[self.step]
            case "g":
                self._prompt = InputLine("go to step ", self._go_where)
            case "up" | "down":
                self._browser.press(key, self._playback.scene)
            case "escape":
                self._has_help, self._wanted = False, None
                self._browser.press(key, self._playback.scene)
            case "?":
                self._has_help = not self._has_help
            case "q":
                self.is_over = True
            case _ if key in MOVES:
                self._go_to(self.step + MOVES[key])
            case _:
                pass

    def _go_along(self, steps: Sequence[int], nothing: str, *, is_on: bool) -> bool:
        """Go to the next of `steps`, or the one before; return whether there is one."""
        first, last = bisect_left(steps, self._span.first), bisect_right(steps, self._span.last)
        at = bisect_right(steps, self.step) if is_on else bisect_left(steps, self.step) - 1
        self._is_paused = True
        if first <= at < last:
            self._go_to(steps[at])
            return True
        self._message = f"{nothing} {'after' if is_on else 'before'} step {self.step:,}"
        return False

    def _find(self, text: str) -> None:
        if not text:
            return
        self._found = self._recording.find(text)
        steps = sorted(self._found)
        if steps:
            self._go_to(steps[bisect_left(steps, self.step) % len(steps)])
            self._wanted = self._found.get(self.step)
        else:
            self._message = f"no request with {printable(text)} in its id was admitted"

    def _go_where(self, text: str) -> None:
        digits = text.strip().replace(",", "")
        if digits.isdecimal() and self._span.first <= int(digits[:18]) <= self._span.last:
            self._go_to(int(digits))
        elif digits:
            first, last = self._span
            self._message = f"{printable(text)} is no step from {first:,} to {last:,}"

    def _draw(self, width: int, height: int) -> None:
        width, height = max(width, 1), max(height, 1)
        below = [self._footer(width)] if height >= MIN_HEIGHT else []
        room = height - 2 * len(below)
        if self._has_help:
            keys = help_lines([KEYS], WIDEST)
            lines = [[], *(_cut(line, width, self._glyphs) for line in keys)]
        else:
            scene = self._playback.seek(self.step)
            self._browser.found = self._wanted  # anew for each step: it may hold another slot
            self._browser.follow(scene)
            lines = picture(scene, width, room, has_gantt=True, browser=self._browser)
        if below:
            note = self._browser.line(self._playback.scene, width)
            below.insert(0, _cut(note, width, self._glyphs))
        lines = [*lines[:room], *[[]] * (room - len(lines)), *below]
        if self._display.show(lines) is not None:
            raise TerminalGone

    def _footer(self, width: int) -> Line:
        if self._prompt is not None:
            line = prompt_line(self._prompt, self._playback.scene, width)
            return _cut(line, width, self._glyphs)
        pace = "paused" if self._is_paused else f"{number(self._speed)} steps/s"
        back = " back" if self._direction < 0 else ""
        line = [(f"{pace}{back}", "figure")]
        where = f"  {self.step:,}/{self._span.last:,}"
        if self._message:
            line += [(where, ""), ("  ", ""), (self._message, "blocked")]
            return _cut(line, width, self._glyphs)
        spare = width - line_width(line) - len(where)
        hint = next((hint for hint in HINTS if len(hint) + 4 <= spare), "")
        room = min(spare - len(hint) - 4, MAX_BAR)
        if room >= MIN_BAR:
            share = (self.step - self._span.first) / max(self._span.last - self._span.first, 1)
            line += [("  ", ""), *bar(share, room, self._glyphs, "progress")]
        line.append((where, ""))
        spare = width - line_width(line) - len(hint)
        return _cut([*line, (" " * max(spare, 0), ""), (hint, LABEL)], width, self._glyphs)


def _cut(line: Line, width: int, glyphs: Glyphs) -> Line:
    found: Line = []
    for text, style in line:
        room = width - line_width(found)
        if room < 1:
            break
        found.append((cut_middle(text, room, glyphs.cut), style))
    return found


class Quit(Exception):  # noqa: N818 - a wish, and no error
    """A person wants no more while the input is read."""


class InteractiveTerminal:
    """The terminal that stdout is, with a person at its keyboard."""

    def __init__(self, color: ColorChoice) -> None:
        environ, encoding = os.environ, encoding_of(sys.stdout.encoding, os.environ)
        self.output = Terminal(os.dup(1), encoding, wants_color(color, 1, environ), environ)
        self.glyphs: Glyphs = UNICODE if can_print(encoding) else ASCII
        self.display = ScreenLive(self.output)
        keyboard_fd = 0
        if not is_same_terminal(0, self.output.fd):  # it is that of the session
            try:
                keyboard_fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise BatchdecodeError(
                    "--play needs a keyboard: stdin is something else, and /dev/tty cannot be "
                    f"opened: {error.strerror}"
                ) from error
        self.keyboard = Keyboard(keyboard_fd, self.output)
        self._next_frame = time.monotonic() + READING_SECONDS

    def with_progress(self, events: Iterable[Event], name: str) -> Iterator[Event]:
        for num_events, event in enumerate(events, 1):
            yield event
            if time.monotonic() >= self._next_frame:
                if "q" in self.keyboard.pressed():
                    raise Quit
                if self.output.is_ours:
                    room = max(self.output.size.columns - len("  q quit") - 1, 1)
                    text = printable(f"reading {name}: {num_events:,} events")
                    told = cut_middle(text, room, self.glyphs.cut)
                    self.display.show([[(told, ""), ("  q quit", LABEL)]])
                self._next_frame = time.monotonic() + READING_SECONDS

    def step_aside(self) -> None:
        self.display.step_aside()
        self.keyboard.release()

    def close(self) -> None:
        self.keyboard.release()
        if self.display.is_started:
            self.display.close([])
