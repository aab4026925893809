"""Arrival patterns: when requests come that do not wait for each other.

Rule: the first request comes at 0, the gaps after it are the pattern's, and `rate` is the mean rate
of a long workload.
"""

from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct
from numpy.random import Generator

_BLOCK = 1024  # gaps drawn at once
_DIGITS = 6  # of times, after the point: rounded, they are the same on every machine


class Arrivals(Protocol):
    """A pattern of arrivals."""

    def times(self, generator: Generator) -> Iterator[float]:
        """Yield arrival times in seconds, without end, from 0 on; none is before the last."""


class Constant(Struct, frozen=True):
    """Arrivals at equal distances; rate: requests a second."""

    rate: float

    def times(self, generator: Generator) -> Iterator[float]:  # noqa: ARG002 - chance has no part
        """Yield arrival times; see Arrivals."""
        index = 0
        while True:
            yield round(index / self.rate, _DIGITS)
            index += 1


class Gamma(Struct, frozen=True):
    """Arrivals with gaps of a gamma distribution, which for burstiness 1 make a Poisson process.

    rate: requests a second.  burstiness: the shape of the distribution; the gaps' coefficient of
    variation is burstiness ** -0.5, so a lower one makes more of a burst.
    """

    rate: float
    burstiness: float

    def times(self, generator: Generator) -> Iterator[float]:
        """Yield arrival times; see Arrivals."""
        scale = 1 / (self.rate * self.burstiness)
        time = 0.0
        while True:
            for gap in generator.standard_gamma(self.burstiness, _BLOCK).tolist():
                yield round(time, _DIGITS)
                time += gap * scale


class Poisson(Struct, frozen=True):
    """Arrivals that know nothing of each other; rate: requests a second."""

    rate: float

    def times(self, generator: Generator) -> Iterator[float]:
        """Yield arrival times; see Arrivals."""
        time = 0.0
        while True:
            for gap in generator.standard_exponential(_BLOCK).tolist():
                yield round(time, _DIGITS)
                time += gap / self.rate


class Bursty(Struct, frozen=True):
    """A Poisson process that is on for `on` seconds, then off for `off`, again and again.

    rate: requests a second over all the time; while it is on, there are more.
    """

    rate: float
    on: float
    off: float

    def times(self, generator: Generator) -> Iterator[float]:
        """Yield arrival times; see Arrivals."""
        period = self.on + self.off
        rate_on = self.rate * period / self.on
        time_on = 0.0
        while True:
            for gap in generator.standard_exponential(_BLOCK).tolist():
                num_periods, rest = divmod(time_on, self.on)
                yield round(num_periods * period + rest, _DIGITS)
                time_on += gap / rate_on
