"""How long a step takes by the number of its tokens, learned from the steps that were."""

from bisect import bisect_left, insort
from collections import deque
from statistics import fmean, median
from typing import NamedTuple

_EXACT = 64  # up to so many tokens each number has its own steps: a model may compute tiles of them
_KEPT = (
    5  # the latest steps of each; the median of their seconds counts, so that an odd one is lost
)

_REACH = 2  # times as far as numbers were seen they go on alike beyond the largest
_OPTIMISM = 2  # the power of the way between two numbers of tokens that the seconds rise with


class _Seen(NamedTuple):
    """A step that was, or what stands for some."""

    num_tokens: float
    seconds: float


class StepCosts:
    """Learns the seconds of steps and estimates those of others; a step costs O(1), so do they all.

    Rows count by their tokens: a row that is verified is no more rows, but longer.  Between numbers
    of tokens that were seen the seconds rise late, as if more were free, so that it is found out
    whether they are.  Beyond the largest they go on as from the smallest to it, but only so far;
    from there on, and below the smallest, they are in proportion: what is not known is not cheap.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[_Seen]] = {}  # by the number of tokens, rounded
        self._numbers: list[int] = []  # ascending
        self._points: list[_Seen] = []  # what stands for each of these

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take in that a step of so many tokens, at least one, took so long."""
        number = _rounded(num_tokens)
        place = bisect_left(self._numbers, number)
        if number not in self._steps:
            self._steps[number] = deque(maxlen=_KEPT)
            insort(self._numbers, number)
            self._points.insert(place, _Seen(0, 0))
        steps = self._steps[number]
        steps.append(_Seen(num_tokens, seconds))
        self._points[place] = _Seen(
            fmean(step.num_tokens for step in steps), median(step.seconds for step in steps)
        )

    def estimate(self, num_rows: int, num_tokens: int) -> float:  # noqa: ARG002 - see the class
        """Return the seconds that a step would take; 0 as long as none was seen."""
        points = self._points
        if not points:
            return 0.0
        first, last = points[0], points[-1]
        place = bisect_left(points, (num_tokens,))
        if place == 0 or len(points) == 1:
            return first.seconds * num_tokens / first.num_tokens
        if place < len(points):
            low, high = points[place - 1], points[place]
            way = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
            return low.seconds + (high.seconds - low.seconds) * way**_OPTIMISM
        seen = last.num_tokens - first.num_tokens
        slope = max(last.seconds - first.seconds, 0.0) / seen
        end = last.num_tokens + _REACH * seen
        seconds = last.seconds + slope * (min(num_tokens, end) - last.num_tokens)
        return seconds * max(num_tokens / end, 1.0)


def _rounded(number: int) -> int:
    """Return what stands for a number of tokens and those near it."""
    if number <= _EXACT:
        return number
    unit = 1 << number.bit_length() - 4  # an octave has eight
    return -(-number // unit) * unit
