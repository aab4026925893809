"""The sequences that hold slots: how they begin, go on in lockstep, give way and leave.

Rule: whoever decides to do one of these things does it here, so that slots, blocks, deadlines and
the rows that decode never disagree.
"""

from batcher.errors import Failure
from batcher.lifecycle import Move, move
from batcher.scheduling.decoding_rows import DecodingRows
from batcher.scheduling.kv_cache import KVCache, most_tokens
from batcher.scheduling.plan import PlannedChunk, StepPlan
from batcher.scheduling.sequence import ScheduledSequence
from batcher.scheduling.slots import SlotTable

Rows = tuple[ScheduledSequence, ...]


class Running:
    """What runs, in slots and blocks.

    decode_step: the number of the current decode step; steps that only compute prompts are none.
    """

    def __init__(self, num_slots: int, kv_cache: KVCache | None) -> None:
        self.decode_step = 0
        self.slots = SlotTable(num_slots)
        self.kv_cache = kv_cache
        self.decoding = DecodingRows(0 if kv_cache is None else kv_cache.block_size)
        self._chasing: list[ScheduledSequence] = []  # leaders, by admission
        self._leaders: dict[ScheduledSequence, ScheduledSequence] = {}  # of running companions
        self._num_admissions = 0

    @property
    def chasing(self) -> list[ScheduledSequence]:
        """The running leaders that a step gives no token, by admission."""
        return self._chasing

    def _occupy(self, leader: ScheduledSequence) -> None:
        """Give slots to `leader` and its companions."""
        self._num_admissions += 1
        for row in (leader, *leader.companions):
            move(row, Move.ADMIT)
            row.slot = self.slots.occupy(row)
            row.admission = self._num_admissions
            if row is not leader:
                self._leaders[row] = leader

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

    def _stop_decoding(self, row: ScheduledSequence) -> None:
        """Let a row leave the lockstep, before a decode step or after it."""
        row.num_computed = self.decode_step + row.offset
        row.num_tokens = row.num_computed + 1
        row.is_decoding = False
        self.decoding.remove(row)

    def _vacate(self, leader: ScheduledSequence, last_step: int, why: Move) -> None:
        for row in (leader, *leader.companions):
            move(row, why)
            self.slots.vacate(row.slot, last_step)
            if row is not leader:
                del self._leaders[row]
        if self._chasing:
            self._chasing = [other for other in self._chasing if other is not leader]

    def _running(self) -> list[ScheduledSequence]:
        """Return the leaders that hold slots."""
        holders = [holder for holder in self.slots.sequences if holder is not None]
        companions = self._leaders
        return [row for row in holders if row not in companions] if companions else holders

    def leader_of(self, row: ScheduledSequence) -> ScheduledSequence:
        """Return the leader of a running row, perhaps itself."""
        return self._leaders.get(row, row) if self._leaders else row

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

    def lengthen(self, leader: ScheduledSequence, num_more: int) -> None:
        """Let a decoding leader, which was given `num_more` tokens at once, catch up with them."""
        for row in rows_of(leader):
            self._stop_decoding(row)
            row.num_tokens += num_more
        self.slots.clear_deadline(leader.slot)
        self._chasing.append(leader)
        self._chasing.sort(key=lambda other: other.admission)

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

    def sharing(self, chunk: PlannedChunk) -> list[ScheduledSequence]:
        """Return the other rows that hold blocks which `chunk` was to fill."""
        kv_cache, row = self.kv_cache, chunk.sequence
        if kv_cache is None:
            return []
        stop = kv_cache.num_blocks(chunk.start + chunk.num_tokens)
        blocks = set(row.table[chunk.start // kv_cache.block_size : stop])
        holders = [holder for holder in self.slots.sequences if holder is not None]
        return [holder for holder in holders if holder is not row and blocks & {*holder.table}]

    def why_never(self, leader: ScheduledSequence) -> Failure | None:
        """Return why `leader` could never end, if so: all blocks together cannot hold it."""
        kv_cache = self.kv_cache
        if kv_cache is None:
            return None
        rows = (leader, *leader.companions)
        num_needed = sum(kv_cache.num_blocks(most_tokens(row)) for row in rows)
        if kv_cache.max_blocks is None or num_needed <= kv_cache.max_blocks:
            return None
        what = f"{leader.num_prompt_tokens} prompt tokens and max_tokens {leader.max_tokens}"
        return Failure(
            "kv-too-small",
            f"it can never run: with {what} it needs up to {num_needed} blocks of "
            f"{kv_cache.block_size} tokens, and there are {kv_cache.max_blocks}",
        )

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
