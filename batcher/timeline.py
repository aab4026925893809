"""The timeline of a run: who held which slot at which step, rebuilt from its events alone.

Rule: spans and waits are what is stored, half-open in steps; all that is by step is derived.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from msgspec import Struct

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    EndEvent,
    Event,
    FinishEvent,
    RejectEvent,
    RunEvent,
)
from batcher.request import FinishReason

MAX_SLOTS = 2**20
MAX_STEPS = 2**28
"""Views hold figures for each step of a run, so a longer one has no room in memory."""


class Span(Struct, frozen=True):
    """One stay of a request in a slot, over the steps [start, end).

    `outcome` is None if the events break off while the request runs; its end is then theirs.
    """

    slot: int
    id: str
    index: int
    start: int
    end: int
    outcome: FinishReason | None


class Wait(Struct, frozen=True):
    """One stay of a request in the waiting queue, over the steps [start, end), at least one."""

    id: str
    index: int
    start: int
    end: int


class StepRow(Struct, frozen=True):
    """The batch in one step: the request id in each slot (None: empty), and how many waited."""

    step: int
    slots: list[str | None]
    waiting: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a timeline that a view shows: everything, unless a field says otherwise.

    `start` and `stop` are a slice of the steps; `request_ids` and `slots`, where not empty, are
    all that is shown.
    """

    start: int | None = None
    stop: int | None = None
    request_ids: frozenset[str] = frozenset()
    slots: frozenset[int] = frozenset()

    def takes(self, request_id: str) -> bool:
        """Return whether the request is shown."""
        return not self.request_ids or request_id in self.request_ids


EVERYTHING = Selection()


class Timeline:
    """What happened in a run; `model` names what decoded it.

    spans: by (start, slot).  waits: by (start, index).
    """

    def __init__(
        self, *, model: str, num_slots: int, num_steps: int, spans: list[Span], waits: list[Wait]
    ) -> None:
        self.model, self.num_slots, self.num_steps = model, num_slots, num_steps
        self.spans = sorted(spans, key=lambda span: (span.start, span.slot))
        self.waits = sorted(waits, key=lambda wait: (wait.start, wait.index))

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "Timeline":
        """Return the timeline of a run; events that break off give the timeline up to there.

        Raises:
            InvariantError: the events contradict each other, or do not begin with a run event.
            BatchdecodeError: there are more slots or steps than a timeline can hold.
        """
        return _Builder().build(events)

    @cached_property
    def occupied(self) -> Sequence[int]:
        """How many slots hold a request, by step: [num_steps]."""
        return self._count_by_step(self.spans)

    @cached_property
    def waiting(self) -> Sequence[int]:
        """How many requests have arrived and are not admitted, by step: [num_steps]."""
        return self._count_by_step(self.waits)

    def window(self, selection: Selection) -> range:
        """Return the steps `selection` covers, as a slice of the run's steps does."""
        return range(*slice(selection.start, selection.stop).indices(self.num_steps))

    def select_spans(self, selection: Selection = EVERYTHING) -> Iterator[Span]:
        """Yield the spans `selection` touches, uncut, by (start, slot)."""
        window = self.window(selection)
        for span in self.spans if window else ():
            if span.start >= window.stop:
                return
            if (
                span.end > window.start
                and selection.takes(span.id)
                and (not selection.slots or span.slot in selection.slots)
            ):
                yield span

    def select_waits(self, selection: Selection = EVERYTHING) -> Iterator[Wait]:
        """Yield the waits `selection` touches, uncut, by (start, index); slots do not matter."""
        window = self.window(selection)
        for wait in self.waits if window else ():
            if wait.start >= window.stop:
                return
            if wait.end > window.start and selection.takes(wait.id):
                yield wait

    def select_steps(self, selection: Selection = EVERYTHING) -> Iterator[StepRow]:
        """Yield the rows `selection` covers.

        Chosen slots are all the columns there are; chosen requests leave the steps in which one of
        them holds such a slot, with their neighbours in the batch.
        """
        window = self.window(selection)
        columns = sorted(selection.slots) or range(self.num_slots)
        holders: list[str | None] = [None] * self.num_slots
        ends: list[tuple[int, int]] = []
        spans = self.select_spans(Selection(start=window.start, stop=window.stop))
        upcoming = next(spans, None)
        for step in window:
            while ends and ends[0][0] <= step:
                holders[heappop(ends)[1]] = None
            while upcoming is not None and upcoming.start <= step:
                holders[upcoming.slot] = upcoming.id
                heappush(ends, (upcoming.end, upcoming.slot))
                upcoming = next(spans, None)
            row = [holders[slot] for slot in columns]
            if not selection.request_ids or not selection.request_ids.isdisjoint(row):
                yield StepRow(step, row, self.waiting[step])

    def check_integrity(self) -> None:
        """Make sure that the spans can have happened.

        Raises:
            InvariantError: a slot that does not exist or holds two requests at once, a step outside
                the run, or a step without any request.
        """
        for span in self.spans:
            if not 0 <= span.slot < self.num_slots:
                raise InvariantError(f"{span.id!r} is in slot {span.slot} of {self.num_slots}")
            if not 0 <= span.start < span.end <= self.num_steps:
                raise InvariantError(
                    f"{span.id!r} holds its slot over [{span.start}, {span.end}) "
                    f"of {self.num_steps} steps"
                )
        for before, after in pairwise(sorted(self.spans, key=lambda s: (s.slot, s.start))):
            if before.slot == after.slot and after.start < before.end:
                raise InvariantError(f"{before.id!r} and {after.id!r} share slot {after.slot}")
        if 0 in self.occupied:
            raise InvariantError(f"nothing runs in step {self.occupied.index(0)}")

    def _count_by_step(self, stays: Iterable[Span | Wait]) -> list[int]:
        """Return how many of `stays` cover each step: [num_steps]."""
        changes = [0] * (self.num_steps + 1)
        for stay in stays:
            changes[min(stay.start, self.num_steps)] += 1
            changes[min(stay.end, self.num_steps)] -= 1
        return list(accumulate(changes[:-1]))


