"""The way of a sequence to a slot: known, but still to come; arrived; in the waiting queue."""

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter

from batcher.sequence import Sequence

ARRIVAL_ORDER = attrgetter("request.arrival_time", "place", "index")


class WaitingQueue:
    """Sequences without a slot, in order of (arrival time, place in the input, sample).

    A sequence is admitted together with its companions, so it waits for as many slots at once.

    num_slots: how many slots all that wait need together.
    num_pending: how many sequences have not joined the queue yet.
    """

    __slots__ = ("_arrived", "_num_added", "_pending", "_waiting", "num_pending", "num_slots")

    def __init__(self) -> None:
        self.num_slots = self.num_pending = 0
        self._num_added = 0
        self._pending: list[tuple[float, int, int, Sequence]] = []  # a heap, by arrival time
        self._arrived: list[Sequence] = []  # since arrivals last joined
        self._waiting: deque[Sequence] = deque()

    @property
    def num_waiting(self) -> int:
        """How many sequences wait, companions not counted."""
        return len(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """When the next sequence will arrive; None if one has arrived already, or none will."""
        return self._pending[0][0] if self._pending and not self._arrived else None

    @property
    def has_pending(self) -> bool:
        """Whether some are known that will arrive later."""
        return bool(self._pending)

    def add(self, sequence: Sequence, now: float) -> None:
        """Take in a sequence, which joins once its arrival time has come."""
        self.num_pending += 1
        time = sequence.request.arrival_time
        if time <= now:
            self._arrived.append(sequence)
        else:
            heappush(self._pending, (time, sequence.place, self._num_added, sequence))
            self._num_added += 1

    def take_arrivals(self, now: float) -> list[Sequence]:
        """Return those that have arrived by `now` and not been returned before, in order."""
        pending, arrived = self._pending, self._arrived
        while pending and pending[0][0] <= now:
            arrived.append(heappop(pending)[-1])
        if len(arrived) > 1:
            arrived.sort(key=ARRIVAL_ORDER)
        self._arrived = []
        self.num_pending = len(pending)
        return arrived

    def push(self, sequence: Sequence) -> None:
        """Let `sequence` wait behind all others."""
        self._waiting.append(sequence)
        self.num_slots += sequence.num_slots

    def pop(self, num_free: int) -> Sequence | None:
        """Take the first out of the queue; None if there is none, or it needs more slots.

        Those behind one that needs more than are free wait, too: else it might wait for ever.
        """
        if not self._waiting or self._waiting[0].num_slots > num_free:
            return None
        sequence = self._waiting.popleft()
        self.num_slots -= sequence.num_slots
        return sequence

    def find(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that have no slot yet."""
        pending = (entry[-1] for entry in self._pending)
        everything = chain(self._waiting, self._arrived, pending)
        return [sequence for sequence in everything if sequence.id == request_id]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever on its way it is."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self.num_slots -= sequence.num_slots
        else:
            self.num_pending -= 1
            self._pending = [entry for entry in self._pending if entry[-1] is not sequence]
            heapify(self._pending)
            self._arrived = [arrived for arrived in self._arrived if arrived is not sequence]
