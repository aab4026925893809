"""Who gets slots and blocks: admitted in the order of the queue, as long as there is room.

Rule: while the first of the queue is not admitted nobody behind it is, and what it lacks is told.
"""

from typing import TYPE_CHECKING, Generic, NamedTuple

from msgspec import Struct

from batcher.errors import InvariantError
from batcher.events import BlockedReason, PreemptReason
from batcher.lifecycle import PREEMPT
from batcher.scheduling.batch import RunningBatch
from batcher.scheduling.cached_blocks import PrefixMatch
from batcher.scheduling.output import Blocked, Preemption, SchedulerOutput
from batcher.scheduling.queue import Ordering, WaitingQueue
from batcher.scheduling.sequence import NO_SLOT, S
from batcher.settings import SchedulingSettings

if TYPE_CHECKING:
    from batcher.scheduling.kv_cache import KVCache

UNLIMITED = 2**62
"""Tokens in a step: more than there are."""


class _Room(NamedTuple, Generic[S]):
    """What it takes to admit a group, for each of its rows.

    matches: what is found of it.  stops: how many tokens its blocks are to hold at first.
    num_tokens: how many of which row the step computes.  num_needed: how many blocks have to be
    free.
    """

    matches: list[PrefixMatch]
    stops: list[int]
    num_tokens: dict[S, int]
    num_needed: int


class _Refusal(Struct, Generic[S], frozen=True):
    """There were fewer blocks for a group than num_needed.

    budget, is_alone, outlook: what these depend on: how many tokens it may compute, whether nothing
    runs, and what is found of it.
    """

    first: S
    budget: int
    is_alone: bool
    outlook: tuple[int, ...]
    num_needed: int


