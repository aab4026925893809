"""A run that was recorded, kept so that how it stood after any step is there at once.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

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

from ..screen.live import MAX_TREND, NUM_SAMPLES
from ..screen.live_picture import MAX_CELLS, MAX_REQUEST, Longest, Scene, Strips
from ..screen.live_state import (
    MAX_LABEL,
    Lately,
    Mark,
    Moment,
    QueueDepths,
    RunState,
    SlotState,
    newest_ends,
)
from ..screen.terminal import cell_width, printable
from ..screen.theme import Glyphs
from ..screen.view import GaugeReading, HeldBlocks, RunPlan

MIN_EVENTS = 4096  # the fewest events of a chapter; there are more where more requests wait at once
MAX_ENDS = 64  # so many of those that have ended are known after each step
NUM_UNPACKED = 4  # so many chapters are kept unpacked

MAX_SLOTS = 2**16  # each takes an object, and a trace of a few bytes may state any number
NUM_WATCHED = MAX_CELLS
"""More steps than any mark or note is shown for, and as many as a strip has cells."""
SECONDS_PER_STEP = 0.125
"""Marks and notes are shown for as long as in a live view that makes a step in this time."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[list[int], list[Event]])


class Chapter(NamedTuple):
    """Events that were told with `step` and later ones, and what the run was like before, packed.

    first: the number of the first of them, of all that there are.
    """

    step: int
    first: int
    state: bytes
    events: bytes


class AdmittedSample(NamedTuple):
    """What was admitted in `step`; waits_from: the step since which it waited."""

    step: int
    label: str
    waits_from: int


