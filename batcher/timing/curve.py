"""What is known at some places, and linear between them, in whole ticks."""

from bisect import bisect_right
from collections.abc import Sequence


class Curve:
    """Ticks over a whole number from 0 on: those of `points`, (place, ticks), beyond them a slope.

    The places ascend, and the first is 0.  What falls between two ticks is rounded down.
    """

    __slots__ = ("_places", "_slope", "_ticks")

    def __init__(self, points: Sequence[tuple[int, int]], slope: int) -> None:
        self._places = [place for place, _ in points]
        self._ticks = [ticks for _, ticks in points]
        self._slope = slope

    def at(self, place: int) -> int:
        """Return the ticks at a place."""
        after = bisect_right(self._places, place)
        left, low = self._places[after - 1], self._ticks[after - 1]
        if after == len(self._places):
            return low + (place - left) * self._slope
        rise, width = self._ticks[after] - low, self._places[after] - left
        return low + rise * (place - left) // width
