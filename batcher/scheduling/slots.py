"""The slot table: who holds which slot, and at which step each has to leave it at the latest."""

from heapq import heappop, heappush

import numpy as np

from batcher.errors import InvariantError
from batcher.sequence import Sequence

NEVER = 2**62


class SlotTable:
    """`num_slots` places, each with one sequence or none.

    sequences: [num_slots] the holder of each slot.
    next_deadline: the earliest step at which a holder has to leave; NEVER if all slots are empty.
    """

    __slots__ = ("_deadlines", "_free", "_vacated", "next_deadline", "sequences")

    def __init__(self, num_slots: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.next_deadline = NEVER
        self._free = list(range(num_slots))  # a heap, so that the lowest slot is filled first
        self._deadlines = np.full(num_slots, NEVER, np.int64)
        self._vacated = [-2] * num_slots  # [num_slots] the step each was last used in; -2: none

    @property
    def num_free(self) -> int:
        """How many slots nobody holds."""
        return len(self._free)

    @property
    def num_occupied(self) -> int:
        """How many slots are held."""
        return len(self.sequences) - len(self._free)

    def occupy(self, sequence: Sequence, deadline: int) -> int:
        """Give the lowest free slot to `sequence`, which leaves it after `deadline` at latest."""
        slot = heappop(self._free)
        if self.sequences[slot] is not None:
            raise InvariantError(f"slot {slot} is free and held")
        self.sequences[slot] = sequence
        self._deadlines[slot] = deadline
        self.next_deadline = min(self.next_deadline, deadline)
        return slot

    def was_used_in(self, slot: int, step: int) -> bool:
        """Whether the last holder of `slot` left it in `step`."""
        return self._vacated[slot] == step

    def vacate(self, slot: int, step: int) -> None:
        """Take `slot` from its holder, which used it in `step` for the last time.

        `next_deadline` may now be too early; `refresh_deadline` puts it right, once for any number
        of rows.
        """
        if self.sequences[slot] is None:
            raise InvariantError(f"slot {slot} is vacated twice")
        self.sequences[slot] = None
        self._deadlines[slot] = NEVER
        self._vacated[slot] = step
        heappush(self._free, slot)

    def refresh_deadline(self) -> None:
        """Find `next_deadline` anew."""
        self.next_deadline = int(self._deadlines[self._deadlines.argmin()])  # min() is slower

    def due(self, step: int) -> list[int]:
        """Return the slots whose holders have to leave after `step`, ascending."""
        return (self._deadlines <= step).nonzero()[0].tolist()
