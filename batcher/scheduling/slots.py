"""The slot table: who holds which slot, and after which step each has to leave it at the latest."""

from heapq import heappop, heappush

from batcher.errors import InvariantError
from batcher.sequence import Sequence

NO_DEADLINE = -1


class SlotTable:
    """`num_slots` places, each with one sequence or none.

    sequences: [num_slots] the holder of each slot.
    due: step -> the slots whose holders have to leave after it; no step without a slot.
    """

    __slots__ = ("_deadlines", "_free", "_vacated", "due", "sequences")

    def __init__(self, num_slots: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.due: dict[int, list[int]] = {}
        self._free = list(range(num_slots))  # a heap, so that the lowest slot is filled first
        self._deadlines = [NO_DEADLINE] * num_slots  # of the holders
        self._vacated = [-2] * num_slots  # the step each was last used in; -2: none

    @property
    def num_free(self) -> int:
        """How many slots nobody holds."""
        return len(self._free)

    @property
    def num_occupied(self) -> int:
        """How many slots are held."""
        return len(self.sequences) - len(self._free)

    def occupy(self, sequence: Sequence, deadline: int = NO_DEADLINE) -> int:
        """Give the lowest free slot to `sequence`, which leaves it after `deadline` at latest."""
        slot = heappop(self._free)
        if self.sequences[slot] is not None:
            raise InvariantError(f"slot {slot} is free and held")
        self.sequences[slot] = sequence
        if deadline != NO_DEADLINE:
            self._deadlines[slot] = deadline
            self.due.setdefault(deadline, []).append(slot)
        return slot

    def advance_deadline(self, slot: int, num_steps: int) -> None:
        """Let the holder of `slot` leave it so many steps earlier."""
        deadline = self._deadlines[slot]
        self._forget_deadline(slot)
        self._deadlines[slot] = deadline - num_steps
        self.due.setdefault(deadline - num_steps, []).append(slot)

    def find(self, request_id: str) -> list[Sequence]:
        """Return the holders that are sequences of a request, by slot."""
        holders = (sequence for sequence in self.sequences if sequence is not None)
        return [sequence for sequence in holders if sequence.id == request_id]

    def was_used_in(self, slot: int, step: int) -> bool:
        """Whether the last holder of `slot` left it in `step`."""
        return self._vacated[slot] == step

    def vacate(self, slot: int, step: int) -> None:
        """Take `slot` from its holder, which used it in `step` for the last time."""
        if self.sequences[slot] is None:
            raise InvariantError(f"slot {slot} is vacated twice")
        self.sequences[slot] = None
        self._vacated[slot] = step
        self._forget_deadline(slot)
        heappush(self._free, slot)

    def _forget_deadline(self, slot: int) -> None:
        deadline = self._deadlines[slot]
        if deadline >= 0:
            self.due[deadline].remove(slot)
            if not self.due[deadline]:
                del self.due[deadline]
            self._deadlines[slot] = NO_DEADLINE
