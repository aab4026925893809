"""Decides what each step does: who is let in, who is preempted, which tokens are computed.

There are no phases.  A sequence has tokens that are computed and tokens that are known, and the
former chase the latter; when they meet, the step gives a token.  Prompts, parts of prompts, what
has to be computed again after a preemption and what a cache holds already are all that one rule.

Rows that have met go on in lockstep, one token a decode step, so nothing is done for them one by
one: the position of each is the number of the decode step plus a constant of its own.
"""

from collections.abc import Iterator

from batcher.errors import Failure, InvariantError
from batcher.events import HoldReason
from batcher.lifecycle import Move, State, move
from batcher.scheduling.decoding_rows import DecodingRows
from batcher.scheduling.kv_cache import KVCache, Match
from batcher.scheduling.orderings import Ordering
from batcher.scheduling.plan import NOTHING_NEW, Hold, PlannedChunk, Preemption, StepPlan
from batcher.scheduling.queue import WaitingQueue
from batcher.scheduling.sequence import NO_SLOT, ScheduledSequence
from batcher.scheduling.slots import SlotTable
from batcher.settings import SchedulingSettings

Rows = tuple[ScheduledSequence, ...]
Asked = tuple[ScheduledSequence, int, tuple[int, int, int]]  # who, its budget, version of the pool

UNLIMITED = 2**62
"""Tokens in a step: more than there are."""