class Recording:
    """Takes in what followed the start of a run, event by event, up to `close`.

    timeline: what happened.
    preemptions, failures: the steps with which each was told, ascending.
    longest: the widest that there is to be shown of it.  chapters: by step.
    """

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
        self.preemptions, self.failures = array("q"), array("q")
        self.longest = Longest()
        self.chapters: list[Chapter] = []
        self.num_requests = 0
        self._arrive_steps = array("q")  # of what waits on its own account; sorted in the end
        # Of what was admitted on its own account: the step, the number of the event, its wait.
        self._admit_steps, self._admit_numbers = array("q"), array("q")
        self._admit_waits = array("q")
        self._step = self._num_events = 0
        self._is_measured = False
        self._early: list[Event] = []  # arrivals, until the next event tells their step
        self._again = Counter[SequenceKey]()  # sequences that were lost, and come again
        self._state = _packed(self._run)
        self._steps: list[int] = []  # with which the events of the chapter were told
        self._events: list[Event] = []
        self._unpacked = lru_cache(NUM_UNPACKED)(self._unpack)

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
                self._again.update(
                    key_of(found.id, found.index, found.role)
                    for found in self._run.fold.open
                    if not is_follower(found)
                )
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
        self._end_chapter(self._step)
        self.timeline.close()
        self.timeline.check_integrity()
        self._arrive_steps = array("q", sorted(self._arrive_steps))
        if not self.num_steps:
            raise BatchdecodeError("there is nothing to play: no request took a slot")

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for event in early:
            self._take(event)

    def state_before(self, chapter: int) -> RunState:
        state: RunState = pickle.loads(zlib.decompress(self.chapters[chapter].state))  # noqa: S301 - our own
        return state

    def events_from(self, chapter: int) -> Iterator[tuple[int, list[Event]]]:
        for number in range(chapter, len(self.chapters)):
            steps, events = self._unpacked(number)
            start = 0
            for step, same in groupby(steps):
                stop = start + len(list(same))
                yield step, events[start:stop]
                start = stop

    @cached_property
    def depths(self) -> QueueDepths:
        stretches = list(self.timeline.waiting())
        return QueueDepths((s.start for s in stretches), (s.num for s in stretches))

    def num_coming(self, step: int) -> int:
        return len(self._arrive_steps) - bisect_right(self._arrive_steps, step)

    def admission_after(self, step: int) -> AdmittedSample | None:
        place = bisect_right(self._admit_steps, step)
        if place == len(self._admit_steps):
            return None
        number = self._admit_numbers[place]
        chapter = bisect_right(self.chapters, number, key=attrgetter("first")) - 1
        _, events = self._unpacked(chapter)
        admit = events[number - self.chapters[chapter].first]
        if not isinstance(admit, AdmitEvent):
            raise InvariantError(f"event {number} is no admission")
        label = label_of(admit.id, admit.index, "sample")
        return AdmittedSample(self._admit_steps[place], label, self._admit_waits[place])

    def find(self, text: str) -> dict[int, str]:
        """Return who is admitted, by the steps, that is called `text` or else has it in its name.

        Of those that one step admits it is the first.
        """
        named, alike = dict[int, str](), dict[int, str]()
        for step, event in self._admissions():
            label = label_of(event.id, event.index, event.role)
            if text in (event.id, label):
                named.setdefault(step, label)
            elif text in label:
                alike.setdefault(step, label)
        return named or alike

    def admissions_of(self, request_ids: Collection[str]) -> dict[int, str]:
        found = dict[int, str]()
        for step, event in self._admissions() if request_ids else ():
            if event.id in request_ids:
                found.setdefault(step, label_of(event.id, event.index, event.role))
        return found

    def _admissions(self) -> Iterator[tuple[int, AdmitEvent]]:
        for number in range(len(self.chapters)):
            for step, event in zip(*self._unpack(number), strict=True):
                if type(event) is AdmitEvent:
                    yield step, event

    @cached_property
    def worst_bubble(self) -> int | None:
        bubble = worst_bubble(self.timeline)
        return None if bubble is None else bubble.start

    def _take(self, event: Event) -> None:
        step, run = self._step, self._run
        # Packing the state costs as much as some events: a chapter has at least so many.
        size = max(MIN_EVENTS, 2 * len(run.fold.open), len(run.slots))
        if len(self._events) >= size and step > self._steps[-1]:
            self._end_chapter(step)
        self._steps.append(step)
        self._events.append(event)
        if isinstance(event, AdmitEvent) and not 0 <= event.slot < len(run.slots):
            raise InvariantError(f"{event.id!r} is in slot {event.slot} of {len(run.slots)}")
        found = self.timeline.add(event)
        run.keep_up()
        if found is not None and found.first_event is event:
            key = key_of(found.id, found.index, found.role)
            if self._again[key]:  # it was lost, and comes again
                self._again[key] -= 1
            elif not is_follower(found):
                self.num_requests += not found.index
                self._arrive_steps.append(found.waits_from)
            width = cell_width(printable(found.label[: MAX_LABEL + 1]))
            self.longest.request = max(self.longest.request, min(width, MAX_REQUEST))
        match event:
            case AdmitEvent() if not is_follower(event):
                self._admit_steps.append(step)
                self._admit_numbers.append(self._num_events)
                self._admit_waits.append(0 if found is None else found.waits_from)
            case PreemptEvent() if not is_follower(event):
                self.preemptions.append(step)
            case FinishEvent():
                if found is not None:
                    self._see_tokens(found, event.tokens)
                if event.reason in FAILURES:
                    self.failures.append(step)
            case RejectEvent():
                self.num_requests += 1
                self.failures.append(step)
            case DraftEvent():
                drafts = 2 * len(str(event.tokens)) + 1
                self.longest.drafts = max(self.longest.drafts, len("drafts"), drafts)
            case _:
                pass
        self._num_events += 1

    def _end_chapter(self, step: int) -> None:
        first = self._num_events - len(self._events)
        packed = zlib.compress(_encoder.encode((self._steps, self._events)), 1)
        begun = self._steps[0] if self.chapters else 0
        self.chapters.append(Chapter(begun, first, self._state, packed))
        self._run.catch_up()
        self._run.num_tokens(step)  # by which it forgets whom it need not know of any more
        self._state = _packed(self._run)
        self._steps, self._events = [], []

    def _unpack(self, chapter: int) -> tuple[list[int], list[Event]]:
        return _decoder.decode(zlib.decompress(self.chapters[chapter].events))

    def _see_tokens(self, found: RequestTimeline, num_tokens: int) -> None:
        if found.max_tokens:
            width = len(f"{num_tokens}/{found.max_tokens}")
            self.longest.tokens = max(self.longest.tokens, width)


