"""A recorded run, whose steps the player shows in any order.

The recording keeps the state that the live view folds from events, packed every few thousand
events, and the events in between (about 25 bytes each).  A step is shown by folding the events from
the nearest packed state on.  The picture of a step depends on that state alone.
"""

import gc
import pickle
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Self

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
    SequenceName,
    StepsEvent,
)
from batcher.explaining.story import story_of
from batcher.trace.run import (
    FAILURES,
    RequestTimeline,
    SequenceKey,
    is_follower,
    key_of,
    label_of_name,
)
from batcher.trace.timeline import MAX_STEPS, Timeline, worst_bubble

from ..screen.live import NUM_SAMPLES
from ..screen.live_picture import (
    MAX_CELLS,
    MAX_REQUEST,
    MAX_TREND,
    SHOWN_SECONDS,
    Longest,
    Scene,
    StepStrips,
    Strips,
)
from ..screen.live_state import MAX_LABEL, Moment, QueueDepths, RunState
from ..screen.terminal import cell_width, printable
from ..screen.theme import Glyphs
from ..screen.view import MAX_LISTED, GaugeReading, HeldBlocks, RunPlan
from .story_text import tell

MIN_EVENTS = 4096  # of a chapter; more if more requests wait at once
MAX_ENDS = 64  # sequences that have ended, kept for each step
MAX_LOOKED = 4096  # admissions after a step, among which the queue is found

MAX_SLOTS = 2**16  # a trace of a few bytes may state any number
SECONDS_PER_STEP = 0.125  # marks and notes are shown as in a live view at this pace

