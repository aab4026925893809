"""The timeline of a run: who held which slot at which step, rebuilt from its events alone.

Rule: spans and waits are what is stored, half-open in steps, and of these only a part in memory;
all that is by step is derived as it is asked for.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, merge
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Self, TypeVar

from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.events import Event, RestartEvent, RunEvent
from batcher.trace.drafts import StepDrafts
from batcher.trace.recording import MAX_STEPS, TimelineRecords
from batcher.trace.records import RequestTimeline, SlotSpan, StepRow, Wait, is_follower, label_of
from batcher.trace.step_counts import Stretch, changes_of, clip, count_steps


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
MAX_EMPTY_SLOTS = 1024  # a trace of a few bytes may state a batch of a million
_NO_DRAFTS: tuple[int, Iterable[StepDrafts]] = (MAX_STEPS, ())
AnyRecord = TypeVar("AnyRecord", SlotSpan, Wait)


class Timeline(TimelineRecords):
    """What happened in a run: its records, and what they tell of its steps."""

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Self:
        """Return the timeline of a run; events that break off give the timeline up to there.

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
        """Return what a gantt shows of sequences that were folded, those of all workers.

        dropped: the ids and indexes of samples that have no result.
        """
        timeline = cls()
        timeline._run, timeline.num_steps = run, num_steps
        for found in sequences:
            is_dropped = found.role == "sample" and (found.id, found.index) in dropped
            timeline.add_sequence(found, is_dropped=is_dropped)
        for each in drafts:
            timeline.drafts.add((each.step, each.slot), each)
        timeline.restarts += restarts
        return timeline

    @property
    def num_slots(self) -> int:
        """How many slots there are, those of all workers."""
        return self.run.batch * self.run.workers

    def columns(self, selection: Selection = EVERYTHING) -> list[int]:
        """Return the slots that views of `selection` show, ascending.

        Of more than MAX_EMPTY_SLOTS slots, only those that held a sequence at any time.
        """
        if selection.slots or self.num_slots <= MAX_EMPTY_SLOTS:
            return sorted(selection.slots) or list(range(self.num_slots))
        return sorted({span.slot for span in self.spans})

    @property
    def has_figures(self) -> bool:
        """Whether the events tell when steps ended and what they computed."""
        return bool(self.figures.ends)

    @property
    def has_drafts(self) -> bool:
        """Whether any step verified drafts."""
        return len(self.drafts) > 0

    @cached_property
    def has_memory(self) -> bool:
        """Whether what the steps computed, or the blocks, made any span differ from a plain one."""
        return any(
            span.prefill > 1 or span.cached or span.generated or span.resumed or span.preemption
            for span in self.spans
        )

    def occupied(self) -> Iterator[Stretch]:
        """Yield how many slots hold a sequence."""
        held = ((span.start, span.end) for span in self.spans)
        return count_steps(changes_of(held), self.num_steps)

    def waiting(self) -> Iterator[Stretch]:
        """Yield how many samples, or beams together, have arrived and are not admitted."""
        starts = ((wait.start, 1) for wait in self.waits)
        ends = ((end, -1) for end in self.wait_ends)
        return count_steps(merge(starts, ends, key=itemgetter(0)), self.num_steps)

    def drafts_in(self, window: range) -> Iterator[StepDrafts]:
        """Yield the drafts of the steps of `window`, by (step, slot)."""
        for drafts in self.drafts:
            if drafts.step >= window.stop:
                return
            if drafts.step >= window.start:
                yield drafts

    def window(self, selection: Selection) -> range:
        """Return the steps `selection` covers, as a slice of the run's steps does."""
        return range(*slice(selection.start, selection.stop).indices(self.num_steps))

    def select_spans(self, selection: Selection = EVERYTHING) -> Iterator[SlotSpan]:
        """Yield the spans `selection` touches, uncut, by (start, slot)."""
        slots = selection.slots
        for span in self._select(self.spans, selection):
            if not slots or span.slot in slots:
                yield span

    def select_waits(self, selection: Selection = EVERYTHING) -> Iterator[Wait]:
        """Yield the waits `selection` touches, uncut and in order; slots do not matter."""
        return self._select(self.waits, selection)

    def _select(self, records: Iterable[AnyRecord], selection: Selection) -> Iterator[AnyRecord]:
        """Yield those of `records`, which come by their starts, that `selection` touches."""
        window = self.window(selection)
        for record in records if window else ():
            if record.start >= window.stop:
                return
            if record.end > window.start and selection.takes(record.id):
                yield record

    def select_steps(self, selection: Selection = EVERYTHING) -> Iterator[StepRow]:
        """Yield the rows `selection` covers.

        Chosen slots are all the columns there are; chosen requests leave the steps in which one of
        them holds such a slot, with their neighbours in the batch.
        """
        rows = self._step_rows(selection)
        return self._with_drafts(rows, self.window(selection)) if self.has_drafts else rows

    def _step_rows(self, selection: Selection) -> Iterator[StepRow]:
        """Yield the rows `selection` covers, without drafts."""
        window = self.window(selection)
        columns = self.columns(selection)
        waiting, figures = clip(self.waiting(), window), self.figures
        waits_until = num_waiting = 0
        for start, stop, labels, chosen in self._batches(window, selection):
            if not chosen and selection.request_ids:
                continue
            shown = [labels.get(slot) for slot in columns]
            for step in range(start, stop):
                while waits_until <= step:
                    _, waits_until, num_waiting = next(waiting)
                told: tuple[float, float, int, int] | tuple[()] = ()
                if step < len(figures.ends):
                    begin, end = figures.start_of(step), figures.ends[step]
                    told = begin, end, figures.tokens[step], figures.blocks[step]
                yield StepRow(step, shown, num_waiting, *told)

    def _with_drafts(self, rows: Iterator[StepRow], window: range) -> Iterator[StepRow]:
        """Yield `rows`, of steps of `window`, with what became of the drafts of their steps."""
        of_steps = groupby(self.drafts_in(window), key=attrgetter("step"))
        step, drafts = next(of_steps, _NO_DRAFTS)
        for row in rows:
            while step < row.step:
                step, drafts = next(of_steps, _NO_DRAFTS)
            if step == row.step:
                of_step = list(drafts)
                row = replace(  # noqa: PLW2901 - the same row
                    row,
                    drafted=sum(one.drafted for one in of_step),
                    accepted=sum(one.accepted for one in of_step),
                )
            yield row

    def select_batches(self, window: range) -> Iterator[tuple[range, tuple[str, ...]]]:
        """Yield steps of `window` in which the batch stays the same, and its labels by slot."""
        for start, stop, labels, _ in self._batches(window, EVERYTHING):
            yield range(start, stop), tuple(labels[slot] for slot in sorted(labels))

    def _batches(
        self, window: range, selection: Selection
    ) -> Iterator[tuple[int, int, dict[int, str], set[int]]]:
        """Yield a start, a stop, the label by held slot, and which chosen ones a chosen one holds.

        The last two change from one to the next.
        """
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
            next_steps = [window.stop, *(end for end, _ in ends[:1])]
            if upcoming is not None:
                next_steps.append(upcoming.start)
            stop = min(next_steps)
            yield step, stop, labels, chosen
            step = stop

    def check_integrity(self) -> None:
        """Make sure that the spans can have happened.

        Raises:
            InvariantError: a slot that does not exist or holds two sequences at once, a step
                outside the run, a step without any sequence, or a sequence that is not in step with
                the one it belongs to.
        """
        last_in: dict[int, SlotSpan] = {}  # by slot
        idle_from, end = None, 0  # the first step in which nothing runs, and the end so far
        for _, together in groupby(self.spans, key=attrgetter("start")):
            spans = list(together)
            if idle_from is None and spans[0].start > end:
                idle_from = end
            for span in spans:
                self._check_span(span, last_in.get(span.slot))
                last_in[span.slot] = span
                end = max(end, span.end)
            _check_followers(spans)
        if idle_from is None and end < self.num_steps:
            idle_from = end
        if idle_from is not None:
            raise InvariantError(f"nothing runs in step {idle_from}")

    def _check_span(self, span: SlotSpan, before: SlotSpan | None) -> None:
        """Make sure that `span` is in the run, after the one before it in its slot; or raise."""
        if not 0 <= span.slot < self.num_slots:
            raise InvariantError(f"{span.label!r} is in slot {span.slot} of {self.num_slots}")
        if not 0 <= span.start < span.end <= self.num_steps:
            raise InvariantError(
                f"{span.label!r} holds its slot over [{span.start}, {span.end}) "
                f"of {self.num_steps} steps"
            )
        if before is not None and span.start < before.end:
            raise InvariantError(f"{before.label!r} and {span.label!r} share slot {span.slot}")


def _check_followers(spans: list[SlotSpan]) -> None:
    """Make sure that of `spans`, all that begin in one step, those of a group end together."""
    followers = [span for span in spans if is_follower(span)]
    if not followers:
        return
    held = {(span.id, span.index, span.role, span.end) for span in spans}
    for span in followers:
        first = (0, "beam") if span.role == "beam" else (span.index, "sample")
        if (span.id, *first, span.end) not in held:
            raise InvariantError(
                f"{span.label!r} holds its slot over [{span.start}, {span.end}), "
                f"but {label_of(span.id, first[0], 'sample')!r} does not"
            )
