"""Whole numbers counted in bounded memory, and what is told of how they are distributed.

Rule: seconds are counted in whole microseconds.
"""

from collections import defaultdict
from typing import ClassVar

from msgspec import Struct, field

from batcher.totals import Totals

KEPT_BITS = 12
EXACT_BELOW = 2**KEPT_BITS
PERCENTS = (50, 90, 95, 99)
MICROSECONDS = 10**6  # of a second
NUM_DIGITS = 6  # of seconds, after the point


class Distribution(Struct, frozen=True):
    """How a number of steps is distributed over samples; percentiles are by nearest rank.

    Percentiles are exact below 4,096 and at most 0.05 % low above.
    """

    count: int
    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    max: int


class SecondsDistribution(Struct, frozen=True):
    """How a time in seconds is distributed; percentiles are by nearest rank.

    Times are known to a microsecond; percentiles are at most 0.05 % low, and times that there were.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def microseconds(seconds: float) -> int:
    """Return the whole number of microseconds that is next to `seconds`."""
    return round(seconds * MICROSECONDS)


class Histogram(Totals):
    """Counts of whole numbers >= 0 in at most 2,048 buckets for each doubling.

    Buckets as in HdrHistogram (Tene): a number of more than 12 bits is known by its first 12.

    counts: by the least number of a bucket.  sum_inexact, max_inexact: of the numbers that are not
    counted as they are.
    """

    LARGEST: ClassVar = frozenset({"max_inexact"})

    counts: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    sum_inexact: int = 0
    max_inexact: int = 0

    def add(self, value: int, count: int = 1) -> None:
        """Count `value`, `count` times over; called three times a request, so it does little."""
        if value >= EXACT_BELOW:
            self.sum_inexact += value * count
            if value > self.max_inexact:  # noqa: PLR1730 - max() takes twice as long
                self.max_inexact = value
            value = bucket_of(value)
        self.counts[value] += count

    def percentiles(self, percents: tuple[int, ...]) -> list[int]:
        """Return for each of `percents`, ascending, the least number that so many do not exceed."""
        found: list[int] = []
        seen, total = 0, sum(self.counts.values())
        for value, count in sorted(self.counts.items()):
            seen += count
            while len(found) < len(percents) and seen * 100 >= percents[len(found)] * total:
                found.append(value)
        return found

    @property
    def count(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts.values())

    @property
    def sum(self) -> int:
        """The exact sum of all numbers."""
        exact = (value * count for value, count in self.counts.items() if value < EXACT_BELOW)
        return self.sum_inexact + sum(exact)

    @property
    def max(self) -> int:
        """The largest number, of at least one."""
        return self.max_inexact or max(self.counts)

    def distribution(self) -> Distribution | None:
        """Return what was counted in short, None for nothing."""
        count = self.count
        if not count:
            return None
        mean = round(self.sum / count, 3)
        p50, p90, p95, p99 = self.percentiles(PERCENTS)
        return Distribution(count, mean, p50, p90, p95, p99, self.max)


class SecondsHistogram(Totals):
    """Counts of times, in microseconds; a percentile is a time that was counted.

    least: the least number that was counted in a bucket, where that is not the number itself.
    """

    LEAST: ClassVar = frozenset({"least"})

    counts: Histogram = field(default_factory=Histogram)
    least: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time, `count` times over; one below 0, which rounding can make, is 0."""
        value = max(0, microseconds(seconds))
        self.counts.add(value, count)
        if value >= EXACT_BELOW:
            bucket = bucket_of(value)
            least = self.least.get(bucket)
            if least is None or value < least:
                self.least[bucket] = value

    def distribution(self) -> SecondsDistribution | None:
        """Return what was counted in short, None for nothing."""
        counts, least = self.counts, self.least
        count = counts.count
        if not count:
            return None
        percentiles = [least.get(bucket, bucket) for bucket in counts.percentiles(PERCENTS)]
        return seconds_distribution(count, counts.sum / count, percentiles, counts.max)


def bucket_of(value: int) -> int:
    """Return the least number of the bucket of `value`, which is at least EXACT_BELOW."""
    dropped_bits = value.bit_length() - KEPT_BITS
    return value >> dropped_bits << dropped_bits


def seconds_distribution(
    count: int, mean: float, percentiles: list[int], largest: int
) -> SecondsDistribution:
    """Return the record of times that are given in microseconds."""
    p50, p90, p95, p99 = (value / MICROSECONDS for value in percentiles)
    mean_seconds = round(mean / MICROSECONDS, NUM_DIGITS)
    return SecondsDistribution(count, mean_seconds, p50, p90, p95, p99, largest / MICROSECONDS)
