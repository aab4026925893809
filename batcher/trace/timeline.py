"""The timeline of a run, rebuilt from its events: which sequence held which slot at which step.

It stores spans and waits, half-open in steps and mostly on disk, and derives figures by step.
"""

import os
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, merge
from itertools import chain, groupby
from operator import add, attrgetter, itemgetter
from typing import Any, BinaryIO, Generic, NamedTuple, Self, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    MAX_WORKERS,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    DropEvent,
    EndEvent,
    EndReason,
    Event,
    FinishEvent,
    PreemptEvent,
    PrefillEvent,
    RejectEvent,
    RestartEvent,
    RunEvent,
    StepsEvent,
)
from batcher.trace.run import (
    FAILURES,
    BlockedSpan,
    InSlotEvent,
    RequestFold,
    RequestTimeline,
    SlotSpan,
    StepDrafts,
    StepRow,
    Wait,
    check_worker,
    is_follower,
    label_of,
)

MAX_HELD = 2**14
_BLOCK_BYTES = 2**16

Record = TypeVar("Record")
Same = TypeVar("Same")
Key = tuple[int, ...]

_encoder = msgspec.json.Encoder()


class SortedRecords(Generic[Record]):
    """Takes records in any order and iterates over them by key; equal keys keep their order.

    Long lists are sorted in runs on disk, which are merged as they are read (Knuth, The Art of
    Computer Programming 3, section 5.4).  A run is read from the key of its first record on, so
    about two runs are open at once if the records come nearly in order.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(tuple[Key, kind])
        self._held: list[tuple[Key, Record]] = []
        self._file: BinaryIO | None = None
        self._runs: list[tuple[Key, int, int]] = []  # the first key, and where it starts and ends
        self._num_records = 0

    def add(self, key: Key, record: Record) -> None:
        self._held.append((key, record))
        self._num_records += 1
        if len(self._held) >= MAX_HELD:
            if self._file is None:
                import tempfile  # noqa: PLC0415 - only for long runs

                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
                weakref.finalize(self, self._file.close)
            self._held.sort(key=itemgetter(0))
            start = self._file.tell()
            self._file.write(_encoder.encode_lines(self._held))
            self._file.flush()
            self._runs.append((self._held[0][0], start, self._file.tell()))
            self._held = []

    def __len__(self) -> int:
        return self._num_records

    def __iter__(self) -> Iterator[Record]:
        self._held.sort(key=itemgetter(0))
        runs = (self._read_run(*run) for run in self._runs)
        for _, record in merge(*runs, self._held, key=itemgetter(0)):
            if record is not None:
                yield record

    def _read_run(self, first: Key, start: int, end: int) -> Iterator[tuple[Key, Record | None]]:
        yield first, None  # nothing is read before the first key is due
        rest = b""
        while self._file is not None and start < end:
            block = os.pread(self._file.fileno(), min(_BLOCK_BYTES, end - start), start)
            start += len(block)
            *lines, rest = (rest + block).split(b"\n")
            yield from map(self._decoder.decode, lines)


class MergedRecords(SortedRecords[Record]):
    """The records of several SortedRecords, merged by `key` as they are read."""

    def __init__(self, parts: list[SortedRecords[Record]], key: Callable[[Record], Any]) -> None:
        self._parts, self._key = parts, key

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Record]:
        return merge(*self._parts, key=self._key)


class Stretch(NamedTuple):
    """The steps [start, stop), and a number that all of them have."""

    start: int
    stop: int
    num: int

    @property
    def total(self) -> int:
        return (self.stop - self.start) * self.num


def count_steps(spans: Iterable[tuple[int, int]], num_steps: int) -> Iterator[Stretch]:
    """Yield how many of `spans`, sorted by start, cover each step of a run."""
    ends: list[int] = []  # a heap
    start = 0
    for step, end in chain(spans, [(MAX_STEPS, MAX_STEPS)]):
        while start < num_steps and start < step:
            stop = min([step, num_steps, *ends[:1]])
            if stop > start:
                yield Stretch(start, stop, len(ends))
                start = stop
            while ends and ends[0] <= start:
                heappop(ends)
        heappush(ends, end)


def cut(
    stretches: Iterable[tuple[int, int, Same]], points: Iterator[int]
) -> Iterator[tuple[int, int, Same]]:
    """Yield `stretches` of steps [start, stop), cut at `points`."""
    point = next(points, None)
    for first, stop, same in stretches:
        start = first
        while point is not None and point < stop:
            if point > start:
                yield start, point, same
                start = point
            point = next(points, None)
        yield start, stop, same


def clip(stretches: Iterable[Stretch], steps: range) -> Iterator[Stretch]:
    for start, stop, count in stretches:
        if start >= steps.stop:
            return
        if stop > steps.start:
            yield Stretch(max(start, steps.start), min(stop, steps.stop), count)


_IN_SLOT = (AdmitEvent, FinishEvent, PrefillEvent, *get_args(InSlotEvent))
STEP_SECONDS = 1.0
MAX_STEPS = 2**28  # more than any run takes
MAX_SLOTS = 2**20  # of all workers, more than any run has


class StepFigures:
    """The figures of steps, as far as StepsEvents report them, in arrays by step.

    ends: in seconds.  tokens: computed.  decodes: tokens of sequences past their prefill, among
    them.  blocks: held.  known_steps: the steps whose start is in an event.
    """

    def __init__(self) -> None:
        self.ends = array("d")
        self.tokens, self.decodes, self.blocks = array("q"), array("q"), array("q")
        self.known_steps = array("q")
        self._known_starts = array("d")
        self._standstill_changes: list[int] = []

    def note_start(self, step: int, time: float) -> None:
        if not self.known_steps or step > self.known_steps[-1]:
            self.known_steps.append(step)
            self._known_starts.append(time)

    def starts(self) -> Iterator[tuple[int, float]]:
        return zip(self.known_steps, self._known_starts, strict=True)

    def add(self, event: StepsEvent) -> None:
        """Add the figures of the next steps, or raise InvariantError if they do not fit."""
        columns = (event.ends, event.decodes, event.prefills, event.rows, event.blocks)
        if event.step != len(self.ends):
            raise InvariantError(
                f"step figures start at step {event.step}, expected {len(self.ends)}"
            )
        if len({len(column) for column in columns}) != 1:
            raise InvariantError(f"the figures of the steps from {event.step} on are not whole")
        times = [*self.ends[-1:], *event.ends]
        if times != sorted(times):
            raise InvariantError(f"time goes back in the steps from {event.step} on")
        try:
            self.tokens.extend(map(add, event.decodes, event.prefills))
            self.decodes.extend(event.decodes)
            self.blocks.extend(event.blocks)
        except OverflowError:
            raise InvariantError(
                f"no step can have the figures of the steps from {event.step} on"
            ) from None
        self.ends.extend(event.ends)
        changes = self._standstill_changes
        if changes[-1:] == [event.step]:  # the figures ended there
            changes.pop()
        for step in range(max(event.step, 1), len(self.decodes) + 1):
            if self.is_standstill(step) != self.is_standstill(step - 1):
                changes.append(step)

    def start_of(self, step: int) -> float:
        """Return the start of `step` in seconds, estimated where no event reports it."""
        number = bisect_right(self.known_steps, step) - 1
        known_step = self.known_steps[number] if number >= 0 else 0
        known_start = self._known_starts[number] if number >= 0 else 0.0
        if known_step == step or not step:
            return known_start
        if step <= len(self.ends):
            return self.ends[step - 1]
        if known_step < len(self.ends):
            known_step, known_start = len(self.ends), self.ends[-1]
        likely = known_start + (step - known_step) * self._usual_duration()
        return min([likely, *self._known_starts[number + 1 : number + 2]])

    def end_of(self, step: int) -> float:
        if step < len(self.ends):
            return self.ends[step]
        return min(self.start_of(step) + self._usual_duration(), self.start_of(step + 1))

    def end_before(self, step: int) -> float:
        """Return the end of the step before `step`; the clock may jump in between."""
        return self.end_of(step - 1) if step else self.start_of(step)

    def is_standstill(self, step: int) -> bool:
        """Return whether `step` computed prompts and no tokens of sequences past their prefill."""
        return step < len(self.decodes) and not self.decodes[step]

    def standstill_changes(self, steps: range) -> Sequence[int]:
        """Return the steps in `steps` where a standstill begins or ends."""
        found = self._standstill_changes
        return found[bisect_left(found, steps.start) : bisect_left(found, steps.stop)]

    def _usual_duration(self) -> float:
        last = len(self.ends) - 1
        return self.ends[last] - self.start_of(last) if self.ends else STEP_SECONDS


def _check_step(step: int) -> None:
    if not 0 <= step < MAX_STEPS:
        raise BatchdecodeError(f"step {step}; a timeline has steps 0 to {MAX_STEPS - 1}")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a timeline that a view shows; each field selects all by default."""

    start: int | None = None
    stop: int | None = None
    request_ids: frozenset[str] = frozenset()
    slots: frozenset[int] = frozenset()

    def takes(self, request_id: str) -> bool:
        return not self.request_ids or request_id in self.request_ids


