"""The sequences that wait, in the order of a policy, kept up as they come and go.

Rule: the first of an ordering is the same as if all that wait were sorted from scratch.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Protocol

from batcher.scheduling.policies import Key, Policy, queue_number
from batcher.scheduling.sequence import ScheduledSequence

Entry = tuple[Key, int]

MAX_GONE = 256  # entries of a KeyOrder that are no more than forgotten
MAX_MATCHED = 128  # that have waited longest: only for these is it looked up what is cached


class Ordering(Protocol):
    """Sequences that wait."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ScheduledSequence]: ...

    def __contains__(self, sequence: object) -> bool: ...

    def push(self, sequence: ScheduledSequence) -> None:
        """Take in a sequence."""

    def first(self, now: float) -> ScheduledSequence | None:
        """Return the one that is to be admitted first; None if there is none."""

    def remove(self, sequence: ScheduledSequence) -> None:
        """Let one go; nearly always it is the first."""

    def last(self, sequences: Iterable[ScheduledSequence], now: float) -> ScheduledSequence:
        """Return the one of `sequences`, which are running, that is to be preempted first."""

    def steady_until(self, now: float) -> float:
        """Return until when the first stays that if none is pushed or removed; `now`: unknown."""


class ArrivalOrder:
    """First come, first served: what is preempted came before all that wait."""

    def __init__(self) -> None:
        self._waiting: deque[ScheduledSequence] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def push(self, sequence: ScheduledSequence) -> None:
        """Take in a sequence."""
        waiting = self._waiting
        if waiting and sequence.queue_number < waiting[-1].queue_number:
            insort(waiting, sequence, key=queue_number)
        else:
            waiting.append(sequence)

    def first(self, now: float) -> ScheduledSequence | None:  # noqa: ARG002 - as others need it
        """Return the one that came first."""
        return self._waiting[0] if self._waiting else None

    def remove(self, sequence: ScheduledSequence) -> None:
        """Let one go."""
        if self._waiting[0] is sequence:
            self._waiting.popleft()
        else:
            self._waiting.remove(sequence)

    def steady_until(self, now: float) -> float:  # noqa: ARG002 - as above
        """Return that nothing but arrivals changes the order of arrival."""
        return inf

    def last(self, sequences: Iterable[ScheduledSequence], now: float) -> ScheduledSequence:  # noqa: ARG002 - as above
        """Return the one that came last."""
        return max(sequences, key=queue_number)


class KeyOrder:
    """The smallest key first, but before it the one that has waited for `aging` seconds.

    Both are heaps of numbers; that of what has gone is skipped when it comes to the top, and such
    are cleared out when they are most of what is there.
    """

    def __init__(self, policy: Policy, aging: float) -> None:
        self._policy, self._aging = policy, aging
        self._numbers: dict[ScheduledSequence, int] = {}  # that its entries have
        self._waiting: dict[int, ScheduledSequence] = {}  # by that number
        self._by_key: list[Entry] = []
        self._by_arrival: list[Entry] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._numbers)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._numbers

    def push(self, sequence: ScheduledSequence) -> None:
        """Take in a sequence."""
        number = self._num_pushed
        self._num_pushed += 1
        heappush(self._by_key, (self._policy(sequence), number))
        heappush(self._by_arrival, (queue_number(sequence), number))
        self._numbers[sequence] = number
        self._waiting[number] = sequence

    def first(self, now: float) -> ScheduledSequence | None:
        """Return the one that has waited too long, else that with the smallest key."""
        if not self._waiting:
            return None
        oldest = self._top(self._by_arrival)
        if now - oldest.arrival_time >= self._aging:
            return oldest
        return self._top(self._by_key)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Let one go."""
        waiting = self._waiting
        del waiting[self._numbers.pop(sequence)]
        num_entries = len(self._by_key) + len(self._by_arrival)
        if not waiting or num_entries > 4 * len(waiting) + MAX_GONE:
            self._by_key = self._still_here(self._by_key)
            self._by_arrival = self._still_here(self._by_arrival)

    def steady_until(self, now: float) -> float:
        """Return when the one that has waited longest will have waited too long."""
        if not self._waiting:
            return inf
        aged = self._top(self._by_arrival).arrival_time + self._aging
        return aged if aged > now else inf

    def last(self, sequences: Iterable[ScheduledSequence], now: float) -> ScheduledSequence:
        """Return the one with the largest key, and only if there is no other one that is aged."""

        def key(sequence: ScheduledSequence) -> tuple[bool, Key]:
            return now - sequence.arrival_time < self._aging, self._policy(sequence)

        return max(sequences, key=key)

    def _still_here(self, heap: list[Entry]) -> list[Entry]:
        """Return a heap without what has gone."""
        kept = [entry for entry in heap if entry[1] in self._waiting]
        heapify(kept)
        return kept

    def _top(self, heap: list[Entry]) -> ScheduledSequence:
        while True:
            sequence = self._waiting.get(heap[0][1])
            if sequence is not None:
                return sequence
            heappop(heap)


class PrefixOrder(ArrivalOrder):
    """The longest cached prefix first, of those that have waited longest; see KeyOrder for aging.

    num_cached: how many tokens of a sequence are found in the cache now.
    """

    def __init__(self, num_cached: Callable[[ScheduledSequence], int], aging: float) -> None:
        super().__init__()
        self._num_cached, self._aging = num_cached, aging

    def first(self, now: float) -> ScheduledSequence | None:
        """Return the one of which most is cached; of equals, the one that came first."""
        oldest = super().first(now)
        if oldest is None or now - oldest.arrival_time >= self._aging:
            return oldest
        return max(islice(self, MAX_MATCHED), key=self._num_cached)

    def steady_until(self, now: float) -> float:
        """Return `now`: what is cached is not known ahead."""
        return now
