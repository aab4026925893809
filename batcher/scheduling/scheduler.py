"""Decides what each step does: who is admitted, who is preempted, which tokens are computed.

There are no phases.  A sequence has tokens that are computed and tokens that are known; when all
that are known are computed, the step gives a token.  Prompts, parts of prompts, what has to be
computed again after a preemption and what a cache holds already are all that one rule.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from batcher.errors import Failure, InvariantError
from batcher.lifecycle import Move, State
from batcher.scheduling.admission import UNLIMITED, Admission
from batcher.scheduling.cached_blocks import PrefixMatch
from batcher.scheduling.checks import check_settings
from batcher.scheduling.clock import BatchStats, one_second
from batcher.scheduling.output import NO_DRAFTS, SchedulerOutput
from batcher.scheduling.queue import ordering_of
from batcher.scheduling.sequence import S
from batcher.scheduling.urgency import Estimate, Urgency
from batcher.settings import ONE_GROUP, CacheWindows, SchedulingSettings

if TYPE_CHECKING:
    from batcher.scheduling.kv_cache import Contents, KVCache

NO_CHANGES: SchedulerOutput[Any] = SchedulerOutput()  # for most steps; nothing is ever put into it


class Scheduler(Admission[S]):
    """What runs and what waits, and what each step does: `schedule` before it, `update` after it.

    token_contents: what stands for the tokens of a sequence in the prefix cache; None if no blocks
    are shared or found, and how many there are is all that matters.
    estimate: how long a step would take.
    windows: of each cache group, see GroupedKVCache.  block_bytes: what a block takes, if known.
    is_paged: whether there are blocks though the settings need none.
    recomputes_drafts: whether drafts that are accepted have to be computed again.
    kv_cache: the blocks, if they are not simply as the settings say.

    Raises:
        BatchdecodeError: the settings contradict each other, or are not what there is.
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
            from batcher.scheduling.kv_caches import make_kv_cache  # noqa: PLC0415 - as it says

            kv_cache = make_kv_cache(settings, token_contents, windows, block_bytes)
        self._recomputes_drafts = recomputes_drafts
        self._num_uncomputed: dict[S, int] = {}  # accepted drafts of this step
        ordering = ordering_of(settings, self._num_cached)
        self._urgency: Urgency[S] | None = None
        if settings.preempt_for is not None:
            limits = (settings.max_batch_tokens, settings.long_prefill_threshold)
            max_chunk = min((limit for limit in limits if limit is not None), default=UNLIMITED)
            ordering = self._urgency = Urgency(ordering, settings.preempt_for, max_chunk, estimate)
        super().__init__(num_slots, settings, ordering, kv_cache)

    def _num_cached(self, sequence: S) -> int:
        """Return how many tokens of a sequence that waits are found in blocks now."""
        return 0 if self.kv_cache is None else self.kv_cache.match(sequence).num_tokens

    # -- before a step ---------------------------------------------------------------------------

    def schedule(
        self, step: int, now: float, num_wanted: Mapping[S, int] = NO_DRAFTS
    ) -> SchedulerOutput[S]:
        """Return what `step`, which starts at `now`, does, after doing the book-keeping of it.

        num_wanted: how many drafts are wanted of which rows that decode.
        """
        kv_cache, batch = self.kv_cache, self.batch
        can_admit = self.queue.num_slots and (batch.num_free or self._urgency is not None)
        if not (can_admit or batch.prefilling or num_wanted) and (
            kv_cache is None or not batch.may_need_blocks
        ):
            return NO_CHANGES
        self._step, self._now = step, now
        output: SchedulerOutput[S] = SchedulerOutput()
        if self._is_prefill_first:
            self._schedule_prompts(output, self._max_tokens, 1)
            if output.num_scheduled_tokens:
                output.is_decode_step = False
                return output
        if kv_cache is not None:
            self._grow(output, kv_cache)
        self._schedule_prompts(output, self._max_tokens - batch.num_decoding, 0)
        if output.prefill_finished and batch.prefilling:
            batch.prefilling = [first for first in batch.prefilling if not first.is_decoding]
        if num_wanted:
            self._schedule_drafts(output, num_wanted)
        return output

    def _schedule_drafts(self, output: SchedulerOutput[S], num_wanted: Mapping[S, int]) -> None:
        """Spend what is left of the step's budget and of the free blocks on drafts."""
        kv_cache, budget, num_drafts = self.kv_cache, output.budget, dict[S, int]()
        num_computed_tokens = self.batch.decode_step + 1  # beside the offset of each
        scheduled, has_changed = output.num_scheduled_tokens, bool(output.preempted)
        for row, wanted in num_wanted.items():
            if has_changed and (not row.is_decoding or row in scheduled):  # perhaps it came back
                continue
            num = min(wanted, budget)
            if kv_cache is not None and num > 0:
                num = kv_cache.extend_for_drafts(row, num_computed_tokens + row.offset, num)
            if num > 0:
                num_drafts[row] = num
                budget -= num
        output.num_drafts, output.budget = num_drafts, budget

    def _schedule_prompts(self, output: SchedulerOutput[S], budget: int, num_kept: int) -> None:
        """Spend `budget` on tokens that are known: of running groups, then of those that wait.

        num_kept: how many of each are left for a later step, 0 or 1.  With prefill-first there is a
        second pass, for decode steps, in which nobody is admitted who was not in the first.
        """
        is_second = self._is_prefill_first and not num_kept
        if self._urgency is not None and not (is_second or output.preempted):
            budget = self._admit_urgent(output, self._urgency, budget, num_kept)
        if self.batch.prefilling:
            budget = self._continue_all(output, budget, num_kept)
        if output.preempted:
            self._note_blocked(output, self._ordering.first(self._now), "preemption")
        elif self.queue.num_slots and not is_second:
            budget = self._admit_waiting(output, budget, num_kept)
        output.budget = budget

    def _continue_all(self, output: SchedulerOutput[S], budget: int, num_kept: int) -> int:
        """Spend `budget` on tokens that running groups know; return what is left of it."""
        batch = self.batch
        just_admitted = {*map(batch.first_of, output.num_scheduled_tokens)}
        for first in batch.prefilling.copy():
            if budget <= 0:
                break
            if first.state is State.RUNNING and first not in just_admitted:  # else preempted
                budget -= self._continue(output, first, budget, num_kept)
        return budget

    def _continue(self, output: SchedulerOutput[S], first: S, budget: int, num_kept: int) -> int:
        """Compute more of what a running group knows; return how many tokens the step computes."""
        output.has_continued = True
        scheduled, spent = output.num_scheduled_tokens, 0
        for row, num_tokens in self._split(first, budget, num_kept).items():
            start, stop = row.num_computed_tokens, row.num_computed_tokens + num_tokens
            if self.kv_cache is not None:
                if self.kv_cache.has_windows:
                    self.kv_cache.slide(row, start - scheduled.get(row, 0))
                if not self._make_room(output, row, stop):
                    return spent
                self.kv_cache.extend(row, stop)
                self.kv_cache.compute(row, start, stop)
            row.num_computed_tokens = stop
            scheduled[row] = scheduled.get(row, 0) + num_tokens
            spent += num_tokens
        if not num_kept:
            self._finish_prefill(output, first)
        return spent

    def lengthen_admitted(self, output: SchedulerOutput[S], first: S, num_more: int) -> None:
        """Let a group that this step admits begin with `num_more` tokens more.

        What the budget still allows of them is computed in the same step.
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
        num_kept = int(not output.is_decode_step)
        if self._has_room_for(self._split(first, output.budget, num_kept)):
            output.budget -= self._continue(output, first, output.budget, num_kept)
            batch.prefilling = [other for other in batch.prefilling if not other.is_decoding]

    def _has_room_for(self, num_tokens: dict[S, int]) -> bool:
        """Whether running rows can compute so many tokens more without anybody giving way."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return True
        return kv_cache.has_room(
            sum(
                kv_cache.num_blocks_to_grow(row, row.num_computed_tokens + more)
                for row, more in num_tokens.items()
            )
        )

    def batch_stats(self, output: SchedulerOutput[S]) -> BatchStats:
        """Return what the step computes, as far as its duration depends on that, before its end."""
        batch, scheduled = self.batch, output.num_scheduled_tokens
        num_decodes, num_rows = self.count_rows(output)
        num_read = batch.num_read if output.is_decode_step else 0
        if not (scheduled or output.prefill_finished or output.num_drafts):
            return BatchStats(num_decodes, num_rows, num_read, 0)
        for first in output.prefill_finished:  # they compute chunks
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
        """Return how many rows only decode in the step, and how many it computes in all."""
        num_decodes = num_empty = 0
        if output.is_decode_step:
            num_decodes = self.batch.num_decoding
            for first in output.prefill_finished:  # they compute chunks
                num_decodes -= len(first.computed_group) if first.others else 1
                if not first.num_tokens:  # it has no chunk
                    num_empty += 1
        return num_decodes, num_decodes + len(output.num_scheduled_tokens) + num_empty

    # -- who may not wait ------------------------------------------------------------------------

    def has_urgent(self, now: float) -> bool:
        """Whether one that waits may be admitted ahead of the queue, now or in a later step."""
        urgency = self._urgency
        return urgency is not None and bool(urgency.ahead(self.batch.firsts, now))

    def _admit_urgent(
        self, output: SchedulerOutput[S], urgency: Urgency[S], budget: int, num_kept: int
    ) -> int:
        """Admit, ahead of the queue, those that may not wait; return what is left of the budget.

        Those that give way to them free tokens of the step, if they were to decode.  They come
        back in a later step, even if there is room: they have still to be taken out of their slots.
        Until then nobody overtakes them who is not more urgent.  Who has no room even if all less
        urgent give way is passed over: it loses nothing, as they do so once that is enough.  But
        nobody as urgent goes before it, since such a one would not.
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
            freed = 0 if num_kept else sum(row.is_decoding for row in rows)
            if budget + freed < first.num_slots:
                break
            for victim in victims:
                self._preempt(output, victim, first, urgency.measure)
            num_tokens = self._open(output, first, budget + freed, num_kept)
            if num_tokens is None:
                raise InvariantError(f"{first.id!r} has no room, and others gave way to it")
            budget += freed - num_tokens
        return budget

    def _victims_of(self, first: S, urgency: Urgency[S]) -> list[S] | None:
        """Return who gives way to one that waits, as few as will do; None if all are not enough."""
        less_urgent = urgency.less_urgent(first, self.batch.firsts)
        num_free = self.batch.num_free
        if num_free + sum(victim.num_slots for victim in less_urgent) < first.num_slots:
            return None
        matches = self._matches_of(first)
        for count in range(len(less_urgent) + 1):
            gone = less_urgent[:count]
            if num_free >= first.num_slots and self._would_fit(first, matches, gone):
                return gone
            if count < len(less_urgent):
                num_free += less_urgent[count].num_slots
        return None

    def _would_fit(self, first: S, matches: list[PrefixMatch], gone: list[S]) -> bool:
        """Whether all that is known of a group has room if the groups of `gone` give way."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return True
        rows = first.computed_group
        is_alone = self.batch.num_occupied == sum(victim.num_slots for victim in gone)
        known = [row.num_tokens for row in rows]
        num_needed = self._num_needed(kv_cache, first, matches, known, is_alone=is_alone)
        kept = {block for match in matches for block in match.found}
        tables = [kv_cache.held_blocks(row) for victim in gone for row in victim.computed_group]
        return kv_cache.has_room(num_needed - kv_cache.pool.num_only_in(tables, kept))

    # -- after a step ----------------------------------------------------------------------------

    def settle_drafts(
        self, output: SchedulerOutput[S], num_accepted: Mapping[int, int]
    ) -> dict[S, int]:
        """Let rows keep the drafts that were accepted, by slot, and give back what others took.

        Returns how many blocks rows give back, of those that do.
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
        """Let rows compute the drafts again that the last step accepted; return those rows."""
        uncomputed, self._num_uncomputed = self._num_uncomputed, {}
        for row, num in uncomputed.items():
            if row.is_decoding:
                self.batch.stop_decoding(row)
                self.batch.go_back_to_prefill(row)
            row.num_computed_tokens -= num
        if uncomputed:
            self.batch.prefilling.sort(key=lambda other: other.admission)
        return [*uncomputed]

    def update(self, output: SchedulerOutput[S]) -> Collection[int]:
        """Take note that the step has been computed; return the slots of rows that end with it."""
        if output is not NO_CHANGES:
            self._note_step(output)
        return self.batch.end_decode_step() if output.is_decode_step else ()

    def _note_step(self, output: SchedulerOutput[S]) -> None:
        """Let groups know the step that first admitted them, and that of their first token."""
        step, kv_cache = self._step, self.kv_cache
        for first in output.admitted:
            if first.admitted_step is None:
                first.admitted_step = step
                for other in first.others:
                    other.admitted_step = step
        for first in output.prefill_finished:
            if first.first_token_step is None:
                first.first_token_step = step
                for other in first.others:
                    other.first_token_step = step
            if first.has_siblings and kv_cache is not None:
                kv_cache.note_sibling(first)
        if kv_cache is not None:
            kv_cache.end_step()

    def lengthen(self, num_more: dict[S, int]) -> None:
        """Let decoding groups that were given so many tokens more at once catch up with them."""
        for first, num in num_more.items():
            for row in first.computed_group:
                self.batch.stop_decoding(row)
                row.num_tokens += num
            self.batch.go_back_to_prefill(first)
        self.batch.prefilling.sort(key=lambda other: other.admission)

    def fork(self, parent: S, child: S) -> None:
        """Let a beam go on from where another of its request stands, between two steps."""
        self.batch.fork(parent, child)
        if self.kv_cache is not None:
            self.kv_cache.fork(parent, child, self.batch.decode_step + parent.offset)

    def finish_waiting(self, first: S, move: Move) -> None:
        """End a group that has no slot."""
        for sequence in first.group:
            sequence.state = move[sequence.state]

    def finish(self, first: S, last_step: int, move: Move, *, has_failed: bool = False) -> None:
        """Take a running group out of its slots; it is over.

        Its `num_tokens` count one from each decode step by then.

        has_failed: whether what the last step was to compute of it is not to be relied on.
        """
        batch, kv_cache = self.batch, self.kv_cache
        for row in (first,) if not first.others else first.group:
            if row.is_decoding:
                batch.stop_decoding(row)
            if self._num_uncomputed:
                row.num_computed_tokens -= self._num_uncomputed.pop(row, 0)
            if kv_cache is not None:
                if has_failed:
                    kv_cache.forget(row)
                    row.num_computed_tokens = 0
                kv_cache.close(row, row.num_computed_tokens)
        batch.vacate(first, last_step, move)

    def sharing(self, row: S, num_tokens: int) -> list[S]:
        """Return the other rows with blocks that the last `num_tokens` of a row were to fill."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return []
        start, stop = (
            row.num_computed_tokens - num_tokens,
            kv_cache.num_blocks(row.num_computed_tokens),
        )
        blocks = set(row.block_table[start // kv_cache.block_size : stop])
        return [
            holder
            for holder in self.batch.holders
            if holder is not row and blocks & {*holder.block_table}
        ]

    def why_never(self, first: S) -> Failure | None:
        """Return why a group could never end, if so: all blocks together cannot hold it."""
        kv_cache = self.kv_cache
        if kv_cache is None or kv_cache.max_blocks is None:
            return None
        if first.num_prompt_tokens + first.max_tokens <= kv_cache.sure_tokens and not first.others:
            return None
        num_needed = _most_blocks(kv_cache, first, first.max_tokens)
        if num_needed <= kv_cache.max_blocks:
            return None
        what = f"{first.num_prompt_tokens} prompt tokens and max_tokens {first.max_tokens}"
        return Failure(
            "kv-too-small",
            f"it can never run: with {what} it needs up to {num_needed} blocks of "
            f"{kv_cache.block_size} tokens, and there are {kv_cache.max_blocks}",
        )

    def room_for_output(self, first: S) -> int:
        """Return for how many of a group's max_tokens all blocks together are enough."""
        kv_cache = self.kv_cache
        if kv_cache is None or kv_cache.max_blocks is None:
            return first.max_tokens
        sizes = range(1, first.max_tokens + 1)
        return bisect_right(
            sizes, kv_cache.max_blocks, key=lambda num: _most_blocks(kv_cache, first, num)
        )

    def check(self) -> None:
        """Make sure that no block is lost, shared wrongly or held by who does not run.

        Raises:
            InvariantError: that is not so.
        """
        if self.kv_cache is not None:
            self.kv_cache.check(self.batch.holders)


def _most_blocks(kv_cache: "KVCache[S]", first: S, max_tokens: int) -> int:
    """Return how many blocks a group holds at most, if each generates so many tokens at most."""
    return sum(
        kv_cache.most_blocks(max(row.num_prompt_tokens + max_tokens - 1, 1)) for row in first.group
    )
