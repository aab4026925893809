"""Follows who waits for a slot, and why the first of them is not let in.

Rule: what waits is known by the sequence that leads it, be it new or preempted.
"""

from batcher.errors import InvariantError
from batcher.events import ArriveEvent, BlockedEvent, PreemptEvent
from batcher.timeline.sorted_records import SortedRecords
from batcher.timeline.stays import Hold, SequenceKey, Wait, key_of, label_of


class WaitingRoom:
    """The waits and holds of a run, each recorded when it is over.

    waits: by start, and those that start together as they joined the queue.  wait_ends: their ends.
    holds: by start.
    """

    def __init__(self) -> None:
        self._num_waits = 0
        self._waiting: dict[SequenceKey, tuple[int, ArriveEvent | PreemptEvent]] = {}
        self.waits = SortedRecords[Wait](Wait)
        self.wait_ends = SortedRecords[int](int)
        self.holds = SortedRecords[Hold](Hold)
        self._hold: BlockedEvent | None = None

    def join(self, event: ArriveEvent | PreemptEvent) -> None:
        """Let the sequence of `event` wait."""
        self._waiting[key_of(event.id, event.index, "sample")] = self._num_waits, event
        self._num_waits += 1

    def leave(self, key: SequenceKey, end: int) -> bool:
        """Record the wait of the sequence up to `end`; return whether there was one.

        Raises:
            InvariantError: it began before the run did.
        """
        number, event = self._waiting.pop(key, (0, None))
        if event is None:
            return False
        hold = self._hold
        if hold is not None and (hold.id, hold.index) == (event.id, event.index):
            self._end_hold(end)
        if event.step < 0:
            raise InvariantError(f"{event.id!r} arrives in step {event.step}")
        if event.step < end:
            wait = Wait(event.id, event.index, event.step, end)
            self.waits.add((event.step, number), wait)
            self.wait_ends.add((end,), end)
        return True

    def hold(self, event: BlockedEvent) -> None:
        """Note that the first of those who wait is not let in from now on.

        Raises:
            InvariantError: it does not wait, or time goes back.
        """
        label = label_of(event.id, event.index, "sample")
        if key_of(event.id, event.index, "sample") not in self._waiting:
            raise InvariantError(f"{label!r} is held in step {event.step}, but does not wait")
        if self._hold is not None and event.step < self._hold.step:
            raise InvariantError(f"{label!r} is held in step {event.step}, after a later one")
        self._end_hold(event.step)
        self._hold = event

    def close(self, num_steps: int) -> None:
        """End what is not over, after `num_steps`."""
        self._end_hold(num_steps)
        for key in list(self._waiting):
            self.leave(key, num_steps)

    def _end_hold(self, end: int) -> None:
        hold, self._hold = self._hold, None
        if hold is not None and hold.step < end:
            held = Hold(hold.id, hold.index, hold.step, end, hold.reason, hold.blocks)
            self.holds.add((hold.step,), held)
