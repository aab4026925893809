"""What an engine has done, as events, in the order in which it happened."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batcher.engine.sequence import Decoded, Sequence
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    BlockedEvent,
    DraftEvent,
    DropEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RequestEvent,
    RollbackEvent,
    SpeculateEvent,
    SpeculateReason,
    StepsEvent,
)
from batcher.result import Result
from batcher.scheduling.clock import BatchStats, Clock, ConstantClock, WallClock
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.scheduler import Blocked, Preemption, Scheduler, SchedulerOutput
from batcher.scheduling.sequence import NO_SLOT

if TYPE_CHECKING:
    from batcher.speculation.proposal import Proposal

MAX_STEPS = 256  # in one event


class Recorder:
    """Turns what happens to sequences into events, each with the step and time it has now.

    events: since they were last taken.  steps: what steps compute, where that is told.
    """

    def __init__(self, clock: Clock, steps: "StepStats | None") -> None:
        self._clock = clock
        self.events: list[RequestEvent] = []
        self.steps = steps

    def __bool__(self) -> bool:
        return bool(self.events) or (self.steps is not None and self.steps.is_full)

    def take(self) -> list[RequestEvent]:
        """Return the events since the last call; what steps have computed comes before them."""
        events, self.events = self.events, []
        if self.steps is not None and self.steps:
            return [self.steps.take(), *events]
        return events

    def admitted(self, first: Sequence, last_used: list[int], num_forced: int) -> None:
        """Tell that a group was given its slots, after the step has been scheduled.

        last_used: [num_slots] the step each slot was last used in before.
        num_forced: how many tokens it has from the outset.
        """
        step, now, events = self._clock.step, self._clock.now, self.events
        for row in (first, *first.others) if first.others else (first,):
            slot = row.slot
            num_generated = num_tokens = 0
            if first.admitted_step is not None:  # below 0: a beam before the first fork
                num_generated = max(row.num_generated, 0)
            elif num_forced or row.role == "negative":
                num_tokens = row.num_tokens
            num_left = row.num_tokens - row.num_computed_tokens
            if not (row.is_decoding or row.num_tokens) and row in first.computed_group:
                num_left = 1  # an empty prompt that this step gives no token
            events.append(
                AdmitEvent(
                    step,
                    now,
                    row.id,
                    row.index,
                    slot,
                    "refill" if last_used[slot] == step - 1 else "empty",
                    row.role,
                    num_generated,
                    row.num_cached_tokens,
                    num_left,
                    num_tokens,
                    row.cached_from,
                )
            )
        if num_forced:
            self.jumped(first, num_forced)

    def prefilled(
        self, scheduled: SchedulerOutput[Sequence], batch: RunningBatch[Sequence]
    ) -> None:
        """Tell what is computed of groups admitted before, but for those that jumped just now.

        An empty prompt counts as a token, as where it is admitted.
        """
        clock = self._clock
        finished = (row for first in scheduled.prefill_finished for row in first.computed_group)
        without_tokens = dict.fromkeys((row for row in finished if not row.num_tokens), 1)
        for row, num_tokens in (scheduled.num_scheduled_tokens | without_tokens).items():
            first = batch.first_of(row)
            has_jumped = first.more is not None and first.more.jumped_step == clock.step - 1
            if (has_jumped and first.is_decoding) or first in scheduled.admitted:
                continue
            num_left = row.num_tokens - row.num_computed_tokens
            self.events.append(PrefillEvent(*self._of(row), num_tokens, num_left, row.role))

    def preempted(self, preemption: Preemption[Sequence]) -> None:
        """Tell that the rows of a group lost their slots and what they had computed, and why."""
        beneficiary = preemption.beneficiary
        why = preemption.reason, beneficiary.id, beneficiary.index
        for row, num_computed_tokens in preemption.num_computed_tokens.items():
            num_generated = max(row.num_generated, 0)
            self.events.append(
                PreemptEvent(*self._of(row), *why, num_computed_tokens, num_generated, row.role)
            )

    def blocked(self, blocked: Blocked[Sequence]) -> None:
        clock, first = self._clock, blocked.first
        self.events.append(
            BlockedEvent(
                clock.step, clock.now, first.id, first.index, blocked.reason, blocked.num_blocks
            )
        )

    def jumped(self, sequence: Sequence, num_tokens: int) -> None:
        self.events.append(JumpEvent(*self._of(sequence), num_tokens))

    def drafted(self, drafts: "Mapping[Sequence, Proposal]", decode_step: int) -> None:
        for row, proposal in drafts.items():
            if proposal.tokens:
                position, num = decode_step + row.offset + 1, len(proposal.tokens)
                self.events.append(DraftEvent(*self._of(row), position, num, proposal.parents))

    def settled(
        self,
        num_drafts: Mapping[Sequence, int],
        decoded: Decoded,
        num_blocks: Mapping[Sequence, int],
        decode_step: int,
    ) -> None:
        """Tell what became of drafts, after rows were moved on by those that were accepted.

        num_blocks: how many rows give back, of those that do.
        """
        for row, num in num_drafts.items():
            slot, position = row.slot, decode_step + row.offset + 1
            accepted = decoded.num_accepted.get(slot, 0)
            if accepted:
                way, first = tuple(decoded.ways.get(slot, ())), position - accepted
                self.events.append(AcceptEvent(*self._of(row), first, accepted, way))
            if accepted < num:
                blocks, left = num_blocks.get(row, 0), num - accepted
                self.events.append(RollbackEvent(*self._of(row), position, left, blocks))

    def speculates(self, row: Sequence, num_tokens: int, reason: SpeculateReason) -> None:
        """Tell that another number of drafts is wanted for a row than before, and why."""
        self.events.append(SpeculateEvent(*self._of(row), num_tokens, reason))

    def forked(self, child: Sequence, parent: Sequence) -> None:
        self.events.append(ForkEvent(*self._of(child), parent.index))

    def _of(self, row: Sequence) -> tuple[int, float, str, int, int]:
        return self._clock.step, self._clock.now, row.id, row.index, row.slot

    def unused(self, row: Sequence, step: int) -> None:
        """Tell that a row of a group ended with `step`, without a result of its own."""
        time, slot = self._clock.start_of(step), None if row.slot == NO_SLOT else row.slot
        self.events.append(
            FinishEvent(step, time, row.id, row.index, slot, "unused", None, 0, row.role)
        )

    def dropped(self, results: Iterable[Result], step: int) -> None:
        """Tell which samples have turned out in `step` not to be among the best."""
        now = self._clock.start_of(step)
        self.events += [DropEvent(step, now, r.id, r.index, r.finish_reason) for r in results]


class StepStats:
    """What each step computes; an engine whose steps nobody asks about does without."""

    def __init__(self, scheduler: Scheduler[Sequence], clock: Clock) -> None:
        self._scheduler, self._batch, self._clock = scheduler, scheduler.batch, clock
        self._is_even = isinstance(clock, ConstantClock)
        self._pool = None if scheduler.kv_cache is None else scheduler.kv_cache.pool
        self._first_step = self._padding = 0
        self._ends: list[float] = []
        # Of each step, as StepsEvent names them; and its drafts.
        self._stats: list[tuple[int, ...]] = []
        # Of times on the wall: when a step began, what it read, and its prefill_work.
        self._timed: list[tuple[float, int, int]] | None = (
            [] if isinstance(clock, WallClock) else None
        )

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def is_full(self) -> bool:
        return len(self._ends) >= MAX_STEPS

    def go_on_from(self, step: int) -> None:
        self._first_step = step

    def begin_step(self) -> None:
        self._padding = self._batch.padding

    def measure(self, output: SchedulerOutput[Sequence]) -> BatchStats | None:
        """Return what a scheduled step computes, before it has ended; None if nobody wants it."""
        stats, pool, num_prefill, prefill_padding, num_drafts = None, self._pool, 0, 0, 0
        if not self._is_even:
            stats = self._scheduler.batch_stats(output)
            if self._timed is not None:
                self._timed.append((self._clock.now, stats.kv_read, stats.prefill_work))
        num_decodes, num_rows = self._scheduler.count_rows(output)
        if output.num_scheduled_tokens:
            sizes = output.num_scheduled_tokens.values()
            num_prefill = sum(sizes)
            prefill_padding = max(sizes) * len(sizes) - num_prefill
        if output.num_drafts:
            num_drafts = sum(output.num_drafts.values())
            num_prefill += num_drafts
        num_blocks = 0 if pool is None else pool.num_total - pool.num_free
        padding = self._padding if output.is_decode_step else 0
        self._stats.append(
            (num_decodes, num_prefill, num_rows, num_blocks, prefill_padding, padding, num_drafts)
        )
        return stats

    def end_step(self, end: float) -> None:
        self._ends.append(end)

    def take(self) -> StepsEvent:
        """Return the event of all steps since the last call, of which there are some."""
        ends = self._ends
        columns = map(list, zip(*self._stats))  # noqa: B905 - alike, and most often only one
        *told, drafts = columns
        event = StepsEvent(self._first_step, ends, *told)
        if any(drafts):
            event = replace(event, drafts=drafts)
        if self._timed:
            starts, kv_read, prefill_work = map(list, zip(*self._timed, strict=True))
            seconds = [end - start for start, end in zip(starts, ends, strict=True)]
            event = replace(event, seconds=seconds, kv_read=kv_read, prefill_work=prefill_work)
            self._timed = []
        self._ends, self._stats = [], []
        self._first_step += len(ends)
        return event
