"""The running batch: the sequence in each slot, the rows that decode in lockstep, and their end.

Rule: all changes go through this class, so that slots, decoding rows and the steps in which they
end always agree.

Rows in lockstep receive one token each in every decode step.  The position of a row's token is the
number of the decode step plus the row's `offset`.  So a step does no work per row, and sums over
all rows follow from the sum of their offsets.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from typing import Generic

from batcher.errors import InvariantError
from batcher.lifecycle import ADMIT, Move
from batcher.scheduling.sequence import NEVER, S


class RunningBatch(Generic[S]):
    """`num_slots` slots, each with one sequence or none, and the rows that decode.

    slots: [num_slots] the sequence in each slot.  num_free: free slots.
    last_used: [num_slots] the last step that used each slot; -2: none.
    decode_step: the number of the current decode step; steps that only compute prompts do not
    count.
    ending: the number of a decode step -> the slots whose sequences end with it; never empty.
    num_decoding: rows that decode.
    by_boundary: the rows by the decode steps, modulo the block size, in which they begin a block.
    prefilling: the first sequences of running groups without a token in this step, by admission.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        """Create an empty batch. block_size: tokens per KV block, 0 without blocks."""
        self.slots: list[S | None] = [None] * num_slots
        self.num_free = num_slots
        self.decode_step = 0
        self.ending: defaultdict[int, list[int]] = defaultdict(list)
        self.num_decoding = 0
        self.prefilling: list[S] = []
        self.block_size = block_size
        self._free = list(range(num_slots))  # a heap, so that the lowest slot is filled first
        self.last_used = [-2] * num_slots
        self._num_admissions = 0
        self._first_of: dict[S, S] = {}  # running sequence -> the first of its group
        self._sum_of_offsets = 0
        self._longest: int | None = None  # the largest offset, if known
        self.by_boundary: defaultdict[int, dict[S, None]] = defaultdict(dict)
        self._forked: dict[S, None] = {}

    # -- slots -----------------------------------------------------------------------------------

    def admit(self, first: S) -> None:
        """Give the lowest free slots to the sequences of a group."""
        self._num_admissions += 1
        self.num_free -= first.num_slots
        for row in first.group if first.others else (first,):
            row.state = ADMIT[row.state]
            row.slot = slot = heappop(self._free)
            if self.slots[slot] is not None:
                raise InvariantError(f"slot {slot} is free and held")
            self.slots[slot] = row
            row.admission = self._num_admissions
            if row is not first:
                self._first_of[row] = first

    def release(self, first: S, last_step: int, move: Move) -> None:
        """Free the slots of a group, which used them until `last_step`.

        Rows that decode leave the lockstep.
        """
        for row in first.group if first.others else (first,):
            slot = row.slot
            if self.slots[slot] is not row:
                raise InvariantError(f"slot {slot} is released by who does not hold it")
            if row.is_decoding:
                self.stop_decoding(row)
            row.state = move[row.state]
            self.slots[slot] = None
            self.last_used[slot] = last_step
            heappush(self._free, slot)
            if row is not first:
                del self._first_of[row]
        self.num_free += first.num_slots
        if first.last_decode_step != NEVER:
            self._forget_end(first)
        if first in self.prefilling:
            self.prefilling.remove(first)

    @property
    def num_occupied(self) -> int:
        return len(self.slots) - self.num_free

    def first_of(self, sequence: S) -> S:
        return self._first_of.get(sequence, sequence) if self._first_of else sequence

    @property
    def has_groups(self) -> bool:
        return bool(self._first_of)

    @property
    def holders(self) -> list[S]:
        return [*filter(None, self.slots)]

    @property
    def firsts(self) -> list[S]:
        holders, first_of = self.holders, self._first_of
        return [row for row in holders if row not in first_of] if first_of else holders

    # -- lockstep --------------------------------------------------------------------------------

    def begin_decoding(self, row: S) -> None:
        """Let a row decode from this step on; all its tokens but the next are known."""
        row.is_decoding = True
        row.offset = offset = row.num_tokens - 1 - self.decode_step
        self.num_decoding += 1
        self._sum_of_offsets += offset
        if self.block_size:
            self.by_boundary[-offset % self.block_size][row] = None
        if self._longest is not None and offset > self._longest:
            self._longest = offset

    def end_after(self, first: S, num_steps: int) -> None:
        """Schedule the end of a decoding group after this many steps, the current one included."""
        if first.last_decode_step != NEVER:
            self._forget_end(first)
        first.last_decode_step = step = self.decode_step + num_steps - 1
        self.ending[step].append(first.slot)

    def advance(self, num_more: Mapping[S, int]) -> None:
        """Move decoding rows ahead by the extra tokens of the current step."""
        size, by_boundary, ending = self.block_size, self.by_boundary, self.ending
        for row, num in num_more.items():
            offset, last_step = row.offset + num, row.last_decode_step - num
            if size:
                del by_boundary[-row.offset % size][row]
                by_boundary[-offset % size][row] = None
            self._forget_end(row)
            ending[last_step].append(row.slot)
            row.offset, row.last_decode_step = offset, last_step
        self._sum_of_offsets += sum(num_more.values())
        self._longest = None

    def end_decode_step(self) -> Collection[int]:
        """Move to the next decode step; return the slots whose sequences have all their tokens."""
        step = self.decode_step
        self.decode_step = step + 1
        ended = self.ending.pop(step, None)
        if ended is None:
            return ()
        slots = self.slots
        for slot in ended:
            if (first := slots[slot]) is not None:
                first.last_decode_step = NEVER
        return ended

    def stop_decoding(self, row: S) -> None:
        """Remove a row from the lockstep, before or after a decode step."""
        offset = row.offset
        row.num_computed_tokens = num_computed_tokens = self.decode_step + offset
        row.num_tokens = num_computed_tokens + 1
        row.is_decoding = False
        self.num_decoding -= 1
        self._sum_of_offsets -= offset
        if offset == self._longest:
            self._longest = None
        if self.block_size:
            del self.by_boundary[-offset % self.block_size][row]
            if self._forked:
                self._forked.pop(row, None)

    def go_back_to_prefill(self, first: S) -> None:
        """Return a group that has stopped decoding to prefill."""
        self._forget_end(first)
        self.prefilling.append(first)

    def fork(self, parent: S, child: S) -> None:
        """Start beam `child` at the position of `parent`."""
        if not child.is_decoding:
            child.num_tokens = parent.offset + self.decode_step + 1
            self.begin_decoding(child)
        if self.block_size:
            self._forked[parent] = self._forked[child] = None

    def _forget_end(self, first: S) -> None:
        slots = self.ending[first.last_decode_step]
        if len(slots) == 1:
            del self.ending[first.last_decode_step]
        else:
            slots.remove(first.slot)
        first.last_decode_step = NEVER

    # -- sums over the rows that decode ----------------------------------------------------------

    @property
    def num_read(self) -> int:
        return self._sum_of_offsets + self.num_decoding * self.decode_step

    @property
    def padding(self) -> int:
        """The padding tokens if all rows were as long as the longest, in any step."""
        if not self.num_decoding:
            return 0
        if self._longest is None:
            self._longest = max(row.offset for row in self.holders if row.is_decoding)
        return self._longest * self.num_decoding - self._sum_of_offsets

    # -- rows that need a block ------------------------------------------------------------------

    def rows_at_boundary(self) -> list[S]:
        """Return the rows that compute the first token of a block in the current decode step."""
        return list(self.by_boundary.get(self.decode_step % self.block_size, ()))

    @property
    def may_need_blocks(self) -> bool:
        rows = self.by_boundary.get(self.decode_step % self.block_size)
        return bool(rows or self._forked)

    def num_steps_to_boundary(self) -> int:
        """Return the number of steps, from the current one, before a row begins a block."""
        step, size = self.decode_step, self.block_size
        return min((at - step) % size for at, rows in self.by_boundary.items() if rows)

    def num_steps_for(self, num_blocks: int) -> int:
        """Return the number of steps, from the current one, that this many blocks last for."""
        num_cycles, num_left = divmod(num_blocks, self.num_decoding)
        size, by_boundary = self.block_size, self.by_boundary
        for number in range(size):
            num_left -= len(by_boundary.get((self.decode_step + number) % size, ()))
            if num_left < 0:
                return num_cycles * size + number
        raise InvariantError("rows begin no block in as many steps as a block has tokens")

    def take_forked(self) -> list[S]:
        """Return the rows that may share their last block since the last call."""
        if not self._forked:
            return []
        forked, self._forked = list(self._forked), {}
        return forked
