"""Distributions of lengths and of times, as text names them: `lognormal:512,0.8`.

Rule: TIMES and LENGTHS are all there is; a name that is not in them is an error that lists them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial

import numpy as np
from msgspec import Struct
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from batcher.fields import read_number
from batcher.planning.entries import MAX_LENGTH, WorkloadError
from batcher.planning.workload_traces import NumberedLine, Side, read_lengths

MAX_PARAMETER = 1e9
MAX_SIGMA, MIN_ALPHA, MAX_ALPHA = 10, 0.1, 100  # beyond, a draw may be too large for a float
_BLOCK = 1024  # numbers drawn at once
_FROM_FILE = "empirical"

Numbers = NDArray[np.float64]
ReadLines = Callable[[str], Iterable[NumberedLine]]


Distribution = Callable[[Generator, int], Numbers]
"""Draws so many numbers: [count] float64; of lengths, they are still to be rounded."""


class Family(Struct, frozen=True):
    """Distributions that differ in their parameters.

    draw: that of a Distribution, if a number for each of `parameters` follows, in order.  allowed:
    what `is_allowed` tests, in words.
    """

    parameters: tuple[str, ...]
    draw: Callable[..., Numbers]
    is_allowed: Callable[..., bool]
    allowed: str


def make_generator(seed: int, stream: int) -> Generator:
    """Return the generator of one of the independent streams of random numbers of a seed."""
    return Generator(PCG64(SeedSequence(seed, spawn_key=(stream,))))


def draw_lengths(
    distribution: Distribution, generator: Generator, maximum: int = MAX_LENGTH
) -> Iterator[int]:
    """Yield whole numbers without end: at least 1, and at most `maximum`."""
    while True:
        numbers = np.clip(distribution(generator, _BLOCK), 1, maximum)
        yield from np.rint(numbers).astype(np.int64).tolist()


def draw_seconds(distribution: Distribution, generator: Generator) -> Iterator[float]:
    """Yield times without end: in whole microseconds, at least 0."""
    while True:
        numbers = np.maximum(distribution(generator, _BLOCK), 0)
        yield from (round(number, 6) for number in numbers.tolist())


def parse_distribution(
    text: str, option: str, families: Mapping[str, Family], *others: str
) -> Distribution:
    """Return the distribution that `text`, the value of `option`, names; a number is constant.

    others: what the option takes beside these, for the error.

    Raises:
        WorkloadError: it names none.
    """
    place = f"{option} {text}"
    name, _, numbers = text.partition(":")
    if name not in families:
        if not _is_number(text):
            usages = (_usage(*item) for item in families.items())
            known = "; ".join(["N", *usages, *others])
            raise WorkloadError(f"{place}: unknown distribution {name!r} (known: {known})")
        name, numbers = "constant", text
    family = families[name]
    usage = _usage(name, family)
    values = numbers.replace(":", ",").split(",")
    if len(values) != len(family.parameters):
        raise WorkloadError(f"{place}: expected {usage} with {family.allowed}")
    for value in values:
        if not _is_number(value):
            raise WorkloadError(
                f"{place}: {value!r} is not a number up to {MAX_PARAMETER:g} (expected {usage})"
            )
    parameters = [float(value) for value in values]
    if not family.is_allowed(*parameters):
        raise WorkloadError(f"{place}: expected {usage} with {family.allowed}")
    return lambda chance, count: family.draw(chance, count, *parameters)


def parse_lengths(text: str, option: str, side: Side, read_lines: ReadLines) -> Distribution:
    """Return the distribution of lengths that `text`, the value of `option`, names.

    side: which lengths of a trace count.  read_lines: gives the lines of a file.

    Raises:
        WorkloadError: it names none, or the file is not right.
    """
    name, _, path = text.partition(":")
    if name != _FROM_FILE:
        return parse_distribution(text, option, LENGTHS, f"{_FROM_FILE}:FILE")
    if not path:
        raise WorkloadError(f"{option} {text}: expected {_FROM_FILE}:FILE")
    values = np.array(read_lengths(read_lines(path), path, side), dtype=np.float64)
    return lambda chance, count: values[chance.integers(len(values), size=count)]


def _usage(name: str, family: Family) -> str:
    return f"{name}:{','.join(family.parameters)}"


def _is_number(text: str) -> bool:
    """Return whether `text` is a number that can be a parameter."""
    try:
        value = read_number(text, float)
    except ValueError:
        return False
    return abs(value) <= MAX_PARAMETER  # which nan and infinity are not


@cache
def _zipf_shares(alpha: float, largest: float) -> Numbers:
    """Return the chances of up to k, for each whole k from 1 to `largest`: k ** -alpha, summed."""
    weights = np.arange(1, int(largest) + 1, dtype=np.float64) ** -alpha
    cumulative: Numbers = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0  # whatever the rounding, no draw is beyond the largest
    return cumulative


def _zipf(chance: Generator, count: int, alpha: float, largest: float) -> Numbers:
    places = _zipf_shares(alpha, largest).searchsorted(chance.random(count), side="right")
    return places.astype(np.float64) + 1


_UNIFORM = partial(
    Family,
    ("LOW", "HIGH"),
    is_allowed=lambda low, high: 0 <= low <= high,
    allowed="0 <= LOW <= HIGH",
)

TIMES = {
    "constant": Family(("N",), lambda _, count, n: np.full(count, n), lambda n: n >= 0, "N >= 0"),
    "uniform": _UNIFORM(lambda chance, count, low, high: chance.uniform(low, high, count)),
    "normal": Family(
        ("MEAN", "STD"),
        lambda chance, count, mean, deviation: mean + deviation * chance.standard_normal(count),
        lambda mean, deviation: mean >= 0 and deviation >= 0,
        "MEAN >= 0 and STD >= 0",
    ),
    "lognormal": Family(
        ("MEDIAN", "SIGMA"),
        lambda chance, count, median, sigma: median * np.exp(sigma * chance.standard_normal(count)),
        lambda median, sigma: median > 0 and 0 <= sigma <= MAX_SIGMA,
        f"MEDIAN > 0 and SIGMA from 0 to {MAX_SIGMA}",
    ),
    "exponential": Family(
        ("MEAN",),
        lambda chance, count, mean: mean * chance.standard_exponential(count),
        lambda mean: mean > 0,
        "MEAN > 0",
    ),
    "pareto": Family(
        ("MIN", "ALPHA"),
        lambda chance, count, least, alpha: (
            least * np.exp(chance.standard_exponential(count) / alpha)
        ),
        lambda least, alpha: least > 0 and MIN_ALPHA <= alpha <= MAX_ALPHA,
        f"MIN > 0 and ALPHA from {MIN_ALPHA} to {MAX_ALPHA}",
    ),
}
LENGTHS = TIMES | {
    # Half a token more on either side: when all is rounded, the ends are as likely as the rest.
    "uniform": _UNIFORM(
        lambda chance, count, low, high: np.clip(
            chance.uniform(low - 0.5, high + 0.5, count), low, high
        )
    ),
    "zipf": Family(
        ("ALPHA", "MAX"),
        _zipf,
        lambda alpha, largest: 0 < alpha <= MAX_ALPHA and 1 <= largest <= MAX_LENGTH,
        f"ALPHA above 0, up to {MAX_ALPHA}, and MAX from 1 to {MAX_LENGTH:,}",
    ),
}
