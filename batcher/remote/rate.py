"""How many requests may be in flight, and how soon after one another they may be sent.

Rule: additive increase, multiplicative decrease (Chiu and Jain, 1989): as many answers as the limit
is raise it by one, and a refusal halves it; those that were in flight together count as one.
"""

from batcher.events import BlockedReason

DECREASE = 0.5


class Rate:
    """What is in flight, and whether there may be more.

    num_in_flight: how many requests are.  max_rate: how many may be sent in a second; None for any.
    Times are in seconds, of any clock.
    """

    def __init__(self, max_in_flight: int, max_rate: float | None) -> None:
        self.num_in_flight = 0
        self._max_in_flight, self._limit = max_in_flight, float(max_in_flight)
        self._interval = 0.0 if max_rate is None else 1 / max_rate
        self._next_start = 0.0
        self._decreased = -1.0  # when the limit last was

    @property
    def limit(self) -> int:
        """How many may be in flight."""
        return int(self._limit)

    def why_not(self, now: float) -> BlockedReason | None:
        """Return why nothing may be sent now; None if something may."""
        if self.num_in_flight >= self.limit:
            return "concurrency"
        return "rate" if now < self._next_start else None

    def start_of_next(self, now: float) -> float | None:
        """Return when the next request may be sent if nothing ends before; None if it may not."""
        return None if self.num_in_flight >= self.limit else max(now, self._next_start)

    def note_sent(self, now: float) -> None:
        """Take note that a request is sent."""
        self.num_in_flight += 1
        self._next_start = max(now, self._next_start) + self._interval

    def note_over(self) -> None:
        """Take note that one is over, whatever came of it."""
        self.num_in_flight -= 1

    def succeed(self) -> bool:
        """Allow a little more after an answer; return whether the limit is another one."""
        before = self.limit
        self._limit = min(self._limit + 1 / self._limit, float(self._max_in_flight))
        return self.limit != before

    def refuse(self, sent: float, now: float) -> bool:
        """Allow less after a refusal of what was `sent` then; return whether the limit is another.

        What was sent before the limit was last lowered says nothing of the one that holds.
        """
        if sent <= self._decreased:
            return False
        before, self._decreased = self.limit, now
        self._limit = max(self._limit * DECREASE, 1.0)
        return self.limit != before
