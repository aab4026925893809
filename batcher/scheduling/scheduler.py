"""Decides what each step does: who is let in, who is preempted, which tokens are computed.

There are no phases.  A sequence has tokens that are computed and tokens that are known, and the
former chase the latter; when they meet, the step gives a token.  Prompts, parts of prompts, what
has to be computed again after a preemption and what a cache holds already are all that one rule.

Rows that have met go on in lockstep, one token a decode step, so nothing is done for them one by
one: the position of each is the number of the decode step plus a constant of its own.
"""

from typing import NamedTuple

from batcher.errors import InvariantError
from batcher.events import HoldReason
from batcher.lifecycle import Move, State
from batcher.scheduling.kv_cache import KVCache, Match
from batcher.scheduling.orderings import Ordering
from batcher.scheduling.plan import NOTHING_NEW, Hold, PlannedChunk, Preemption, StepPlan
from batcher.scheduling.queue import WaitingQueue
from batcher.scheduling.running import Rows, Running, most_tokens, rows_of
from batcher.scheduling.sequence import NO_SLOT, ScheduledSequence
from batcher.settings import SchedulingSettings

Chunks = list[tuple[ScheduledSequence, int]]


class _Refusal(NamedTuple):
    """There were too few blocks for a leader: num_needed, where num_free were.

    budget, is_alone, version: what else decides: the tokens it may compute, whether nothing runs,
    and what can be found.
    """

    leader: ScheduledSequence
    budget: int
    is_alone: bool
    version: tuple[int, int, int]
    num_free: int
    num_needed: int


UNLIMITED = 2**62
"""Tokens in a step: more than there are."""


