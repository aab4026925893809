"""A run that was recorded, kept so that any step of it is shown at once.

Rule: what is kept is the state that a live view folds from events, packed every few thousand of
them, with the events between.  So a step is shown by the code that shows it live, folded from
somewhere near; an event takes about 25 bytes, and nothing is looked up in a second description.
What is shown depends on the step alone, not on where one came from.  So what a view remembers from
frame to frame is made again from the NUM_WATCHED steps before.
"""

import gc
import pickle
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter

import msgspec

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    RejectEvent,
    RestartEvent,
    RunEvent,
    StepsEvent,
)
from batcher.trace.run import FAILURES, RequestTimeline, SequenceKey, is_follower, key_of, label_of
from batcher.trace.timeline import MAX_STEPS, Timeline, worst_bubble

from ..screen.live import NUM_SAMPLES
from ..screen.live_picture import MAX_CELLS, MAX_REQUEST, Longest, Scene, Strips
from ..screen.live_state import MAX_LABEL, Moment, QueueDepths, RunState
from ..screen.terminal import cell_width, printable
from ..screen.theme import Glyphs
from ..screen.view import GaugeReading, HeldBlocks, RunPlan

MIN_EVENTS = 4096  # the fewest events of a chapter; there are more where more requests wait at once
MAX_ENDS = 64  # so many of those that have ended are known after each step

MAX_SLOTS = 2**16  # each takes an object, and a trace of a few bytes may state any number
NUM_WATCHED = MAX_CELLS
"""As many steps as a strip has cells; fewer of many slots, but more than notes are shown for."""
MAX_WATCHED, MIN_WATCHED = 2**14, 96  # cells, steps
SECONDS_PER_STEP = 0.125
"""Marks and notes are shown for as long as in a live view that makes a step in this time."""

