"""The live view: a picture of every slot, redrawn between steps.

During a long step another thread draws, under a lock.
"""

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from threading import RLock

from ..signals import stop_by_key
from .live_picture import (
    BROWSING_KEYS,
    SHOWN_SECONDS,
    Browser,
    Scene,
    Strips,
    last_picture,
    picture,
    texts_of,
)
from .live_state import GAP, Moment, RunState
from .terminal import Keyboard, Pace, Pasted, Terminal, can_print
from .theme import ASCII, LABEL, UNICODE, Glyphs, Line, colored, line_width
from .view import MAX_LISTED, Gauges, RunPlan, View

MIN_RUN = 0.25  # seconds before the first frame; a shorter run shows its end only
MIN_INTERVAL = 0.1  # seconds between frames
MAX_SHARE = 0.02  # of the time, spent on frames
MAX_PENDING_BYTES = 2**16  # of results that wait for the next frame
MAX_RESULT_BYTES = 2**16  # of the lines of a step that are kept to be shown
TICK = 1.0  # seconds between frames while the run waits, for the clock
SHORTEST_WAIT = 0.05
USUAL_COST = 0.02  # seconds; a frame that took longer may have hung
NUM_SAMPLES = 20  # frames over which the speed is measured
END_SECONDS = 1.0  # for which the newest ends are shown, so that they can be read
PAUSED_SECONDS = 0.6  # that a single step of a paused run counts for marks
KEY_SECONDS = 0.05  # between looks for keys

PACE_KEYS = (
    ("space", "pause or continue"),
    (".", "one step, then pause"),
    ("-, +", "slower, faster"),
)
QUIT_KEYS = (("q", "stop the run, like Ctrl-C"),)
TYPING_HINTS = ("enter find  escape cancel",)
HINTS = ("space pause  . step  / find  ? keys  q end", "/ find  ? keys  q end", "? keys")
ROOM_FOR_HINT = 16  # lines; with fewer there is no line of hints

_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # synchronized output
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ENTER_SCREEN, _LEAVE_SCREEN, _HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
_ERASE_REST = "\x1b[K"


