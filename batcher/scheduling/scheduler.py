"""Decides what each step does: who is let in, who is preempted, which tokens are computed.

There are no phases.  A sequence has tokens that are computed and tokens that are known, and the
former chase the latter; when they meet, the step gives a token.  Prompts, parts of prompts, what
has to be computed again after a preemption and what a cache holds already are all that one rule.

Rows that have met go on in lockstep, one token a decode step, so nothing is done for them one by
one: the position of each is the number of the decode step plus a constant of its own.
"""

from math import inf

from batcher.errors import InvariantError
from batcher.events import PreemptReason
from batcher.lifecycle import Move, State
from batcher.scheduling.admission import Admission, Chunks
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.orderings import Ordering
from batcher.scheduling.plan import NOTHING_NEW, PlannedChunk, Preemption, StepPlan
from batcher.scheduling.running import rows_of
from batcher.scheduling.sequence import NO_SLOT, ScheduledSequence
from batcher.scheduling.urgency import Urgency
from batcher.settings import SchedulingSettings


class Scheduler(Admission):
    """What runs and what waits, and the plan of each step."""

    def __init__(
        self,
        num_slots: int,
        settings: SchedulingSettings,
        ordering: Ordering,
        kv_cache: KVCache | None,
    ) -> None:
        super().__init__(num_slots, settings, ordering, kv_cache)
        self._urgency = ordering if isinstance(ordering, Urgency) else None

    # -- the plan of a step ----------------------------------------------------------------------

    def plan(self, step: int, now: float) -> StepPlan:
        """Return what `step`, which starts at `now`, does, after doing the book-keeping of it."""
        kv_cache = self.kv_cache
        can_admit = self.queue.num_slots and (self.slots.num_free or self._urgency is not None)
        if not (can_admit or self._chasing) and (
            kv_cache is None or not self.decoding.is_growing(self.decode_step)
        ):
            return NOTHING_NEW
        self._step, self._now = step, now
        plan = StepPlan(self.decode_step)
        if self._is_prefill_first:
            budget = self._max_tokens
            if self._urgency is not None:
                budget = self._let_in_urgent(plan, self._urgency, budget, 1)
            budget = self._continue_all(plan, budget, 1)
            plan.budget = self._let_in(plan, budget, 1)
            if plan.chunks:
                plan.decodes = False
                return plan
        if kv_cache is not None:
            self._grow(plan, kv_cache)
        budget = self._max_tokens - self.decoding.num_rows
        if self._urgency is not None and not (self._is_prefill_first or plan.has_preempted):
            budget = self._let_in_urgent(plan, self._urgency, budget, 0)
        plan.budget = self._continue_all(plan, budget, 0)
        if plan.has_preempted or not self._is_prefill_first:
            plan.budget = self._let_in(plan, plan.budget, 0)
        if plan.begun and self._chasing:
            self._chasing = [leader for leader in self._chasing if not leader.is_decoding]
        return plan

    def _continue_all(self, plan: StepPlan, budget: int, num_kept: int) -> int:
        """Spend `budget` on tokens that running sequences know; return what is left of it.

        num_kept: how many of each are left for a later step, 0 or 1.
        """
        if not self._chasing:
            return budget
        begun = {self.leader_of(chunk.sequence) for chunk in plan.chunks}  # let in just now
        for leader in self._chasing.copy():
            if budget <= 0:
                break
            if leader.state is State.RUNNING and leader not in begun:  # else it was preempted
                budget -= self._continue(plan, leader, budget, num_kept)
        return budget

    def _let_in(self, plan: StepPlan, budget: int, num_kept: int) -> int:
        """Spend `budget` on sequences that wait, unless somebody had to give way."""
        if plan.has_preempted:
            self._note_hold(plan, self.queue.peek(self._now), "preemption")
            return budget
        return self._admit(plan, budget, num_kept) if self.queue.num_slots else budget

    def _continue(
        self, plan: StepPlan, leader: ScheduledSequence, budget: int, num_kept: int
    ) -> int:
        """Plan the next chunks of a running leader; return how many tokens they have."""
        plan.has_continued = True
        spent = 0
        for row, num_tokens in self._chunks_of(leader, budget, num_kept):
            if self.kv_cache is not None:
                stop = row.num_computed + num_tokens
                if not self._make_room(plan, row, stop):
                    return spent
                self.kv_cache.extend(row, stop)
            plan.chunks += self._planned([(row, num_tokens)])
            spent += num_tokens
        if not num_kept:
            self._begin_if_met(plan, leader)
        return spent

    # -- who may not wait ------------------------------------------------------------------------

    def has_urgent(self, now: float) -> bool:
        """Whether one that waits may be let in ahead of the queue, in this step or a later one."""
        urgency = self._urgency
        return urgency is not None and bool(urgency.ahead(self._running(), now))

    def _let_in_urgent(self, plan: StepPlan, urgency: Urgency, budget: int, num_kept: int) -> int:
        """Let in, ahead of the queue, those that may not wait; return what is left of the budget.

        Those that give way to them free tokens of the step, if they were to decode.  They come
        back in a later step, even if there is room: they have still to be taken out of their slots.
        Until then nobody overtakes them who is not more urgent.  Who has no room even if all less
        urgent give way is passed over: it loses nothing, as they do so once that is enough.  But
        nobody as urgent goes before it, since such a one would not.
        """
        passed_over = -inf
        for leader in urgency.ahead(self._running(), self._now):
            degree = urgency.degree(leader)
            if any(urgency.degree(lost.leader) <= degree for lost in plan.preempted):
                break
            if degree == passed_over or not urgency.is_due(
                leader, self._now, self.decoding, self.decode_step
            ):
                continue
            victims = self._victims_of(leader, urgency)
            if victims is None:
                passed_over = degree
                continue
            rows = [row for victim in victims for row in rows_of(victim)]
            freed = 0 if num_kept else sum(row.is_decoding for row in rows)
            if budget + freed < leader.num_slots:
                break
            for victim in victims:
                self._preempt(plan, victim, leader, urgency.measure)
            chunks = self._open(plan, leader, budget + freed, num_kept)
            if chunks is None:
                raise InvariantError(f"{leader.id!r} has no room, and others gave way to it")
            budget += freed - self._board(plan, leader, chunks, num_kept)
        return budget

    def _victims_of(
        self, leader: ScheduledSequence, urgency: Urgency
    ) -> list[ScheduledSequence] | None:
        """Return who gives way to one that waits, as few as will do; None if all are not enough."""
        less_urgent = urgency.less_urgent(leader, self._running())
        num_free = self.slots.num_free
        if num_free + sum(row.num_slots for row in less_urgent) < leader.num_slots:
            return None
        matches = self._matches_of(rows_of(leader))
        for count in range(len(less_urgent) + 1):
            if num_free >= leader.num_slots and self._would_fit(
                leader, matches, less_urgent[:count]
            ):
                return less_urgent[:count]
            if count < len(less_urgent):
                num_free += less_urgent[count].num_slots
        return None

    # -- blocks of running sequences -------------------------------------------------------------

    def _grow(self, plan: StepPlan, kv_cache: KVCache) -> None:
        """Give a block to every decoding row whose next token begins one, by admission."""
        rows = self.decoding.at_border(self.decode_step)
        has_room = kv_cache.has_room(len(rows))
        if has_room and not self._leaders:  # without beams each of them needs one block at most
            kv_cache.grow_all(rows, self.decode_step)
            plan.grown = rows
            return
        if not has_room:
            rows.sort(key=lambda row: (row.admission, row.slot))
        for row in rows:
            position = self.decode_step + row.offset
            if row.is_decoding and self._make_room(plan, row, position + 1):  # else it had to go
                kv_cache.grow(row, position + 1)
                plan.grown.append(row)
        for row in self.decoding.take_forked():
            position = self.decode_step + row.offset
            if not row.is_decoding or position % kv_cache.block_size == 0:
                continue
            if self._make_room(plan, row, position + 1):
                kv_cache.copy_shared_end(row)
                plan.grown.append(row)

    def _make_room(self, plan: StepPlan, row: ScheduledSequence, num_tokens: int) -> bool:
        """Preempt until there is room for `num_tokens` of `row`; False if it had to go itself."""
        kv_cache, leader = self.kv_cache, self.leader_of(row)
        if kv_cache is None:
            raise InvariantError("there are no blocks")
        while not kv_cache.has_room(kv_cache.num_blocks_to_grow(row, num_tokens)):
            computing = (self.leader_of(chunk.sequence) for chunk in plan.chunks)
            busy = {*plan.admitted, *plan.begun, *computing}
            victims = [other for other in self._running() if other is leader or other not in busy]
            victim = self._ordering.last(victims, self._now)
            self._preempt(plan, victim, leader, "kv")
            if victim is leader:
                return False
        return True

    def _preempt(
        self,
        plan: StepPlan,
        leader: ScheduledSequence,
        beneficiary: ScheduledSequence,
        reason: PreemptReason,
    ) -> None:
        """Take slots and blocks from `leader`, and let it wait again."""
        kv_cache, rows = self.kv_cache, rows_of(leader)
        for chunk in [chunk for chunk in plan.chunks if chunk.sequence in rows]:
            plan.chunks.remove(chunk)
            self._take_back(chunk)
        for row in rows:
            if row.is_decoding:
                self._stop_decoding(row)
            if kv_cache is not None:
                kv_cache.close(row, row.num_computed)
        num_computed = {row: row.num_computed for row in (leader, *leader.companions)}
        for row in rows:
            row.num_computed = 0
        plan.grown = [row for row in plan.grown if row not in rows]
        self._vacate(leader, self._step - 1, Move.PREEMPT)
        if leader in plan.admitted:  # and so of no use to anybody yet: it has not been let in
            plan.admitted.remove(leader)
            for row in num_computed:
                row.slot = NO_SLOT
        else:
            plan.preempted.append(Preemption(leader, beneficiary, reason, num_computed))
        plan.has_preempted = True
        self.queue.push(leader)

    def _take_back(self, chunk: PlannedChunk) -> None:
        """Undo the plan of a chunk that is not computed after all."""
        chunk.sequence.num_computed = chunk.start
        if self.kv_cache is not None:
            self.kv_cache.forget(chunk.sequence)

    def lengthen_begun(self, plan: StepPlan, leader: ScheduledSequence, num_more: int) -> None:
        """Let a leader of the current `plan`, just admitted, begin with `num_more` tokens more.

        What the budget still allows of them is computed in the same step.
        """
        for row in rows_of(leader):
            row.num_tokens += num_more
            if row.is_decoding:
                row.is_decoding = False
                self.decoding.remove(row)
        if leader in plan.begun:
            plan.begun.remove(leader)
            self.slots.clear_deadline(leader.slot)
            self._chasing.append(leader)
        num_kept = int(not plan.decodes)
        if self._has_room_for(self._chunks_of(leader, plan.budget, num_kept)):
            plan.budget -= self._continue(plan, leader, plan.budget, num_kept)
            plan.merge_chunks()
            self._chasing = [other for other in self._chasing if not other.is_decoding]

    def _has_room_for(self, chunks: Chunks) -> bool:
        """Whether running rows can compute so many tokens more without anybody giving way."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return True
        return kv_cache.has_room(
            sum(kv_cache.num_blocks_to_grow(row, row.num_computed + more) for row, more in chunks)
        )