def _packed(run: RunState) -> bytes:
    return zlib.compress(pickle.dumps(run, pickle.HIGHEST_PROTOCOL), 1)


class StepStrips(Strips):
    """Strips with a cell for each step after `step`, for which nobody looks at slots at rest."""

    def __init__(self, slots: Sequence[SlotState], glyphs: Glyphs, step: int) -> None:
        super().__init__(slots, glyphs)
        self.steps.append(step + 1)
        self.steps.popleft()
        self._until = [step + 1] * len(slots)  # up to which step each has its cells
        self._admitted = [slot.num_admitted for slot in slots]
        self._at_rest = [self._resting(slot) for slot in slots]

    def watch(self, step: int, marks: Mapping[int, Mark]) -> None:
        self.steps.append(step + 1)
        for number, mark in marks.items():
            slot, before = self._slots[number], self._admitted[number]
            admitted = self._admitted[number] = slot.num_admitted
            self._fill(number, step)
            share = float(slot.is_busy(step))
            self.cells[number] += self._cell(slot, mark, share, admitted - before, step)
            self._until[number] = step + 1
            self._at_rest[number] = self._resting(slot)

    def fill(self) -> None:
        for number in range(len(self.cells)):
            self._fill(number, self.steps[-1])

    def _fill(self, number: int, until: int) -> None:
        more = self._at_rest[number] * (until - self._until[number])
        self.cells[number] = (self.cells[number] + more)[-self._max_cells :]
        self._until[number] = until

    def _resting(self, slot: SlotState) -> str:
        return self._cell(slot, "", float(slot.end is None), 0, self.steps[-1])


