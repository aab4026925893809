"""The worst bubble of a run: the steps in a row that left far more slots empty than the others.

Rule: the steps from the last admission on do not count; at its end every run falls empty.
"""

from collections.abc import Iterator
from typing import NamedTuple

from batcher.trace.step_counts import Stretch, clip
from batcher.trace.timeline import Timeline


class Bubble(NamedTuple):
    """The steps [start, stop); num_idle: how many slots stayed empty in each of them, in all."""

    start: int
    stop: int
    num_idle: int


def worst_bubble(timeline: Timeline) -> Bubble | None:
    """Return the first of the steps in a row with most empty slots above the mean of all steps.

    None if all steps have equally many. Kadane's algorithm (J. Bentley, Programming Pearls, column
    8), on what each step has above the mean.
    """
    num_steps = max((span.start for span in timeline.spans), default=0)
    total = sum(stretch.total for stretch in _idle(timeline, num_steps))
    worst, most = None, 0
    start = num_idle = gain = 0
    for stretch in _idle(timeline, num_steps):
        if gain <= 0:
            start, num_idle, gain = stretch.start, 0, 0
        num_idle += stretch.total
        # Times the number of steps, so that the mean is a whole number.
        gain += stretch.total * num_steps - total * (stretch.stop - stretch.start)
        if gain > most:
            worst, most = Bubble(start, stretch.stop, num_idle), gain
    return worst


def _idle(timeline: Timeline, num_steps: int) -> Iterator[Stretch]:
    """Yield how many slots are empty in each of the first steps."""
    for start, stop, occupied in clip(timeline.occupied(), range(num_steps)):
        yield Stretch(start, stop, timeline.num_slots - occupied)