Chapter = tuple[int, bytes, bytes]
"""The step with which its first event was told, the state before that, and its events, packed."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[list[int], list[Event]])


class Recording:
    """Takes in what followed the start of a run, event by event, up to `close`."""

    def __init__(self, run: RunEvent) -> None:
        if run.workers > 1:
            raise BatchdecodeError(
                f"--play shows the steps of one engine, and this is a run of {run.workers} workers "
                "with steps of their own; use --format gantt, svg or chrome"
            )
        Timeline().add(run)  # which refuses what is no batch
        if run.batch > MAX_SLOTS:
            raise BatchdecodeError(
                f"--play shows up to {MAX_SLOTS:,} slots, and this run states {run.batch:,}; use "
                "--format gantt"
            )
        self._run = RunState(run.batch)
        self._run.keep_ends(MAX_ENDS)  # each chapter has them
        self.timeline = Timeline(self._run.fold)
        self.timeline.add(run)
        self._points = set[int]()
        self.longest = Longest()
        self.chapters: list[Chapter] = []
        self._arrive_steps = array("q")  # of what waits on its own account; sorted in the end
        self._step = 0
        self._is_measured = False
        self._early: list[Event] = []  # arrivals, until the next event tells their step
        self._again = Counter[SequenceKey]()  # sequences that were lost, and come again
        self._state = _packed(self._run)
        self._steps: list[int] = []  # with which the events of the chapter were told
        self._events: list[Event] = []

    @property
    def num_steps(self) -> int:
        return self.timeline.num_steps

    def add(self, event: Event) -> None:
        """Take in the next event, with the step with which a view of the run was told of it."""
        step = self._step
        match event:
            case ArriveEvent() if not self._is_measured:
                # Read when a slot was free for it: in the step that the next event tells.
                self._early.append(event)
                return
            case StepsEvent():  # stands before all else that the last of these steps has told
                self._is_measured = True
                step = event.step + len(event.ends) - 1
            case RestartEvent():
                step = event.last_step
                self._points.add(step)
                self._again.update(map(_key, self._run.fold.open))
            case EndEvent() | ArriveEvent() | RunEvent():  # a second start is the fold's to refuse
                pass
            case _:
                step = event.step
        self._step = max(self._step, step)
        self._take_early()
        if isinstance(event, EndEvent):
            self.timeline.add(event)
        else:
            self._take(event)

    def close(self) -> None:
        self._take_early()
        for found in self._run.fold.open:
            self._see_tokens(found, found.max_tokens)
        self._end_chapter()
        self.timeline.close()
        self.timeline.check_integrity()
        self._arrive_steps = array("q", sorted(self._arrive_steps))
        if not self.num_steps:
            raise BatchdecodeError("there is nothing to play: no request took a slot")

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for event in early:
            self._take(event)

    def _take(self, event: Event) -> None:
        step, run, longest = self._step, self._run, self.longest
        # Packing the state costs as much as some events: a chapter has at least so many.
        size = max(MIN_EVENTS, 2 * len(run.fold.open), len(run.slots))
        if len(self._events) >= size and step > self._steps[-1]:
            self._end_chapter()
        self._steps.append(step)
        self._events.append(event)
        if isinstance(event, AdmitEvent) and not 0 <= event.slot < len(run.slots):
            raise InvariantError(f"{event.id!r} is in slot {event.slot} of {len(run.slots)}")
        found = self.timeline.add(event)
        run.keep_up()
        if found is not None and found.first_event is event:
            if self._again[_key(found)]:  # it was lost, and comes again
                self._again[_key(found)] -= 1
            elif not is_follower(found):
                self._arrive_steps.append(found.waits_from)
            width = cell_width(printable(found.label[: MAX_LABEL + 1]))
            longest.request = max(longest.request, min(width, MAX_REQUEST))
        if isinstance(event, DraftEvent):
            longest.drafts = max(longest.drafts, len("drafts"), 2 * len(str(event.tokens)) + 1)
        elif isinstance(event, FinishEvent) and found is not None:
            self._see_tokens(found, event.tokens)
        is_lost = isinstance(event, PreemptEvent) and not is_follower(event)
        has_failed = isinstance(event, FinishEvent) and event.reason in FAILURES
        if is_lost or has_failed or isinstance(event, RejectEvent):
            self._points.add(step)

    def _see_tokens(self, found: RequestTimeline, num_tokens: int) -> None:
        if found.max_tokens:
            width = len(f"{num_tokens}/{found.max_tokens}")
            self.longest.tokens = max(self.longest.tokens, width)

    def _end_chapter(self) -> None:
        packed = zlib.compress(_encoder.encode((self._steps, self._events)), 1)
        self.chapters.append((self._steps[0] if self.chapters else 0, self._state, packed))
        self._run.catch_up()
        self._run.num_tokens(self._step)  # by which it forgets what it need not know any more
        self._state = _packed(self._run)
        self._steps, self._events = [], []

    def state_before(self, chapter: int) -> RunState:
        state: RunState = pickle.loads(zlib.decompress(self.chapters[chapter][1]))  # noqa: S301 - our own
        return state

    def events_from(self, chapter: int) -> Iterator[tuple[int, list[Event]]]:
        """Yield the events of each step from a chapter on, with the step."""
        unpacked = (_decoder.decode(zlib.decompress(one[2])) for one in self.chapters[chapter:])
        told = chain.from_iterable(zip(*columns, strict=True) for columns in unpacked)
        for step, same in groupby(told, key=itemgetter(0)):
            yield step, [event for _, event in same]

    @cached_property
    def depths(self) -> QueueDepths:
        stretches = list(self.timeline.waiting())
        return QueueDepths((s.start for s in stretches), (s.num for s in stretches))

    def num_coming(self, step: int) -> int:
        return len(self._arrive_steps) - bisect_right(self._arrive_steps, step)

    def find(self, text: str) -> dict[int, str]:
        """Return labels by the steps of their admission: called `text`, else with it in them."""
        named, alike = dict[int, str](), dict[int, str]()
        for span in self.timeline.spans:
            if text in (span.id, span.label):
                named.setdefault(span.start, span.label)
            elif text in span.label:
                alike.setdefault(span.start, span.label)
        return named or alike

    def admissions_of(self, request_ids: Collection[str]) -> dict[int, str]:
        found = dict[int, str]()
        for span in self.timeline.spans if request_ids else ():
            if span.id in request_ids:
                found.setdefault(span.start, span.label)
        return found

    @cached_property
    def points(self) -> list[int]:
        """The steps of preemptions, failures, restarts and of the worst bubble, ascending."""
        bubble = worst_bubble(self.timeline)
        return sorted(self._points if bubble is None else {*self._points, bubble.start})


def _packed(run: RunState) -> bytes:
    return zlib.compress(pickle.dumps(run, pickle.HIGHEST_PROTOCOL), 1)


def _key(found: RequestTimeline) -> SequenceKey:
    return key_of(found.id, found.index, found.role)


class Playback:
    """Shows a recording; `scene` is that of `step`, once one was sought."""

    def __init__(self, recording: Recording, title: str, glyphs: Glyphs) -> None:
        run, timeline = recording.timeline.run, recording.timeline
        self.recording, self.step = recording, -1
        self._num_blocks = run.scheduling.get("kv_blocks")
        self._has_blocks = self._num_blocks is not None or any(timeline.figures.blocks)
        watched = max(MAX_WATCHED // timeline.num_slots, MIN_WATCHED)
        self._num_watched = min(NUM_WATCHED, watched)
        self._open(0)
        is_timed = bool(run.step_time)
        self.scene = Scene(
            self._state,
            RunPlan(
                title, run.policy, timeline.num_slots, timeline.num_requests, is_timed=is_timed
            ),
            GaugeReading(0.0, timeline.num_slots, None, None),
            glyphs,
            Strips(self._state.slots, glyphs),
            Moment(-1, 0, 0.0, None, None),
            depths=recording.depths,
            longest=recording.longest,
        )
        self._begin(0)

    def seek(self, step: int) -> Scene:
        first = max(step - self._num_watched + 1, 0)
        # What is unpacked lives on: looking for garbage in it would take half of the time.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            if not first <= self.step + 1 <= step + 1:
                chapters = self.recording.chapters
                chapter = bisect_right(chapters, first, key=itemgetter(0)) - 1
                if not chapters[chapter][0] <= self.step + 1 <= first:
                    self._open(chapter)
                self._begin(first)
            while self.step < step:
                self._watch(self.step + 1, is_sampled=self.step + 1 >= step - NUM_SAMPLES)
        finally:
            if is_collecting:
                gc.enable()
        self._look()
        return self.scene

    def _open(self, chapter: int) -> None:
        self._state = self.recording.state_before(chapter)
        self._told = self.recording.events_from(chapter)
        self._ahead = deque[tuple[int, list[Event]]]()  # of steps that are still to be shown
        # The first after the step, once it was looked for, with the step that it was told with.
        self._next_admission: tuple[int, AdmitEvent | None] = -1, None

    def _peek(self, place: int) -> tuple[int, list[Event]] | None:
        """Return what a later step is told of, and its number; the next one for 0."""
        if place == len(self._ahead):
            self._ahead.extend(filter(None, [next(self._told, None)]))
        return self._ahead[place] if place < len(self._ahead) else None

    def _take_before(self, step: int) -> None:
        while (told := self._peek(0)) is not None and told[0] < step:
            for event in told[1]:
                self._state.fold.take(event)
            self._state.keep_up()
            self._ahead.popleft()
        self._state.catch_up()

    def _begin(self, step: int) -> None:
        """Take in the steps before `step`, and forget what was seen in them."""
        self._take_before(step)
        state, scene = self._state, self.scene
        self.step = step - 1
        state.notes.clear()
        for slot in state.slots:
            slot.take_mark(slot.use_until(self.step)[2])
        # The newest steps, with the tokens after each.
        self._samples = deque([(self.step, state.num_tokens(self.step))], maxlen=NUM_SAMPLES + 1)
        scene.run, scene.marks = state, [""] * len(state.slots)
        scene.strips = Strips(state.slots, scene.glyphs, self.step, self._num_watched)
        for seen in (scene.busy, scene.queued, scene.marked, scene.noted):
            seen.clear()

    def _watch(self, step: int, *, is_sampled: bool) -> None:
        self.step = step
        is_last = step == self.recording.num_steps - 1
        self._take_before(MAX_STEPS if is_last else step + 1)
        self.scene.watch(step, step * SECONDS_PER_STEP)
        self.scene.queued.append(self.recording.depths.at(step))
        if is_sampled:
            self._samples.append((step, self._state.num_tokens(step)))

    def _look(self) -> None:
        """Let the scene show what the trace has of `step`, and what a live view asks gauges for."""
        scene, state, step = self.scene, self._state, self.step
        figures, depths = self.recording.timeline.figures, self.recording.depths
        now = figures.end_of(step)
        scene.read_ends()
        (first_step, first_tokens), (_, num_tokens) = self._samples[0], self._samples[-1]
        num_new, speed = num_tokens - first_tokens, None
        if scene.plan.is_timed:
            begun = figures.end_of(first_step) if first_step >= 0 else 0.0
            speed = num_new / max(now - begun, 1e-9)
        rate = num_new / max(1, step - first_step)
        scene.moment = Moment(step, num_tokens, rate, speed, None)
        num_free, use = sum(slot.end is not None for slot in state.slots), None
        if self._has_blocks and step < len(figures.blocks):
            held = figures.blocks[step]
            use = HeldBlocks(held, None if self._num_blocks is None else self._num_blocks - held)
        queue = depths.at(step), self.recording.num_coming(step)
        scene.gauges = GaugeReading(now, num_free, self._next_up(num_free), use, *queue)

    def _next_up(self, num_free: int) -> str | None:
        """Return the label of the next to be admitted, if it waits already."""
        place, (step, admit) = 0, self._next_admission
        while step <= self.step:
            told = self._peek(place)
            step, events = (MAX_STEPS, []) if told is None else told
            admitted = (e for e in events if isinstance(e, AdmitEvent) and not is_follower(e))
            admit, place = next(admitted, None), place + 1
            step = self.step if told is not None and admit is None else step
            self._next_admission = step, admit
        if admit is None or (num_free and step > self.step + 1):
            return None
        name = admit.id, admit.index
        waiting = (r for r in self._state.fold.open if (r.id, r.index) == name)
        known = next((r for r in waiting if not is_follower(r)), None)
        if known is None:  # its arrival may be told later
            later = chain.from_iterable(events for _, events in self._ahead)
            arrivals = (e for e in later if isinstance(e, ArriveEvent) and e.step <= self.step)
            is_waiting = any((e.id, e.index) == name for e in arrivals)
        else:
            is_waiting = known.admission is None
        return label_of(*name, "sample") if is_waiting else None
