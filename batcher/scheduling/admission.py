"""Who of those that wait is let in: in the order of the queue, as long as there is room.

Rule: while the first of the queue is not let in nobody behind it is, and what it lacks is told.
"""

from typing import NamedTuple

from batcher.events import BlockedReason
from batcher.scheduling.kv_cache import KVCache, PrefixMatch, most_tokens
from batcher.scheduling.orderings import Ordering
from batcher.scheduling.plan import Hold, PlannedChunk, StepPlan
from batcher.scheduling.queue import WaitingQueue
from batcher.scheduling.running import Rows, Running, rows_of
from batcher.scheduling.sequence import ScheduledSequence
from batcher.settings import SchedulingSettings

Chunks = list[tuple[ScheduledSequence, int]]

UNLIMITED = 2**62
"""Tokens in a step: more than there are."""


class _Entry(NamedTuple):
    """What it takes to let a leader in, for each of its rows.

    matches: what is found of it.  stops: how many tokens its blocks are to hold at first.
    chunks: what the step computes.  num_needed: how many blocks have to be free.
    """

    matches: list[PrefixMatch]
    stops: list[int]
    chunks: Chunks
    num_needed: int


class _Refusal(NamedTuple):
    """There were fewer blocks for a leader than num_needed.

    budget, is_alone, outlook: what these depend on: how many tokens it may compute, whether nothing
    runs, and what is found of it.
    """

    leader: ScheduledSequence
    budget: int
    is_alone: bool
    outlook: tuple[int, ...]
    num_needed: int


