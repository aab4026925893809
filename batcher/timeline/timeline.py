"""The timeline of a run: who held which slot at which step, rebuilt from its events alone.

Rule: spans and waits are what is stored, half-open in steps; all that is by step is derived.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from batcher.errors import InvariantError
from batcher.events import Event, RunEvent
from batcher.timeline.replay import Replay
from batcher.timeline.stays import Hold, Span, StepRow, Wait, is_follower, label_of
from batcher.timeline.step_figures import StepFigures


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
    """What happened in a run, as `run` began it.

    spans: by (start, slot).  waits: by start, and those that start together as they joined the
    queue.  holds: by start.  figures: of the steps.
    """

    def __init__(
        self,
        *,
        run: RunEvent,
        num_steps: int,
        spans: list[Span],
        waits: list[Wait],
        holds: list[Hold],
        figures: StepFigures,
    ) -> None:
        self.run, self.num_steps = run, num_steps
        self.spans = sorted(spans, key=lambda span: (span.start, span.slot))
        self.waits = sorted(waits, key=lambda wait: wait.start)
        self.holds, self.figures = holds, figures

    @property
    def model(self) -> str:
        """What decoded it."""
        return self.run.model

    @property
    def num_slots(self) -> int:
        """How many slots the batch has."""
        return self.run.batch

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "Timeline":
        """Return the timeline of a run; events that break off give the timeline up to there.

        Raises:
            InvariantError: the events contradict each other, or do not begin with a run event.
            BatchdecodeError: there are more slots or steps than a timeline can hold.
        """
        replay = Replay()
        for event in events:
            replay.add(event)
        return cls(**replay.close()._asdict())

    @property
    def has_figures(self) -> bool:
        """Whether the events tell when steps ended and what they computed."""
        return bool(self.figures.ends)

    @cached_property
    def has_memory(self) -> bool:
        """Whether what the steps computed, or the blocks, made any stay differ from a plain one."""
        return any(
            span.prefill > 1 or span.cached or span.generated or span.resumed or span.preemption
            for span in self.spans
        )

    @cached_property
    def occupied(self) -> Sequence[int]:
        """How many slots hold a sequence, by step: [num_steps]."""
        return self._count_by_step(self.spans)

    @cached_property
    def waiting(self) -> Sequence[int]:
        """How many samples, or beams together, have arrived and are not admitted: [num_steps]."""
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
        """Yield the waits `selection` touches, uncut and in order; slots do not matter."""
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
        labels: list[str | None] = [None] * self.num_slots
        chosen: set[int] = set()  # of the columns, those that a chosen request holds
        ends: list[tuple[int, int]] = []
        spans = self.select_spans(Selection(start=window.start, stop=window.stop))
        upcoming = next(spans, None)
        for step in window:
            while ends and ends[0][0] <= step:
                slot = heappop(ends)[1]
                labels[slot] = None
                chosen.discard(slot)
            while upcoming is not None and upcoming.start <= step:
                labels[upcoming.slot] = upcoming.label
                if selection.takes(upcoming.id) and upcoming.slot in columns:
                    chosen.add(upcoming.slot)
                heappush(ends, (upcoming.end, upcoming.slot))
                upcoming = next(spans, None)
            if chosen or not selection.request_ids:
                yield self._row(step, [labels[slot] for slot in columns])

    def _row(self, step: int, labels: list[str | None]) -> StepRow:
        """Return the row of `step`, with the figures the events tell."""
        figures = self.figures
        if step >= len(figures.ends):
            return StepRow(step, labels, self.waiting[step])
        return StepRow(
            step,
            labels,
            self.waiting[step],
            figures.start_of(step),
            figures.ends[step],
            figures.tokens[step],
            figures.blocks[step],
        )

    def check_integrity(self) -> None:
        """Make sure that the spans can have happened.

        Raises:
            InvariantError: a slot that does not exist or holds two sequences at once, a step
                outside the run, a step without any sequence, or a sequence that is not in step with
                the one it belongs to.
        """
        for span in self.spans:
            if not 0 <= span.slot < self.num_slots:
                raise InvariantError(f"{span.label!r} is in slot {span.slot} of {self.num_slots}")
            if not 0 <= span.start < span.end <= self.num_steps:
                raise InvariantError(
                    f"{span.label!r} holds its slot over [{span.start}, {span.end}) "
                    f"of {self.num_steps} steps"
                )
        for before, after in pairwise(sorted(self.spans, key=lambda s: (s.slot, s.start))):
            if before.slot == after.slot and after.start < before.end:
                raise InvariantError(
                    f"{before.label!r} and {after.label!r} share slot {after.slot}"
                )
        self._check_followers()
        if 0 in self.occupied:
            raise InvariantError(f"nothing runs in step {self.occupied.index(0)}")

    def _check_followers(self) -> None:
        """Make sure that beams, and a sample and its negative prompt, run together.

        Raises:
            InvariantError: one of them does not.
        """
        followers = [span for span in self.spans if is_follower(span)]
        if not followers:
            return
        stays = {(span.id, span.index, span.role, span.start, span.end) for span in self.spans}
        for span in followers:
            leader = (0, "beam") if span.role == "beam" else (span.index, "sample")
            if (span.id, *leader, span.start, span.end) not in stays:
                raise InvariantError(
                    f"{span.label!r} holds its slot over [{span.start}, {span.end}), "
                    f"but {label_of(span.id, leader[0], 'sample')!r} does not"
                )

    def _count_by_step(self, stays: Iterable[Span | Wait]) -> list[int]:
        """Return how many of `stays` cover each step: [num_steps]."""
        changes = [0] * (self.num_steps + 1)
        for stay in stays:
            changes[min(stay.start, self.num_steps)] += 1
            changes[min(stay.end, self.num_steps)] -= 1
        return list(accumulate(changes[:-1]))
