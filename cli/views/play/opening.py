"""`trace --play` and `trace diff --play`: from inputs to a player, and back to a usual terminal."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import EndEvent, Event, RestartEvent, RunEvent
from batcher.explaining.differences import compare
from batcher.trace.merged import WorkersTimeline
from batcher.trace.run import RequestFold, RequestTimeline
from batcher.trace.timeline import SortedRecords, Timeline
from batcher.trace.workers import ByWorker

from ...commands.trace import DiffOptions, TraceOptions
from ...run.intake import OpenInput
from ...run.stdout import user_code_prints_to_stderr
from ...screen.live import ScreenLive
from ...screen.live_state import RunState, WorkerPace
from ...screen.terminal import (
    ColorChoice,
    Keyboard,
    Terminal,
    can_animate,
    can_print,
    cut_middle,
    encoding_of,
    is_same_terminal,
    printable,
    wants_color,
)
from ...screen.theme import ASCII, LABEL, UNICODE, Glyphs
from ...signals import Interrupted, StopSignals
from ..asking import open_both
from ..events import contradictions_named, events_of, open_twice, refuse_workers
from ..show import selection_of
from .player import DEFAULT_SPEED, Player, StepRange, TerminalGone
from .recording import Recording, ToldSteps
from .stage import PairStage, Stage

MAX_SLOTS = 2**16  # each takes an object, and a trace of a few bytes may state any number
READING_SECONDS = 0.3
"""An input that takes longer to read says how far it is, and again after as long."""
HANGUP = 128 + signal.SIGHUP
"""The status where the terminal is gone, if that has not ended the process."""
OF_OTHER_VIEWS = ("format", "width", "axis", "slot", "output", "force")
"""Options that say what is written, or narrow it in a way in which nothing can be played."""


class Quit(Exception):  # noqa: N818 - a wish, and no error
    """A person wants no more while the input is read."""


class InteractiveTerminal:
    """The terminal that stdout is, with a person at its keyboard.

    Raises:
        BatchdecodeError: there is no keyboard.
    """

    def __init__(self, color: ColorChoice) -> None:
        environ, encoding = os.environ, encoding_of(sys.stdout.encoding, os.environ)
        self.output = Terminal(os.dup(1), encoding, wants_color(color, 1, environ), environ)
        self.glyphs: Glyphs = UNICODE if can_print(encoding) else ASCII
        self.display = ScreenLive(self.output)
        self.keyboard = Keyboard(self._keyboard_descriptor(), self.output)
        self._next_frame = time.monotonic() + READING_SECONDS

    def _keyboard_descriptor(self) -> int:
        """Return stdin if that is the terminal, or else the terminal of the session."""
        if is_same_terminal(0, self.output.fd):
            return 0
        try:
            return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BatchdecodeError(
                "--play needs a keyboard: stdin is something else, and /dev/tty cannot be opened: "
                f"{error.strerror}"
            ) from error

    def with_progress(self, events: Iterable[Event], name: str) -> Iterator[Event]:
        """Yield `events`, and say now and then how far they are read.

        Raises:
            Quit: somebody has pressed q.
        """
        for number, event in enumerate(events, 1):
            yield event
            if time.monotonic() >= self._next_frame:
                if "q" in self.keyboard.pressed():
                    raise Quit
                if self.output.is_ours:
                    room = max(self.output.size.columns - len("  q quit") - 1, 1)
                    text = printable(f"reading {name}: {number:,} events")
                    told = cut_middle(text, room, self.glyphs.cut)
                    self.display.show([[(told, ""), ("  q quit", LABEL)]])
                self._next_frame = time.monotonic() + READING_SECONDS

    def step_aside(self) -> None:
        """Leave the terminal to somebody else; a signal handler may call this."""
        self.display.step_aside()
        self.keyboard.release()

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self.keyboard.release()
        if self.display.is_started:
            self.display.close([])


class _Recorded:
    """The events of an input, as often as they are wanted; the first time they are recorded."""

    def __init__(
        self, terminal: InteractiveTerminal, name: str, events: Callable[[], Iterable[Event]]
    ) -> None:
        self._terminal, self._name, self._events = terminal, name, events
        self._recording: Recording | None = None
        self._has_begun = False

    def __iter__(self) -> Iterator[Event]:
        is_recorded, self._has_begun = not self._has_begun, True
        for event in self._terminal.with_progress(self._events(), self._name):
            if is_recorded and isinstance(event, RunEvent):
                self._recording = open_recording(event)
            elif is_recorded and self._recording is not None:
                self._recording.add(event)
            yield event

    def close(self) -> Recording:
        """Return what was recorded.

        Raises:
            InvariantError: it contradicts itself, or has no beginning.
            BatchdecodeError: there is nothing to play.
        """
        if self._recording is None:
            raise InvariantError("there is no run event")
        self._recording.close()
        return self._recording


def play_trace(options: TraceOptions) -> int:
    """Carry out `batchdecode trace --play`; return its exit status.

    Raises:
        BatchdecodeError: the input, an option or the terminal is not right.
    """
    for name in OF_OTHER_VIEWS:
        if getattr(options, name):
            raise BatchdecodeError(
                f"--{name} is for a view that is written; --play shows every slot"
            )
    path, source = open_twice(options.input)
    _check_terminal()

    def make(terminal: InteractiveTerminal) -> Player:
        told = partial(events_of, path, source, options.run_options, options.preset)
        recorded = _Recorded(terminal, source.name, told)
        with contradictions_named(source.name):
            for _ in recorded:
                pass
            recording = recorded.close()
        window = recording.timeline.window(selection_of(recording.timeline, options))
        found = recording.admissions_of(options.request or ())
        first = options.from_step
        if first is None and found:
            first = min(found)
        stage, span = (
            Stage(recording, _title(source), terminal.glyphs),
            StepRange(window[0], window[-1]),
        )
        return _player(terminal, stage, span, first, options.speed, found)

    with source:
        return _play(make, options.color)


def play_diff(options: DiffOptions) -> int:
    """Carry out `batchdecode trace diff --play`; return its exit status.

    Raises:
        BatchdecodeError: an input, an option or the terminal is not right.
    """
    if options.json:
        raise BatchdecodeError("--json is for an answer that is written, and --play for a person")
    if options.html or options.output is not None:
        raise BatchdecodeError("--html is for a browser, and --play for a terminal")
    inputs = open_both(options)
    refuse_workers("trace diff --play", *(source for _, source in inputs))
    _check_terminal()
    (_, source_a), (_, source_b) = inputs

    def make(terminal: InteractiveTerminal) -> Player:
        a, b = (
            _Recorded(terminal, source.name, partial(events_of, path, source, {}))
            for path, source in inputs
        )
        names = source_a.name, source_b.name
        with contradictions_named(" or ".join(names)):
            comparison = compare(a, b)
            recordings = a.close(), b.close()
        titles = _title(source_a), _title(source_b)
        stage = PairStage(recordings, comparison, titles, terminal.glyphs)
        span = StepRange(0, stage.num_steps - 1)
        return _player(terminal, stage, span, options.from_step, options.speed, {})

    with source_a, source_b:
        return _play(make, "auto")


def _check_terminal() -> None:
    """Make sure that there is a terminal to draw on, or raise a BatchdecodeError."""
    if not can_animate(1, os.environ):
        raise BatchdecodeError(
            "--play draws on a terminal, and stdout is none that it can draw on; "
            "trace --format steps or gantt, and trace diff, tell the same without"
        )


def _player(
    terminal: InteractiveTerminal,
    stage: Stage,
    span: StepRange,
    first: int | None,
    speed: float | None,
    found: Mapping[int, str],
) -> Player:
    """Return the player that begins with the step `first`, or raise a BatchdecodeError."""
    if first is not None and not span.first <= first <= span.last:
        raise BatchdecodeError(
            f"--from {first}: the steps to play are {span.first:,} to {span.last:,}"
        )
    return Player(
        stage,
        terminal.output,
        terminal.keyboard,
        terminal.display,
        terminal.glyphs,
        span=span,
        step=span.first if first is None else first,
        speed=speed or DEFAULT_SPEED,
        found=found,
    )


def _play(make: Callable[[InteractiveTerminal], Player], color: ColorChoice) -> int:
    """Play what `make` makes to its end; return the exit status.

    Raises:
        BatchdecodeError: it cannot be made.
    """
    terminal = InteractiveTerminal(color)
    with user_code_prints_to_stderr(), closing(terminal), StopSignals() as stop:
        stop.before_pause = terminal.step_aside
        try:
            with stop.waiting():
                player = make(terminal)
            stop.before_pause = player.step_aside
            while not player.is_over:
                seconds = player.look()
                with stop.waiting():
                    player.wait(seconds)
        except Quit:
            return 0
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except TerminalGone:
            return HANGUP
    return 0


def _title(source: OpenInput) -> str:
    return source.name.rpartition("/")[2]


_Told = tuple[int, Event]


class WorkersRecording(Recording):
    """A recording whose events come as the workers told of them, and are sorted before all else.

    See Recording; `timeline` is that of all workers, once it is closed.
    """

    def __init__(self, run: RunEvent) -> None:
        super().__init__(run)
        self._folds = [RequestFold() for _ in range(run.workers)]
        folds = iter(self._folds)
        self._by_worker = ByWorker(lambda: Timeline(next(folds)))
        self._by_worker.add(run)
        self._told_to = [ToldSteps() for _ in range(run.workers)]
        self._sorted = SortedRecords[_Told](_Told)

    def add(self, event: Event) -> None:
        """Take in the next event; see Recording."""
        if isinstance(event, RunEvent) or event.worker is None:
            raise InvariantError("an event of no worker")
        if isinstance(event, RestartEvent) and event.worker < len(self._folds):
            self._lose(self._folds[event.worker])
        self._by_worker.add(event)
        self._sort(event.worker, self._told_to[event.worker].take(event))

    def close(self) -> None:
        """Take what was added for all there is; see Recording."""
        for worker, told in enumerate(self._told_to):
            self._sort(worker, told.rest())
        timelines = self._by_worker.close()
        for timeline in timelines:
            timeline.close()
        self.timeline = WorkersTimeline(self._by_worker.run, timelines)
        for step, event in self._sorted:
            self._take(event, step)
        self._sorted = SortedRecords[_Told](_Told)
        self._close_chapters()
        self._check()

    def state_before(self, chapter: int) -> RunState:
        """Return what the run was like when a chapter begins; see Recording.

        It says of each worker how far it comes; its slots are shown by the step of all.
        """
        state = super().state_before(chapter)
        if isinstance(self.timeline, WorkersTimeline):
            state.paces = [WorkerPace() for _ in self.timeline.workers]  # those of slots stay
            for pace, timeline in zip(state.paces, self.timeline.workers, strict=True):
                pace.step = max(timeline.num_steps - 1, 0)
        return state

    def _sort(self, worker: int, told: Iterable[_Told]) -> None:
        """Keep events of a worker for their turn."""
        for step, event in told:
            if not isinstance(event, EndEvent):
                self._sorted.add((step, worker), (step, event))

    def _fold(self, event: Event) -> RequestTimeline | None:
        return self._run.fold.take(event)


def open_recording(run: RunEvent) -> Recording:
    """Return what records a run that begins so.

    Raises:
        BatchdecodeError: there is no such batch, or no picture of so many slots.
    """
    num_slots = run.batch * run.workers
    if num_slots > MAX_SLOTS:
        raise BatchdecodeError(
            f"--play shows up to {MAX_SLOTS:,} slots, and this run states {num_slots:,}; use "
            "--format gantt"
        )
    return Recording(run) if run.workers == 1 else WorkersRecording(run)