EVERYTHING = Selection()
MAX_EMPTY_SLOTS = 1024  # a trace of a few bytes may state a batch of a million
AnyRecord = TypeVar("AnyRecord", SlotSpan, Wait)


class Timeline:
    """The record of a run that every view reads.

    spans: by (start, slot).  waits, blocked: by start.  drafts: by (step, slot).  figures: of the
    steps, in a run of one worker.  restarts: of replaced workers, by step.  num_requests,
    num_outputs: as in RunSummary.  failures: by reason, of sequences with an arrival.  All are
    complete once it is closed.  parts: the timelines of several workers, each with its own steps,
    clock and queue, from which the records are merged.
    """

    def __init__(self, fold: RequestFold | None = None) -> None:
        """Start empty; `fold` receives the same events, for other readers."""
        self.spans = SortedRecords[SlotSpan](SlotSpan)
        self.waits = SortedRecords[Wait](Wait)
        self.blocked = SortedRecords[BlockedSpan](BlockedSpan)
        self.drafts = SortedRecords[StepDrafts](StepDrafts)
        self.figures = StepFigures()
        self.num_steps = self.num_requests = self.num_outputs = 0
        self.failures = Counter[EndReason]()
        self.restarts: list[RestartEvent] = []
        self.parts: list[Any] = []  # of the class of this one
        self.fold = RequestFold() if fold is None else fold
        self.worker: int | None = None
        self._run: RunEvent | None = None
        self._last_step = -1  # of any event, with or without a slot
        self._num_alive: Counter[str] = Counter()  # waiting or running sequences, by id
        # Ended samples that may still be dropped, by id and index, and ids that ended in this step.
        self._finished: defaultdict[str, dict[int, RequestTimeline]] = defaultdict(dict)
        self._over: list[str] = []
        self._verifying: list[StepDrafts] = []  # of the last step with drafts

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Self:
        """Return the timeline of a run, up to the end of `events`, which may break off.

        Raises:
            InvariantError: the events contradict each other, or do not begin with a run event.
            BatchdecodeError: there are more slots or steps than a timeline can hold.
        """
        timeline = cls()
        for event in events:
            timeline.add(event)
        timeline.close()
        return timeline

    @classmethod
    def from_sequences(
        cls,
        run: RunEvent,
        num_steps: int,
        sequences: Iterable[RequestTimeline],
        drafts: Iterable[StepDrafts],
        restarts: Iterable[RestartEvent],
        dropped: Collection[tuple[str, int]],
    ) -> Self:
        """Return the timeline of sequences; dropped: samples without a result."""
        timeline = cls()
        timeline._run, timeline.num_steps = run, num_steps
        for found in sequences:
            is_dropped = found.role == "sample" and (found.id, found.index) in dropped
            timeline._record(found, is_dropped=is_dropped)
        timeline._verifying += drafts
        timeline._add_drafts()
        timeline.restarts += restarts
        return timeline

    @property
    def run(self) -> RunEvent:
        if self._run is None:
            raise InvariantError("there is no run event")
        return self._run

    @property
    def workers(self) -> list[Self]:
        return self.parts or [self]

    def of_worker(self, worker: int | None) -> Self:
        found: Self = self if worker == self.worker else self.parts[worker or 0]
        return found

    def add(self, event: Event) -> RequestTimeline | None:
        """Take the next event, and return its sequence, if any; it raises as from_events does."""
        if isinstance(event, RunEvent):
            self._begin(event)
            return None
        if event.worker != self.worker or self.parts:
            check_worker(event, self.run)
            return self.of_worker(event.worker).add(event)
        if isinstance(event, _IN_SLOT):
            _check_step(event.step)
            if event.step > self._last_step:
                self._last_step = event.step
                # Samples are dropped in the step of the last end, so these cannot be any more.
                self._settle([over for over in self._over if over not in self._num_alive])
                self._over.clear()
            if event.step >= self.num_steps and event.slot is not None:
                self.num_steps = event.step + 1
        elif isinstance(event, RestartEvent):
            _check_step(event.step)
            if event.step < self.num_steps:
                made = f"and has made {self.num_steps}"
                raise InvariantError(f"the worker is replaced before step {event.step}, {made}")
            for end in self.fold.ends_at(event):
                self.add(end)
            self._settle(list(self._finished))
            self._over.clear()
            self._num_alive.clear()
            self.go_on_to(event.step)
            self._last_step = max(self._last_step, event.step - 1)
            self.restarts.append(event)
        found = self.fold.take(event)
        match event:
            case ArriveEvent():
                self._num_alive[event.id] += 1
            case AdmitEvent() if found is not None:
                before = self._finished.get(event.id, {}).pop(event.index, None)  # of the same name
                if before is not None:
                    self._record(before)
                self.figures.note_start(event.step, event.time)
                if found.first_event is event and not is_follower(found):
                    self._num_alive[event.id] += 1  # the events begin in the middle of a run
            case FinishEvent() if found is not None:
                if event.role == "sample":
                    self._finished[event.id][event.index] = found
                else:
                    self._record(found)
                if not is_follower(found):
                    self._num_alive[event.id] -= 1
                    if self._num_alive[event.id] <= 0:
                        del self._num_alive[event.id]
                        self._over.append(event.id)
            case PreemptEvent():
                _check_step(event.step)
                self.figures.note_start(event.step, event.time)
                self.go_on_to(event.step)
            case StepsEvent():
                self.figures.add(event)
            case DraftEvent():
                drafts = None if found is None or not found.admission else found.admission.drafts
                if drafts is not None and drafts.latest is not None:
                    if self._verifying and self._verifying[-1].step < drafts.latest.step:
                        self._add_drafts()
                    self._verifying.append(drafts.latest)
            case DropEvent():
                label = label_of(event.id, event.index, "sample")
                dropped = self._finished.get(event.id, {}).pop(event.index, None)
                if dropped is None or dropped.finish is None:
                    raise InvariantError(
                        f"{label!r} is dropped in step {event.step}, and has not finished"
                    )
                reason = dropped.finish.reason
                if event.reason != reason:
                    raise InvariantError(
                        f"{label!r} is dropped with the reason {event.reason!r}, not {reason!r}"
                    )
                self._record(dropped, is_dropped=True)
            case RejectEvent():
                self.num_requests += 1
                self.num_outputs += 1
                self.failures["error"] += 1
            case EndEvent():
                if any(one.admission is not None for one in self.fold.open):
                    raise InvariantError("the run ends while requests hold slots")
                if not 0 <= event.steps <= self._last_step + 1:
                    over = f"all was over by step {self._last_step}"
                    raise InvariantError(f"{event.steps} steps, but {over}")
                self.num_steps = event.steps
        if self.fold.unblocked is not None:
            self._add_blocked()
        return found

    def go_on_to(self, num_steps: int) -> None:
        self.num_steps = max(self.num_steps, num_steps)

    def close(self) -> None:
        """End what runs or waits where the events end; it raises as from_events does."""
        if self._run is None:
            raise InvariantError("there is no run event")
        for part in self.parts:
            part.close()
            self.go_on_to(part.num_steps)
            self.num_requests += part.num_requests
            self.num_outputs += part.num_outputs
            self.failures += part.failures
            self.restarts += part.restarts
        self.restarts.sort(key=attrgetter("step"))
        self._settle(list(self._finished))
        for found in self.fold.open:
            self._record(found)
        self.fold.end_block(self.worker, self.num_steps)
        self._add_blocked()
        self._add_drafts()
        self.fold = RequestFold()

    def _begin(self, event: RunEvent) -> None:
        if not 1 <= event.workers <= MAX_WORKERS:
            raise BatchdecodeError(f"{event.workers} workers; a run has 1 to {MAX_WORKERS}")
        if not 1 <= event.batch * event.workers <= MAX_SLOTS:
            slots = f"a batch of {event.batch} slots"
            slots = slots if event.workers == 1 else f"{event.workers} workers with {slots} each"
            raise BatchdecodeError(f"{slots}; a run has 1 to {MAX_SLOTS}")
        self._run = event
        for worker in range(event.workers if event.workers > 1 else 0):
            part = type(self)()
            part.add(replace(event, workers=1))
            part.worker = worker
            self.parts.append(part)
        if self.parts:
            parts, start = self.parts, attrgetter("start")
            self.spans = MergedRecords([part.spans for part in parts], attrgetter("start", "slot"))
            self.waits = MergedRecords([part.waits for part in parts], start)
            self.blocked = MergedRecords([part.blocked for part in parts], start)
            self.drafts = MergedRecords([part.drafts for part in parts], attrgetter("step", "slot"))

    def _add_drafts(self) -> None:
        for drafts in self._verifying:
            self.drafts.add((drafts.step, drafts.slot), drafts)
        self._verifying.clear()

    def _add_blocked(self) -> None:
        blocked, self.fold.unblocked = self.fold.unblocked, None
        if blocked is not None:
            self.blocked.add((blocked.start,), blocked)

    def _settle(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            for found in self._finished.pop(request_id, {}).values():
                self._record(found)

    def _record(self, found: RequestTimeline, *, is_dropped: bool = False) -> None:
        """Record the spans and waits of a sequence that has ended, or continues at `num_steps`."""
        finish, is_first = found.finish, not is_follower(found)
        reason = None if finish is None else finish.reason
        if is_first:
            self.num_requests += not found.index and reason != "lost"  # a lost one comes again
            if reason in FAILURES:
                self.failures[reason] += 1
        if not is_dropped:
            has_result = found.role != "negative" and reason not in {"unused", "lost"}
            self.num_outputs += is_first if finish is None else has_result
        waits = [(one.number, one.waits_from, one.event.step) for one in found.admissions]
        if found.admission is None:
            end = self.num_steps if finish is None else finish.step
            waits.append((found.number, found.waits_from, end))
        for number, start, end in waits:
            if number and start < end and is_first:
                self.waits.add((start, number), Wait(found.id, found.index, start, end))
        for admission in found.admissions:
            if admission.preempt is not None:
                span = found.slot_span(admission, admission.preempt.step, "preempted")
            else:
                end = self.num_steps if finish is None else finish.step + 1
                span = found.slot_span(admission, end, reason)
                span = replace(span, dropped=True) if is_dropped else span
            self.spans.add((span.start, span.slot), span)

    @property
    def slots(self) -> range:
        first = (self.worker or 0) * self.run.batch
        return range(first, first + self.run.batch * self.run.workers)

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    def columns(self, selection: Selection = EVERYTHING) -> list[int]:
        """Return the slots to show: all, or only used slots if there are very many."""
        if selection.slots or self.num_slots <= MAX_EMPTY_SLOTS:
            return sorted(selection.slots) or list(self.slots)
        return sorted({span.slot for span in self.spans})

    @property
    def has_figures(self) -> bool:
        return bool(self.figures.ends)

    @property
    def has_drafts(self) -> bool:
        return len(self.drafts) > 0

    @cached_property
    def has_memory(self) -> bool:
        """Whether any span shows a chunked prefill, a cache hit or a preemption."""
        return any(
            span.prefill > 1 or span.cached or span.generated or span.resumed or span.preemption
            for span in self.spans
        )

    def occupied(self) -> Iterator[Stretch]:
        return count_steps(((span.start, span.end) for span in self.spans), self.num_steps)

    def waiting(self) -> Iterator[Stretch]:
        """Yield the number of samples, or beams together, in the waiting queue."""
        return count_steps(((wait.start, wait.end) for wait in self.waits), self.num_steps)

    def drafts_in(self, window: range) -> Iterator[StepDrafts]:
        for drafts in self.drafts:
            if drafts.step >= window.stop:
                return
            if drafts.step >= window.start:
                yield drafts

    def window(self, selection: Selection) -> range:
        return range(*slice(selection.start, selection.stop).indices(self.num_steps))

    def select_spans(self, selection: Selection = EVERYTHING) -> Iterator[SlotSpan]:
        """Yield the spans that `selection` touches, unclipped, by (start, slot)."""
        slots = selection.slots
        for span in self._select(self.spans, selection):
            if not slots or span.slot in slots:
                yield span

    def select_waits(self, selection: Selection = EVERYTHING) -> Iterator[Wait]:
        """Yield the waits that `selection` touches, unclipped; its slots do not matter."""
        return self._select(self.waits, selection)

    def _select(self, records: Iterable[AnyRecord], selection: Selection) -> Iterator[AnyRecord]:
        window = self.window(selection)
        for record in records if window else ():
            if record.start >= window.stop:
                return
            if record.end > window.start and selection.takes(record.id):
                yield record

    def select_steps(self, selection: Selection = EVERYTHING) -> Iterator[StepRow]:
        """Yield the steps that `selection` covers.

        Only selected slots are columns.  With selected requests, only steps in which one of them
        holds a column are yielded, with everything else in the batch.
        """
        window, columns = self.window(selection), self.columns(selection)
        waiting, figures = clip(self.waiting(), window), self.figures
        of_steps = groupby(self.drafts_in(window), key=attrgetter("step"))
        no_drafts: tuple[int, Iterable[StepDrafts]] = MAX_STEPS, ()
        drafts_step, drafts = next(of_steps, no_drafts)
        waits_until = num_waiting = 0
        for start, stop, labels, chosen in self.batches(window, selection):
            if not chosen and selection.request_ids:
                continue
            shown = [labels.get(slot) for slot in columns]
            for step in range(start, stop):
                while waits_until <= step:
                    _, waits_until, num_waiting = next(waiting)
                while drafts_step < step:
                    drafts_step, drafts = next(of_steps, no_drafts)
                known: dict[str, Any] = {}
                if step < len(figures.ends):
                    known["begin"], known["end"] = figures.start_of(step), figures.ends[step]
                    known["tokens"], known["blocks"] = figures.tokens[step], figures.blocks[step]
                if drafts_step == step:
                    of_step = list(drafts)
                    known["drafted"] = sum(one.drafted for one in of_step)
                    known["accepted"] = sum(one.accepted for one in of_step)
                yield StepRow(step, shown, num_waiting, **known)

    def batches(
        self, window: range, selection: Selection = EVERYTHING
    ) -> Iterator[tuple[int, int, dict[int, str], set[int]]]:
        """Yield a start, a stop, the labels by slot, and the slots that selected requests hold."""
        labels: dict[int, str] = {}
        chosen: set[int] = set()
        ends: list[tuple[int, int]] = []
        spans = self.select_spans(Selection(start=window.start, stop=window.stop))
        upcoming = next(spans, None)
        step = window.start
        while step < window.stop:
            while ends and ends[0][0] <= step:
                slot = heappop(ends)[1]
                del labels[slot]
                chosen.discard(slot)
            while upcoming is not None and upcoming.start <= step:
                labels[upcoming.slot] = upcoming.label
                is_column = not selection.slots or upcoming.slot in selection.slots
                if is_column and selection.takes(upcoming.id):
                    chosen.add(upcoming.slot)
                heappush(ends, (upcoming.end, upcoming.slot))
                upcoming = next(spans, None)
            next_start = window.stop if upcoming is None else upcoming.start
            stop = min(window.stop, next_start, *(end for end, _ in ends[:1]))
            yield step, stop, labels, chosen
            step = stop

    def check_integrity(self) -> None:
        """Raise InvariantError if the spans cannot have happened.

        For example, two sequences share a slot, a step has no sequence, or a follower is not in
        step with its leader.
        """
        for part in self.parts:
            part.check_integrity()
        if self.parts:
            return
        last_in: dict[int, SlotSpan] = {}  # by slot
        idle_from, end = None, 0  # the first step in which nothing runs, and the end so far
        for _, together in groupby(self.spans, key=attrgetter("start")):
            spans = list(together)
            if idle_from is None and spans[0].start > end:
                idle_from = end
            held = {(span.id, span.index, span.role, span.end) for span in spans}
            for span in spans:
                until = f"holds its slot over [{span.start}, {span.end})"
                before = last_in.get(span.slot)
                if span.slot not in self.slots:
                    raise InvariantError(
                        f"{span.label!r} is in slot {span.slot} of {self.num_slots}"
                    )
                if not 0 <= span.start < span.end <= self.num_steps:
                    raise InvariantError(f"{span.label!r} {until} of {self.num_steps} steps")
                if before is not None and span.start < before.end:
                    raise InvariantError(
                        f"{before.label!r} and {span.label!r} share slot {span.slot}"
                    )
                leader = (0, "beam") if span.role == "beam" else (span.index, "sample")
                if is_follower(span) and (span.id, *leader, span.end) not in held:
                    other = label_of(span.id, leader[0], "sample")
                    raise InvariantError(f"{span.label!r} {until}, but {other!r} does not")
                last_in[span.slot] = span
                end = max(end, span.end)
        if idle_from is None and end < self.num_steps:
            idle_from = end
        if idle_from is not None:
            raise InvariantError(f"nothing runs in step {idle_from}")


class Bubble(NamedTuple):
    """The steps [start, stop), and the empty slots in them, summed over the steps."""

    start: int
    stop: int
    num_idle: int


def worst_bubble(timeline: Timeline) -> Bubble | None:
    """Return the first stretch of steps with most empty slots above the mean, or None.

    Kadane's algorithm (J. Bentley, Programming Pearls, column 8), on what each step has above the
    mean of all steps.  None if all steps have equally many.
    """
    num_steps = max((span.start for span in timeline.spans), default=0)

    def idle() -> Iterator[Stretch]:
        for start, stop, occupied in clip(timeline.occupied(), range(num_steps)):
            yield Stretch(start, stop, timeline.num_slots - occupied)

    total = sum(stretch.total for stretch in idle())
    worst, most = None, 0
    start = num_idle = gain = 0
    for stretch in idle():
        if gain <= 0:
            start, num_idle, gain = stretch.start, 0, 0
        num_idle += stretch.total
        # Times the number of steps, so that the mean is a whole number.
        gain += stretch.total * num_steps - total * (stretch.stop - stretch.start)
        if gain > most:
            worst, most = Bubble(start, stretch.stop, num_idle), gain
    return worst
