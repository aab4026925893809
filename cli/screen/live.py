"""The live view: a picture of every slot, redrawn from inside the loop.

While the loop is in a step that takes long, another thread draws; a lock keeps them apart.
"""

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import RLock
from typing import IO, cast

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.console import ConsoleRenderable as Renderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.style import Style

from ..signals import stop_by_key
from .live_picture import BROWSING_KEYS, Browser, Picture, Scene, Strips, help_lines, last_picture
from .live_state import GAP, MAX_UNSEEN, Lately, Moment, QueueDepths, RunState, newest_ends
from .terminal import Keyboard, Pace, Pasted, Terminal, can_print
from .theme import ASCII, LABEL, THEME, UNICODE, Line, line_width
from .view import Gauges, RunPlan, View

# rich's Live on the terminal: on a screen of its own, or below what is printed.
#
# The cursor is hidden only within a frame, so nothing that ends the process, kill -9 included, can
# leave it hidden.

_BEGIN_FRAME, _END_FRAME = b"\x1b[?2026h", b"\x1b[?2026l"  # shown at once; rich has no name for it
_HIDE_CURSOR, _SHOW_CURSOR = map(Control.show_cursor, (False, True))
_TO_START = Control(ControlType.CARRIAGE_RETURN).segment
_ERASE_REST = Control((ControlType.ERASE_IN_LINE, 0)).segment


class FrameFile:
    """What rich writes to: all of a frame is one write, which the terminal shows at once.

    error: what went wrong with the last frame; None if nothing did.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.error: OSError | None = None
        self._terminal = terminal
        self._parts: list[bytes] = []
        self._is_dropped = False

    def write(self, text: str) -> int:
        """Take in a part of a frame."""
        self._parts.append(text.encode(self._terminal.encoding, "backslashreplace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Take in a part of a frame, which is not to be changed."""
        self._parts.append(data)

    def flush(self) -> None:
        """Nothing: rich calls this in the middle of a frame."""

    def drop(self) -> None:
        """Write nothing of the frame that is being made."""
        self._is_dropped = True

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Write what comes in meanwhile, together."""
        self._parts, self._is_dropped, self.error = [], False, None
        yield
        if self._is_dropped:
            return
        try:
            self._terminal.write_bytes(b"".join([_BEGIN_FRAME, *self._parts, _END_FRAME]))
        except OSError as error:  # rich would end the process
            self.error = error


class FrameLines:
    """A renderable of lines that need no layout any more; each erases what was there.

    num_rows: blank lines follow up to so many.
    """

    def __init__(self, lines: Sequence[Line], num_rows: int = 0) -> None:
        self.lines = [*lines, *[[]] * (num_rows - len(lines))]

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> Iterator[Segment]:
        """Yield the segments of the lines, and leave the cursor where it was."""
        styles: dict[str, Style | None] = {"": None}
        for number, line in enumerate(self.lines):
            if number:
                yield Segment.line()
            for text, name in line:
                if name not in styles:
                    styles[name] = console.get_style(name)
                yield Segment(text, styles[name])
            yield _ERASE_REST
        if len(self.lines) > 1:
            yield Control.move(0, 1 - len(self.lines)).segment
        yield _TO_START


class FrameLive(Live):
    """A Live that its owner refreshes: what is shown is replaced in one write.

    fills_screen: nothing else is to be seen.
    """

    fills_screen = False

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._file = terminal, FrameFile(terminal)
        self._shown = FrameLines([])
        console = Console(
            file=cast(IO[str], self._file),
            theme=THEME,
            color_system="standard" if terminal.has_color else None,
            force_terminal=True,
            force_jupyter=False,
            no_color=False,
            soft_wrap=True,
            legacy_windows=False,
            _environ=terminal.environ,
        )
        super().__init__(
            console=console,
            auto_refresh=False,
            redirect_stdout=False,  # it would take what goes into a pipe, too
            redirect_stderr=False,
            get_renderable=lambda: self._shown,
        )

    def process_renderables(self, renderables: list[Renderable]) -> list[Renderable]:
        """Let the picture be drawn over the one before."""
        return [_HIDE_CURSOR, *renderables, self._shown, _SHOW_CURSOR]

    def show(self, lines: Sequence[Line], above: bytes = b"") -> OSError | None:
        """Replace what is shown by `lines`; `above` are whole lines that stay.

        Return what went wrong.
        """
        with self._frame():
            self.start()
            self._replace(lines, above)
        return self._file.error

    @abstractmethod
    def _replace(self, lines: Sequence[Line], above: bytes) -> None:
        """Draw `lines` over what is shown, after lines that stay."""

    @abstractmethod
    def step_aside(self) -> OSError | None:
        """Leave the terminal to somebody else, in the middle of a frame as well."""

    def forget(self) -> None:
        """Take what is shown as gone: somebody else has written there, if that can be."""

    @abstractmethod
    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` instead of what is shown, and the cursor below them and a blank line."""

    @contextmanager
    def _frame(self) -> Iterator[None]:
        """Write what is drawn meanwhile in one go, for the size that the terminal has now."""
        self.console.size = ConsoleDimensions(*self._terminal.size)
        with self._file.frame():
            yield

    def _leave(self, lines: FrameLines) -> OSError | None:
        """Draw `lines` and end."""
        with self._frame():
            self._shown = lines
            self.start()  # unless that was done
            self.stop()
        return self._file.error

    def _write(self, text: str) -> OSError | None:
        """Write at once; what is being drawn is not."""
        self._file.drop()
        try:
            self._terminal.write(text)
        except OSError as error:
            return error
        return None


