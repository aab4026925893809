"""The slot table: who holds which slot, and after which decode step each has to leave it."""

from heapq import heappop, heappush

from batcher.errors import InvariantError
from batcher.scheduling.sequence import ScheduledSequence

NO_DEADLINE = -1


class SlotTable:
    """`num_slots` places, each with one sequence or none.

    sequences: [num_slots] the holder of each slot.
    due: number of a decode step -> the slots whose holders have to leave after it; none is empty.
    num_free, num_occupied: how many slots nobody holds, and how many somebody does.
    """

    __slots__ = (
        "_deadlines",
        "_free",
        "_vacated",
        "due",
        "num_free",
        "num_occupied",
        "sequences",
    )

    def __init__(self, num_slots: int) -> None:
        self.sequences: list[ScheduledSequence | None] = [None] * num_slots
        self.due: dict[int, list[int]] = {}
        self.num_free, self.num_occupied = num_slots, 0
        self._free = list(range(num_slots))  # a heap, so that the lowest slot is filled first
        self._deadlines = [NO_DEADLINE] * num_slots  # of the holders
        self._vacated = [-2] * num_slots  # the step each was last used in; -2: none

    def occupy(self, sequence: ScheduledSequence) -> int:
        """Give the lowest free slot to `sequence`."""
        slot = heappop(self._free)
        if self.sequences[slot] is not None:
            raise InvariantError(f"slot {slot} is free and held")
        self.sequences[slot] = sequence
        self.num_free -= 1
        self.num_occupied += 1
        return slot

    def set_deadline(self, slot: int, deadline: int) -> None:
        """Let the holder of `slot`, which has no deadline, leave it after `deadline` at latest."""
        self._deadlines[slot] = deadline
        self.due.setdefault(deadline, []).append(slot)

    def clear_deadline(self, slot: int) -> None:
        """Let the holder of `slot` stay until it is told to leave."""
        deadline = self._deadlines[slot]
        if deadline >= 0:
            self.due[deadline].remove(slot)
            if not self.due[deadline]:
                del self.due[deadline]
            self._deadlines[slot] = NO_DEADLINE

    def find(self, request_id: str) -> list[ScheduledSequence]:
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
        self.clear_deadline(slot)
        heappush(self._free, slot)
        self.num_free += 1
        self.num_occupied -= 1
