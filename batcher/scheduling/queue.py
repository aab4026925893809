"""The way of a sequence to a slot: known, but still to come; arrived; in the waiting queue."""

from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter

from batcher.scheduling.orderings import Ordering
from batcher.scheduling.sequence import NEVER, ScheduledSequence

ARRIVAL_ORDER = attrgetter("arrival_time", "place", "index")


class WaitingQueue:
    """Sequences without a slot; those that have arrived wait in the order of `ordering`.

    A sequence is admitted together with its companions, so it waits for as many slots at once.

    num_slots: how many slots all that wait need together.
    num_pending: how many sequences have not joined the queue yet.
    """

    __slots__ = (
        "_arrived",
        "_num_added",
        "_num_joined",
        "_ordering",
        "_pending",
        "num_pending",
        "num_slots",
    )

    def __init__(self, ordering: Ordering) -> None:
        self.num_slots = self.num_pending = 0
        self._num_added = self._num_joined = 0
        self._pending: list[tuple[float, int, int, ScheduledSequence]] = []  # a heap, by arrival
        self._arrived: list[ScheduledSequence] = []  # since arrivals last joined
        self._ordering = ordering

    @property
    def num_waiting(self) -> int:
        """How many sequences wait, companions not counted."""
        return len(self._ordering)

    @property
    def next_arrival(self) -> float | None:
        """When the next sequence will arrive; None if one has arrived already, or none will."""
        return self._pending[0][0] if self._pending and not self._arrived else None

    def add(self, sequence: ScheduledSequence, now: float) -> None:
        """Take in a sequence, which joins once its arrival time has come."""
        self.num_pending += 1
        time = sequence.arrival_time
        if time <= now:
            self._arrived.append(sequence)
        else:
            heappush(self._pending, (time, sequence.place, self._num_added, sequence))
            self._num_added += 1

    def take_arrivals(self, now: float) -> list[ScheduledSequence]:
        """Return those that have arrived by `now` and not been returned before, in order."""
        pending, arrived = self._pending, self._arrived
        while pending and pending[0][0] <= now:
            arrived.append(heappop(pending)[-1])
        if len(arrived) > 1:
            arrived.sort(key=ARRIVAL_ORDER)
        self._arrived = []
        self.num_pending = len(pending)
        return arrived

    def push(self, sequence: ScheduledSequence) -> None:
        """Let `sequence` wait, after it has arrived or was preempted."""
        if sequence.queue_number == NEVER:
            sequence.queue_number = self._num_joined
            self._num_joined += 1
        self._ordering.push(sequence)
        self.num_slots += sequence.num_slots

    def peek(self, now: float) -> ScheduledSequence | None:
        """Return the one that is to be admitted first; None if none waits.

        Those behind it wait even if there is room for them: else it might wait for ever.
        """
        return self._ordering.first(now)

    def take(self, sequence: ScheduledSequence) -> None:
        """Take one that waits out of the queue."""
        self._ordering.remove(sequence)
        self.num_slots -= sequence.num_slots

    def find(self, request_id: str) -> list[ScheduledSequence]:
        """Return the sequences of a request that have no slot."""
        pending = (entry[-1] for entry in self._pending)
        everything = chain(self._ordering, self._arrived, pending)
        return [sequence for sequence in everything if sequence.id == request_id]

    def remove(self, sequence: ScheduledSequence) -> None:
        """Forget a sequence, wherever on its way it is."""
        if sequence in self._ordering:
            self.take(sequence)
        else:
            self.num_pending -= 1
            self._pending = [entry for entry in self._pending if entry[-1] is not sequence]
            heapify(self._pending)
            self._arrived = [arrived for arrived in self._arrived if arrived is not sequence]