class _Builder:
    """Folds events into a timeline; a request is known by its index, since ids may come again."""

    def __init__(self) -> None:
        self.run: RunEvent | None = None
        self.num_steps = 0
        self.last_step = -1  # of any event, whether it takes a slot or not
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.arrivals: dict[int, ArriveEvent] = {}
        self.admissions: dict[int, AdmitEvent] = {}

    def build(self, events: Iterable[Event]) -> Timeline:
        """Return the timeline of all of `events`."""
        for event in events:
            self.add(event)
        if self.run is None:
            raise InvariantError("there is no run event")
        for admit in self.admissions.values():
            self.close(admit, self.num_steps, None)
        for arrive in self.arrivals.values():
            self.leave_queue(arrive, self.num_steps)
        return Timeline(
            model=self.run.model,
            num_slots=self.run.batch,
            num_steps=self.num_steps,
            spans=self.spans,
            waits=self.waits,
        )

    def add(self, event: Event) -> None:
        """Take in the next event."""
        match event:
            case ArriveEvent():
                self.arrivals[event.index] = event
            case AdmitEvent():
                self.admit(event)
            case FinishEvent():
                self.finish(event)
            case RunEvent():
                self.begin(event)
            case EndEvent():
                self.end(event)
            case RejectEvent():
                pass  # it was never a request, so it has no time

    def begin(self, event: RunEvent) -> None:
        """Take in what run it is."""
        if not 1 <= event.batch <= MAX_SLOTS:
            raise BatchdecodeError(f"a batch of {event.batch} slots; there are 1 to {MAX_SLOTS}")
        self.run = event

    def note_step(self, event: AdmitEvent | FinishEvent) -> None:
        """Note that the run has come as far as `event`."""
        if not 0 <= event.step < MAX_STEPS:
            raise BatchdecodeError(f"step {event.step}; a timeline has steps 0 to {MAX_STEPS - 1}")
        self.last_step = max(self.last_step, event.step)
        if event.slot is not None:
            self.num_steps = max(self.num_steps, event.step + 1)

    def admit(self, event: AdmitEvent) -> None:
        """Move a request from the queue into its slot."""
        self.note_step(event)
        if event.index in self.admissions:
            raise InvariantError(f"{event.id!r} is admitted in step {event.step} while it runs")
        self.admissions[event.index] = event
        self.leave_queue(self.arrivals.pop(event.index, None), event.step)

    def finish(self, event: FinishEvent) -> None:
        """End the stay of a request, in its slot or in the queue."""
        self.note_step(event)
        if event.slot is None:
            self.leave_queue(self.arrivals.pop(event.index, None), event.step)
            return
        admit = self.admissions.pop(event.index, None)
        if admit is None or admit.slot != event.slot:
            raise InvariantError(f"{event.id!r} leaves slot {event.slot}, which it does not hold")
        self.close(admit, event.step + 1, event.reason)

    def end(self, event: EndEvent) -> None:
        """Take in the end of the run."""
        if self.admissions:
            raise InvariantError("the run ends while requests hold slots")
        if not 0 <= event.steps <= self.last_step + 1:
            raise InvariantError(f"{event.steps} steps, but all was over by step {self.last_step}")
        self.num_steps = event.steps

    def close(self, admit: AdmitEvent, end: int, outcome: FinishReason | None) -> None:
        """Record the stay that began with `admit`."""
        self.spans.append(Span(admit.slot, admit.id, admit.index, admit.step, end, outcome))

    def leave_queue(self, arrive: ArriveEvent | None, end: int) -> None:
        """Record the wait of a request, if it had to wait."""
        if arrive is not None and arrive.step < 0:
            raise InvariantError(f"{arrive.id!r} arrives in step {arrive.step}")
        if arrive is not None and arrive.step < end:
            self.waits.append(Wait(arrive.id, arrive.index, arrive.step, end))
