"""The player of `batchdecode trace --play`: the live view of a recorded run at any of its steps.

Time and keys choose the step.  A slow terminal gets fewer frames; the steps keep their pace.
"""

import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from signal import SIGHUP
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.trace.timeline import MAX_STEPS

from ..screen.live import ScreenLive
from ..screen.live_picture import Browser, picture
from ..screen.live_state import GAP
from ..screen.terminal import (
    ColorChoice,
    InputLine,
    Keyboard,
    Pasted,
    Terminal,
    can_print,
    encoding_of,
    fill,
    is_same_terminal,
    number,
    printable,
    progress_bar,
    wants_color,
)
from ..screen.theme import ASCII, LABEL, UNICODE, Glyphs, Line, bar, line_width
from ..signals import Interrupted, StopSignals, user_code_prints_to_stderr
from .recording import Playback, Recording

DEFAULT_SPEED = 10.0
SPEEDS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4)
FRAME_SECONDS = 0.05  # between frames, at least
MAX_SHARE = 0.5  # of the time, spent on frames
MIN_BAR, MAX_BAR = 10, 40
MIN_HEIGHT = 4  # lines; with fewer there is no footer
MAX_SECONDS = 1.0  # of play between two looks: the process may have been stopped
IDLE_SECONDS = 0.1
CAPTION_SECONDS = 3.0  # for which a new caption holds the play
MAX_CAPTION = 2  # lines
READ_EVENTS = 1000  # between updates of the bar
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

KEYS = (
    ("space", "pause, or play on"),
    (". or right", "one step forward, then pause"),
    (", or left", "one step back, then pause"),
    ("< and >", f"{JUMP} steps back, forward"),
    ("page up, down", f"{PAGE} steps back, forward"),
    ("home, end", "the first step, the last one"),
    ("g", "go to a step"),
    ("- and +", "slower, faster (steps per second, however long each took)"),
    ("[ and ]", "previous, next preemption, failure or worst bubble"),
    ("/", "find the admission of a request, by its id or a part of it"),
    ("N and n", "previous, next admission found"),
    ("up, down", "select a slot, and show its request; escape shows all"),
    ("?", "show keys and signs, or hide them"),
    ("q", "quit"),
)
HINTS = ("space pause  , . step  / find  ? keys  q quit", "? keys  q quit", "? keys", "?")


class TerminalGone(Exception):  # noqa: N818 - not an error of the command
    """The keyboard or the screen is gone."""


class StepRange(NamedTuple):
    """The steps that are played; last is included."""

    first: int
    last: int

    def clip(self, step: float) -> float:
        return min(max(step, self.first), self.last)


