"""What became of what was promised: to all requests, or to classes of them by their priorities.

Rule: a request is of one class at most, and whatever came to no end of its own has missed all that
was promised of it.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

import numpy as np
from msgspec import Struct

from batcher.metrics.arrays import ServedTimes, goodput_of, latencies_of
from batcher.metrics.slo import OTHERS, Goodput, Slo, class_name
from batcher.metrics.times import MICROSECONDS, Latencies
from batcher.planning.fleet import FleetResult


class ClassOutcome(Struct, frozen=True, kw_only=True):
    """What the requests of a class came to, all of which are promised the same."""

    latencies: Latencies
    goodput: Goodput


class Attainment(Struct, frozen=True, kw_only=True):
    """How an SLO was kept.

    goodput: of all classes together.  classes: of each, by its name; {} if the SLO has none.
    tails: for each limit, what the asked share of samples does not exceed; None if fewer were
    served.
    """

    goodput: Goodput
    classes: dict[str, ClassOutcome]
    tails: dict[str, float | None]


class _Class(Struct, frozen=True):
    """What a class was promised, and what of it was served; place: how its limits are told."""

    name: str
    place: str
    limits: dict[str, float]
    times: ServedTimes
    num_failed: int


def kept(slo: Slo, result: FleetResult, asked: float) -> Attainment:
    """Return how `slo` was kept; `asked`: for which share of the requests of a class it is."""
    makespan = result.times.makespan
    tails: dict[str, float | None] = {}
    classes: dict[str, ClassOutcome] = {}
    missed: dict[str, int] = {}
    requests = good = 0
    for each in _classes(slo, result):
        goodput = goodput_of(each.limits, each.times, each.num_failed, makespan)
        if slo.classes:
            classes[each.name] = ClassOutcome(latencies=latencies_of(each.times), goodput=goodput)
        for metric, tail in _tails(each, asked):
            tails[each.place + metric] = tail
        for reason, count in goodput.missed.items():
            missed[each.place + reason] = count
        requests += goodput.requests
        good += goodput.good
    whole = Goodput.of(slo.all_limits, requests, good, makespan, missed)
    return Attainment(goodput=whole, classes=classes, tails=tails)


def _classes(slo: Slo, result: FleetResult) -> Iterator[_Class]:
    """Yield the classes of an SLO: the others, if they are promised anything, and each of its own.

    Without any it is all requests.
    """
    if not slo.classes:
        yield _Class("", "", slo.limits, result.times, result.num_failed)
        return
    failed = result.failed
    if slo.limits:
        is_other = ~np.isin(result.priorities, list(slo.classes))
        num_failed = sum(count for priority, count in failed.items() if priority not in slo.classes)
        yield _Class(OTHERS, "", slo.limits, result.times.where(is_other), num_failed)
    for priority, own in slo.classes.items():
        name = class_name(priority)
        times = result.times.where(result.priorities == priority)
        yield _Class(name, f"{name}:", own.limits, times, failed[priority])


def _tails(each: _Class, asked: float) -> Iterator[tuple[str, float | None]]:
    """Yield for each limit the least time that the asked share of samples does not exceed."""
    num_served = len(each.times.arrival)
    rank = max(1, ceil(Fraction(str(asked)) * (num_served + each.num_failed)))
    for metric in each.limits:
        values = np.sort(each.times.values(metric))
        yield metric, int(values[rank - 1]) / MICROSECONDS if rank <= num_served else None