class Admission(Generic[S]):
    """The waiting queue and the running batch, and the way from one to the other and back.

    blocked: why the first of the waiting queue was not admitted when that was last told.
    """

    def __init__(
        self,
        num_slots: int,
        settings: SchedulingSettings,
        ordering: Ordering[S],
        kv_cache: "KVCache[S] | None",
    ) -> None:
        self.settings, self.kv_cache = settings, kv_cache
        self.queue = WaitingQueue(ordering)
        self.batch: RunningBatch[S] = RunningBatch(
            num_slots, 0 if kv_cache is None else kv_cache.block_size
        )
        self.blocked: Blocked[S] | None = None
        self._ordering = ordering
        self._max_tokens = settings.max_batch_tokens or UNLIMITED
        self._max_chunk = settings.long_prefill_threshold or UNLIMITED
        self._is_prefill_first = settings.prefill_order == "prefill-first"
        self._is_static = settings.batching == "static"
        self._step, self._now = 0, 0.0
        self._refusal: _Refusal[S] | None = None

    # -- what a step computes of a group ---------------------------------------------------------

    def _share(self, sequence: S, budget: int, num_kept: int) -> int:
        """Return how many tokens of a sequence without others to compute, within `budget`.

        num_kept: how many are left for a later step, 0 or 1.
        """
        num_left = sequence.num_tokens - sequence.num_computed_tokens - num_kept
        if num_left > budget or num_left > self._max_chunk:
            return min(budget, self._max_chunk)
        return max(num_left, 0)

    def _split(self, first: S, budget: int, num_kept: int) -> dict[S, int]:
        """Return how many tokens of which row to compute, within `budget`.

        The rows of one group have to meet their last tokens in the same step.

        num_kept: how many of each are left for a later step, 0 or 1.
        """
        if not first.others:
            num_tokens = self._share(first, budget, num_kept)
            return {first: num_tokens} if num_tokens else {}
        rows = first.computed_group
        most = min(budget, max(self._max_chunk, len(rows)))
        if sum(row.num_tokens - row.num_computed_tokens for row in rows) > most:
            most, num_kept = min(budget, self._max_chunk), 1
        shares = {}
        for row in rows:
            num = min(row.num_tokens - row.num_computed_tokens - num_kept, most)
            if num > 0:
                shares[row] = num
                most -= num
        return shares

    # -- the waiting queue -----------------------------------------------------------------------

    def _admit_waiting(self, output: SchedulerOutput[S], budget: int, num_kept: int) -> int:
        """Fill free slots from the waiting queue, lowest slot first, as long as the head fits.

        Returns what is left of the budget.
        """
        batch, now = self.batch, self._now
        if self._is_static and batch.num_occupied:
            self._note_blocked(output, self._ordering.first(now), "batch")
            return budget
        num_free = batch.num_free
        while num_free and (first := self._ordering.first(now)) is not None:
            if first.num_slots > num_free:
                break
            if budget < first.num_slots:
                self._note_blocked(output, first, "tokens")
                break
            num_tokens = self._open(output, first, budget, num_kept)
            if num_tokens is None:
                break
            num_free -= first.num_slots
            budget -= num_tokens
        return budget

    def _open(self, output: SchedulerOutput[S], first: S, budget: int, num_kept: int) -> int | None:
        """Admit a group if there are blocks for it.

        Returns how many tokens of it the step computes; None if there is no room.
        """
        kv_cache = self.kv_cache
        if kv_cache is not None:
            num_given = self._take_blocks(output, kv_cache, first, budget, num_kept)
            if num_given is None:
                return None
        elif not first.others:
            num_given = self._share(first, budget, num_kept)
            if num_given:
                first.num_computed_tokens = output.num_scheduled_tokens[first] = num_given
        else:
            shares = self._split(first, budget, num_kept)
            for row, num_tokens in shares.items():
                row.num_computed_tokens = num_tokens
            output.num_scheduled_tokens.update(shares)
            num_given = sum(shares.values())
        self.queue.take(first)
        self.blocked = None
        self.batch.admit(first)
        output.admitted.append(first)
        if num_kept or not self._finish_prefill(output, first):
            self.batch.prefilling.append(first)
        return num_given

    def _finish_prefill(self, output: SchedulerOutput[S], first: S) -> bool:
        """Let a group decode from now on if all it knows is computed; return whether it is."""
        rows = (first,) if not first.others else first.computed_group
        for row in rows:
            if row.num_computed_tokens < row.num_tokens:
                return False
        self.batch.begin_decoding(first, rows)
        output.prefill_finished.append(first)
        return True

    # -- blocks ----------------------------------------------------------------------------------

    def _take_blocks(
        self,
        output: SchedulerOutput[S],
        kv_cache: "KVCache[S]",
        first: S,
        budget: int,
        num_kept: int,
    ) -> int | None:
        """Give a group that is to be admitted its blocks, if there is room.

        Returns how many tokens of it the step computes; None if there is no room.
        """
        refusal = self._refusal
        if refusal is not None and refusal.first is first:
            if self._would_refuse(kv_cache, refusal, budget):
                self._note_blocked(output, first, "kv", refusal.num_needed)
                return None
            self._refusal = None
        is_alone = self.batch.num_free == len(self.batch.slots)
        if first.others:
            room = self._room_for(kv_cache, first, budget, num_kept, is_alone=is_alone)
            num_needed = 0 if kv_cache.has_room(room.num_needed) else room.num_needed
        else:
            stop, most = first.num_tokens - num_kept, min(budget, self._max_chunk)
            num_needed = kv_cache.admit(first, stop, most, is_alone=is_alone)
        if num_needed:
            outlook = kv_cache.outlook(first)
            self._refusal = _Refusal(first, budget, is_alone, outlook, num_needed)
            self._note_blocked(output, first, "kv", num_needed)
            return None
        scheduled = output.num_scheduled_tokens
        if not first.others:
            num_given = first.num_computed_tokens - first.num_cached_tokens
            if num_given:
                scheduled[first] = num_given
            return num_given
        rows = first.computed_group
        for row, match in zip(rows, room.matches, strict=True):
            kv_cache.attach(row, match)
        for row, match, stop in zip(rows, room.matches, room.stops, strict=True):
            kv_cache.fill(row, match, stop)
        kv_cache.promise(first)
        for row, num in room.num_tokens.items():
            start = row.num_computed_tokens
            row.num_computed_tokens = start + num
            kv_cache.compute(row, start, start + num)
        scheduled.update(room.num_tokens)
        return sum(room.num_tokens.values())

    def _room_for(
        self, kv_cache: "KVCache[S]", first: S, budget: int, num_kept: int, *, is_alone: bool
    ) -> _Room[S]:
        """Return what it takes to admit a group of several sequences within `budget`."""
        rows = first.computed_group
        matches = self._matches_of(first)
        for row, match in zip(rows, matches, strict=True):
            row.num_computed_tokens = match.num_tokens
        num_tokens = self._split(first, budget, num_kept)
        stops = [row.num_computed_tokens + num_tokens.get(row, 0) for row in rows]
        if not num_tokens:  # their last tokens may be computed in this very step
            stops = [row.num_tokens for row in rows]
        if self.settings.capacity == "no-evict":
            stops = [row.most_tokens for row in rows]
        num_needed = self._num_needed(kv_cache, first, matches, stops, is_alone=is_alone)
        num_needed += kv_cache.num_blocks_to_promise(first)
        return _Room(matches, stops, num_tokens, num_needed)

    def _matches_of(self, first: S) -> list[PrefixMatch]:
        """Return what is found in blocks of each row of a group."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return []
        matches = [kv_cache.match(row) for row in first.computed_group]
        for place in range(1, len(matches)):  # what the first one takes may be what it would copy
            matches[place] = matches[place].without_source(kv_cache.block_size)
        return matches

    def _num_needed(
        self,
        kv_cache: "KVCache[S]",
        first: S,
        matches: list[PrefixMatch],
        stops: list[int],
        *,
        is_alone: bool,
    ) -> int:
        """Return how many blocks have to be free for rows that are to hold `stops` tokens.

        is_alone: whether nobody else runs.
        """
        is_watermark = self.settings.capacity == "watermark"
        counted = [row.num_tokens for row in first.computed_group] if is_watermark else stops
        num_needed = sum(map(kv_cache.num_blocks_to_take, matches, counted))
        found = [block for match in matches for block in match.found]
        num_needed -= kv_cache.pool.num_idle(found) - kv_cache.pool.num_idle({*found})  # each once
        if is_watermark and not is_alone:  # else nothing would ever make room
            num_needed += kv_cache.num_spare
        return num_needed

    def _grow(self, output: SchedulerOutput[S], kv_cache: "KVCache[S]") -> None:
        """Give a block to every decoding row whose next token begins one, by admission."""
        batch = self.batch
        step = batch.decode_step
        rows = batch.rows_at_boundary()
        num_sure, num_groups = len(rows), kv_cache.num_groups
        if kv_cache.has_windows:
            for row in rows:
                kv_cache.slide(row, step + row.offset)
        if not kv_cache.has_room(num_sure * num_groups):
            rows.sort(key=lambda row: (row.admission, row.slot))
            num_sure = kv_cache.pool.num_free // num_groups
        if rows and not batch.has_groups:  # without beams each needs one block at most
            output.grown, rows = rows[:num_sure], rows[num_sure:]
            kv_cache.grow_all(output.grown)
        for row in rows:
            stop = step + row.offset + 1
            if row.is_decoding and self._make_room(output, row, stop):  # else it had to go
                kv_cache.extend(row, stop)
                output.grown.append(row)
        for row in batch.take_forked():
            position = step + row.offset
            if not row.is_decoding or position % kv_cache.block_size == 0:
                continue
            if self._make_room(output, row, position + 1):
                kv_cache.copy_shared_end(row)
                output.grown.append(row)

    def _make_room(self, output: SchedulerOutput[S], row: S, num_tokens: int) -> bool:
        """Preempt until there is room for `num_tokens` of `row`; False if it had to go itself."""
        kv_cache, first_of = self.kv_cache, self.batch.first_of
        if kv_cache is None:
            raise InvariantError("there are no blocks")
        first = first_of(row)
        while not kv_cache.has_room(kv_cache.num_blocks_to_grow(row, num_tokens)):
            busy = {*output.prefill_finished, *map(first_of, output.num_scheduled_tokens)}
            idle = [other for other in output.admitted if other not in busy]
            if idle and not output.preempted:  # nobody is admitted where others give way
                late = idle[-1]
                self._preempt(output, late, first, "kv")
                known = [row.num_tokens for row in late.computed_group]
                num_needed = self._num_needed(
                    kv_cache, late, self._matches_of(late), known, is_alone=False
                )
                self._note_blocked(output, late, "kv", num_needed)
                continue
            busy.update(idle)
            victims = self.batch.firsts
            if busy:
                victims = [other for other in victims if other is first or other not in busy]
            victim = self._ordering.last(victims, self._now)
            self._preempt(output, victim, first, "kv")
            if victim is first:
                return False
        return True

    def _preempt(
        self, output: SchedulerOutput[S], first: S, beneficiary: S, reason: PreemptReason
    ) -> None:
        """Take slots and blocks from a group, and let it wait again."""
        kv_cache, rows, batch = self.kv_cache, first.computed_group, self.batch
        for row in rows:
            num_planned = output.num_scheduled_tokens.pop(row, None)
            if num_planned is not None:  # which is not computed after all
                row.num_computed_tokens -= num_planned
                if kv_cache is not None:
                    kv_cache.forget(row)
        for row in rows:
            if row.is_decoding:
                batch.stop_decoding(row)
            if kv_cache is not None:
                kv_cache.close(row, row.num_computed_tokens)
        num_computed_tokens = {row: row.num_computed_tokens for row in first.group}
        for row in rows:
            row.num_computed_tokens = 0
        output.grown = [row for row in output.grown if row not in rows]
        batch.vacate(first, self._step - 1, PREEMPT)
        if first in output.admitted:  # in this very step, and nobody has been told
            output.admitted.remove(first)
            for row in num_computed_tokens:
                row.slot = NO_SLOT
        else:
            output.preempted.append(Preemption(first, beneficiary, reason, num_computed_tokens))
        self.queue.push(first)

    # -- why nobody is admitted ------------------------------------------------------------------

    def _note_blocked(
        self,
        output: SchedulerOutput[S],
        first: S | None,
        reason: BlockedReason,
        num_blocks: int = 0,
    ) -> None:
        """Tell why a group is not admitted, unless that has been told."""
        if first is None or not self.batch.num_free:
            return
        blocked = self.blocked
        if blocked is None or blocked.first is not first or blocked.reason != reason:
            output.blocked = self.blocked = Blocked(first, reason, num_blocks)

    @property
    def is_refusal_final(self) -> bool:
        """Whether who was refused stays out whatever is evicted: it would not find less then."""
        refusal = self._refusal
        return refusal is not None and refusal.outlook[1:] == (0,)

    def refuses_until(self, now: float) -> float:
        """Return until when the first of the queue stays out for want of blocks; `now`: unknown.

        It does if nothing comes, ends or can be found that could not before.
        """
        kv_cache, refusal, blocked = self.kv_cache, self._refusal, self.blocked
        if kv_cache is None or refusal is None or self._is_prefill_first:
            return now
        if blocked is None or blocked.reason != "kv":  # that has to be told
            return now
        if not self._would_refuse(kv_cache, refusal, self._max_tokens - self.batch.num_decoding):
            return now
        until = self._ordering.steady_until(now)
        return until if until > now and self._ordering.first(now) is refusal.first else now

    def _would_refuse(self, kv_cache: "KVCache[S]", refusal: _Refusal[S], budget: int) -> bool:
        """Whether who was refused would be again: it needs as many blocks, which are not free."""
        return (
            not kv_cache.has_room(refusal.num_needed)
            and (budget == refusal.budget or self.settings.capacity != "on-demand")
            and refusal.is_alone == (self.batch.num_free == len(self.batch.slots))
            and kv_cache.outlook(refusal.first) == refusal.outlook
        )
