"""Decides what each step does: admissions, preemptions, and the tokens to compute.

There are no phases.  A sequence has known tokens and computed tokens; when all known tokens are
computed, the step gives it another token.  Prompts, chunks of prompts, recomputation after a
preemption and prefix-cache hits all follow from this one rule.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from msgspec import Struct

from batcher.errors import BatchdecodeError, Failure, InvariantError
from batcher.events import BlockedReason, PreemptReason
from batcher.fields import check_types
from batcher.lifecycle import PREEMPT, Move, State
from batcher.scheduling.blocks import NO_BLOCK, PrefixMatch
from batcher.scheduling.clock import BatchStats, one_second
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.queue import (
    LONGEST_PREFIX_MATCH,
    Estimate,
    Urgency,
    WaitingQueue,
    make_queue,
    policy_of,
)
from batcher.scheduling.sequence import NEVER, NO_SLOT, S
from batcher.settings import (
    DEFAULT_SCHEDULING,
    ONE_GROUP,
    SETTINGS,
    CacheWindows,
    SchedulingSettings,
)

if TYPE_CHECKING:
    from batcher.scheduling.kv_cache import Contents, KVCache

# The plan of a step: admissions, preemptions, and the tokens to compute.

NO_DRAFTS: Mapping[Any, int] = MappingProxyType({})


class Preemption(NamedTuple, Generic[S]):
    """A group that loses its slots and blocks, with the reason and the beneficiary.

    num_computed_tokens: by sequence, which still names the slot it had.  All are lost except those
    that the prefix cache has when the group is admitted again.
    """

    first: S
    beneficiary: S
    reason: PreemptReason
    num_computed_tokens: dict[S, int]

    def forget_slots(self) -> None:
        """Clear the slots of the sequences, after their events were written."""
        for row in self.num_computed_tokens:
            row.slot = NO_SLOT


class Blocked(Struct, Generic[S], frozen=True):
    """The reason why the head of the waiting queue was not admitted to a free slot."""

    first: S
    reason: BlockedReason
    num_blocks: int


class SchedulerOutput(Struct, Generic[S], eq=False):
    """What a step does in addition to giving every decoding row its next token.

    Sequence groups are named by their first sequences.

    preempted: preemptions, which come first.  admitted: groups with new slots, in order.
    num_scheduled_tokens: tokens to compute of rows that prefill, in order; `num_computed_tokens`
    already includes them.
    has_continued: whether some of these rows may have been admitted earlier.
    prefill_finished: groups that receive a token in this step and did not in the one before.
    is_decode_step: whether decoding rows, and those whose prefill is finished, receive a token.
    grown: decoding rows with a new block, or a copy of the last block, which was shared.
    num_drafts: drafts by row that there is capacity for.
    blocked: a new reason why no other sequence was admitted.
    budget: the tokens the step may still compute.
    num_held_back: known tokens of each row left for a later step: 1 in a step that only computes
    prompts.
    """

    preempted: list[Preemption[S]] = []
    admitted: list[S] = []
    num_scheduled_tokens: dict[S, int] = {}
    prefill_finished: list[S] = []
    grown: list[S] = []
    num_drafts: Mapping[S, int] = NO_DRAFTS
    is_decode_step: bool = True
    blocked: Blocked[S] | None = None
    budget: int = 0
    num_held_back: int = 0
    has_continued: bool = False


# The scheduler: sequences are admitted in queue order while they fit.
#
# Rule: only an urgent group (`_admit_urgent`) overtakes the head of the queue.  A lack of tokens or
# blocks is reported as an event; a lack of slots is not.

UNLIMITED = 2**62
"""Tokens in a step: more than there are."""


NO_CHANGES: SchedulerOutput[Any] = SchedulerOutput()  # the plan of most steps; never changed


class Scheduler(Generic[S]):
    """Keeps what runs and what waits, and plans each step: `schedule` before it, `update` after it.

    token_contents: the prefix-cache contents of a sequence's tokens; None if blocks are only
    counted.
    estimate: returns the expected duration of a step.
    windows: of each cache group, see KVCache.  block_bytes: the size of a block, if known.
    is_paged: use blocks even if the settings do not need them.
    recomputes_drafts: whether accepted drafts must be computed again.
    kv_cache: replaces the cache that the settings describe.
    blocked: the last reported reason why the head of the queue was not admitted.

    Raises:
        BatchdecodeError: the settings contradict each other or the model.
    """

    def __init__(
        self,
        num_slots: int,
        settings: SchedulingSettings,
        token_contents: "Contents[S] | None",
        estimate: Estimate = one_second,
        windows: CacheWindows = ONE_GROUP,
        block_bytes: int | None = None,
        *,
        is_paged: bool = False,
        recomputes_drafts: bool = False,
        kv_cache: "KVCache[S] | None" = None,
    ) -> None:
        check_settings(num_slots, settings)
        if kv_cache is None and (settings.is_paged or is_paged):
            from batcher.scheduling.kv_cache import KVCache  # noqa: PLC0415 - only with blocks

            kv_cache = KVCache(settings, token_contents, windows, block_bytes)
        self.settings, self.kv_cache = settings, kv_cache
        self._recomputes_drafts = recomputes_drafts
        self._num_uncomputed: dict[S, int] = {}  # accepted drafts of this step
        self._max_tokens = settings.max_batch_tokens or UNLIMITED
        self._max_chunk = settings.long_prefill_threshold or UNLIMITED
        self.queue: WaitingQueue[S] = make_queue(
            settings, lambda row: 0 if kv_cache is None else kv_cache.num_found(row)
        )
        self._urgency: Urgency[S] | None = None
        if settings.preempt_for is not None:
            max_chunk = min(self._max_tokens, self._max_chunk)
            self._urgency = Urgency(self.queue, settings.preempt_for, max_chunk, estimate)
            self.queue.urgency = self._urgency
        self.batch: RunningBatch[S] = RunningBatch(
            num_slots, 0 if kv_cache is None else kv_cache.block_size
        )
        self.blocked: Blocked[S] | None = None
        self._is_prefill_first = settings.prefill_order == "prefill-first"
        self._is_static = settings.batching == "static"
        self._step, self._now = 0, 0.0

    # -- before a step -----------------------------------------------------------------------------

    def schedule(
        self, step: int, now: float, num_wanted: Mapping[S, int] = NO_DRAFTS
    ) -> SchedulerOutput[S]:
        """Plan `step`, which starts at `now`, and update slots and blocks for it.

        num_wanted: the number of drafts that each decoding row wants.
        """
        kv_cache, batch = self.kv_cache, self.batch
        can_admit = self.queue.num_slots and (batch.num_free or self._urgency is not None)
        if not (can_admit or batch.prefilling or num_wanted) and (
            kv_cache is None or not batch.may_need_blocks
        ):
            return NO_CHANGES
        self._step, self._now = step, now
        output: SchedulerOutput[S] = SchedulerOutput(budget=self._max_tokens)
        if self._is_prefill_first:
            output.num_held_back = 1
            self._schedule_prompts(output)
            if output.num_scheduled_tokens:
                output.is_decode_step = False
                return output
            output.num_held_back = 0
        if kv_cache is not None:
            self._grow(output, kv_cache)
        output.budget = self._max_tokens - batch.num_decoding
        self._schedule_prompts(output)
        if output.prefill_finished and batch.prefilling:
            batch.prefilling = [first for first in batch.prefilling if not first.is_decoding]
        if num_wanted:
            self._schedule_drafts(output, num_wanted)
        return output

    def _schedule_prompts(self, output: SchedulerOutput[S]) -> None:
        """Spend the budget on known tokens: first of running groups, then of waiting ones.

        In decode steps, prefill-first makes a second pass, which only computes what the first one
        held
        back: the last token of each prompt.
        """
        is_second = self._is_prefill_first and not output.num_held_back
        if self._urgency is not None and not (is_second or output.preempted):
            self._admit_urgent(output, self._urgency)
        if self.batch.prefilling:
            # Urgent groups were admitted above; prefilling ones may be preempted meanwhile.
            just_admitted = {*map(self.batch.first_of, output.num_scheduled_tokens)}
            for first in self.batch.prefilling.copy():
                if output.budget <= 0:
                    break
                if first.state is State.RUNNING and first not in just_admitted:
                    self._continue(output, first)
        if output.preempted:
            self._note_blocked(output, self.queue.head(self._now), "preemption")
        elif self.queue.num_slots and not is_second:
            self._admit_waiting(output)

    def _admit_waiting(self, output: SchedulerOutput[S]) -> None:
        """Fill free slots from the waiting queue, lowest slot first, while the head fits."""
        batch, now = self.batch, self._now
        if self._is_static and batch.num_occupied:
            self._note_blocked(output, self.queue.head(now), "batch")
            return
        while batch.num_free and (first := self.queue.head(now)) is not None:
            if first.num_slots > batch.num_free:
                break
            if output.budget < first.num_slots:
                self._note_blocked(output, first, "tokens")
                break
            if not self._admit(output, first):
                break

    def _admit(self, output: SchedulerOutput[S], first: S) -> bool:
        """Give a group slots and blocks, and schedule its tokens within the budget.

        Returns False, and changes nothing, if blocks are lacking.
        """
        batch, scheduled, kv_cache = self.batch, output.num_scheduled_tokens, self.kv_cache
        if kv_cache is not None:
            if not self._take_blocks(output, kv_cache, first):
                return False
        elif first.others:
            for row, num_tokens in self._split(first, output).items():
                row.num_computed_tokens = scheduled[row] = num_tokens
                output.budget -= num_tokens
        else:  # the same as _split, without a dict for one row
            num_tokens = first.num_tokens - output.num_held_back
            if num_tokens > output.budget or num_tokens > self._max_chunk:
                num_tokens = min(output.budget, self._max_chunk)
            if num_tokens > 0:
                first.num_computed_tokens = scheduled[first] = num_tokens
                output.budget -= num_tokens
        self.queue.take(first)
        self.blocked = None
        batch.admit(first)
        output.admitted.append(first)
        if first.admitted_step is None:
            first.admitted_step = self._step
            for other in first.others:
                other.admitted_step = self._step
        if output.num_held_back or not self._finish_prefill(output, first):
            batch.prefilling.append(first)
        return True

    def _continue(self, output: SchedulerOutput[S], first: S) -> None:
        """Schedule more known tokens of a running group."""
        output.has_continued = True
        scheduled = output.num_scheduled_tokens
        for row, num_tokens in self._split(first, output).items():
            start, stop = row.num_computed_tokens, row.num_computed_tokens + num_tokens
            if self.kv_cache is not None:
                if self.kv_cache.has_windows:
                    self.kv_cache.slide(row, start - scheduled.get(row, 0))
                if not self._make_room(output, row, stop):
                    return
                self.kv_cache.extend(row, stop)
                self.kv_cache.register_planned(row, start, stop)
            row.num_computed_tokens = stop
            scheduled[row] = scheduled.get(row, 0) + num_tokens
            output.budget -= num_tokens
        if not output.num_held_back:
            self._finish_prefill(output, first)

    def _split(self, first: S, output: SchedulerOutput[S]) -> dict[S, int]:
        """Return the number of tokens to compute by row, within the budget.

        The rows of a group must reach their last tokens in the same step.
        """
        budget, num_held_back = output.budget, output.num_held_back
        if not first.others:
            num_left = first.num_tokens - first.num_computed_tokens - num_held_back
            num_tokens = min(num_left, budget, self._max_chunk)
            return {first: num_tokens} if num_tokens > 0 else {}
        rows = first.computed_group
        most = min(budget, max(self._max_chunk, len(rows)))
        if sum(row.num_tokens - row.num_computed_tokens for row in rows) > most:
            # the budget cannot finish all, so each row holds back its last token
            most, num_held_back = min(budget, self._max_chunk), 1
        shares = {}
        for row in rows:
            num = min(row.num_tokens - row.num_computed_tokens - num_held_back, most)
            if num > 0:
                shares[row] = num
                most -= num
        return shares

    def _finish_prefill(self, output: SchedulerOutput[S], first: S) -> bool:
        """Start to decode a group if all its known tokens are computed; return whether they are."""
        batch, rows = self.batch, first.computed_group if first.others else (first,)
        for row in rows:
            if row.num_computed_tokens < row.num_tokens:
                return False
        for row in rows:
            batch.begin_decoding(row)
        if first.last_decode_step == NEVER:
            num_generated = first.num_tokens - first.num_prompt_tokens
            batch.end_after(first, first.max_tokens - num_generated)
        output.prefill_finished.append(first)
        if first.first_token_step is None:
            first.first_token_step = self._step
            for other in first.others:
                other.first_token_step = self._step
        return True

    # -- after it ----------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput[S]) -> Collection[int]:
        """Record the step as computed; return the slots of rows that end with it."""
        if output is NO_CHANGES:
            return self.batch.end_decode_step()
        kv_cache = self.kv_cache
        if kv_cache is not None:
            for first in output.prefill_finished:
                if first.has_siblings:
                    kv_cache.note_sibling(first)
            kv_cache.end_step()
        return self.batch.end_decode_step() if output.is_decode_step else ()

    def release(self, first: S, last_step: int, move: Move, *, has_failed: bool = False) -> None:
        """Remove a finished group from its slots.

        By then `num_tokens` includes one token from each decode step.

        has_failed: whether the group's part of the last step is invalid.
        """
        self.batch.release(first, last_step, move)
        kv_cache = self.kv_cache
        if kv_cache is None and not self._num_uncomputed:
            return
        for row in first.group:
            row.num_computed_tokens -= self._num_uncomputed.pop(row, 0)
            if kv_cache is not None:
                if has_failed:
                    kv_cache.forget(row)
                    row.num_computed_tokens = 0
                kv_cache.close(row, row.num_computed_tokens)

    def finish_waiting(self, first: S, move: Move) -> None:
        for sequence in first.group:
            sequence.state = move[sequence.state]

    # -- blocks, and who gives way for them --------------------------------------------------------

    def _take_blocks(self, output: SchedulerOutput[S], kv_cache: "KVCache[S]", first: S) -> bool:
        """Give a group to be admitted its blocks, and schedule its tokens within the budget.

        Returns whether there were enough blocks.
        """
        matches, num_needed = self._blocks_for(kv_cache, first, output)
        if num_needed > kv_cache.pool.num_free and not kv_cache.has_room(num_needed):
            kv_cache.remember(matches)
            self._note_blocked(output, first, "kv", num_needed)
            return False
        kv_cache.admit(matches)
        for row, match in matches.items():
            num_planned = match.num_planned
            row.num_computed_tokens = match.num_tokens + num_planned
            if num_planned:
                output.num_scheduled_tokens[row] = num_planned
                output.budget -= num_planned
        return True

    def _blocks_for(
        self, kv_cache: "KVCache[S]", first: S, output: SchedulerOutput[S]
    ) -> tuple[dict[S, PrefixMatch], int]:
        """Return by row of a group: its match, the tokens to compute, and the tokens to hold.

        Also the number of free blocks required to admit the group.  Until it is admitted,
        `num_computed_tokens` of its rows is only the length of the match.
        """
        if not first.others:
            match = kv_cache.match(first)
            num_left = first.num_tokens - match.num_tokens - output.num_held_back
            num_planned = min(num_left, output.budget, self._max_chunk)
            if num_planned > 0:
                match.num_planned, match.stop = num_planned, match.num_tokens + num_planned
            matches = {first: match}
        else:
            matches = kv_cache.matches_of(first)
            for row, match in matches.items():
                row.num_computed_tokens = match.num_tokens
            shares = self._split(first, output)
            for row, match in matches.items():
                match.num_planned = shares.get(row, 0)
                if shares:  # else this step may compute the last tokens
                    match.stop = match.num_tokens + match.num_planned
        if self.settings.capacity == "no-evict":
            for row, match in matches.items():
                match.stop = row.most_tokens
        return matches, kv_cache.num_needed(matches, is_alone=self._is_alone)

    def _grow(self, output: SchedulerOutput[S], kv_cache: "KVCache[S]") -> None:
        """Give a block to every decoding row that begins one in this step, by admission."""
        batch, step = self.batch, self.batch.decode_step
        rows = batch.rows_at_boundary()
        num_sure, num_groups = len(rows), kv_cache.num_groups
        if kv_cache.has_windows:
            for row in rows:
                kv_cache.slide(row, step + row.offset)
        if not kv_cache.has_room(num_sure * num_groups):
            rows.sort(key=lambda row: (row.admission, row.slot))
            num_sure = kv_cache.pool.num_free // num_groups
        if rows and not batch.has_groups:  # without beams, at most one block each
            output.grown, rows = rows[:num_sure], rows[num_sure:]
            kv_cache.grow_all(output.grown)
        for row in rows:
            stop = step + row.offset + 1
            if row.is_decoding and self._make_room(output, row, stop):  # else it was preempted
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
        """Preempt until `num_tokens` of `row` have blocks; False if `row` was preempted."""
        kv_cache, first_of = self.kv_cache, self.batch.first_of
        if kv_cache is None:
            raise InvariantError("there are no blocks")
        first = first_of(row)
        while not kv_cache.has_room(kv_cache.num_blocks_to_grow(row, num_tokens)):
            busy = {*output.prefill_finished, *map(first_of, output.num_scheduled_tokens)}
            unused = [other for other in output.admitted if other not in busy]
            if unused and not output.preempted:
                # A preemption pauses admissions; a sequence that computes nothing loses nothing.
                late = unused[-1]
                self._preempt(output, late, first, "kv")
                num_needed = kv_cache.num_needed(kv_cache.matches_of(late), is_alone=False)
                self._note_blocked(output, late, "kv", num_needed)
                continue
            busy.update(unused)
            victims = self.batch.firsts
            if busy:
                victims = [other for other in victims if other is first or other not in busy]
            if self._urgency is None:
                victim = self.queue.last(victims, self._now)
            else:
                victim = self._urgency.last(victims)
            self._preempt(output, victim, first, "kv")
            if victim is first:
                return False
        return True

    def _preempt(
        self, output: SchedulerOutput[S], first: S, beneficiary: S, reason: PreemptReason
    ) -> None:
        kv_cache, rows, batch = self.kv_cache, first.computed_group, self.batch
        # A victim decodes or has a plan to undo, never both.
        for row in rows:
            num_planned = output.num_scheduled_tokens.pop(row, None)
            if num_planned is not None:  # the plan is undone
                row.num_computed_tokens -= num_planned
                if kv_cache is not None:
                    kv_cache.forget(row)
        batch.release(first, self._step - 1, PREEMPT)
        if kv_cache is not None:
            for row in rows:
                kv_cache.close(row, row.num_computed_tokens)
        num_computed_tokens = {row: row.num_computed_tokens for row in first.group}
        for row in rows:
            row.num_computed_tokens = 0
        output.grown = [row for row in output.grown if row not in rows]
        if first in output.admitted:  # admitted in this step, without an event yet
            output.admitted.remove(first)
            for row in num_computed_tokens:
                row.slot = NO_SLOT
                if row.admitted_step == self._step:
                    row.admitted_step = None
        else:
            output.preempted.append(Preemption(first, beneficiary, reason, num_computed_tokens))
        self.queue.push(first)

    def sharing(self, row: S, num_tokens: int) -> list[S]:
        """Return the other rows that hold the blocks of a row's last `num_tokens`."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return []
        start = (row.num_computed_tokens - num_tokens) // kv_cache.block_size
        blocks = {*row.block_table[start : kv_cache.num_blocks(row.num_computed_tokens)]}
        return [
            holder
            for holder in self.batch.holders
            if holder is not row and blocks & {*holder.block_table}
        ]

    def why_never(self, first: S) -> Failure | None:
        """Return a Failure if all blocks together cannot hold a group, else None."""
        kv_cache = self.kv_cache
        if kv_cache is None or kv_cache.max_blocks is None:
            return None
        if first.num_prompt_tokens + first.max_tokens <= kv_cache.sure_tokens and not first.others:
            return None
        num_needed = _most_blocks(kv_cache, first, first.max_tokens)
        if num_needed <= kv_cache.max_blocks:
            return None
        tokens = f"{first.num_prompt_tokens} prompt + {first.max_tokens} output tokens"
        return Failure(
            "kv-too-small",
            f"it needs up to {num_needed} KV blocks ({tokens}, {kv_cache.block_size} per block); "
            f"--kv-blocks is {kv_cache.max_blocks}",
        )

    def room_for_output(self, first: S) -> int:
        """Return the max_tokens that all blocks together can hold for a group."""
        kv_cache = self.kv_cache
        if kv_cache is None or kv_cache.max_blocks is None:
            return first.max_tokens
        sizes = range(1, first.max_tokens + 1)
        return bisect_right(
            sizes, kv_cache.max_blocks, key=lambda num: _most_blocks(kv_cache, first, num)
        )

    def check(self) -> None:
        """Check that no block is lost, shared wrongly, or held by a sequence that does not run."""
        if self.kv_cache is not None:
            self.kv_cache.check(self.batch.holders)

    # -- why nobody is admitted --------------------------------------------------------------------

    def _note_blocked(
        self,
        output: SchedulerOutput[S],
        first: S | None,
        reason: BlockedReason,
        num_blocks: int = 0,
    ) -> None:
        """Report why a group is not admitted, unless that was the last reported reason."""
        if first is None or not self.batch.num_free:
            return
        blocked = self.blocked
        if blocked is None or blocked.first is not first or blocked.reason != reason:
            output.blocked = self.blocked = Blocked(first, reason, num_blocks)

    @property
    def _is_alone(self) -> bool:
        return self.batch.num_free == len(self.batch.slots)

    def refuses_until(self, now: float) -> float:
        """Return the time until which the head stays refused for lack of blocks; `now`: unknown.

        It does if nothing arrives, ends or becomes cached.
        """
        kv_cache, blocked = self.kv_cache, self.blocked
        if kv_cache is None or self._is_prefill_first:
            return now
        if blocked is None or blocked.reason != "kv":  # it must be reported
            return now
        until = self.queue.steady_until(now)
        if until <= now or self.queue.head(now) is not blocked.first:
            return now
        output: SchedulerOutput[S] = SchedulerOutput(
            budget=self._max_tokens - self.batch.num_decoding
        )
        _, num_needed = self._blocks_for(kv_cache, blocked.first, output)
        return now if kv_cache.has_room(num_needed) else until

    @property
    def is_refusal_final(self) -> bool:
        """Whether the head stays refused whatever is evicted: its match cannot shrink."""
        if self.kv_cache is None or self.blocked is None:
            return False
        match = self.kv_cache.match(self.blocked.first)
        return match.source == NO_BLOCK and not self.kv_cache.pool.num_idle(match.found)

    # -- who may not wait --------------------------------------------------------------------------

    def has_urgent(self, now: float) -> bool:
        """Whether a waiting sequence may be admitted ahead of the queue, now or later."""
        urgency = self._urgency
        return urgency is not None and bool(urgency.ahead(self.batch.firsts, now))

    def _admit_urgent(self, output: SchedulerOutput[S], urgency: Urgency[S]) -> None:
        """Admit sequences that cannot wait ahead of the queue, with preemptions where necessary.

        Preempted decoding rows return their tokens to the budget.  They come back in a later step,
        even if slots are free, since they must leave their slots first.  Until then only a more
        urgent sequence may overtake them.  A sequence that does not fit even if all less urgent
        ones are preempted is skipped, without preempting any.  No equally urgent sequence is
        admitted before it.
        """
        passed_over = -inf
        for first in urgency.ahead(self.batch.firsts, self._now):
            degree = urgency.degree(first)
            if any(urgency.degree(lost.first) <= degree for lost in output.preempted):
                break
            if degree == passed_over or not urgency.is_due(first, self._now, self.batch):
                continue
            victims = self._victims_of(first, urgency)
            if victims is None:
                passed_over = degree
                continue
            rows = [row for victim in victims for row in victim.computed_group]
            freed = 0 if output.num_held_back else sum(row.is_decoding for row in rows)
            if output.budget + freed < first.num_slots:
                break
            output.budget += freed
            for victim in victims:
                self._preempt(output, victim, first, urgency.measure)
            if not self._admit(output, first):
                raise InvariantError(f"{first.id!r} has no room, and others gave way to it")

    def _victims_of(self, first: S, urgency: Urgency[S]) -> list[S] | None:
        """Return the fewest victims that make room for `first`, or None if all are not enough."""
        less_urgent, kv_cache = urgency.less_urgent(first, self.batch.firsts), self.kv_cache
        num_free = self.batch.num_free
        if num_free + sum(victim.num_slots for victim in less_urgent) < first.num_slots:
            return None
        matches = {} if kv_cache is None else kv_cache.matches_of(first)
        kept = {block for match in matches.values() for block in match.found}
        for count in range(len(less_urgent) + 1):
            gone = less_urgent[:count]
            if num_free >= first.num_slots:
                if kv_cache is None:
                    return gone
                is_alone = self.batch.num_occupied == sum(victim.num_slots for victim in gone)
                num_needed = kv_cache.num_needed(matches, is_alone=is_alone)
                rows = [row for victim in gone for row in victim.computed_group]
                num_given = kv_cache.pool.num_only_in(map(kv_cache.held_blocks, rows), kept)
                if kv_cache.has_room(num_needed - num_given):
                    return gone
            if count < len(less_urgent):
                num_free += less_urgent[count].num_slots
        return None

    # -- several tokens at once: drafts, jumps and beams -------------------------------------------

    def _schedule_drafts(self, output: SchedulerOutput[S], num_wanted: Mapping[S, int]) -> None:
        """Spend the remaining budget and free blocks on drafts."""
        kv_cache, num_drafts = self.kv_cache, dict[S, int]()
        num_computed_tokens = self.batch.decode_step + 1  # plus the offset of each
        scheduled, has_changed = output.num_scheduled_tokens, bool(output.preempted)
        for row, wanted in num_wanted.items():
            if has_changed and (not row.is_decoding or row in scheduled):  # or is back
                continue
            num = min(wanted, output.budget)
            if kv_cache is not None and num > 0:
                num = kv_cache.extend_for_drafts(row, num_computed_tokens + row.offset, num)
            if num > 0:
                num_drafts[row] = num
                output.budget -= num
        output.num_drafts = num_drafts

    def settle_drafts(
        self, output: SchedulerOutput[S], num_accepted: Mapping[int, int]
    ) -> dict[S, int]:
        """Keep the accepted drafts, given by slot, and free the blocks of rejected ones.

        Returns the number of freed blocks by row.
        """
        batch, rows = self.batch, output.num_drafts
        accepted = {row: num for row in rows if (num := num_accepted.get(row.slot))}
        batch.advance(accepted)
        again = self._num_uncomputed = accepted if self._recomputes_drafts else {}
        if self.kv_cache is None:
            return {}
        num_computed_tokens = batch.decode_step + 1
        return self.kv_cache.truncate(
            {row: num_computed_tokens + row.offset - again.get(row, 0) for row in rows}
        )

    def recompute_drafts(self) -> list[S]:
        """Schedule the accepted drafts of the last step again; return their rows."""
        uncomputed, self._num_uncomputed = self._num_uncomputed, {}
        for row, num in uncomputed.items():
            if row.is_decoding:
                self.batch.stop_decoding(row)
                self.batch.go_back_to_prefill(row)
            row.num_computed_tokens -= num
        if uncomputed:
            self.batch.prefilling.sort(key=lambda other: other.admission)
        return [*uncomputed]

    def lengthen_admitted(self, output: SchedulerOutput[S], first: S, num_more: int) -> None:
        """Add `num_more` forced tokens to the prompt of a group that this step admits.

        They are computed in the same step as far as the budget allows.
        """
        batch = self.batch
        for row in first.computed_group:
            num_known = row.num_tokens
            if row.is_decoding:
                batch.stop_decoding(row)
                row.num_computed_tokens = num_known
            row.num_tokens = num_known + num_more
        if first in output.prefill_finished:
            output.prefill_finished.remove(first)
            batch.go_back_to_prefill(first)
            for row in first.group:
                row.first_token_step = None
        shares, kv_cache = self._split(first, output), self.kv_cache
        if kv_cache is None or kv_cache.has_room(  # without preemption
            sum(
                kv_cache.num_blocks_to_grow(row, row.num_computed_tokens + more)
                for row, more in shares.items()
            )
        ):
            self._continue(output, first)
            batch.prefilling = [other for other in batch.prefilling if not other.is_decoding]

    def lengthen(self, num_more: dict[S, int]) -> None:
        """Return decoding groups that received several tokens at once to prefill."""
        for first, num in num_more.items():
            for row in first.computed_group:
                self.batch.stop_decoding(row)
                row.num_tokens += num
            self.batch.go_back_to_prefill(first)
        self.batch.prefilling.sort(key=lambda other: other.admission)

    def fork(self, parent: S, child: S) -> None:
        """Start a beam from the state of another beam, between two steps."""
        self.batch.fork(parent, child)
        if self.kv_cache is not None:
            self.kv_cache.fork(parent, child, self.batch.decode_step + parent.offset)

    # -- what a step computes, in numbers ----------------------------------------------------------

    def batch_stats(self, output: SchedulerOutput[S]) -> BatchStats:
        """Return what the step computes, before it ends, as the input for its duration."""
        batch, scheduled = self.batch, output.num_scheduled_tokens
        num_decodes, num_rows = self.count_rows(output)
        num_read = batch.num_read if output.is_decode_step else 0
        if not (scheduled or output.prefill_finished or output.num_drafts):
            return BatchStats(num_decodes, num_rows, num_read, 0)
        for first in output.prefill_finished:  # these compute chunks
            for row in (first,) if not first.others else first.computed_group:
                num_read -= row.offset + batch.decode_step
        num_prefill = work = 0
        for row, num_tokens in scheduled.items():
            num_prefill += num_tokens
            work += num_tokens * (2 * row.num_computed_tokens - num_tokens)
        for row, num_tokens in output.num_drafts.items():
            num_prefill += num_tokens
            stop = batch.decode_step + row.offset + 1 + num_tokens
            work += num_tokens * (2 * stop - num_tokens)
        return BatchStats(num_decodes + num_prefill, num_rows, num_read, work)

    def count_rows(self, output: SchedulerOutput[S]) -> tuple[int, int]:
        """Return the numbers of rows that only decode, and of all computed rows."""
        num_decodes = num_empty = 0
        if output.is_decode_step:
            num_decodes = self.batch.num_decoding
            for first in output.prefill_finished:  # these compute chunks
                num_decodes -= len(first.computed_group) if first.others else 1
                if not first.num_tokens:  # an empty prompt has no chunk
                    num_empty += 1
        return num_decodes, num_decodes + len(output.num_scheduled_tokens) + num_empty


