"""Admission control: how many requests a replica is sent at once, and what becomes of the rest.

Rule: whoever is refused, waits or is sent on is decided by numbers that the router counts itself.
"""

from bisect import insort
from heapq import heappop, heappush
from math import inf
from typing import Annotated

from msgspec import Meta, Struct

from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.timing.catalog import Count, OptionalPositive

MAX_QUEUE = Annotated[
    Annotated[int, Meta(ge=0, le=10**9)], Meta(description="a whole number of at least 0")
]


class AdmissionControl(Struct, frozen=True, kw_only=True):
    """What a router admits.

    max_in_flight: how many requests one replica is sent before one of them has ended; the samples
    of a request stay together, whatever it is.  max_queue: how many wait at the router while all
    replicas have so many; one more, and the last in order of priority is refused.
    max_wait: after so many seconds in that queue a request is refused; None: it may wait for ever.
    """

    max_in_flight: Count
    max_queue: MAX_QUEUE = 0
    max_wait: OptionalPositive = None


_Key = tuple[int, float, int, int]


class RouterQueue:
    """Requests that wait at the router: the one of the best priority first, of equals the oldest.

    max_queue: how many may be there.  max_wait: for how many seconds one may; None: for ever.
    """

    def __init__(self, max_queue: int, max_wait: float | None) -> None:
        self._max_queue, self._max_wait = max_queue, inf if max_wait is None else max_wait
        self._keys: list[_Key] = []  # sorted
        self._waiting: dict[_Key, tuple[SimulatedSequence, float]] = {}  # each with its limit
        self._limits: list[tuple[float, _Key]] = []  # a heap, also of those that wait no longer

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def next_limit(self) -> float:
        """Until when nobody has waited too long."""
        return self._limits[0][0] if self._limits else inf

    def push(self, sequence: SimulatedSequence, now: float) -> SimulatedSequence | None:
        """Take in a sequence; return the one that there is no room for, perhaps itself."""
        key = sequence.priority, sequence.first_arrival, sequence.input_index, sequence.index
        deadline = inf if sequence.deadline is None else sequence.deadline
        limit = min(now + self._max_wait, deadline)
        insort(self._keys, key)
        self._waiting[key] = sequence, limit
        if len(self._keys) > self._max_queue:
            return self._waiting.pop(self._keys.pop())[0]
        if limit < inf:
            heappush(self._limits, (limit, key))
        return None

    def pop(self) -> SimulatedSequence:
        """Let the first go."""
        return self._waiting.pop(self._keys.pop(0))[0]

    def pop_late(self, now: float) -> list[SimulatedSequence]:
        """Let those go that have waited too long by `now`."""
        late = []
        while self._limits and self._limits[0][0] <= now:
            limit, key = heappop(self._limits)
            sequence, still = self._waiting.get(key, (None, inf))
            if sequence is not None and still == limit:
                del self._waiting[key]
                self._keys.remove(key)
                late.append(sequence)
        return late
