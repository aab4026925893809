"""Whether more arrives than is served, so that what a simulation shows depends on how long it is.

Rule: what counts is the second half of the time in which requests arrive, once it is known how
long they take; and no more than chance makes of as many requests is taken for a queue that grows.
"""

from math import sqrt
from typing import Any

import numpy as np
from msgspec import Struct

from batcher.metrics.arrays import ServedTimes

MIN_GROWTH = 0.02  # of what arrives
NUM_DEVIATIONS = 3  # of how many requests are there at a time, if these are Poisson distributed
NUM_DIGITS = 6


class Backlog(Struct, frozen=True):
    """Requests a second that arrived and that were served until the last arrival, fewer of them.

    is_short: most of the first requests took longer, once admitted, than a quarter of the time from
    the first arrival to the last, so that the difference may be those that are still running.
    """

    offered_per_s: float
    served_per_s: float
    is_short: bool


def backlog_of(times: ServedTimes) -> Backlog | None:
    """Return by how much less was served than arrived, None if it was as much.

    Nothing is said of requests of which none had ended by the last arrival: these come at once.
    """
    if not len(times.arrival):
        return None
    first, last = times.arrival.min(), times.arrival.max()
    half = (first + last) / 2
    if half == last:
        return None
    num_arrived = _count(times.arrival > half)
    num_ended = _count((times.end > half) & (times.end <= last))
    num_there = _count(times.arrival <= half) - _count(times.end <= half)
    growth = num_arrived - num_ended
    by_chance = NUM_DEVIATIONS * sqrt(2 * num_there + growth) if growth > 0 else 0.0
    if not num_ended or growth <= max(MIN_GROWTH * num_arrived, by_chance):
        return None
    quarter = (last - first) / 4
    is_early = times.arrival <= first + quarter
    took = np.median((times.end - times.admitted)[is_early])
    return Backlog(
        offered_per_s=round(float(num_arrived / (last - half)), NUM_DIGITS),
        served_per_s=round(float(num_ended / (last - half)), NUM_DIGITS),
        is_short=bool(took > quarter),
    )


def _count(is_wanted: Any) -> int:
    return int(np.count_nonzero(is_wanted))
