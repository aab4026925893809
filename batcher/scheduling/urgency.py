"""Who may not wait, and who gives way to it: `--preempt-for`, beside the order of the queue.

Rule: only who is strictly less urgent gives way, by a measure that never changes; so nobody gets
back the slot of the one it gave way to, and no two sequences preempt each other in turn.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Generic

from batcher.scheduling.batch import RunningBatch
from batcher.scheduling.clock import BatchStats
from batcher.scheduling.policies import POLICIES
from batcher.scheduling.queue import Ordering
from batcher.scheduling.sequence import S
from batcher.settings import PreemptFor

Estimate = Callable[[BatchStats], float]
"""How many seconds a step that computes so much would take."""

MAX_ASKED = (
    128  # of those that may not wait: only for these is it looked up in a step what it takes
)


class Urgency(Generic[S]):
    """An order of the queue, and beside it the same sequences by their urgency.

    measure: what makes it up: a smaller priority, or an earlier deadline.
    max_chunk: the tokens of one prompt that a step computes at most.
    """

    def __init__(
        self, ordering: Ordering[S], measure: PreemptFor, max_chunk: int, estimate: Estimate
    ) -> None:
        self.measure = measure
        self._ordering = ordering
        self._key = POLICIES[measure]
        self._by_urgency: list[S] = []
        self._max_chunk, self._estimate = max_chunk, estimate

    # -- as an Ordering --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._ordering)

    def __iter__(self) -> Iterator[S]:
        return iter(self._ordering)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._ordering

    def push(self, sequence: S) -> None:
        """Take in a sequence."""
        self._ordering.push(sequence)
        insort(self._by_urgency, sequence, key=self._key)

    def first(self, now: float) -> S | None:
        """Return the one that the queue's own order puts first."""
        return self._ordering.first(now)

    def remove(self, sequence: S) -> None:
        """Let one go."""
        self._ordering.remove(sequence)
        del self._by_urgency[bisect_left(self._by_urgency, self._key(sequence), key=self._key)]

    def last(self, sequences: Iterable[S], now: float) -> S:  # noqa: ARG002 - as others need it
        """Return the least urgent: by another order, who lacks a block might take it back."""
        return max(sequences, key=self._key)

    def steady_until(self, now: float) -> float:
        """Return until when the first in the queue's own order stays."""
        return self._ordering.steady_until(now)

    # -- who may not wait ------------------------------------------------------------------------

    def degree(self, sequence: S) -> float:
        """Return how urgent one is: the smaller, the more."""
        degree: float = self._key(sequence)[0]
        return degree

    def ahead(self, running: Iterable[S], now: float) -> list[S]:
        """Return those that wait and may be admitted ahead of the queue, the most urgent first.

        They are more urgent than one of `running`, or than the first of the queue, which would be
        the next to give way if it were admitted before them; and their deadlines have not passed.
        """
        first = self._ordering.first(now)
        if first is None:
            return []
        waiting = self._by_urgency
        stop = bisect_left(waiting, max(map(self.degree, (first, *running))), key=self.degree)
        start = 0
        if self.measure == "deadline":
            start = bisect_right(waiting, now, hi=stop, key=self.degree)
        return waiting[start : min(start + MAX_ASKED, stop)]

    def less_urgent(self, first: S, running: Iterable[S]) -> list[S]:
        """Return those of `running` that are less urgent than `first`, the least urgent first."""
        own = self.degree(first)
        less = [row for row in running if self.degree(row) > own]
        return sorted(less, key=self._key, reverse=True)

    def is_due(self, first: S, now: float, batch: RunningBatch[S]) -> bool:
        """Whether one that waits may not do so for another step.

        With deadlines: it would miss its own if it began a step later, had all of max_tokens to
        generate and steps took as long as they would now.
        """
        deadline = first.deadline
        if self.measure == "priority" or deadline is None:
            return True
        num_rows, num_read = batch.num_decoding, batch.num_read
        num_tokens, num_left = first.num_tokens, first.max_tokens - first.num_generated
        step = self._estimate(BatchStats(num_rows + 1, num_rows + 1, num_read + num_tokens, 0))
        prompt = self._estimate(
            BatchStats(num_rows + num_tokens, num_rows + 1, num_read, num_tokens**2)
        )
        num_steps = -(-num_tokens // self._max_chunk) + num_left - 1
        return deadline < now + num_steps * step + prompt
