"""Synthetic workloads: arrivals, prompt and output lengths, shared prefixes and sessions.

Rule: each kind of number has its own random stream, so that another rate does not change the
lengths, and a longer workload begins with the entries of a shorter one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import count, repeat

import numpy as np
from msgspec import Struct
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from batcher.fields import read_number
from batcher.planning.workload_traces import (
    DEFAULT_NAME,
    LengthSegment,
    NumberedLine,
    Side,
    WorkloadEntry,
    WorkloadError,
    read_lengths,
)
from batcher.request import MAX_INT, MAX_LENGTH

MAX_GROUPS = 2**20
MAX_PARAMETER = 1e9
MAX_SIGMA, MIN_ALPHA, MAX_ALPHA = 10, 0.1, 100  # so that draws are finite
MAX_SHARE = 1e9
# The streams of a seed.
ARRIVALS, PROMPTS, OUTPUTS, _TURNS, _THINKING, _GROUPS, PRIORITIES = range(7)
_BLOCK = 1024  # numbers drawn at once
_DIGITS = 6  # decimals of times: rounded, they are the same on every machine
_FROM_FILE = "empirical"

Numbers = NDArray[np.float64]
ReadLines = Callable[[str], Iterable[NumberedLine]]
Distribution = Callable[[Generator, int], Numbers]  # draws [count] float64, lengths unrounded
PriorityShares = dict[int, float]  # relative weights; without any, all priorities are 0


class Family(Struct, frozen=True):
    """Distributions with `parameters`; allowed: the condition of is_allowed in words."""

    parameters: tuple[str, ...]
    draw: Callable[..., Numbers]
    is_allowed: Callable[..., bool]
    allowed: str


def make_generator(seed: int, stream: int) -> Generator:
    return Generator(PCG64(SeedSequence(seed, spawn_key=(stream,))))


def draw_lengths(
    distribution: Distribution, generator: Generator, maximum: int = MAX_LENGTH
) -> Iterator[int]:
    """Yield endless whole numbers from 1 to `maximum`."""
    while True:
        numbers = np.clip(distribution(generator, _BLOCK), 1, maximum)
        yield from np.rint(numbers).astype(np.int64).tolist()


def draw_seconds(distribution: Distribution, generator: Generator) -> Iterator[float]:
    """Yield endless times in whole microseconds, at least 0."""
    while True:
        numbers = np.maximum(distribution(generator, _BLOCK), 0)
        yield from (round(number, _DIGITS) for number in numbers.tolist())


def parse_distribution(
    text: str, option: str, families: Mapping[str, Family], *others: str
) -> Distribution:
    """Return the distribution of `text`, the value of `option`, or raise a WorkloadError.

    others: further forms of the option, for the error.
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
    """Return the distribution of lengths of `text`, the value of `option`.

    side: the lengths to use of a trace.  read_lines: opens a file.
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
    try:
        value = read_number(text, float)
    except ValueError:
        return False
    return abs(value) <= MAX_PARAMETER  # false for nan


@cache
def _zipf_shares(alpha: float, largest: float) -> Numbers:
    """Return the cumulative chances of k = 1 to `largest`, which are in proportion to k**-alpha."""
    weights = np.arange(1, int(largest) + 1, dtype=np.float64) ** -alpha
    cumulative: Numbers = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0  # despite rounding, so that no draw is beyond the largest
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
    # Half a token more on either side, so that the ends are as likely as the rest when rounded.
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


def draw_priorities(shares: PriorityShares, generator: Generator) -> Iterator[int]:
    priorities = list(shares)
    if len(priorities) <= 1:
        yield from repeat(priorities[0] if priorities else 0)
    weights = np.array([*shares.values()])
    while True:
        drawn = generator.choice(priorities, size=_BLOCK, p=weights / weights.sum())
        yield from drawn.tolist()


def parse_priorities(text: str, place: str) -> PriorityShares:
    """Return the shares in `text`; colons may replace commas; place: for errors."""
    parts = text.replace(",", ":").split(":")
    shares: PriorityShares = {}
    try:
        for priority, share in zip(parts[::2], parts[1::2], strict=True):
            shares[read_number(priority, int)] = read_number(share, float)
    except ValueError:
        shares = {}
    is_allowed = all(
        abs(priority) <= MAX_INT and 0 < share <= MAX_SHARE for priority, share in shares.items()
    )
    if not (shares and is_allowed and 2 * len(shares) == len(parts)):
        raise WorkloadError(
            f"{place} {text!r}: expected PRIORITY:SHARE,..., whole numbers, each once, with shares "
            "above 0, such as 0:0.9,1:0.1"
        )
    return shares


Arrivals = Callable[[Generator], Iterator[float]]  # yields endless seconds, ascending from 0


def _arrivals(
    gaps: Callable[[Generator], Numbers],
    time_of: Callable[[float], float] = lambda elapsed: elapsed,
) -> Arrivals:
    def times(generator: Generator) -> Iterator[float]:
        elapsed = 0.0
        while True:
            for gap in gaps(generator).tolist():
                yield round(time_of(elapsed), _DIGITS)
                elapsed += gap

    return times


def constant(rate: float) -> Arrivals:
    """Return arrivals at equal distances, without accumulated rounding."""
    return _arrivals(lambda _: np.ones(_BLOCK), lambda elapsed: elapsed / rate)


def poisson(rate: float) -> Arrivals:
    return _arrivals(lambda generator: generator.standard_exponential(_BLOCK) / rate)


def gamma(rate: float, burstiness: float) -> Arrivals:
    """Return arrivals with gamma-distributed gaps; 1 is a Poisson process, less is burstier.

    burstiness: the shape; the coefficient of variation of the gaps is burstiness ** -0.5.
    """
    scale = 1 / (rate * burstiness)
    return _arrivals(lambda generator: generator.standard_gamma(burstiness, _BLOCK) * scale)


def bursty(rate: float, on: float, off: float) -> Arrivals:
    """Return a Poisson process that alternates between `on` seconds on and `off` seconds off.

    rate: the mean over both.
    """
    rate_on = rate * (on + off) / on

    def time_of(elapsed: float) -> float:
        num_periods, rest = divmod(elapsed, on)
        return num_periods * (on + off) + rest

    return _arrivals(lambda generator: generator.standard_exponential(_BLOCK) / rate_on, time_of)


class SharedPrefix(Struct, frozen=True):
    """Prompts begin with the `length` tokens of one of `num_groups` groups."""

    length: int
    num_groups: int = 1


class SyntheticWorkload(Struct, frozen=True, kw_only=True):
    """The parameters of a workload except arrivals and sessions; name: prefix of ids and seeds."""

    prompt_lengths: Distribution
    output_lengths: Distribution
    max_prompt_tokens: int = MAX_LENGTH
    max_output_tokens: int = MAX_LENGTH
    shared_prefix: SharedPrefix | None = None
    priorities: PriorityShares = {}
    seed: int = 0
    name: str = DEFAULT_NAME


Turn = tuple[str, float, str | None, float | None]  # id, arrival time, session, think time


def open_entries(workload: SyntheticWorkload, arrivals: Arrivals) -> Iterator[WorkloadEntry]:
    times = arrivals(make_generator(workload.seed, ARRIVALS))
    turns = ((f"{workload.name}{number}", time, None, None) for number, time in enumerate(times))
    return _fill(workload, turns)


def session_entries(
    workload: SyntheticWorkload,
    arrivals: Arrivals,
    num_turns: Distribution,
    think_time: Distribution,
) -> Iterator[WorkloadEntry]:
    """Yield the turns of endless sessions; each turn follows `think_time` after the one before."""

    def turns() -> Iterator[Turn]:
        times = arrivals(make_generator(workload.seed, ARRIVALS))
        lengths = draw_lengths(num_turns, make_generator(workload.seed, _TURNS))
        pauses = draw_seconds(think_time, make_generator(workload.seed, _THINKING))
        for number, (time, length) in enumerate(zip(times, lengths, strict=False)):
            session = f"{workload.name}{number}"
            for turn in range(length):
                yield f"{session}.{turn}", time, session, next(pauses) if turn else None

    return _fill(workload, turns())


def closed_entries(
    workload: SyntheticWorkload, num_users: int, think_time: Distribution
) -> Iterator[WorkloadEntry]:
    """Yield endless requests of users in turn.

    Each user is a session from time 0, and sends a request `think_time` after each answer.
    """

    def turns() -> Iterator[Turn]:
        pauses = draw_seconds(think_time, make_generator(workload.seed, _THINKING))
        for number in count():
            turn, user = divmod(number, num_users)
            session = f"{workload.name}{user}"
            yield f"{session}.{turn}", 0.0, session, next(pauses) if turn else None

    return _fill(workload, turns())


def parse_shared_prefix(text: str, option: str) -> SharedPrefix:
    length, colon, groups = text.partition(":")
    try:
        prefix = SharedPrefix(read_number(length, int), read_number(groups, int) if colon else 1)
    except ValueError:
        prefix = SharedPrefix(0, 0)
    if not (1 <= prefix.length <= MAX_LENGTH and 1 <= prefix.num_groups <= MAX_GROUPS):
        raise WorkloadError(
            f"{option} {text}: expected TOKENS or TOKENS:GROUPS, whole numbers from 1 to "
            f"{MAX_LENGTH:,}"
        )
    return prefix


def _fill(workload: SyntheticWorkload, turns: Iterable[Turn]) -> Iterator[WorkloadEntry]:
    generators = [make_generator(workload.seed, n) for n in (PROMPTS, OUTPUTS, PRIORITIES, _GROUPS)]
    prompt_lengths = draw_lengths(
        workload.prompt_lengths, generators[0], workload.max_prompt_tokens
    )
    output_lengths = draw_lengths(
        workload.output_lengths, generators[1], workload.max_output_tokens
    )
    priorities = draw_priorities(workload.priorities, generators[2])
    prefix, groups = workload.shared_prefix, iter(list[int]())
    for request_id, time, session, pause in turns:
        prompt = [LengthSegment(length=next(prompt_lengths), seed=request_id)]
        if prefix is not None and pause is None:  # later turns inherit it
            group = next(groups, None)
            if group is None:
                groups = iter(generators[3].integers(prefix.num_groups, size=_BLOCK).tolist())
                group = next(groups)
            seed = f"prefix-{workload.name}{group}"
            prompt.insert(0, LengthSegment(length=prefix.length, seed=seed, type="system"))
        yield WorkloadEntry(
            id=request_id,
            session=session,
            arrival_time=time,
            priority=next(priorities),
            think_time=pause,
            prompt=prompt,
            max_tokens=next(output_lengths),
            ignore_eos=True,
        )
