"""Synthetic workloads that are never written down: requests are drawn as they arrive.

Rule: they are those that `batchdecode workload` writes with the same numbers and seed.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice, takewhile
from math import ceil
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from batcher.fields import read_number
from batcher.planning.simulated_sequence import SimulatedSequence, Turns, make_sequence
from batcher.planning.synthetic import (
    ARRIVALS,
    LENGTHS,
    OUTPUTS,
    PRIORITIES,
    PROMPTS,
    Arrivals,
    Distribution,
    PriorityShares,
    constant,
    draw_lengths,
    draw_priorities,
    gamma,
    make_generator,
    parse_distribution,
    parse_priorities,
    poisson,
)
from batcher.planning.workload import GREEDY, Job, Piece, Workload
from batcher.planning.workload_traces import DEFAULT_NAME, MAX_LENGTH, WorkloadError
from batcher.timing.catalog import hint_at

PREFIX = "synthetic:"
FORM = (
    "synthetic:rate=R,duration=SECONDS,prompt=D,output=D, and perhaps burstiness=B (1, which is "
    "Poisson, or constant), priority=N:SHARE:N:SHARE (0) and seed=N (0); a distribution has : "
    "between its numbers"
)
MAX_RATE, MAX_DURATION, MAX_REQUESTS = 1e6, 1e9, 10**9
_NUM_SAMPLED = 4096  # lengths, for their means
_MAX_DIGITS = 18


class StreamedWorkload(Struct, frozen=True, kw_only=True):
    """Requests that arrive for `duration` seconds, `rate` of them a second; none shares a prefix.

    It has the numbers that a Workload has, of tokens and samples about as many.
    prompt, output: distributions of their lengths, as text.  burstiness: see Gamma; None: at equal
    distances.  shares: of priorities.
    """

    rate: float
    duration: float
    prompt: str
    output: str
    burstiness: float | None = 1.0
    shares: PriorityShares = {}
    seed: int = 0

    @property
    def num_samples(self) -> int:
        return max(round(self.rate * self.duration), 1)

    @property
    def priorities(self) -> set[int]:
        return set(self.shares) or {0}

    @property
    def num_output_tokens(self) -> int:
        return round(self.num_samples * _mean(self.output, "output"))

    @property
    def num_tokens(self) -> int:
        return self.num_output_tokens + round(self.num_samples * _mean(self.prompt, "prompt"))

    @property
    def shares_nothing(self) -> bool:
        return True

    @property
    def span(self) -> float:
        return self.duration

    @property
    def mean_rate(self) -> float:
        return self.rate

    def num_blocks(self, block_size: int) -> int:
        return self.num_samples + ceil(self.num_tokens / block_size)

    def at_rate(self, rate: float) -> Self:
        return replace(self, rate=self.rate * rate, duration=self.duration / rate)

    def rows(self) -> Iterator[tuple[float, int, int, int]]:
        """Yield (arrival, prompt length, output length, priority) of each request."""
        arrivals: Arrivals = poisson(self.rate)
        if self.burstiness is None:
            arrivals = constant(self.rate)
        elif self.burstiness != 1:
            arrivals = gamma(self.rate, self.burstiness)
        times = arrivals(make_generator(self.seed, ARRIVALS))
        lengths = (
            draw_lengths(_distribution(text, name), make_generator(self.seed, stream))
            for text, name, stream in (
                (self.prompt, "prompt", PROMPTS),
                (self.output, "output", OUTPUTS),
            )
        )
        priorities = draw_priorities(self.shares, make_generator(self.seed, PRIORITIES))
        return zip(takewhile(self.duration.__gt__, times), *lengths, priorities, strict=False)


AnyWorkload = Workload | StreamedWorkload


class StreamedTurns(Turns):
    """Makes the sequences of a streamed workload, one after the other; none is kept."""

    has_siblings = has_sessions = False
    all_wait = True

    def __init__(self, workload: StreamedWorkload) -> None:
        super().__init__(Workload([]))
        self._workload = workload

    @cached_property
    def longest(self) -> SimulatedSequence:
        """One that is as long as any can be by the distributions."""

        def most(text: str) -> int:
            constant = text.removeprefix("constant:")
            is_number = constant.isascii() and constant.isdecimal()
            return min(max(int(constant), 1), MAX_LENGTH) if is_number else MAX_LENGTH

        return _sequence(0, 0.0, most(self._workload.prompt), most(self._workload.output), 0)

    def arrivals(self) -> Iterable[SimulatedSequence]:
        return (_sequence(number, *row) for number, row in enumerate(self._workload.rows()))


def _sequence(
    number: int, arrival: float, num_prompt: int, num_output: int, priority: int
) -> SimulatedSequence:
    job = Job(
        id=f"{DEFAULT_NAME}{number}",
        input_index=number,
        arrival_time=arrival,
        num_prompt_tokens=num_prompt,
        max_tokens=num_output,
        priority=priority,
        output=Piece(num_output, GREEDY),
    )
    return make_sequence(job)


def _distribution(text: str, name: str) -> Distribution:
    return parse_distribution(text, f"{name} of {PREFIX}", LENGTHS)


def _mean(text: str, name: str) -> float:
    lengths = draw_lengths(_distribution(text, name), make_generator(0, 0))
    return sum(islice(lengths, _NUM_SAMPLED)) / _NUM_SAMPLED


def parse_streamed(text: str) -> StreamedWorkload:
    """Return the workload that `text`, in FORM, stands for.

    Raises:
        WorkloadError: it stands for none.
    """
    given: dict[str, str] = {}
    for part in text.removeprefix(PREFIX).split(","):
        name, equals, value = part.partition("=")
        problem = None
        if not equals:
            problem = "this is no NAME=VALUE"
        elif name not in _READERS:
            problem = f"there is no {name}{hint_at(name, _READERS)}"
        elif name in given:
            problem = f"{name} is there twice"
        if problem is not None:
            raise WorkloadError(f"{text}: {part!r}: {problem}; expected {FORM}")
        given[name] = value
    missing = [name for name in ("rate", "duration", "prompt", "output") if name not in given]
    if missing:
        raise WorkloadError(f"{text}: {missing[0]} is missing; expected {FORM}")
    values = {name: _READERS[name](value, f"{text}: {name}") for name, value in given.items()}
    shares = values.pop("priority", {})
    workload = StreamedWorkload(**values, shares=shares)
    if workload.num_samples > MAX_REQUESTS:
        raise WorkloadError(f"{text}: more than {MAX_REQUESTS:,} requests")
    for length, name in ((workload.prompt, "prompt"), (workload.output, "output")):
        _distribution(length, name)
    return workload


def _number(most: float) -> Callable[[str, str], float]:
    def read(text: str, place: str) -> float:
        try:
            number = read_number(text, float)
        except ValueError:
            number = -1.0
        if not 0 < number <= most:  # nor is NaN
            raise WorkloadError(f"{place} {text!r}: expected a number above 0, up to {most:,.0f}")
        return number

    return read


def _seed(text: str, place: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise WorkloadError(f"{place} {text!r}: expected a whole number")
    return int(text)


_READERS: dict[str, Callable[[str, str], Any]] = {
    "rate": _number(MAX_RATE),
    "duration": _number(MAX_DURATION),
    "prompt": lambda text, _: text,
    "output": lambda text, _: text,
    "burstiness": lambda text, place: (
        None if text == "constant" else _number(MAX_RATE)(text, place)
    ),
    "priority": parse_priorities,
    "seed": _seed,
}