def _most_blocks(kv_cache: "KVCache[S]", first: S, max_tokens: int) -> int:
    """Return the largest number of blocks a group holds with these output lengths."""
    return sum(
        kv_cache.most_blocks(max(row.num_prompt_tokens + max_tokens - 1, 1)) for row in first.group
    )


# Checks of scheduling settings.
#
# Rule: messages name settings by their command-line options, where most of them come from.


def check_settings(num_slots: int, settings: SchedulingSettings) -> None:
    """Check that `settings` are consistent and possible with `num_slots` slots.

    Raises:
        BatchdecodeError: they are not; the message says why, and how to change them.
    """
    check_types(settings, SETTINGS)
    for name, setting in SETTINGS.items():
        value = getattr(settings, name)
        if setting.kind is int and value is not None and value < 1:
            raise BatchdecodeError(f"{name} must be at least 1, not {value}")
        if setting.is_allowed is not None and not setting.is_allowed(value):
            raise BatchdecodeError(f"{setting.option} must be {setting.must_be}, not {value}")
    policy_of(settings.policy)
    budget, block_size = settings.max_batch_tokens, settings.block_size
    if budget is not None and budget < num_slots:
        raise BatchdecodeError(
            f"--max-batch-tokens {budget} is less than the {num_slots} slots: "
            "each slot needs one token per step"
        )
    if budget is not None and settings.is_paged and budget < block_size:
        raise BatchdecodeError(
            f"--max-batch-tokens {budget} is less than a block of {block_size} tokens"
        )
    if settings.policy == LONGEST_PREFIX_MATCH and not settings.has_prefix_cache:
        raise BatchdecodeError("the policy lpm needs a prefix cache: --prefix-cache on")
    if settings.preempt_for is not None:
        for name, value in (("batching", "static"), ("capacity", "no-evict")):
            if getattr(settings, name) == value:
                raise BatchdecodeError(
                    f"--preempt-for {settings.preempt_for} does not work with --{name} {value}, "
                    "which never preempts"
                )
    if settings.capacity != DEFAULT_SCHEDULING.capacity and settings.kv_blocks is None:
        raise BatchdecodeError(f"--capacity {settings.capacity} has no effect without --kv-blocks")


def check_effects(given: Collection[str], alternatives: Sequence[SchedulingSettings]) -> None:
    """Check that each given setting has an effect in one of the `alternatives`.

    Raises:
        BatchdecodeError: a setting has none; the message names the setting it needs.
    """
    for name, setting in SETTINGS.items():
        if name not in given or setting.has_effect is None:
            continue
        if not any(map(setting.has_effect, alternatives)):
            raise BatchdecodeError(f"{setting.option} has no effect without {setting.without}")