class Player:
    """Plays a recording on a whole terminal.

    title: the name of the run.  span: the steps to play.  step: the first one shown.  speed: in
    steps per second.  found: labels of the admissions that were looked for, by step.  captions: a
    sentence for each of some steps, shown until the next one.  ends: whether playing the last step
    closes the player.
    """

    def __init__(
        self,
        recording: Recording,
        title: str,
        terminal: "InteractiveTerminal",
        *,
        span: StepRange,
        step: int,
        speed: float = DEFAULT_SPEED,
        found: Mapping[int, str],
        captions: Mapping[int, str] = {},
        ends: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recording, self._terminal = recording, terminal
        self._span, self._clock = span, clock
        self._playback = Playback(recording, title, terminal.glyphs)
        self._browser = Browser()
        self._position = float(span.clip(step))
        self._speed, self._is_paused = speed, False
        self._found = found
        self._wanted = found.get(self.step)  # the label that the picture marks
        self.is_over, self._ends = False, ends
        self._shown: object = None  # as the last frame shows it
        self._now = self._next_frame = clock()
        self._captions, self._caption_steps = captions, sorted(captions)
        self._held = CAPTION_SECONDS if self.step in captions else 0.0  # seconds left to hold

    @property
    def step(self) -> int:
        return int(self._position)

    @property
    def _pace(self) -> str:
        return f"{number(self._speed)} steps/s"

    def look(self) -> float:
        """Handle pressed keys and redraw; return the seconds until the next call."""
        now = self._clock()
        self._play(min(now - self._now, MAX_SECONDS))
        self._now = now
        for key in self._terminal.keyboard.pressed():
            if isinstance(key, Pasted):
                self._browser.paste(key.text)
            else:
                self._press(key)
            self._shown = None
        if self._terminal.keyboard.is_gone:
            raise TerminalGone
        size = self._terminal.output.size
        wanted = size, self.step, bool(self._held)
        if self._terminal.output.is_ours and now >= self._next_frame and self._shown != wanted:
            self._draw(max(size.columns - 1, 1), max(size.lines - 1, 1))
            self._shown = wanted
            end = self._clock()
            self._next_frame = end + max(FRAME_SECONDS, (end - now) * (1 / MAX_SHARE - 1))
        return IDLE_SECONDS if self._is_paused else FRAME_SECONDS

    def wait(self, seconds: float) -> None:
        self._terminal.keyboard.wait(seconds)

    def step_aside(self) -> None:
        self._terminal.step_aside()
        self._shown = None

    def _play(self, seconds: float) -> None:
        if self._is_paused or self._browser.is_typing:
            return
        if self._held:
            self._held = max(self._held - seconds, 0.0)
            return
        steps, before = self._caption_steps, self.step
        self._position += self._speed * seconds
        new = steps[bisect_right(steps, before) : bisect_right(steps, self.step)]
        if new:
            self._position, self._held = float(new[0]), CAPTION_SECONDS
        if self._position >= self._span.last:
            self._go_to(self._span.last)
            self.is_over = self._ends and not self._held

    def _go_to(self, step: float) -> None:
        self._position, self._is_paused = float(self._span.clip(step)), True

    def _press(self, key: str) -> None:
        browser, scene = self._browser, self._playback.scene
        if browser.is_typing:
            browser.press(key, scene)
            return
        browser.message = ""
        was_held, self._held = self._held, 0.0
        if was_held and key == " ":
            return
        match key:
            case " ":
                self._is_paused = not self._is_paused
                if not self._is_paused and self.step == self._span.last:
                    self._position = float(self._span.first)
            case "+" | "=":  # one key, with shift and without
                self._speed = next((more for more in SPEEDS if more > self._speed), self._speed)
            case "-":
                less = (less for less in reversed(SPEEDS) if less < self._speed)
                self._speed = next(less, self._speed)
            case "[" | "]":
                nothing = "no preemption, failure or bubble"
                self._go_along(self._recording.points, nothing, is_on=key == "]")
            case "/":
                browser.ask(InputLine("find ", self._find))
            case "n" | "N":
                steps, nothing = sorted(self._found), "no admission that was found"
                if self._go_along(steps, nothing, is_on=key == "n"):
                    self._wanted = self._found[self.step]
            case "g":
                browser.ask(InputLine("go to step ", self._go_where, str.isdecimal))
            case "up" | "down" | "?" | "escape":
                if key != "?":
                    self._wanted = None
                browser.press(key, scene)
            case "q":
                self.is_over = True
            case _ if key in MOVES:
                self._go_to(self.step + MOVES[key])
            case _:
                pass
        if self._is_paused and key in ("+", "=", "-"):
            browser.message = self._pace

    def _go_along(self, steps: Sequence[int], nothing: str, *, is_on: bool) -> bool:
        """Go to the next or previous one of `steps`; return whether there is one."""
        first, last = bisect_left(steps, self._span.first), bisect_right(steps, self._span.last)
        at = bisect_right(steps, self.step) if is_on else bisect_left(steps, self.step) - 1
        self._is_paused = True
        if first <= at < last:
            self._go_to(steps[at])
            return True
        self._browser.message = f"{nothing} {'after' if is_on else 'before'} step {self.step:,}"
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
            self._browser.message = f"no request with {printable(text)} in its id was admitted"

    def _go_where(self, text: str) -> None:
        first, last = self._span
        if text and first <= int(text) <= last:
            self._go_to(int(text))
        elif text:
            self._browser.message = f"{text} is not a step from {first:,} to {last:,}"

    def _draw(self, width: int, height: int) -> None:
        scene = self._playback.seek(self.step)
        self._browser.found = None if self._browser.message else self._wanted
        self._browser.follow(scene)
        caption = self._caption(width) if height >= MIN_HEIGHT + MAX_CAPTION else []
        lines = picture(
            scene,
            width,
            height - len(caption),
            has_gantt=True,
            browser=self._browser,
            overlay=partial(self._browser.help, KEYS, self._terminal.glyphs, width),
            footer=partial(self._footer, width) if height >= MIN_HEIGHT else None,
        )
        lines[-1:-1] = caption
        if self._terminal.display.show(lines) is not None:
            raise TerminalGone

    def _caption(self, width: int) -> list[Line]:
        """Return the newest caption, in as many lines as the longest one needs."""
        texts = {step: fill(text.split(), " ", width) for step, text in self._captions.items()}
        num_lines = min(max(map(len, texts.values()), default=0), MAX_CAPTION)
        steps = self._caption_steps
        place = bisect_right(steps, self.step)
        found = texts[steps[place - 1]] if place else []
        return [[(text, "title")] for text in [*found, *[""] * num_lines][:num_lines]]

    def _footer(self, width: int) -> Line:
        pace = "paused" if self._is_paused else self._pace
        pace = "any key continues" if self._held else pace
        line: Line = [(pace, "figure"), (GAP, "")]
        where = f"{GAP}{self.step:,}/{self._span.last:,}"
        room = width - line_width(line) - len(where)
        if room < 1:
            return [(f"{self.step:,}"[:width], "")]
        about = self._browser.line(self._playback.scene, room)
        room -= line_width(about) + 2 * len(GAP)
        hint = next((hint for hint in HINTS if len(hint) <= room), "")
        cells = min(room - len(hint), MAX_BAR)
        if not about and cells >= MIN_BAR:
            share = (self.step - self._span.first) / max(self._span.last - self._span.first, 1)
            about = bar(share, cells, self._terminal.glyphs, "progress")
        line += [*about, (where, "")]
        return [*line, (" " * (width - line_width(line) - len(hint)), ""), (hint, LABEL)]


class InteractiveTerminal:
    """The terminal at stdout, and its keyboard."""

    def __init__(self, color: ColorChoice) -> None:
        encoding = encoding_of(sys.stdout.encoding)
        self.output = Terminal(os.dup(1), encoding, wants_color(color, 1))
        self.glyphs: Glyphs = UNICODE if can_print(encoding) else ASCII
        self.display = ScreenLive(self.output)
        keyboard_fd = 0
        if not is_same_terminal(0, self.output.fd):
            try:
                keyboard_fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise BatchdecodeError(
                    "--play needs a keyboard, but stdin is not a terminal, and /dev/tty cannot be "
                    f"opened: {error.strerror}"
                ) from error
        self.keyboard = Keyboard(keyboard_fd, self.output)

    def with_progress(self, events: Iterable[Event], name: str) -> Iterator[Event]:
        from rich.markup import escape  # noqa: PLC0415 - as the bar

        title = escape(f"reading {printable(name)}")
        with progress_bar("{task.description}", title, None, unit="events") as show:
            for num_events, event in enumerate(events, 1):
                if not num_events % READ_EVENTS:
                    show(completed=num_events)
                yield event

    def step_aside(self) -> None:
        self.display.step_aside()
        self.keyboard.release()

    def close(self) -> None:
        self.keyboard.release()
        if self.display.is_started:
            self.display.close([])


def play(color: ColorChoice, make_player: Callable[[InteractiveTerminal], Player]) -> int:
    """Play on the terminal at stdout until `q`, and return the exit status."""
    terminal = InteractiveTerminal(color)
    with user_code_prints_to_stderr(), closing(terminal), StopSignals() as stop:
        stop.before_pause = terminal.step_aside
        try:
            with stop.waiting():
                player = make_player(terminal)
            stop.before_pause = player.step_aside
            while not player.is_over:
                seconds = player.look()
                with stop.waiting():
                    player.wait(seconds)
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except TerminalGone:
            return 128 + SIGHUP
    return 0
