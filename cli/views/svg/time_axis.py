"""Steps onto pixels: one as wide as another, or as long as each took on the engine's clock."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Literal

from batcher.trace.run import SlotSpan
from batcher.trace.timeline import Stretch, Timeline

from .drawing import CELL_WIDTH

Axis = Literal["steps", "seconds"]
MIN_TICK_WIDTH = 60  # pixels
_BASES = (1, 2, 5)


@dataclass(frozen=True)
class TimeAxis:
    """Where `steps` are between the pixels `left` and `right`.

    start_of, end_before: when a step begins, and when the one before it ends, in the axis's unit.
    """

    steps: range
    left: float
    right: float
    unit: Axis
    start_of: Callable[[int], float]
    end_before: Callable[[int], float]

    @classmethod
    def of(
        cls, timeline: Timeline, steps: range, left: float, right: float, unit: Axis
    ) -> "TimeAxis":
        """Return the axis of `steps` of a run."""
        if unit == "steps":
            return cls(steps, left, right, unit, float, float)
        figures = timeline.figures
        return cls(steps, left, right, unit, figures.start_of, figures.end_before)

    @property
    def first(self) -> float:
        """When the first step begins."""
        return self.start_of(self.steps.start)

    @property
    def last(self) -> float:
        """When the last step ends; more than `first`, even if the clock stands still."""
        return max(self.end_before(self.steps.stop), self.first + 1e-9)

    def num_steps(self, span: SlotSpan) -> int:
        """Return how many of the shown steps `span` takes."""
        return min(span.end, self.steps.stop) - max(span.start, self.steps.start)

    def place(self, start: int, end: int) -> tuple[float, float]:
        """Return where the steps [start, end), as far as they are shown, begin and end."""
        start, end = max(start, self.steps.start), min(end, self.steps.stop)
        return self._at(self.start_of(start)), self._at(self.end_before(end))

    def levels(self, stretches: Iterator[Stretch]) -> list[tuple[float, float, int]]:
        """Return where counts begin and end, and how high they are: a few for each pixel at most.

        Where several share a pixel it is the highest.
        """
        levels: list[tuple[float, float, int]] = []
        for start, end, num in stretches:
            left, right = self.place(start, end)
            if levels and right < levels[-1][0] + 1:
                before, _, highest = levels.pop()
                levels.append((before, right, max(highest, num)))
            else:
                levels.append((left, right, num))
        return levels

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the places of round numbers, and these."""
        width = max(MIN_TICK_WIDTH, (len(f"{self.last:,.0f}") + 2) * CELL_WIDTH)
        fewest = (self.last - self.first) * width / (self.right - self.left)
        exponents = count(-6) if self.unit == "seconds" else count()
        interval, exponent = next(
            (base * 10.0**exponent, exponent)
            for exponent in exponents
            for base in _BASES
            if base * 10.0**exponent >= fewest
        )
        number = ceil(self.first / interval - 1e-9)
        while number * interval <= self.last:
            yield self._at(number * interval), f"{number * interval:,.{max(0, -exponent)}f}"
            number += 1

    def _at(self, moment: float) -> float:
        share = (moment - self.first) / (self.last - self.first)
        return self.left + share * (self.right - self.left)