class Playback:
    """Shows a recording; `scene` is that of `step`, once one was sought.

    glyphs: what it is drawn with.
    """

    def __init__(self, recording: Recording, title: str, glyphs: Glyphs) -> None:
        run = recording.timeline.run
        self.recording, self.step = recording, -1
        blocks = run.scheduling.get("kv_blocks")
        self._num_blocks = blocks
        self._has_blocks = self._num_blocks is not None or any(recording.timeline.figures.blocks)
        plan = RunPlan(
            title,
            run.policy,
            recording.timeline.num_slots,
            recording.num_requests,
            is_timed=bool(run.step_time),
        )
        self._state = recording.state_before(0)
        self._told = recording.events_from(0)
        self._ahead = next(self._told, None)
        self._held = set[int]()  # the slots that are, after the step
        self._lately = Lately(recording.timeline.num_slots)
        self._samples: deque[tuple[int, int]] = deque(maxlen=NUM_SAMPLES + 1)  # step and tokens
        self._strips = StepStrips(self._state.slots, glyphs, -1)
        self.scene = Scene(
            self._state,
            plan,
            GaugeReading(0.0, recording.timeline.num_slots, None, None),
            glyphs,
            self._strips,
            Moment(-1, 0, 0.0, None, None),
            marks=[],
            notes=[],
            ends=[],
            busy=deque(maxlen=MAX_TREND),
            queued=deque(maxlen=MAX_TREND),
            depths=recording.depths,
            longest=recording.longest,
        )
        self._begin(0)

    @property
    def last_step(self) -> int:
        return self.recording.num_steps - 1

    def seek(self, step: int) -> Scene:
        first, recording = max(step - NUM_WATCHED + 1, 0), self.recording
        # What is unpacked lives on: looking for garbage in it would take half of the time.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            if not first <= self.step + 1 <= step + 1:
                chapters = recording.chapters
                chapter = bisect_right(chapters, first, key=attrgetter("step")) - 1
                if not chapters[chapter].step <= self.step + 1 <= first:
                    self._state = recording.state_before(chapter)
                    self._told = recording.events_from(chapter)
                    self._ahead = next(self._told, None)
                self._take_before(first)
                self._begin(first)
            while self.step < step:
                self._watch(self.step + 1, is_sampled=self.step + 1 >= step - NUM_SAMPLES)
        finally:
            if is_collecting:
                gc.enable()
        self._look()
        return self.scene

    def _take_before(self, step: int) -> set[int]:
        """Take in what was told with the steps before `step`; return the slots it was about."""
        slots = set[int]()
        while self._ahead is not None and self._ahead[0] < step:
            for event in self._ahead[1]:
                self._state.fold.take(event)
                slot = getattr(event, "slot", None)
                if slot is not None:
                    slots.add(slot)
                elif isinstance(event, RestartEvent):
                    slots.update(range(len(self._state.slots)))
            self._state.keep_up()
            self._ahead = next(self._told, None)
        self._state.catch_up()
        return slots

    def _begin(self, step: int) -> None:
        state, scene = self._state, self.scene
        self.step = step - 1
        state.notes.clear()
        for slot in state.slots:
            slot.take_mark()
        self._held = {number for number, slot in enumerate(state.slots) if slot.end is None}
        self._samples.clear()
        self._samples.append((self.step, state.num_tokens(self.step)))
        self._lately = Lately(len(state.slots))
        self._strips = StepStrips(state.slots, scene.glyphs, self.step)
        scene.run, scene.marks, scene.strips = state, self._lately.marks, self._strips
        scene.busy.clear()
        scene.queued.clear()

    def _watch(self, step: int, *, is_sampled: bool) -> None:
        self.step, state = step, self._state
        touched = self._take_before(MAX_STEPS if step == self.last_step else step + 1)
        marks = {number: state.slots[number].take_mark() for number in touched}
        self._strips.watch(step, marks)
        num_busy = len(self._held - touched) + sum(state.slots[n].is_busy(step) for n in touched)
        self._held -= touched
        self._held |= {number for number in touched if state.slots[number].end is None}
        self.scene.busy.append(num_busy / len(state.slots))
        self.scene.queued.append(self.recording.depths.at(step))
        self._lately.take(state, marks, step * SECONDS_PER_STEP)
        if is_sampled:
            self._samples.append((step, state.num_tokens(step)))

    def _look(self) -> None:
        scene, state, step = self.scene, self._state, self.step
        self._strips.fill()
        scene.notes = self._lately.notes(step * SECONDS_PER_STEP)
        scene.ends = newest_ends(state)
        (first_step, first_tokens), (_, num_tokens) = self._samples[0], self._samples[-1]
        num_new, speed = num_tokens - first_tokens, None
        if scene.plan.is_timed:
            speed = num_new / max(self._end_of(step) - self._end_of(first_step), 1e-9)
        rate = num_new / max(1, step - first_step)
        scene.moment = Moment(step, num_tokens, rate, speed, None)
        # What the trace tells of what events do not tell a live view.
        blocks, use = self.recording.timeline.figures.blocks, None
        num_free = len(state.slots) - len(self._held)
        if self._has_blocks and step < len(blocks):
            free = None if self._num_blocks is None else self._num_blocks - blocks[step]
            use = HeldBlocks(blocks[step], free)
        queue = self.recording.depths.at(step), self.recording.num_coming(step)
        next_up, found = None, self.recording.admission_after(step)
        if found is not None and found.waits_from <= step:
            next_up = found.label if found.step == step + 1 or not num_free else None
        scene.gauges = GaugeReading(self._end_of(step), num_free, next_up, use, *queue)

    def _end_of(self, step: int) -> float:
        return self.recording.timeline.figures.end_of(step) if step >= 0 else 0.0