class ScreenLive:
    """Frames on the alternate screen, each in one write over the previous one.

    The cursor is hidden only within a frame, so that not even kill -9 leaves it hidden.  It rests
    on the first line.  is_started: there was a frame.
    """

    fills_screen = True

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.is_started = self._is_dropped = self._is_there = False

    def show(self, lines: Sequence[Line], above: bytes = b"") -> OSError | None:
        """Print `above`, replace the picture by `lines`, and return the error, if any."""
        self.is_started, self._is_dropped = True, False
        before, drawn = self._frame(lines, has_above=bool(above))
        return self._write_frame(before, above, drawn)

    def _frame(self, lines: Sequence[Line], *, has_above: bool) -> tuple[str, str]:
        """Return what to write before the permanent lines, and what draws `lines` after them."""
        before = _LEAVE_SCREEN if has_above and self._is_there else ""
        enter = "" if self._is_there and not has_above else _ENTER_SCREEN
        drawn = self._drawn(lines, self._terminal.size.lines)
        self._is_there = self._is_there or not self._is_dropped
        return before, enter + _HOME + drawn

    def step_aside(self) -> OSError | None:
        """Leave the terminal to another program, even in the middle of a frame."""
        self._is_dropped, was_there = True, self._is_there
        self._is_there = False
        return self._write(_LEAVE_SCREEN.encode()) if was_there else None

    def forget(self) -> None:
        """Forget the picture: another program may have written over it."""

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Replace the picture by `lines` for good, with the cursor below a blank line."""
        error = self.step_aside()
        self._is_dropped = False
        error = self._write_frame("", b"", self._drawn(lines)) or error
        self._is_dropped = True
        return error or self._write(b"\r" + b"\n" * (len(lines) + bool(lines)))

    def _drawn(self, lines: Sequence[Line], num_rows: int = 0) -> str:
        rows = [*lines, *[[]] * (num_rows - len(lines))]
        if self._terminal.has_color:
            texts = colored(rows)
        else:
            texts = ["".join(text for text, _ in line) for line in rows]
        drawn = "\n".join(text + _ERASE_REST for text in texts)
        up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        return f"{_HIDE_CURSOR}{drawn}{up}\r{_SHOW_CURSOR}"

    def _write_frame(self, before: str, above: bytes, drawn: str) -> OSError | None:
        if self._is_dropped:
            return None
        begin, end = (
            text.encode(self._terminal.encoding, "backslashreplace")
            for text in (_BEGIN_FRAME + before, drawn + _END_FRAME)
        )
        return self._write(begin + above + end)

    def _write(self, data: bytes) -> OSError | None:
        try:
            self._terminal.write_bytes(data)
        except OSError as error:
            return error
        return None


class InlineLive(ScreenLive):
    """A picture below the printed lines, which moves down with them.

    A resized terminal keeps the cursor on its line, so the next picture starts at the same place.
    """

    fills_screen = False

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._shown: Sequence[Line] = []
        self._columns = 0  # of the last frame

    def _frame(self, lines: Sequence[Line], *, has_above: bool) -> tuple[str, str]:
        num_rows, before = self._num_rows(), ""
        if has_above:
            before, num_rows = self._drawn([], num_rows), 0
        drawn = self._drawn(lines, num_rows)
        if not self._is_dropped:
            self._shown, self._columns = lines, self._terminal.size.columns
        return before, drawn

    def _num_rows(self) -> int:
        columns, rows = self._terminal.size
        needed = len(self._shown)
        if columns < self._columns:  # the terminal may have wrapped lines
            widths = (line_width(line) for line in self._shown)
            needed = sum(max(1, -(-width // columns)) for width in widths)
        return min(needed, max(rows - 1, 1))

    def step_aside(self) -> OSError | None:
        num_rows = self._num_rows()
        self.forget()
        self._is_dropped = True
        return self._write(b"\r" + b"\n" * num_rows) if num_rows else None

    def forget(self) -> None:
        self._shown = []

    def close(self, lines: Sequence[Line]) -> OSError | None:
        self._is_dropped = False
        error = self._write_frame("", b"", self._drawn(lines, self._num_rows()))
        self._shown = [*lines, []] if lines else []
        return error or self.step_aside()


class Controls:
    """The keys of a live view, which scroll, find, and change the pace of the run.

    pace: None for a run that cannot be paused.
    """

    def __init__(self, keyboard: Keyboard, pace: Pace | None, gauges: Gauges) -> None:
        self.keyboard, self.browser = keyboard, Browser(gauges.find_upcoming, gauges.knows_upcoming)
        self._pace = pace

    def obey(self, scene: Scene) -> bool:
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

    def overlay(self, glyphs: Glyphs, width: int, room: int) -> Sequence[Line]:
        keys = (*(PACE_KEYS if self._pace else ()), *BROWSING_KEYS, *QUIT_KEYS)
        return self.browser.help(keys, glyphs, width, room)

    def has_footer(self, height: int) -> bool:
        is_held = self._pace is not None and self._pace.is_slow
        return is_held or self.browser.is_used or height >= ROOM_FOR_HINT

    def footer(self, scene: Scene, width: int) -> Line:
        line, pace = self.browser.line(scene, width), self._pace

        def add_first(texts: Sequence[str], style: str, *, is_right: bool = False) -> None:
            gap = len(GAP) if line else 0
            for text in texts:
                spare = width - line_width(line) - len(text)
                if spare >= gap:
                    line.extend([(" " * (spare if is_right else gap), ""), (text, style)])
                    return

        if pace is not None and pace.is_slow:
            text = str(pace)
            shorter = [text.partition(":")[0], "paused"] if pace.is_paused else []
            add_first([text, *shorter], "paused" if pace.is_paused else "")
        hints: Sequence[str] = HINTS if pace is not None else HINTS[1:]
        add_first(TYPING_HINTS if self.browser.is_typing else hints, LABEL, is_right=True)
        return line


class LiveView(View):
    """Every slot, at most ten times a second and in a small share of the time.

    A slowed run draws every step.  At the end the gantt of the run stays.  keyboard: None without
    keys.  pace: of the run, for keys; None for a run that cannot be paused.
    """

    def __init__(
        self,
        plan: RunPlan,
        gauges: Gauges,
        terminal: Terminal,
        display: ScreenLive,
        *,
        pace: Pace | None = None,
        keyboard: Keyboard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._gauges, self._clock, self._pace = gauges, clock, pace
        self._run = run = RunState(plan.batch_size, plan.num_workers)
        self.fold, self.paces = run.fold, run.paces
        glyphs = UNICODE if can_print(terminal.encoding) else ASCII
        self._scene = Scene(
            run,
            plan,
            gauges.read_gauges(),
            glyphs,
            Strips(run, glyphs),
            Moment(-1, 0, 0.0, 0.0, 0.0),
        )
        self._display = display
        self._controls = None if keyboard is None else Controls(keyboard, pace, gauges)
        if self._controls is not None and plan.total == 1:
            self._controls.browser.selected = 0  # one request alone shows its text
        # A signal handler may run at any time, in the thread that holds the lock.
        self.lock = RLock()
        self._step = -1
        self._drawn_step: int | None = None
        self._computing: float | None = None  # when the next step was first seen computing
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._has_results = False
        self._results = deque[bytes](maxlen=MAX_LISTED)  # the newest
        self._started = self._looked = started = clock()
        self._samples = deque([(-1, 0, started)], maxlen=NUM_SAMPLES)  # step, tokens, time
        self._seconds = 0.0  # since the first frame, pauses not counted
        self._frames: list[tuple[float, int]] = []  # their seconds, and the step after each
        self._cost = self._next_ends = 0.0
        first_frame = started if self._shows_every_step else started + MIN_RUN
        self._earliest_frame = self._next_frame = self._tick = first_frame
        self._next_look = math.inf if keyboard is None else first_frame  # at the keyboard
        self._is_waiting = self._is_closed = False

    def after_step(self, step: int) -> None:
        with self.lock:
            self._step, self._computing = step, None
            self._is_waiting = False
            now = self._clock()
            self._obey(now)
            if now >= self._next_frame:
                self._draw(now)
            else:
                self._run.keep_up()

    def keep_up(self) -> None:
        with self.lock:
            self._run.keep_up()

    def still_computing(self, step: int) -> None:
        """Draw the state and how long `step` has taken, also before the first step."""
        with self.lock, suppress(OSError):  # pending results raise it again
            if self._is_closed or self._gauges.current_step != step:
                return
            if self._computing is None:
                self._computing = self._clock()
            self.refresh()

    def refresh(self) -> float:
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
        if self._controls is None:
            super().wait(seconds)
        else:
            self._controls.keyboard.wait(min(seconds, KEY_SECONDS))

    def write_results(self, lines: bytes) -> None:
        """Print whole lines above the picture, with the next frame."""
        self._has_results = True
        self._put(lines)

    def note_results(self, lines: Sequence[bytes]) -> None:
        with self.lock:
            self._results.extend(line[-MAX_RESULT_BYTES:] for line in lines[-MAX_LISTED:])

    def write_message(self, text: str) -> None:
        self._put(text.encode(self._terminal.encoding, "backslashreplace"))

    def _put(self, lines: bytes) -> None:
        with self.lock:
            self._pending.append(lines)
            self._num_pending_bytes += len(lines)
            if self._num_pending_bytes > MAX_PENDING_BYTES:
                self._draw(self._clock())

    def close(self) -> None:
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
        return self._step >= 0 or self._computing is not None

    def _obey(self, now: float) -> bool:
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
        """Print pending lines, and the picture below them if the terminal is ours."""
        above = b"".join(self._pending)
        is_ours = self._terminal.is_ours
        if not is_ours:  # the shell may write there
            self._display.forget()
            self._next_frame = now + MIN_INTERVAL
        if is_ours and self._has_picture:
            self._look(now)
            self._read_gauges()
            columns, rows = self._terminal.size
            lines = self._lines(max(columns - 1, 1), max(rows - 1, 1))
            drawn = self._clock()
            self._check(self._display.show(lines, above))
            self._drawn_step = self._step
            if math.isfinite(self._next_frame):
                # Results do not count as a cost of the picture.  A frame that hung, such as in a
                # stopped terminal, counts for twice the previous one.
                end = drawn if above else self._clock()
                self._cost = min(end - now, max(2 * self._cost, USUAL_COST))
                self._earliest_frame = end + self._cost * (1 / MAX_SHARE - 1)
                self._tick = end + TICK
                latest = max(self._earliest_frame, end + MIN_INTERVAL)
                self._next_frame = 0.0 if self._shows_every_step else latest
        elif above:
            try:
                self._terminal.write_bytes(above)
            except OSError as error:
                self._check(error)
        self._pending.clear()
        self._num_pending_bytes = 0

    def _lines(self, width: int, height: int) -> list[Line]:
        scene, has_gantt, controls = self._scene, self._display.fills_screen, self._controls
        if controls is None:
            return picture(scene, width, height, has_gantt=has_gantt)
        controls.browser.follow(scene)
        return picture(
            scene,
            width,
            height,
            has_gantt=has_gantt,
            browser=controls.browser,
            overlay=partial(controls.overlay, scene.glyphs, width),
            footer=partial(controls.footer, scene, width) if controls.has_footer(height) else None,
        )

    def _check(self, error: OSError | None) -> None:
        if error is not None:
            self._next_frame = self._earliest_frame = self._tick = math.inf
            if self._has_results:
                raise error

    def _look(self, now: float) -> None:
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
        rate, speed = scene.moment.rate, scene.moment.speed
        if self._is_paused:  # keep the speed of before the pause
            self._samples = deque([(step, num_tokens, now)], maxlen=NUM_SAMPLES)
        elif step > first_step:
            rate = (num_tokens - first_tokens) / (step - first_step)
            speed = (num_tokens - first_tokens) / max(now - first_time, 1e-9)
        elapsed = now - self._started
        computing = None if self._computing is None else now - self._computing
        scene.moment = Moment(step, num_tokens, rate, speed, elapsed, computing, self._is_waiting)
        if step >= scene.strips.ends(0)[-1]:
            busy = sum(run.is_busy(number, step) for number in range(run.num_slots))
            scene.busy.append(busy / run.num_slots)
            scene.strips.extend(step)
        frames, old = self._frames, seconds - max(SHOWN_SECONDS.values())
        frames.append((seconds, step + 1))
        del frames[: max(bisect_right(frames, old, key=itemgetter(0)) - 1, 0)]
        scene.since = {kind: self._first_step(seconds - ago) for kind, ago in SHOWN_SECONDS.items()}
        if seconds >= self._next_ends:
            self._next_ends = seconds + END_SECONDS
            scene.read_ends()
            scene.texts = texts_of(self._results)

    def _first_step(self, seconds: float) -> int:
        """Return the first step that was shown later than `seconds`."""
        place = bisect_right(self._frames, seconds, key=itemgetter(0))
        return self._frames[place - 1][1] if place else 0

    def _read_gauges(self) -> None:
        """Read the gauges, but not during a step: this may be another thread."""
        scene = self._scene
        if self._computing is None:
            scene.gauges = gauges = self._gauges.read_gauges()
            if self._step not in (self._drawn_step, -1):
                scene.queued.append(gauges.num_queued)
                scene.depths.add(self._step, gauges.num_queued)
            browser = None if self._controls is None else self._controls.browser
            request = None if browser is None else browser.subject(scene)
            if request is not None and request.role != "negative":
                num_tokens = request.tokens_after(self._step)
                texts = self._gauges.peek(request.id, request.index, num_tokens)
                if texts is not None:
                    scene.peeked = {request.label: texts}
        elif self._step != self._drawn_step and self._drawn_step is not None:
            scene.gauges = scene.gauges._replace(next_up=None)
