"""The live view: a table of the slots, redrawn in place from inside the loop."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from batcher.events import RequestEvent
from cli.screen.live_header import Moment
from cli.screen.live_state import RunState
from cli.screen.live_table import ASCII, BOXES, COLORS, PLAIN, LiveTable
from cli.screen.terminal import Terminal, can_print_boxes
from cli.screen.view import View

MIN_INTERVAL = 0.1
"""Seconds from one frame to the next, at least."""
MAX_SHARE = 0.03
"""How much of the time the pictures may take."""
MAX_UNSEEN = 10_000
"""Events wait for the next frame, but no more than these."""
MAX_PENDING_BYTES = 2**16
"""Results wait for the next frame, but no more than these."""
TICK = 1.0
"""Seconds after which the clock in the header goes on while the run waits."""
SHORTEST_WAIT = 0.05
"""Seconds that a run which waits is left alone, at least."""
RATE_FRAMES = 10
"""The speed in the header is the one since so many frames ago."""

# The picture is written over the one before, and the cursor goes back to its first line: a terminal
# that is resized keeps the cursor on its line, whatever it does to the lines below.  Lines do not
# wrap, so one that a resized terminal has no room for cannot become two.  The cursor is hidden only
# within a frame, so nothing that ends the process, kill -9 included, can leave it hidden.
_BEGIN_FRAME = "\x1b[?2026h\x1b[?25l\r"
_ERASE_BELOW = "\x1b[J"
_BEGIN_PICTURE, _NEXT_LINE, _END_PICTURE = "\x1b[?7l", "\x1b[K\r\n", "\x1b[J\x1b[?7h"
_END_FRAME = "\r\x1b[?25h\x1b[?2026l"


class LiveView(View):
    """The table of slots, redrawn in place from inside the loop, without a thread.

    Steps are sampled by wall time; with `every_step` each one is drawn.  The last picture stays.
    """

    def __init__(
        self,
        *,
        title: str,
        batch_size: int,
        total: int | None,
        terminal: Terminal,
        every_step: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._total, self._clock = total, clock
        self._run = RunState(batch_size)
        self._unseen: list[RequestEvent] = []  # not taken in by `_run` yet
        glyphs = BOXES if can_print_boxes(terminal.encoding) else ASCII
        colors = COLORS if terminal.has_color else PLAIN
        self._table = LiveTable(title, self._run, glyphs, colors)
        self._every_step = every_step
        self._step, self._drawn_step = -1, -1
        self._num_queued: int | None = None
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._has_results = False  # among what is pending, or was
        self._height = 0
        self._samples = deque([(-1, 0)], maxlen=RATE_FRAMES)  # (step, tokens so far) of frames
        self._started = clock()
        self._cost = 0.0
        self._earliest_frame = self._next_frame = self._tick = 0.0
        self._is_closed = False

    def observe(self, events: Sequence[RequestEvent]) -> None:
        """Take in what happened in the step that is being made."""
        self._unseen += events  # many at once take less time than a few for every step
        if len(self._unseen) > MAX_UNSEEN:
            self._catch_up()

    def _catch_up(self) -> None:
        self._run.observe(self._unseen)
        self._unseen.clear()

    def after_step(self, step: int, num_queued: int | None) -> None:
        """Draw how things stand after `step`, if it is time to."""
        self._step, self._num_queued = step, num_queued
        now = self._clock()
        if now >= self._next_frame:
            self._draw(now)

    def refresh(self) -> float:
        """Draw what is not drawn yet, and the time while the run waits; see View."""
        now = self._clock()
        is_new = self._step != self._drawn_step or now >= self._tick
        if self._pending or (is_new and now >= self._earliest_frame):
            self._draw(now)
        wanted = self._tick if self._step == self._drawn_step else self._earliest_frame
        return max(wanted - self._clock(), SHORTEST_WAIT) if math.isfinite(wanted) else 0.0

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
        self._pending.append(lines)
        self._num_pending_bytes += len(lines)
        if self._num_pending_bytes > MAX_PENDING_BYTES:
            self._draw(self._clock())

    def close(self) -> None:
        """Draw the last picture, if any, and leave the cursor below it, after a blank line."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pending or self._step >= 0:
            self._draw(self._clock())
        if self._height:
            self.step_aside()
            self._show("\n")

    def step_aside(self) -> None:
        """Put the cursor below the picture, for somebody else to write; the next one is new."""
        if self._height:
            self._show("\r" + "\n" * self._height)
            self._height = 0

    def _draw(self, now: float) -> None:
        is_ours = self._terminal.is_ours
        if not is_ours:
            self._height = 0  # the shell writes there now
            self._next_frame = now + MIN_INTERVAL
        if self._pending:
            self._print_pending()
            now = self._clock()  # what the results take is no cost of the picture
        if is_ours and self._step >= 0 and self._show(self._frame(now)):
            self._plan_next_frame(now, self._clock())

    def _show(self, text: str) -> bool:
        """Write `text`, and return whether that worked; without a terminal, draw no more."""
        try:
            self._terminal.write(text)
        except OSError:
            self._next_frame = self._earliest_frame = self._tick = math.inf
            return False
        return True

    def _plan_next_frame(self, start: float, end: float) -> None:
        """Keep the share of the time that pictures take, given when this one started and ended."""
        self._drawn_step = self._step
        # A frame that hung, in a stopped terminal say, counts for about twice the one before.
        self._cost = min(end - start, 2 * self._cost + 0.001)
        self._earliest_frame = end + self._cost * (1 / MAX_SHARE - 1)
        self._tick = end + TICK
        latest = max(self._earliest_frame, end + MIN_INTERVAL)
        self._next_frame = 0.0 if self._every_step else latest

    def _frame(self, now: float) -> str:
        self._catch_up()
        columns, rows = self._terminal.size
        moment = self._moment(now)
        lines = self._table.lines(moment, max(1, columns - 1), max(1, rows - 1))
        self._height = len(lines)
        back = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        picture = _NEXT_LINE.join(lines)
        return f"{_BEGIN_FRAME}{_BEGIN_PICTURE}{picture}{_END_PICTURE}{back}{_END_FRAME}"

    def _moment(self, now: float) -> Moment:
        num_tokens = self._run.num_tokens(self._step)
        if self._samples[-1][0] != self._step:
            self._samples.append((self._step, num_tokens))
        first_step, first_tokens = self._samples[0]
        rate = (num_tokens - first_tokens) / max(1, self._step - first_step)
        elapsed = now - self._started
        return Moment(self._step, self._total, self._num_queued, rate, elapsed)

    def _print_pending(self) -> None:
        """Print what waits where the picture stands; the next one follows below."""
        erase = f"{_BEGIN_FRAME}{_ERASE_BELOW}" if self._height else ""
        lines = b"".join(self._pending)
        self._pending.clear()
        self._num_pending_bytes = self._height = 0
        try:
            self._terminal.write_bytes(erase.encode("ascii") + lines)
        except OSError:
            if self._has_results:  # messages may get lost, results not
                raise
