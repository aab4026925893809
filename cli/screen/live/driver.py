"""The live view: a picture of every slot, redrawn from inside the loop.

While the loop is in a step that takes long, another thread draws; a lock keeps them apart.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import RLock

from ..keyboard import Keyboard
from ..pace import Pace
from ..terminal import Terminal, can_print
from ..view import Gauges, RunPlan, View
from .controls import Controls
from .display import FrameLive
from .facts import Moment
from .history import QueueDepths
from .picture import Picture, last_picture
from .scene import Scene, Strips
from .state import MAX_UNSEEN, Lately, RunState, newest_ends
from .theme import ASCII, UNICODE, Line

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
        self.fold, self.workers, self.paces = run.only_fold, run.workers, run.paces
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