class ScreenLive(FrameLive):
    """Fills the alternate screen: nothing that happens to its size leaves anything behind."""

    fills_screen = True

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._is_there = False

    def _replace(self, lines: Sequence[Line], above: bytes) -> None:
        if above and self._is_there:
            self.console.set_alt_screen(False)
            self._is_there = False
        self._file.write_bytes(above)
        if not self._is_there:
            self.console.set_alt_screen(True)
            self._is_there = True
        self._shown = FrameLines(lines, self._terminal.size.lines)
        self.console.control(Control.home())
        self.refresh()

    def step_aside(self) -> OSError | None:
        """Go back to the usual screen."""
        if not self._is_there:
            return None
        self._is_there = False
        return self._write(str(Control.alt_screen(enable=False)))

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` on the usual screen."""
        error = self.step_aside()
        error = self._leave(FrameLines(lines)) or error
        return error or self._write("\r" + "\n" * (len(lines) + bool(lines)))


class InlineLive(FrameLive):
    """Stands below what is printed, and moves down with it.

    The cursor rests on the first line of the picture.  A terminal that is resized keeps the cursor
    on its line, whatever becomes of the lines below, so the next picture starts where this one did.
    """

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._columns = 0  # when it was drawn

    def _replace(self, lines: Sequence[Line], above: bytes) -> None:
        num_rows, self._columns = self._num_rows(), self._terminal.size.columns
        if above:
            self._shown = FrameLines([], num_rows)
            self.refresh()
            self._file.write_bytes(above)
            num_rows = 0
        self._shown = FrameLines(lines, num_rows)
        self.refresh()
        self._shown = FrameLines(lines)

    def _num_rows(self) -> int:
        """Return how many rows what is shown takes now, from the cursor's on."""
        columns, rows = self._terminal.size
        needed = len(self._shown.lines)
        if columns < self._columns:  # it may have broken lines into several
            widths = (line_width(line) for line in self._shown.lines)
            needed = sum(max(1, -(-width // columns)) for width in widths)
        return min(needed, max(rows - 1, 1))

    def step_aside(self) -> OSError | None:
        """Put the cursor below what is shown."""
        num_rows = self._num_rows()
        self.forget()
        return self._write("\r" + "\n" * num_rows) if num_rows else None

    def forget(self) -> None:
        """Take what is shown as gone."""
        self._shown = FrameLines([])

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` where the picture was."""
        error = self._leave(FrameLines(lines, self._num_rows()))
        self._shown = FrameLines([*lines, []] if lines else [])
        return error or self.step_aside()


# What a person does to a run that is shown: looks around in it, holds it, ends it.

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


MIN_RUN = 0.25
"""Seconds before the first frame: of a run that is over by then only its end is shown."""
MIN_INTERVAL = 0.1
"""Seconds from one frame to the next, at least."""
MAX_SHARE = 0.02
"""How much of the time the pictures take at most."""
MAX_PENDING_BYTES = 2**16
"""Results wait for the next frame, but no more than these."""
TICK = 1.0
"""Seconds after which the clock in the header goes on while the run waits."""
SHORTEST_WAIT = 0.05
"""Seconds that a run which waits is left alone, at least."""
USUAL_COST = 0.02
"""Seconds that a frame may take without being thought to have hung."""
NUM_SAMPLES = 20
"""The speed in the header is the one since so many frames ago."""
END_SECONDS = 1.0
"""Who has ended is shown for so long: more come, but nobody can read faster."""
PAUSED_SECONDS = 0.6
"""With a step of a paused run so much passes of the time for which marks are shown, and no more."""
MAX_TREND = 256
KEY_SECONDS = 0.05
"""After so long it is looked whether a key was pressed, and what that asks for is drawn at once:
nobody presses enough of them to keep a run from its work."""


class LiveView(View):
    """Every slot, at most ten times a second and in a small share of the time.

    Steps are sampled by wall time; of a run that is slowed down each one is drawn.  The gantt of
    the run stays when it is over.  keyboard: of the person who looks at it, if that is
    known.  pace: what that may change; None for a run that nobody may hold.
    """

    def __init__(
        self,
        plan: RunPlan,
        gauges: Gauges,
        terminal: Terminal,
        display: FrameLive,
        *,
        pace: Pace | None = None,
        keyboard: Keyboard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._gauges, self._clock, self._pace = gauges, clock, pace
        self._run = run = RunState(plan.batch_size, plan.num_workers)
        self.fold, self.paces = run.fold, run.paces
        self._ended = run.news.ended
        glyphs = UNICODE if can_print(terminal.encoding) else ASCII
        lately = Lately(plan.batch_size)
        self._scene = Scene(
            run,
            plan,
            gauges.read_gauges(),
            glyphs,
            Strips(run.slots, glyphs),
            Moment(-1, 0, 0.0, 0.0, 0.0),
            marks=lately.marks,
            notes=[],
            ends=[],
            busy=deque(maxlen=MAX_TREND),
            queued=deque(maxlen=MAX_TREND),
            depths=QueueDepths(),
        )
        self._picture, self._display = Picture(), display
        self._controls = None if keyboard is None else Controls(keyboard, pace, gauges)
        # A signal handler may come in at any time, in the thread that holds it.
        self.lock = RLock()
        self._step = -1
        self._drawn_step: int | None = None
        self._computing: float | None = None  # since when the next step is told of
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._has_results = False  # among what is pending, or was
        self._started = started = clock()
        self._samples = deque([(-1, 0, started)], maxlen=NUM_SAMPLES)  # step, tokens, time
        self._lately, self._looked = lately, started
        self._seconds = 0.0  # for which it was looked at, pauses not counted
        self._cost = self._next_ends = 0.0
        first_frame = started if self._shows_every_step else started + MIN_RUN
        self._earliest_frame = self._next_frame = self._tick = first_frame
        self._next_look = math.inf if keyboard is None else first_frame  # at the keyboard
        self._is_waiting = self._is_closed = False

    def after_step(self, step: int) -> None:
        """Draw how things stand after `step`, if it is time to."""
        with self.lock:
            self._step, self._computing = step, None
            self._is_waiting = False
            now = self._clock()
            self._obey(now)
            if now >= self._next_frame:
                self._draw(now)
            elif len(self._ended) >= MAX_UNSEEN:
                self._run.catch_up()

    def keep_up(self) -> None:
        """Take in what is known by now, if it is much; see View."""
        with self.lock:
            self._run.keep_up()

    def still_computing(self, step: int) -> None:
        """Draw how things stand and how long `step` has taken; before the first step, too."""
        with self.lock, suppress(OSError):  # what is lost then is pending, and lost once more
            if self._is_closed or self._gauges.current_step != step:
                return  # what it has brought may be there already
            if self._computing is None:
                self._computing = self._clock()
            self.refresh()

    def refresh(self) -> float:
        """Draw what is not drawn yet, and the time while the run waits; see View."""
        with self.lock:
            now = self._clock()
            is_asked = self._obey(now)
            is_drawn, is_due = self._step == self._drawn_step, now >= self._tick
            if is_drawn and is_due:
                self._is_waiting = self._computing is None and not self._is_paused
            is_new = is_due or not is_drawn or is_asked
            if self._pending or (is_new and now >= self._earliest_frame):
                self._draw(now)
            wanted = self._tick if self._step == self._drawn_step else self._earliest_frame
            wanted = min(wanted, self._next_look)
            return max(wanted - self._clock(), SHORTEST_WAIT) if math.isfinite(wanted) else 0.0

    def wait(self, seconds: float) -> None:
        """Wait so long, but no longer than until a key may have been pressed."""
        if self._controls is None:
            super().wait(seconds)
        else:
            self._controls.keyboard.wait(min(seconds, KEY_SECONDS))

    def write_results(self, lines: bytes) -> None:
        """Print whole lines above the picture, with the next frame.

        For a stdout that is the same terminal: what is written past the picture would spoil it.

        Raises:
            OSError: the terminal is gone.
        """
        self._has_results = True
        self._put(lines)

    def write_message(self, text: str) -> None:
        """Print whole lines above the picture, with the next frame."""
        self._put(text.encode(self._terminal.encoding, "backslashreplace"))

    def _put(self, lines: bytes) -> None:
        with self.lock:
            self._pending.append(lines)
            self._num_pending_bytes += len(lines)
            if self._num_pending_bytes > MAX_PENDING_BYTES:
                self._draw(self._clock())

    def close(self) -> None:
        """Leave the gantt of the run where the picture was, and the cursor below it."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._controls is not None:
                self._controls.keyboard.release()
            if self._pending:
                self._draw(self._clock())
            if self._has_picture and self._terminal.is_ours and math.isfinite(self._next_frame):
                self._read_gauges()
                self._look(self._clock())
                columns, rows = self._terminal.size
                lines = last_picture(self._scene, columns - 1, rows - 2)
                self._check(self._display.close(lines))

    def step_aside(self) -> None:
        """Put the cursor below the picture, for somebody else to write; the next one is new."""
        with self.lock:
            self._display.step_aside()
            if self._controls is not None:
                self._controls.keyboard.release()

    @property
    def _shows_every_step(self) -> bool:
        return self._pace is not None and self._pace.is_slow

    @property
    def _is_paused(self) -> bool:
        return self._pace is not None and self._pace.is_paused

    @property
    def _has_picture(self) -> bool:
        """Whether there is anything to draw: a step, or one that takes long."""
        return self._step >= 0 or self._computing is not None

    def _obey(self, now: float) -> bool:
        """Do what keys ask for, if it is time to look for some; return whether there were any."""
        controls = self._controls
        if now < self._next_look or controls is None or self._is_closed or not self._has_picture:
            return False
        self._next_look = now + KEY_SECONDS
        if not controls.obey(self._scene):
            return False
        if math.isfinite(self._next_frame):
            self._earliest_frame = self._next_frame = now
        return True

    def _draw(self, now: float) -> None:
        """Print what is pending, and the picture below it if the terminal is ours.

        Raises:
            OSError: the terminal is gone, and results are lost.
        """
        above = b"".join(self._pending)
        if not self._terminal.is_ours:  # the shell writes there now
            self._display.forget()
            self._next_frame = now + MIN_INTERVAL
            if above:
                self._write(above)
        elif self._has_picture:
            self._look(now)
            self._read_gauges()
            columns, rows = self._terminal.size
            size = max(columns - 1, 1), max(rows - 1, 1)
            lines = self._lines(*size)
            drawn = self._clock()
            self._check(self._display.show(lines, above))
            # What results take is no cost of the picture.
            self._plan_next_frame(now, drawn if above else self._clock())
        elif above:
            self._write(above)
        self._pending.clear()
        self._num_pending_bytes = 0

    def _lines(self, width: int, height: int) -> list[Line]:
        """Return the picture, as it is looked at."""
        scene, has_gantt, controls = self._scene, self._display.fills_screen, self._controls
        if controls is None:
            return self._picture.lines(scene, width, height, has_gantt=has_gantt)
        browser = controls.browser
        browser.follow(scene)
        return self._picture.lines(
            scene,
            width,
            height,
            has_gantt=has_gantt,
            browser=browser,
            overlay=controls.overlay(width),
            footer=partial(controls.footer, scene, width) if controls.has_footer(height) else None,
        )

    def _write(self, lines: bytes) -> None:
        try:
            self._terminal.write_bytes(lines)
        except OSError as error:
            self._check(error)

    def _check(self, error: OSError | None) -> None:
        """Draw no more without a terminal; messages may get lost then, results not."""
        if error is not None:
            self._next_frame = self._earliest_frame = self._tick = math.inf
            if self._has_results:
                raise error

    def _plan_next_frame(self, start: float, end: float) -> None:
        """Keep the share of the time that pictures take, given when this one started and ended."""
        self._drawn_step = self._step
        if math.isinf(self._next_frame):
            return
        # A frame that hung, in a stopped terminal say, counts for twice the one before.
        self._cost = min(end - start, max(2 * self._cost, USUAL_COST))
        self._earliest_frame = end + self._cost * (1 / MAX_SHARE - 1)
        self._tick = end + TICK
        latest = max(self._earliest_frame, end + MIN_INTERVAL)
        self._next_frame = 0.0 if self._shows_every_step else latest

    def _look(self, now: float) -> None:
        """Let the scene be how things stand after the last step."""
        self._run.catch_up()
        run, scene, step = self._run, self._scene, self._step
        num_tokens = run.num_tokens(step)
        first_step, first_tokens, first_time = self._samples[0]
        passed, self._looked = now - self._looked, now
        if self._is_paused:
            passed = min(passed, PAUSED_SECONDS if self._samples[-1][0] != step else 0.0)
        self._seconds = seconds = self._seconds + passed
        if self._samples[-1][0] != step:
            self._samples.append((step, num_tokens, now))
            scene.busy.append(run.num_busy(step) / len(run.slots))
        rate, speed = scene.moment.rate, scene.moment.speed
        if self._is_paused:  # the speed is that of before: time that passes is none of the run's
            self._samples = deque([(step, num_tokens, now)], maxlen=NUM_SAMPLES)
        elif step > first_step:
            rate = (num_tokens - first_tokens) / (step - first_step)
            speed = (num_tokens - first_tokens) / max(now - first_time, 1e-9)
        elapsed = now - self._started
        computing = None if self._computing is None else now - self._computing
        scene.moment = Moment(step, num_tokens, rate, speed, elapsed, computing, self._is_waiting)
        fresh = [slot.take_mark() for slot in run.slots]
        scene.strips.extend(step, fresh)
        self._lately.take(run, {n: mark for n, mark in enumerate(fresh) if mark}, seconds)
        scene.notes = self._lately.notes(seconds)
        if seconds >= self._next_ends:
            self._next_ends, scene.ends = seconds + END_SECONDS, newest_ends(run)

    def _read_gauges(self) -> None:
        """Ask the gauges, but not in the middle of a step, which may be in another thread.

        Who was next before steps that no frame has shown may be so no more.
        """
        scene = self._scene
        if self._computing is None:
            scene.gauges = gauges = self._gauges.read_gauges()
            if self._step not in (self._drawn_step, -1):
                scene.queued.append(gauges.num_queued)
                scene.depths.add(self._step, gauges.num_queued)
        elif self._step != self._drawn_step and self._drawn_step is not None:
            scene.gauges = scene.gauges._replace(next_up=None)