Chapter = tuple[int, bytes, bytes]
"""The step of its first event, the state before that event, and its events, packed."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[list[int], list[Event]])


class Recording:
    """Records the events after the start of a run, up to `close`.

    first_point: the first step with a preemption, a failure or a refilled slot.
    """

    def __init__(self, run: RunEvent) -> None:
        if run.workers > 1:
            raise BatchdecodeError(
                f"--play shows one engine, and this run has {run.workers} workers with their own "
                "steps; use --format gantt, svg or chrome"
            )
        Timeline().add(run)  # checks the size of the batch
        if run.batch > MAX_SLOTS:
            raise BatchdecodeError(
                f"--play shows up to {MAX_SLOTS:,} slots, but this run has {run.batch:,}; use "
                "--format gantt"
            )
        self._run = RunState(run.batch)
        self._run.keep_ends(MAX_ENDS)
        self.timeline = Timeline(self._run.fold)
        self.timeline.add(run)
        self._points = set[int]()
        self.longest = Longest()
        self.chapters: list[Chapter] = []
        self._arrive_steps = array("q")  # of leaders; sorted at the end
        self._admissions: list[tuple[int, int, SequenceName]] = []  # step, wait from
        self.first_point: int | None = None
        self._step = 0
        self._is_measured = False
        self._early: list[ArriveEvent] = []  # until the next event shows their step
        self._again = Counter[SequenceKey]()  # sequences that were lost, and come again
        self._state = _packed(self._run)
        self._steps: list[int] = []  # in which the events of the chapter were reported
        self._events: list[Event] = []

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Self:
        """Return the recording of a whole run, which begins with its run event."""
        recording: Self | None = None
        for event in events:
            if recording is not None:
                recording.add(event)
            elif isinstance(event, RunEvent):
                recording = cls(event)
        if recording is None:
            raise InvariantError("there is no run event")
        recording.close()
        return recording

    @property
    def num_steps(self) -> int:
        return self.timeline.num_steps

    def add(self, event: Event) -> None:
        """Record the next event in the step in which the live view of the run received it."""
        step = self._step
        match event:
            case ArriveEvent() if not self._is_measured:
                # Read when a slot was free for it, in the step of the next event.
                self._early.append(event)
                return
            case StepsEvent():  # precedes the other events of its last step
                self._is_measured = True
                step = event.step + len(event.ends) - 1
            case RestartEvent():
                step = event.last_step
                self._points.add(step)
                self._again.update(map(_key, self._run.fold.open))
            case EndEvent() | ArriveEvent() | RunEvent():  # the fold rejects a second start
                pass
            case _:
                step = event.step
        before, self._step = self._step, max(self._step, step)
        self._take_early(event, before)
        if isinstance(event, EndEvent):
            self.timeline.add(event)
        else:
            self._take(event)

    def close(self) -> None:
        self._take_early(None, self._step)
        for found in self._run.fold.open:
            self._see_tokens(found, found.max_tokens)
        self._end_chapter()
        self.timeline.close()
        self.timeline.check_integrity()
        self._arrive_steps = array("q", sorted(self._arrive_steps))
        if not self.num_steps:
            raise BatchdecodeError("nothing to play: no request took a slot")

    def _take_early(self, event: Event | None, before: int) -> None:
        """Take the arrivals between the last event, of the step `before`, and `event`.

        A request that was read for a free slot arrives with its admission, others in their step.
        """
        early, self._early = self._early, []
        was_read = isinstance(event, AdmitEvent) and event.id in {each.id for each in early}
        last, current = before, self._step
        for each in early:
            is_told = last < each.step < current and not was_read
            self._step = last = each.step if is_told else current
            self._take(each)
        self._step = current

    def _take(self, event: Event) -> None:
        step, run, longest = self._step, self._run, self.longest
        # Packing the state costs as much as packing some events, so a chapter has as many.
        size = max(MIN_EVENTS, 2 * len(run.fold.open), run.num_slots)
        if len(self._events) >= size and step > self._steps[-1]:
            self._end_chapter()
        self._steps.append(step)
        self._events.append(event)
        if isinstance(event, AdmitEvent) and not 0 <= event.slot < run.num_slots:
            raise InvariantError(f"{event.id!r} is in slot {event.slot} of {run.num_slots}")
        found = self.timeline.add(event)
        run.keep_up()
        if found is not None and found.first_event is event:
            if self._again[_key(found)]:
                self._again[_key(found)] -= 1
            elif not is_follower(found):
                self._arrive_steps.append(found.waits_from)
            width = cell_width(printable(found.label[: MAX_LABEL + 1]))
            longest.request = max(longest.request, min(width, MAX_REQUEST))
        if isinstance(event, AdmitEvent) and found is not None and not is_follower(found):
            name = SequenceName(found.id, found.index)
            self._admissions.append((step, found.waits_from, name))
        elif isinstance(event, DraftEvent):
            longest.drafts = max(longest.drafts, len("drafts"), 2 * len(str(event.tokens)) + 1)
        elif isinstance(event, FinishEvent) and found is not None:
            self._see_tokens(found, event.tokens)
        is_lost = isinstance(event, PreemptEvent) and not is_follower(event)
        has_failed = isinstance(event, FinishEvent) and event.reason in FAILURES
        is_refill = isinstance(event, AdmitEvent) and event.reason == "refill"
        is_point = is_lost or has_failed or isinstance(event, RejectEvent)
        if is_point:
            self._points.add(step)
        if self.first_point is None and (is_point or is_refill):
            self.first_point = step

    def _see_tokens(self, found: RequestTimeline, num_tokens: int) -> None:
        if found.max_tokens:
            width = len(f"{num_tokens}/{found.max_tokens}")
            self.longest.tokens = max(self.longest.tokens, width)

    def _end_chapter(self) -> None:
        packed = zlib.compress(_encoder.encode((self._steps, self._events)), 1)
        self.chapters.append((self._steps[0] if self.chapters else 0, self._state, packed))
        self._run.catch_up()
        self._run.num_tokens(self._step)  # drops what it no longer needs
        self._run.forget(self._step - MAX_CELLS)
        self._state = _packed(self._run)
        self._steps, self._events = [], []

    def events_from(self, chapter: int) -> Iterator[tuple[int, list[Event]]]:
        """Yield the steps from a chapter on with their events."""
        unpacked = (_decoder.decode(zlib.decompress(one[2])) for one in self.chapters[chapter:])
        pairs = chain.from_iterable(zip(*columns, strict=True) for columns in unpacked)
        for step, same in groupby(pairs, key=itemgetter(0)):
            yield step, [event for _, event in same]

    @cached_property
    def depths(self) -> QueueDepths:
        stretches = list(self.timeline.waiting())
        return QueueDepths((s.start for s in stretches), (s.num for s in stretches))

    def num_coming(self, step: int) -> int:
        return len(self._arrive_steps) - bisect_right(self._arrive_steps, step)

    def waiting(self, step: int) -> list[SequenceName]:
        """Return the first requests in the queue after `step`, in the order of their admission."""
        place = bisect_right(self._admissions, step, key=itemgetter(0))
        coming = self._admissions[place : place + MAX_LOOKED]
        found = (name for _, waits_from, name in coming if waits_from <= step)
        return list(islice(found, min(self.depths.at(step), MAX_LISTED)))

    def next_up(self, step: int, *, has_free: bool) -> str | None:
        """Return the label of the next request to be admitted after `step`, if it waits already."""
        place = bisect_right(self._admissions, step, key=itemgetter(0))
        for admitted, waits_from, name in self._admissions[place : place + 1]:
            if waits_from <= step and not (has_free and admitted > step + 1):
                return label_of_name(name)
        return None

    def find(self, text: str) -> dict[int, str]:
        """Return labels equal to `text`, or else containing it, by the steps of their admission."""
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
        """The steps of preemptions, failures, restarts and the worst bubble, ascending."""
        bubble = worst_bubble(self.timeline)
        return sorted(self._points if bubble is None else {*self._points, bubble.start})


def _packed(run: RunState) -> bytes:
    return zlib.compress(pickle.dumps(run, pickle.HIGHEST_PROTOCOL), 1)


def _key(found: RequestTimeline) -> SequenceKey:
    return key_of(found.id, found.index, found.role)


class Playback:
    """Shows a recording; `scene` is that of `step`, after the first `seek`."""

    def __init__(self, recording: Recording, title: str, glyphs: Glyphs) -> None:
        run, timeline = recording.timeline.run, recording.timeline
        self.recording = recording
        self._num_blocks = run.scheduling.get("kv_blocks")
        self._has_blocks = self._num_blocks is not None or any(timeline.figures.blocks)
        self._open(0)
        batch_size, is_timed = timeline.num_slots, bool(run.step_time)
        self.scene = Scene(
            self._state,
            RunPlan(title, run.policy, batch_size, timeline.num_requests, is_timed=is_timed),
            GaugeReading(0.0, batch_size, None, None),
            glyphs,
            Strips(self._state, glyphs),
            Moment(-1, 0, 0.0, None, None),
            depths=recording.depths,
            longest=recording.longest,
            story=self._story,
        )

    def _story(self, request: RequestTimeline) -> list[str]:
        """Return the story of a request up to the step that is shown."""
        timeline = copy(self.recording.timeline)
        timeline.num_steps = self.step + 1
        return [line.strip() for line in tell(story_of(timeline, request), is_so_far=True)]

    def seek(self, step: int) -> Scene:
        first = max(step - NUM_SAMPLES + 1, 0)
        # Unpacked objects live on: collecting garbage would take half of the time.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            if not first <= self.step + 1 <= step + 1:
                chapters = self.recording.chapters
                chapter = bisect_right(chapters, first, key=itemgetter(0)) - 1
                if not chapters[chapter][0] <= self.step + 1 <= first:
                    self._open(chapter)
                self._fold_up_to(first - 1)
                self._samples.clear()
                self._samples.append((self.step, self._state.num_tokens(self.step)))
            while self.step < step:
                self._fold_up_to(self.step + 1)
                self._samples.append((self.step, self._state.num_tokens(self.step)))
        finally:
            if is_collecting:
                gc.enable()
        self._state.forget(step - MAX_CELLS)
        self._update()
        return self.scene

    def _open(self, chapter: int) -> None:
        packed = self.recording.chapters[chapter][1]
        self._state = pickle.loads(zlib.decompress(packed))  # noqa: S301 - our own
        self._events = self.recording.events_from(chapter)
        self._next = next(self._events, None)
        self.step = -1
        # The newest steps, with the tokens after each.
        self._samples = deque([(-1, 0)], maxlen=NUM_SAMPLES + 1)

    def _fold_up_to(self, step: int) -> None:
        self.step = step
        last = MAX_STEPS if step == self.recording.num_steps - 1 else step
        while self._next is not None and self._next[0] <= last:
            for event in self._next[1]:
                self._state.fold.take(event)
            self._state.keep_up()
            self._next = next(self._events, None)
        self._state.catch_up()

    def _update(self) -> None:
        """Set the scene to what the live view shows after `step`."""
        scene, state, step = self.scene, self._state, self.step
        figures, depths = self.recording.timeline.figures, self.recording.depths
        scene.run, scene.strips = state, StepStrips(state, scene.glyphs, step)
        scene.since = {
            kind: max(step + 1 - int(seconds / SECONDS_PER_STEP), 0)
            for kind, seconds in SHOWN_SECONDS.items()
        }
        scene.read_ends()
        trend = range(max(step + 1 - MAX_TREND, 0), step + 1)
        busy = [0] * len(trend)
        for slot in range(state.num_slots):
            for stay in state.stays(slot):
                end = step + 1 if stay.end is None else min(stay.end, step + 1)
                for each in range(max(stay.start, trend.start), end):
                    busy[each - trend.start] += 1
        scene.busy = deque(num / state.num_slots for num in busy)
        scene.queued = deque(map(depths.at, trend))
        (first_step, first_tokens), (_, num_tokens) = self._samples[0], self._samples[-1]
        num_new, speed, now = num_tokens - first_tokens, None, figures.end_of(step)
        if scene.plan.is_timed:
            begun = figures.end_of(first_step) if first_step >= 0 else 0.0
            speed = num_new / max(now - begun, 1e-9)
        rate = num_new / max(1, step - first_step)
        scene.moment = Moment(step, num_tokens, rate, speed, None)
        num_free, use = state.num_slots - state.num_running, None
        if self._has_blocks and step < len(figures.blocks):
            held = figures.blocks[step]
            use = HeldBlocks(held, None if self._num_blocks is None else self._num_blocks - held)
        next_up = self.recording.next_up(step, has_free=num_free > 0)
        queue = depths.at(step), self.recording.num_coming(step)
        waiting = self.recording.waiting(step)
        scene.gauges = GaugeReading(now, num_free, next_up, use, *queue, waiting)