class Scheduler:
    """Slots, waiting queue and blocks, and the plan of each step.

    decode_step: the number of the current decode step; steps that only compute prompts are none.
    """

    def __init__(
        self,
        num_slots: int,
        settings: SchedulingSettings,
        ordering: Ordering,
        kv_cache: KVCache | None,
    ) -> None:
        self.settings = settings
        self.decode_step = 0
        self.slots = SlotTable(num_slots)
        self.queue = WaitingQueue(ordering)
        self.kv_cache = kv_cache
        self.decoding = DecodingRows(0 if kv_cache is None else settings.block_size)
        self._ordering = ordering
        self._max_tokens = settings.max_batch_tokens or UNLIMITED
        self._max_chunk = settings.long_prefill_threshold or UNLIMITED
        self._is_prefill_first = settings.prefill_order == "prefill-first"
        self._is_static = settings.batching == "static"
        self._chasing: list[ScheduledSequence] = []  # leaders, by admission
        self._leaders: dict[ScheduledSequence, ScheduledSequence] = {}  # of running companions
        self._num_admissions = 0
        self._step, self._now = 0, 0.0
        self._hold: Hold | None = None
        self._refused: Asked | None = None

    @property
    def chasing(self) -> list[ScheduledSequence]:
        """The running leaders that a step gives no token, by admission."""
        return self._chasing

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
            self._compute_known(plan, self._max_tokens, 1)
            if plan.chunks:
                plan.decodes = False
                return plan
        if kv_cache is not None:
            self._grow(plan, kv_cache)
        self._compute_known(plan, self._max_tokens - self.decoding.num_rows, 0)
        return plan

    def _compute_known(self, plan: StepPlan, budget: int, num_kept: int) -> None:
        """Spend `budget` on tokens that are known: of running sequences, then of waiting ones.

        num_kept: how many of each are left for a later step, 0 or 1.
        """
        for leader in self._chasing.copy() if self._chasing else ():
            if budget <= 0:
                break
            if leader.state is State.RUNNING:  # it has not been preempted just now
                budget -= self._continue(plan, leader, budget, num_kept)
        if self.queue.num_slots and not plan.has_preempted:
            budget = self._admit(plan, budget, num_kept)
        elif plan.has_preempted:
            self._note_hold(plan, self.queue.peek(self._now), "preemption")
        plan.budget = budget
        if plan.begun and self._chasing:
            self._chasing = [leader for leader in self._chasing if not leader.is_decoding]

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

    def _chunks_of(
        self, leader: ScheduledSequence, budget: int, num_kept: int
    ) -> list[tuple[ScheduledSequence, int]]:
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

    def _begin_if_met(self, plan: StepPlan, leader: ScheduledSequence) -> None:
        """Let a leader decode from this step on if all it knows is computed."""
        rows, step = rows_of(leader), self.decode_step
        for row in rows:
            if row.num_computed < row.num_tokens:
                return
        for row in rows:
            row.is_decoding = True
            row.offset = row.num_tokens - 1 - step
            self.decoding.add(row)
        num_generated = leader.num_tokens - leader.num_prompt_tokens
        self.slots.set_deadline(leader.slot, step + leader.max_tokens - num_generated - 1)
        plan.begun.append(leader)

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
            if self.kv_cache is not None and not self._open(plan, leader, budget, num_kept):
                break
            queue.take(leader)
            self._hold = None
            num_free -= leader.num_slots
            self._occupy(leader)
            plan.admitted.append(leader)
            for row, num_tokens in self._chunks_of(leader, budget, num_kept):
                self._plan_chunk(plan, row, num_tokens)
                budget -= num_tokens
            if not num_kept:
                self._begin_if_met(plan, leader)
            if not leader.is_decoding:
                self._chasing.append(leader)
        return budget

    def _occupy(self, leader: ScheduledSequence) -> None:
        """Give slots to `leader` and its companions."""
        self._num_admissions += 1
        for row in (leader, *leader.companions):
            move(row, Move.ADMIT)
            row.slot = self.slots.occupy(row)
            row.admission = self._num_admissions
            if row is not leader:
                self._leaders[row] = leader

    def _open(self, plan: StepPlan, leader: ScheduledSequence, budget: int, num_kept: int) -> bool:
        """Give a leader that is to be admitted its blocks, if there is room for it."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            raise InvariantError("there are no blocks")
        asked = leader, budget, kv_cache.pool.version
        if self._refused is not None and _is_no_better(asked, self._refused):
            return False
        rows = rows_of(leader)
        matches = [kv_cache.match(row) for row in rows]
        for place in range(1, len(rows)):  # what the first one takes may be what it would copy
            matches[place] = matches[place].without_source(kv_cache.block_size)
        for row, match in zip(rows, matches, strict=True):
            row.num_computed = match.num_tokens
        stops = {row: row.num_computed for row in rows}
        for row, num_tokens in self._chunks_of(leader, budget, num_kept):
            stops[row] += num_tokens
        num_needed = self._num_needed(rows, matches, list(stops.values()))
        if not kv_cache.has_room(num_needed):
            self._refused = asked
            self._note_hold(plan, leader, "kv", num_needed)
            return False
        for row, match in zip(rows, matches, strict=True):
            kv_cache.attach(row, match)
        for row, match in zip(rows, matches, strict=True):
            reserved = most_tokens(row) if self.settings.capacity == "no-evict" else stops[row]
            kv_cache.fill(row, match, reserved)
        return True

    def _num_needed(self, rows: Rows, matches: list[Match], stops: list[int]) -> int:
        """Return how many blocks must be free to let a leader with these rows in."""
        if self.kv_cache is None:
            raise InvariantError("there are no blocks")
        settings, num_kept_free = self.settings, 0
        if settings.capacity == "no-evict":
            stops = [most_tokens(row) for row in rows]
        elif settings.capacity == "watermark":
            stops = [row.num_tokens for row in rows]
            if self.slots.num_occupied:  # else nothing would ever make room
                num_kept_free = int(settings.watermark * self.kv_cache.pool.num_total)
        need = map(self.kv_cache.num_blocks_to_take, matches, stops)
        return sum(need) + num_kept_free

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
        kv_cache, refused = self.kv_cache, self._refused
        if kv_cache is None or refused is None or self._is_prefill_first:
            return None
        until = self._ordering.steady_until(now)
        leader = self.queue.peek(now) if until > now else None
        if leader is None:
            return None
        asked = leader, self._max_tokens - self.decoding.num_rows, kv_cache.pool.version
        is_told = self._hold is not None and self._hold.reason == "kv"
        return until if is_told and _is_no_better(asked, refused) else None

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
            busy = {*plan.admitted, *(self.leader_of(chunk.sequence) for chunk in plan.chunks)}
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

    def _stop_decoding(self, row: ScheduledSequence) -> None:
        """Let a row leave the lockstep, before a decode step or after it."""
        row.num_computed = self.decode_step + row.offset
        row.num_tokens = row.num_computed + 1
        row.is_decoding = False
        self.decoding.remove(row)

    def _running(self) -> Iterator[ScheduledSequence]:
        """Yield the leaders that hold slots."""
        for holder in self.slots.sequences:
            if holder is not None and holder not in self._leaders:
                yield holder

    def _vacate(self, leader: ScheduledSequence, last_step: int, why: Move) -> None:
        for row in (leader, *leader.companions):
            move(row, why)
            self.slots.vacate(row.slot, last_step)
            if row is not leader:
                del self._leaders[row]
        if self._chasing:
            self._chasing = [other for other in self._chasing if other is not leader]

    # -- after a step ----------------------------------------------------------------------------

    def end_step(self, plan: StepPlan) -> None:
        """Take note that the step has been computed."""
        if plan.decodes:
            self.decode_step += 1
        if self.kv_cache is not None:
            self.kv_cache.end_step()
            for leader in plan.begun:
                if leader.has_siblings:
                    self.kv_cache.note_sibling(leader)

    def why_never(self, leader: ScheduledSequence) -> Failure | None:
        """Return why `leader` could never end, if so: all blocks together cannot hold it."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return None
        rows = (leader, *leader.companions)
        num_needed = sum(kv_cache.num_blocks(most_tokens(row)) for row in rows)
        if self.settings.kv_blocks is None or num_needed <= self.settings.kv_blocks:
            return None
        what = f"{leader.num_prompt_tokens} prompt tokens and max_tokens {leader.max_tokens}"
        return Failure(
            "kv-too-small",
            f"it can never run: with {what} it needs up to {num_needed} blocks of "
            f"{kv_cache.block_size} tokens, and there are {self.settings.kv_blocks}",
        )

    def leader_of(self, row: ScheduledSequence) -> ScheduledSequence:
        """Return the leader of a running row, perhaps itself."""
        return self._leaders.get(row, row) if self._leaders else row

    def lengthen(self, leader: ScheduledSequence, num_more: int) -> None:
        """Let a decoding leader, which was given `num_more` tokens at once, catch up with them."""
        for row in rows_of(leader):
            self._stop_decoding(row)
            row.num_tokens += num_more
        self.slots.clear_deadline(leader.slot)
        self._chasing.append(leader)
        self._chasing.sort(key=lambda other: other.admission)

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

    def _has_room_for(self, chunks: list[tuple[ScheduledSequence, int]]) -> bool:
        """Whether running rows can compute so many tokens more without anybody giving way."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return True
        return kv_cache.has_room(
            sum(kv_cache.num_blocks_to_grow(row, row.num_computed + more) for row, more in chunks)
        )

    def fork(self, parent: ScheduledSequence, child: ScheduledSequence) -> None:
        """Let a beam go on from where another of its request stands, between two steps."""
        if not child.is_decoding:
            child.is_decoding, child.offset, child.num_tokens = True, parent.offset, 1
            self.decoding.add(child)
        if self.kv_cache is not None:
            self.kv_cache.fork(parent, child, self.decode_step + parent.offset)
            self.decoding.note_fork(parent)
            self.decoding.note_fork(child)

    def leave(
        self, leader: ScheduledSequence, last_step: int, why: Move, *, has_failed: bool
    ) -> int:
        """Take a running leader and its companions out of their slots; they are over.

        Returns how many tokens the leader has, counting one from each decode step.

        has_failed: what the last step was to compute of them is not to be relied on.
        """
        kv_cache = self.kv_cache
        for row in rows_of(leader):
            if row.is_decoding:
                self._stop_decoding(row)
            if kv_cache is not None:
                if has_failed:
                    kv_cache.forget(row)
                    row.num_computed = 0
                kv_cache.close(row, row.num_computed)
        self._vacate(leader, last_step, why)
        return leader.num_tokens

    def check(self) -> None:
        """Make sure that no block is lost, shared wrongly or held by who does not run.

        Raises:
            InvariantError: that is not so.
        """
        if self.kv_cache is not None:
            holders = (holder for holder in self.slots.sequences if holder is not None)
            self.kv_cache.check(holders)


def rows_of(leader: ScheduledSequence) -> Rows:
    """Return `leader` and those of its companions that are computed: beams are after a fork."""
    if not leader.companions:
        return (leader,)
    return (leader, *(row for row in leader.companions if row.num_tokens or row.role != "beam"))


def most_tokens(row: ScheduledSequence) -> int:
    """Return how many tokens of `row` are computed at most: the last one it generates is not."""
    return max(row.num_prompt_tokens + row.max_tokens - 1, 1)


def _is_no_better(asked: Asked, refused: Asked) -> bool:
    """Return whether what was `refused` would be again: nothing has changed, but less is free."""
    leader, budget, (num_free, *changes) = asked
    last_leader, last_budget, (num_free_then, *changes_then) = refused
    is_same = leader is last_leader and budget == last_budget and changes == changes_then
    return is_same and num_free <= num_free_then
