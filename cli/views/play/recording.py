"""A run that was recorded, kept so that how it stood after any step is there at once.

Rule: what is kept is the state that a live view folds from events, packed every few thousand of
them, with the events between.  So a step is shown by the code that shows it live, folded from
somewhere near; an event takes about 25 bytes, and nothing is looked up in a second description.
"""

import pickle
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

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
from batcher.trace.run import (
    RequestFold,
    RequestTimeline,
    SequenceKey,
    is_follower,
    key_of,
    label_of,
)
from batcher.trace.timeline import Timeline, worst_bubble
from batcher.trace.workers import ByWorker

from ...screen.live_picture import MAX_REQUEST, Longest
from ...screen.live_state import MAX_LABEL, QueueDepths, RunState
from ...screen.terminal import cell_width, printable

MIN_EVENTS = 4096
"""The fewest events of a chapter; there are more where more requests wait at once."""
MAX_ENDS = 64
"""So many of those that have ended are known after each step."""
NUM_UNPACKED = 4
"""So many chapters are kept unpacked."""

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


class ToldSteps:
    """With which step a view is told of the events of an engine, which come one by one."""

    def __init__(self) -> None:
        self._step = 0
        self._is_measured = False
        self._early: list[Event] = []

    def take(self, event: Event) -> list[tuple[int, Event]]:
        """Return what is told since `event` has come, in order, each with the step."""
        step = self._step
        match event:
            case ArriveEvent() if not self._is_measured:
                # Read when a slot was free for it: in the step that the next event tells.
                self._early.append(event)
                return []
            case StepsEvent():  # stands before all else that the last of these steps has told
                self._is_measured = True
                step = event.step + len(event.ends) - 1
            case RestartEvent():
                step = event.last_step
            case (
                EndEvent() | ArriveEvent() | RunEvent()
            ):  # a second start is the reader's to refuse
                pass
            case _:
                step = event.step
        self._step = max(self._step, step)
        return [*self.rest(), (self._step, event)]

    def rest(self) -> list[tuple[int, Event]]:
        """Return the arrivals that were to be told with the next step."""
        early, self._early = self._early, []
        return [(self._step, event) for event in early]


