"""Arrival patterns: when requests come that do not wait for each other.

Rule: the first request comes at 0, the gaps after it are the pattern's, and `rate` is the mean rate
of a long workload.
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.random import Generator
from numpy.typing import NDArray

_BLOCK = 1024  # gaps drawn at once
_DIGITS = 6  # of times, after the point: rounded, they are the same on every machine


class Arrivals(Struct, frozen=True):
    """A pattern of arrivals; rate: requests a second."""

    rate: float

    def times(self, generator: Generator) -> Iterator[float]:
        """Yield arrival times in seconds, without end, from 0 on; none is before the last."""
        elapsed = 0.0
        while True:
            for gap in self._gaps(generator).tolist():
                yield round(self._time(elapsed), _DIGITS)
                elapsed += gap

    def _gaps(self, generator: Generator) -> NDArray[np.float64]:
        """Return the next _BLOCK gaps."""
        raise NotImplementedError

    def _time(self, elapsed: float) -> float:
        """Return the time at which the gaps so far, summed up, are over."""
        return elapsed


class Constant(Arrivals, frozen=True):
    """Arrivals at equal distances."""

    def _gaps(self, generator: Generator) -> NDArray[np.float64]:  # noqa: ARG002 - chance has no part
        return np.ones(_BLOCK)

    def _time(self, elapsed: float) -> float:
        return elapsed / self.rate  # so that no rounding adds up


class Gamma(Arrivals, frozen=True):
    """Arrivals with gaps of a gamma distribution, which for burstiness 1 make a Poisson process.

    burstiness: the shape of the distribution; the gaps' coefficient of variation is
    burstiness ** -0.5, so a lower one makes more of a burst.
    """

    burstiness: float

    def _gaps(self, generator: Generator) -> NDArray[np.float64]:
        scale = 1 / (self.rate * self.burstiness)
        return generator.standard_gamma(self.burstiness, _BLOCK) * scale


class Poisson(Arrivals, frozen=True):
    """Arrivals that know nothing of each other."""

    def _gaps(self, generator: Generator) -> NDArray[np.float64]:
        return generator.standard_exponential(_BLOCK) / self.rate


class Bursty(Arrivals, frozen=True):
    """A Poisson process that is on for `on` seconds, then off for `off`, again and again.

    Its rate is that over all the time; while it is on, there are more.
    """

    on: float
    off: float

    def _gaps(self, generator: Generator) -> NDArray[np.float64]:
        rate_on = self.rate * (self.on + self.off) / self.on
        return generator.standard_exponential(_BLOCK) / rate_on

    def _time(self, elapsed: float) -> float:
        num_periods, rest = divmod(elapsed, self.on)
        return num_periods * (self.on + self.off) + rest
