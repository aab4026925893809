"""The size of a workload in a few numbers, counted while its rows go by."""

from collections import Counter
from collections.abc import Iterable, Iterator

from batcher.workloads.rows import WorkloadRow


class LengthCounts:
    """How often each length comes."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @property
    def total(self) -> int:
        """The sum of all lengths."""
        return sum(length * count for length, count in self._counts.items())

    def add(self, length: int) -> None:
        """Count one more."""
        self._counts[length] += 1

    def percentile(self, percent: int) -> int:
        """Return the least length that so many per cent do not exceed, of at least one length."""
        needed, seen = self._counts.total() * percent, 0
        for length, count in sorted(self._counts.items()):
            seen += count * 100
            if seen >= needed:
                return length
        raise ValueError(percent)


class WorkloadSummary:
    """Counts rows.

    num_arrivals: those that wait for no other.  span: the last arrival time; the first is 0.
    """

    def __init__(self) -> None:
        self.num_requests = self.num_sessions = self.num_arrivals = 0
        self.span = 0.0
        self.prompt_lengths, self.output_lengths = LengthCounts(), LengthCounts()

    @property
    def mean_rate(self) -> float | None:
        """Arrivals a second, of sessions if there are any; None if all come at once."""
        return (self.num_arrivals - 1) / self.span if self.span else None

    def observe(self, rows: Iterable[WorkloadRow]) -> Iterator[WorkloadRow]:
        """Yield `rows`, and count them."""
        for row in rows:
            self.num_requests += 1
            if row.think_time is None:
                self.num_arrivals += 1
                self.num_sessions += row.session is not None
                self.span = row.arrival_time
            self.prompt_lengths.add(row.prompt_tokens)
            self.output_lengths.add(row.max_tokens)
            yield row