class Scheduler(Running):
    """What runs and what waits, and the plan of each step."""

    def __init__(
        self,
        num_slots: int,
        settings: SchedulingSettings,
        ordering: Ordering,
        kv_cache: KVCache | None,
    ) -> None:
        super().__init__(num_slots, kv_cache)
        self.settings = settings
        self.queue = WaitingQueue(ordering)
        self._ordering = ordering
        self._max_tokens = settings.max_batch_tokens or UNLIMITED
        self._max_chunk = settings.long_prefill_threshold or UNLIMITED
        self._is_prefill_first = settings.prefill_order == "prefill-first"
        self._is_static = settings.batching == "static"
        self._step, self._now = 0, 0.0
        self._hold: Hold | None = None
        self._refusal: _Refusal | None = None

    @property
    def hold(self) -> Hold | None:
        """Why the first of the waiting queue was not let in when that was last told."""
        return self._hold

    # -- the plan of a step ----------------------------------------------------------------------

    def plan(self, step: int, now: float) -> StepPlan:
        """Return what `step`, which starts at `now`, does, after doing the book-keeping of it."""
        kv_cache = self.kv_cache
        can_admit = self.queue.num_slots and self.slots.num_free
        if not (can_admit or self._chasing) and (
            kv_cache is None or not self.decoding.is_growing(self.decode_step)
        ):
            return NOTHING_NEW
        self._step, self._now = step, now
        plan = StepPlan(self.decode_step)
        if self._is_prefill_first:
            budget = self._continue_all(plan, self._max_tokens, 1)
            plan.budget = self._let_in(plan, budget, 1)
            if plan.chunks:
                plan.decodes = False
                return plan
        if kv_cache is not None:
            self._grow(plan, kv_cache)
        plan.budget = self._continue_all(plan, self._max_tokens - self.decoding.num_rows, 0)
        if plan.has_preempted or not self._is_prefill_first:
            plan.budget = self._let_in(plan, plan.budget, 0)
        if plan.begun and self._chasing:
            self._chasing = [leader for leader in self._chasing if not leader.is_decoding]
        return plan

    def _continue_all(self, plan: StepPlan, budget: int, num_kept: int) -> int:
        """Spend `budget` on tokens that running sequences know; return what is left of it.

        num_kept: how many of each are left for a later step, 0 or 1.
        """
        for leader in self._chasing.copy() if self._chasing else ():
            if budget <= 0:
                break
            if leader.state is State.RUNNING:  # it has not been preempted just now
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
            self._plan_chunk(plan, row, num_tokens)
            spent += num_tokens
        if not num_kept:
            self._begin_if_met(plan, leader)
        return spent

    def _chunks_of(self, leader: ScheduledSequence, budget: int, num_kept: int) -> Chunks:
        """Return how much of which row to compute, within `budget`.

        The rows of one leader have to meet their last tokens in the same step.
        """
        if not leader.companions:
            need = leader.num_tokens - leader.num_computed - num_kept
            if need > budget or need > self._max_chunk:
                need = min(budget, self._max_chunk)
            return [(leader, need)] if need > 0 else []
        rows = rows_of(leader)
        budget = min(budget, max(self._max_chunk, len(rows)))
        if sum(row.num_tokens - row.num_computed for row in rows) > budget:
            num_kept = 1
        chunks = []
        for row in rows:
            num_tokens = min(row.num_tokens - row.num_computed - num_kept, budget)
            if num_tokens > 0:
                chunks.append((row, num_tokens))
                budget -= num_tokens
        return chunks

    def _plan_chunk(self, plan: StepPlan, row: ScheduledSequence, num_tokens: int) -> None:
        start = row.num_computed
        row.num_computed = stop = start + num_tokens
        plan.chunks.append(PlannedChunk(row, start, num_tokens))
        if self.kv_cache is not None:
            self.kv_cache.compute(row, start, stop)

    # -- the waiting queue -----------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int, num_kept: int) -> int:
        """Fill free slots from the waiting queue, lowest slot first, as long as the head fits.

        Returns what is left of the budget.
        """
        queue, slots, now = self.queue, self.slots, self._now
        if self._is_static and slots.num_occupied:
            self._note_hold(plan, queue.peek(now), "batch")
            return budget
        num_free = slots.num_free
        while num_free and (leader := self._ordering.first(now)) is not None:
            if leader.num_slots > num_free:
                break
            if budget < leader.num_slots:
                self._note_hold(plan, leader, "tokens")
                break
            if self.kv_cache is None:
                chunks = self._chunks_of(leader, budget, num_kept)
            else:
                opened = self._open(plan, leader, budget, num_kept)
                if opened is None:
                    break
                chunks = opened
            queue.take(leader)
            self._hold = None
            num_free -= leader.num_slots
            self._occupy(leader)
            plan.admitted.append(leader)
            for row, num_tokens in chunks:
                self._plan_chunk(plan, row, num_tokens)
                budget -= num_tokens
            if not num_kept:
                self._begin_if_met(plan, leader)
            if not leader.is_decoding:
                self._chasing.append(leader)
        return budget

    def _open(
        self, plan: StepPlan, leader: ScheduledSequence, budget: int, num_kept: int
    ) -> Chunks | None:
        """Give a leader that is to be admitted its blocks, if there is room; return its chunks."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            raise InvariantError("there are no blocks")
        refusal = self._refusal
        if refusal is not None and self._would_refuse(kv_cache, refusal, leader, budget):
            self._note_hold(plan, leader, "kv", refusal.num_needed)
            return None
        rows = rows_of(leader)
        matches = [kv_cache.match(row) for row in rows]
        for place in range(1, len(rows)):  # what the first one takes may be what it would copy
            matches[place] = matches[place].without_source(kv_cache.block_size)
        for row, match in zip(rows, matches, strict=True):
            row.num_computed = match.num_tokens
        chunks = self._chunks_of(leader, budget, num_kept)
        stops = [match.num_tokens for match in matches]
        for row, num_tokens in chunks:
            stops[rows.index(row)] += num_tokens
        if self.settings.capacity == "no-evict":
            stops = [most_tokens(row) for row in rows]
        num_needed = self._num_needed(kv_cache, rows, matches, stops)
        if not kv_cache.has_room(num_needed):
            is_alone, num_free = not self.slots.num_occupied, kv_cache.pool.num_free
            self._refusal = _Refusal(
                leader, budget, is_alone, kv_cache.version, num_free, num_needed
            )
            self._note_hold(plan, leader, "kv", num_needed)
            return None
        for row, match in zip(rows, matches, strict=True):
            kv_cache.attach(row, match)
        for row, match, stop in zip(rows, matches, stops, strict=True):
            kv_cache.fill(row, match, stop)
        return chunks

    def _num_needed(
        self, kv_cache: KVCache, rows: Rows, matches: list[Match], stops: list[int]
    ) -> int:
        """Return how many blocks have to be free for rows that are to hold `stops` tokens."""
        if self.settings.capacity != "watermark":
            return sum(map(kv_cache.num_blocks_to_take, matches, stops))
        known = [row.num_tokens for row in rows]
        num_needed = sum(map(kv_cache.num_blocks_to_take, matches, known))
        if self.slots.num_occupied:  # else nothing would ever make room
            num_needed += int(self.settings.watermark * kv_cache.pool.num_total)
        return num_needed

    def _note_hold(
        self,
        plan: StepPlan,
        leader: ScheduledSequence | None,
        reason: HoldReason,
        num_blocks: int = 0,
    ) -> None:
        """Tell why `leader` is not let in, unless that has been told."""
        if leader is None or not self.slots.num_free:
            return
        hold = self._hold
        if hold is None or hold.leader is not leader or hold.reason != reason:
            plan.hold = self._hold = Hold(leader, reason, num_blocks)

    def refuses_until(self, now: float) -> float | None:
        """Return until when the first of the queue stays out for want of blocks; None: not so.

        It does if nothing comes, ends or can be found that could not before.
        """
        kv_cache, refusal = self.kv_cache, self._refusal
        if kv_cache is None or refusal is None or self._is_prefill_first:
            return None
        until = self._ordering.steady_until(now)
        leader = self.queue.peek(now) if until > now else None
        if leader is None:
            return None
        budget = self._max_tokens - self.decoding.num_rows
        is_told = self._hold is not None and self._hold.reason == "kv"
        would_refuse = self._would_refuse(kv_cache, refusal, leader, budget)
        return until if is_told and would_refuse else None

    def _would_refuse(
        self, kv_cache: KVCache, refusal: _Refusal, leader: ScheduledSequence, budget: int
    ) -> bool:
        """Whether what was refused would be again: nothing has changed, but less may be free."""
        return (
            leader is refusal.leader
            and kv_cache.pool.num_free <= refusal.num_free
            and budget == refusal.budget
            and refusal.is_alone == (not self.slots.num_occupied)
            and kv_cache.version == refusal.version
        )

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
            self._preempt(plan, victim, leader)
            if victim is leader:
                return False
        return True

    def _preempt(
        self, plan: StepPlan, leader: ScheduledSequence, beneficiary: ScheduledSequence
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
            plan.preempted.append(Preemption(leader, beneficiary, num_computed))
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
