"""How many hold a slot, or wait, in each step: as stretches of steps in which that is the same."""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple


class Stretch(NamedTuple):
    """The steps [start, stop), and how many hold a slot, or wait, in each of them."""

    start: int
    stop: int
    num: int

    @property
    def total(self) -> int:
        """The sum of the counts of its steps."""
        return (self.stop - self.start) * self.num


Change = tuple[int, int]
"""A step, and by how much the count changes with it."""


def changes_of(spans: Iterable[tuple[int, int]]) -> Iterator[Change]:
    """Yield the changes that `spans` make, each its start and its end, which come by their start.

    There are as many at once as spans that have begun and not ended.
    """
    ends: list[int] = []
    for start, end in spans:
        while ends and ends[0] <= start:
            yield heappop(ends), -1
        yield start, 1
        heappush(ends, end)
    while ends:
        yield heappop(ends), -1


def count_steps(changes: Iterable[Change], num_steps: int) -> Iterator[Stretch]:
    """Yield the counts of the steps [0, num_steps), by the changes that make them, ascending."""
    count = start = 0
    for step, change in changes:
        stop = min(step, num_steps)
        if stop > start:
            yield Stretch(start, stop, count)
            start = stop
        count += change
    if start < num_steps:
        yield Stretch(start, num_steps, count)


def clip(stretches: Iterable[Stretch], steps: range) -> Iterator[Stretch]:
    """Yield the parts of `stretches` that lie in `steps`."""
    for start, stop, count in stretches:
        if start >= steps.stop:
            return
        if stop > steps.start:
            yield Stretch(max(start, steps.start), min(stop, steps.stop), count)