class Recording:
    """Takes in what followed the start of a run, event by event, up to `close`.

    timeline: what happened.
    preemptions, failures: the steps with which each was told, ascending.
    longest: the widest that there is to be shown of it.

    Raises:
        BatchdecodeError: there is no such batch.
    """

    def __init__(self, run: RunEvent) -> None:
        ByWorker(Timeline).add(run)  # which refuses what is no batch
        self._run = RunState(run.batch * run.workers, run.workers)
        self._run.keep_ends(MAX_ENDS)  # each chapter has them
        self.timeline = Timeline(self._run.only_fold)
        self.timeline.add(replace(run, workers=1))
        self.preemptions, self.failures = array("q"), array("q")
        self.longest = Longest()
        self._chapters: list[Chapter] = []
        self.num_requests = 0
        self._arrive_steps = array("q")  # of what waits on its own account; sorted in the end
        # Of what was admitted on its own account: the step, the number of the event, its wait.
        self._admit_steps, self._admit_numbers = array("q"), array("q")
        self._admit_waits = array("q")
        self._step = self._num_events = 0
        self._told = ToldSteps()
        self._again = Counter[SequenceKey]()  # sequences that were lost, and come again
        self._state = _packed(self._run)
        self._steps: list[int] = []  # with which the events of the chapter were told
        self._events: list[Event] = []
        self._unpacked = lru_cache(NUM_UNPACKED)(self._unpack)

    @property
    def num_steps(self) -> int:
        """How many steps are known of it."""
        return self.timeline.num_steps

    def add(self, event: Event) -> None:
        """Take in the next event, with the step with which a view of the run was told of it.

        Raises:
            InvariantError, BatchdecodeError: see Timeline.from_events.
        """
        if isinstance(event, RestartEvent) and self._run.only_fold is not None:
            self._lose(self._run.only_fold)
        for step, told in self._told.take(event):
            if isinstance(told, EndEvent):
                self.timeline.add(told)
            else:
                self._take(told, step)

    def close(self) -> None:
        """Take what was added for all there is.

        Raises:
            InvariantError: it contradicts itself.
            BatchdecodeError: it has no steps.
        """
        for step, told in self._told.rest():
            self._take(told, step)
        self._close_chapters()
        self.timeline.close()
        self._check()

    def _close_chapters(self) -> None:
        """End the last chapter."""
        for found in self._run.fold.open:
            self._see_tokens(found, found.max_tokens)
        self._end_chapter(self._step)

    def _check(self) -> None:
        """Make sure that there is something to play, which can have happened."""
        self.timeline.check_integrity()
        self._arrive_steps = array("q", sorted(self._arrive_steps))
        if not self.num_steps:
            raise BatchdecodeError("there is nothing to play: no request took a slot")

    def chapter_before(self, step: int) -> int:
        """Return the number of the last chapter that begins with `step` or before it."""
        return bisect_right(self._chapters, step, key=attrgetter("step")) - 1

    def step_of(self, chapter: int) -> int:
        """Return the step that a chapter begins with."""
        return self._chapters[chapter].step

    def state_before(self, chapter: int) -> RunState:
        """Return what the run was like when a chapter begins; it is the caller's to change."""
        state: RunState = pickle.loads(zlib.decompress(self._chapters[chapter].state))  # noqa: S301 - our own
        return state

    def events_from(self, chapter: int) -> Iterator[tuple[int, list[Event]]]:
        """Yield the steps from a chapter on with which something was told, and what that was."""
        for number in range(chapter, len(self._chapters)):
            steps, events = self._unpacked(number)
            start = 0
            for step, same in groupby(steps):
                stop = start + len(list(same))
                yield step, events[start:stop]
                start = stop

    @cached_property
    def depths(self) -> QueueDepths:
        """How long the queue was in each step."""
        stretches = list(self.timeline.waiting())
        return QueueDepths((s.start for s in stretches), (s.num for s in stretches))

    def num_coming(self, step: int) -> int:
        """Return how many outputs arrive after `step`."""
        return len(self._arrive_steps) - bisect_right(self._arrive_steps, step)

    def admission_after(self, step: int) -> AdmittedSample | None:
        """Return what was admitted next after `step`, on its own account; None if nothing was."""
        place = bisect_right(self._admit_steps, step)
        if place == len(self._admit_steps):
            return None
        number = self._admit_numbers[place]
        chapter = bisect_right(self._chapters, number, key=attrgetter("first")) - 1
        _, events = self._unpacked(chapter)
        admit = events[number - self._chapters[chapter].first]
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
        """Return who is admitted of these requests, by the steps, as `find` does."""
        found = dict[int, str]()
        for step, event in self._admissions() if request_ids else ():
            if event.id in request_ids:
                found.setdefault(step, label_of(event.id, event.index, event.role))
        return found

    def _admissions(self) -> Iterator[tuple[int, AdmitEvent]]:
        for number in range(len(self._chapters)):
            for step, event in zip(*self._unpack(number), strict=True):
                if type(event) is AdmitEvent:
                    yield step, event

    @cached_property
    def worst_bubble(self) -> int | None:
        """The step with which the worst bubble begins; None if there is none."""
        bubble = worst_bubble(self.timeline)
        return None if bubble is None else bubble.start

    def _take(self, event: Event, step: int) -> None:
        """Take in an event that is told with `step`, which is none before that of the last one."""
        self._step = step
        if len(self._events) >= self._chapter_size and step > self._steps[-1]:
            self._end_chapter(step)
        self._steps.append(step)
        self._events.append(event)
        if isinstance(event, AdmitEvent) and not 0 <= event.slot < len(self._run.slots):
            raise InvariantError(f"{event.id!r} is in slot {event.slot} of {len(self._run.slots)}")
        found = self._fold(event)
        self._run.keep_up()
        if found is not None and found.first_event is event:
            if self._is_new(found):
                self.num_requests += not found.index
                self._arrive_steps.append(found.waits_from)
            width = cell_width(printable(found.label[: MAX_LABEL + 1]))
            self.longest.request = max(self.longest.request, min(width, MAX_REQUEST))
        if isinstance(event, FinishEvent) and found is not None:
            self._see_tokens(found, event.tokens)
        self._note(event, step, found)
        self._num_events += 1

    def _fold(self, event: Event) -> RequestTimeline | None:
        """Take the event to what is shown; return the sequence that it tells of."""
        return self.timeline.add(event)

    def _is_new(self, found: RequestTimeline) -> bool:
        """Return whether a sequence that has become known is one that waits, and was not lost."""
        if is_follower(found):
            return False
        key = key_of(found.id, found.index, found.role)
        if self._again and self._again[key]:
            self._again[key] -= 1
            return False
        return True

    def _lose(self, fold: RequestFold) -> None:
        """Take note that all that `fold` has open comes again, and is counted by now."""
        self._again.update(
            key_of(found.id, found.index, found.role)
            for found in fold.open
            if not is_follower(found)
        )

    def _note(self, event: Event, step: int, found: RequestTimeline | None) -> None:
        """Note what somebody may look for."""
        match event:
            case AdmitEvent() if not is_follower(event):
                self._admit_steps.append(step)
                self._admit_numbers.append(self._num_events)
                self._admit_waits.append(0 if found is None else found.waits_from)
            case PreemptEvent() if not is_follower(event):
                self.preemptions.append(step)
            case FinishEvent(reason="error" | "aborted"):
                self.failures.append(step)
            case RejectEvent():
                self.num_requests += 1
                self.failures.append(step)
            case DraftEvent():
                drafts = 2 * len(str(event.tokens)) + 1
                self.longest.drafts = max(self.longest.drafts, len("drafts"), drafts)
            case _:
                pass

    @property
    def _chapter_size(self) -> int:
        """How many events it has at least: packing the state costs as much as some of them."""
        return max(MIN_EVENTS, 2 * self._run.fold.num_open, len(self._run.slots))

    def _end_chapter(self, step: int) -> None:
        """Pack what was told; the next chapter begins with `step`."""
        first = self._num_events - len(self._events)
        packed = zlib.compress(_encoder.encode((self._steps, self._events)), 1)
        begun = self._steps[0] if self._chapters else 0
        self._chapters.append(Chapter(begun, first, self._state, packed))
        self._run.catch_up()
        self._run.num_tokens(step)  # by which it forgets whom it need not know of any more
        self._state = _packed(self._run)
        self._steps, self._events = [], []

    def _unpack(self, chapter: int) -> tuple[list[int], list[Event]]:
        return _decoder.decode(zlib.decompress(self._chapters[chapter].events))

    def _see_tokens(self, found: RequestTimeline, num_tokens: int) -> None:
        if found.max_tokens:
            width = len(f"{num_tokens}/{found.max_tokens}")
            self.longest.tokens = max(self.longest.tokens, width)


def _packed(run: RunState) -> bytes:
    return zlib.compress(pickle.dumps(run, pickle.HIGHEST_PROTOCOL), 1)
