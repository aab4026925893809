"""Latencies and goodput of requests whose times are arrays, by the definitions of a run's summary.

Rule: a time here and the same time in a trace give the same microseconds.
"""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from batcher.metrics.slo import Goodput
from batcher.metrics.times import (
    MICROSECONDS,
    PERCENTS,
    Distribution,
    Latencies,
    seconds_distribution,
)

Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


class ServedTimes(NamedTuple):
    """When each request that came to its end by itself did what: [request], all of one length.

    arrival, admitted, first_token, end: float64, in seconds on one clock.  num_tokens: int64, those
    that it generated, at least 1.
    """

    arrival: Seconds
    admitted: Seconds
    first_token: Seconds
    end: Seconds
    num_tokens: Counts

    def where(self, is_wanted: NDArray[np.bool_]) -> Self:
        columns: list[Any] = [column[is_wanted] for column in self]
        return type(self)(*columns)

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end, in seconds; 0 of no request."""
        return float(self.end.max() - self.arrival.min()) if len(self.arrival) else 0.0

    def values(self, metric: str) -> NDArray[np.int64]:
        """Return one of the METRICS of an SLO in microseconds [request]; tpot is 0 of one token."""
        if metric == "tpot":
            gaps = np.maximum(self.num_tokens - 1, 1)
            seconds = ((self.end - self.arrival) - (self.first_token - self.arrival)) / gaps
            return _microseconds(np.where(self.num_tokens > 1, seconds, 0.0))
        until = {"queue": self.admitted, "ttft": self.first_token, "e2e": self.end}[metric]
        return _microseconds(until - self.arrival)


def latencies_of(times: ServedTimes) -> Latencies:
    """Return the latencies of requests; percentiles are exact by nearest rank.

    There is no itl, which these times do not tell.
    """
    return Latencies(
        queue=distribution_of(times.values("queue")),
        ttft=distribution_of(times.values("ttft")),
        tpot=distribution_of(times.values("tpot")[times.num_tokens > 1]),
        itl=None,
        e2e=distribution_of(times.values("e2e")),
    )


def goodput_of(
    limits: dict[str, float], times: ServedTimes, num_failed: int, makespan: float
) -> Goodput:
    """Return how many requests met `limits`, with `num_failed` others that came to no end.

    limits: in seconds, by metric.  makespan: of the run, in seconds.
    """
    is_good = np.ones(len(times.arrival), bool)
    missed = {"failed": num_failed} if num_failed else {}
    for metric, limit in limits.items():
        is_late = times.values(metric) > round(limit * MICROSECONDS)
        is_good &= ~is_late
        if is_late.any():
            missed[metric] = int(is_late.sum())
    num_requests = len(times.arrival) + num_failed
    return Goodput.of(limits, num_requests, int(is_good.sum()), makespan, missed)


def distribution_of(values: NDArray[np.int64]) -> Distribution | None:
    count = len(values)
    if not count:
        return None
    ranks = [-(-count * percent // 100) - 1 for percent in PERCENTS]
    percentiles = [int(value) for value in np.sort(values)[ranks]]
    mean = int(values.sum()) / count
    return seconds_distribution(count, mean, percentiles, int(values.max()))


def _microseconds(seconds: Seconds) -> NDArray[np.int64]:
    return np.maximum(np.rint(seconds * MICROSECONDS), 0).astype(np.int64)