class Admission(Running):
    """What runs and what waits."""

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

    # -- chunks ----------------------------------------------------------------------------------

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
        most = min(budget, max(self._max_chunk, len(rows)))
        if sum(row.num_tokens - row.num_computed for row in rows) > most:
            most, num_kept = min(budget, self._max_chunk), 1
        budget = most
        chunks = []
        for row in rows:
            num_tokens = min(row.num_tokens - row.num_computed - num_kept, budget)
            if num_tokens > 0:
                chunks.append((row, num_tokens))
                budget -= num_tokens
        return chunks

    def _planned(self, chunks: Chunks) -> list[PlannedChunk]:
        """Let the step compute `chunks`, whose rows have the blocks for them."""
        planned = []
        for row, num_tokens in chunks:
            start = row.num_computed
            row.num_computed = stop = start + num_tokens
            planned.append(PlannedChunk(row, start, num_tokens))
            if self.kv_cache is not None:
                self.kv_cache.compute(row, start, stop)
        return planned

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
            chunks = self._open(plan, leader, budget, num_kept)
            if chunks is None:
                break
            num_free -= leader.num_slots
            budget -= self._board(plan, leader, chunks, num_kept)
        return budget

    def _board(
        self,
        plan: StepPlan,
        leader: ScheduledSequence,
        chunks: list[PlannedChunk],
        num_kept: int,
    ) -> int:
        """Give slots to a leader that has its blocks; return how many tokens the step computes."""
        self.queue.take(leader)
        self._hold = None
        self._occupy(leader)
        plan.admitted.append(leader)
        plan.chunks += chunks
        if not num_kept:
            self._begin_if_met(plan, leader)
        if not leader.is_decoding:
            self._chasing.append(leader)
        return sum([chunk.num_tokens for chunk in chunks])

    def _open(
        self, plan: StepPlan, leader: ScheduledSequence, budget: int, num_kept: int
    ) -> list[PlannedChunk] | None:
        """Give a leader that is to be admitted its blocks, if there is room; return its chunks."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return self._planned(self._chunks_of(leader, budget, num_kept))
        refusal = self._refusal
        if refusal is not None and self._would_refuse(kv_cache, refusal, leader, budget):
            self._note_hold(plan, leader, "kv", refusal.num_needed)
            return None
        is_alone = not self.slots.num_occupied
        if leader.companions:
            entry = self._entry_of(kv_cache, leader, budget, num_kept, is_alone=is_alone)
            num_needed = 0 if kv_cache.has_room(entry.num_needed) else entry.num_needed
        else:
            stop, most = leader.num_tokens - num_kept, min(budget, self._max_chunk)
            num_needed = kv_cache.admit(leader, stop, most, is_alone=is_alone)
        if num_needed:
            outlook = kv_cache.outlook(leader)
            self._refusal = _Refusal(leader, budget, is_alone, outlook, num_needed)
            self._note_hold(plan, leader, "kv", num_needed)
            return None
        if leader.companions:
            _give_blocks(kv_cache, leader, entry)
            return self._planned(entry.chunks)
        start, stop = leader.num_cached, leader.num_computed
        return [PlannedChunk(leader, start, stop - start)] if stop > start else []

    def _entry_of(
        self,
        kv_cache: KVCache,
        leader: ScheduledSequence,
        budget: int,
        num_kept: int,
        *,
        is_alone: bool,
    ) -> _Entry:
        """Return what it takes to let a leader and its companions in within `budget`."""
        rows = rows_of(leader)
        matches = self._matches_of(rows)
        for row, match in zip(rows, matches, strict=True):
            row.num_computed = match.num_tokens
        chunks = self._chunks_of(leader, budget, num_kept)
        stops = [match.num_tokens for match in matches]
        for row, num_tokens in chunks:
            stops[rows.index(row)] += num_tokens
        if self.settings.capacity == "no-evict":
            stops = [most_tokens(row) for row in rows]
        num_needed = self._num_needed(kv_cache, rows, matches, stops, is_alone=is_alone)
        return _Entry(matches, stops, chunks, num_needed)

    def _matches_of(self, rows: Rows) -> list[PrefixMatch]:
        """Return what is found in blocks of each row of a leader."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return []
        matches = [kv_cache.match(row) for row in rows]
        for place in range(1, len(rows)):  # what the first one takes may be what it would copy
            matches[place] = matches[place].without_source(kv_cache.block_size)
        return matches

    def _num_needed(
        self,
        kv_cache: KVCache,
        rows: Rows,
        matches: list[PrefixMatch],
        stops: list[int],
        *,
        is_alone: bool,
    ) -> int:
        """Return how many blocks have to be free for rows that are to hold `stops` tokens.

        is_alone: whether nobody else runs.
        """
        if self.settings.capacity != "watermark":
            return sum(map(kv_cache.num_blocks_to_take, matches, stops))
        known = [row.num_tokens for row in rows]
        num_needed = sum(map(kv_cache.num_blocks_to_take, matches, known))
        if not is_alone:  # else nothing would ever make room
            num_needed += kv_cache.num_spare
        return num_needed

    def _would_fit(
        self, leader: ScheduledSequence, matches: list[PrefixMatch], gone: list[ScheduledSequence]
    ) -> bool:
        """Whether all that is known of a leader, with `matches`, has room if `gone` give way."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return True
        rows = rows_of(leader)
        is_alone = self.slots.num_occupied == sum(victim.num_slots for victim in gone)
        known = [row.num_tokens for row in rows]
        num_needed = self._num_needed(kv_cache, rows, matches, known, is_alone=is_alone)
        kept = {block for match in matches for block in match.blocks}
        tables = [row.table for victim in gone for row in rows_of(victim)]
        return kv_cache.has_room(num_needed - kv_cache.pool.num_only_in(tables, kept))

    # -- why nobody is let in --------------------------------------------------------------------

    def _note_hold(
        self,
        plan: StepPlan,
        leader: ScheduledSequence | None,
        reason: BlockedReason,
        num_blocks: int = 0,
    ) -> None:
        """Tell why `leader` is not let in, unless that has been told."""
        if leader is None or not self.slots.num_free:
            return
        hold = self._hold
        if hold is None or hold.leader is not leader or hold.reason != reason:
            plan.hold = self._hold = Hold(leader, reason, num_blocks)

    @property
    def is_refusal_final(self) -> bool:
        """Whether who was refused stays out whatever is evicted: it would not find less then."""
        refusal = self._refusal
        return refusal is not None and refusal.outlook[1:] == (0,)

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
        """Whether who was refused would be again: it needs as many blocks, which are not free."""
        return (
            leader is refusal.leader
            and not kv_cache.has_room(refusal.num_needed)
            and (budget == refusal.budget or self.settings.capacity != "on-demand")
            and refusal.is_alone == (not self.slots.num_occupied)
            and kv_cache.outlook(leader) == refusal.outlook
        )


def _give_blocks(kv_cache: KVCache, leader: ScheduledSequence, entry: _Entry) -> None:
    """Give the rows of a leader what is found of them, and blocks for what the step computes."""
    rows = rows_of(leader)
    for row, match in zip(rows, entry.matches, strict=True):
        kv_cache.attach(row, match)
    for row, match, stop in zip(rows, entry.matches, entry.stops, strict=True):
        kv_cache.fill(row, match, stop)
