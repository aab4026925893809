"""The entries of a workload: requests of which only times, lengths and shared parts are known."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import msgspec
from msgspec import Struct

from batcher.errors import BatchdecodeError

MAX_LENGTH = 2**20  # tokens of one prompt or one output
DEFAULT_NAME = "r"
_ENTRIES_PER_BLOCK = 256


class WorkloadError(BatchdecodeError):
    """An option of a workload, or a line of a trace, is not what it has to be."""


class LengthSegment(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A part of a prompt: `length` tokens that `seed` stands for.

    The same seed and length are the same tokens, wherever they come.
    """

    length: int
    seed: int | str
    type: Literal["system"] | None = None


class WorkloadEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A line of a requests file, with the fields that workloads set.

    arrival_time and think_time are in seconds.  think_time: None for what waits for no other turn
    of its session.
    """

    id: str
    session: str | None = None
    arrival_time: float
    priority: int = 0
    think_time: float | None = None
    prompt: list[LengthSegment]
    max_tokens: int
    ignore_eos: bool

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt as the entry has it, without what a session brings along."""
        return sum(segment.length for segment in self.prompt)


def encode_entries(entries: Iterable[WorkloadEntry]) -> Iterator[bytes]:
    """Yield `entries` as lines of JSON, in blocks of whole lines."""
    encode = msgspec.json.Encoder().encode_lines
    remaining = iter(entries)
    while block := list(islice(remaining, _ENTRIES_PER_BLOCK)):
        yield encode(block)


class LengthCounts(Counter[int]):
    """How often each length comes."""

    @property
    def sum(self) -> int:
        """The sum of all lengths."""
        return sum(length * count for length, count in self.items())

    def percentile(self, percent: int) -> int:
        """Return the least length that so many per cent do not exceed, of at least one length."""
        needed, seen = self.total() * percent, 0
        for length, count in sorted(self.items()):
            seen += count * 100
            if seen >= needed:
                return length
        raise ValueError(percent)


class WorkloadSummary:
    """Counts entries.

    num_arrivals: those that wait for no other.  span: the last arrival time; the first is 0.
    """

    def __init__(self) -> None:
        self.num_requests = self.num_sessions = self.num_arrivals = 0
        self.span = 0.0
        self.prompt_lengths, self.output_lengths = LengthCounts(), LengthCounts()

    @property
    def mean_rate(self) -> float | None:
        """Arrivals a second, of sessions if there are any; None if all come at once."""
        return (self.num_arrivals - 1) / self.span if self.span else None

    def observe(self, entries: Iterable[WorkloadEntry]) -> Iterator[WorkloadEntry]:
        """Yield `entries`, and count them."""
        for entry in entries:
            self.num_requests += 1
            if entry.think_time is None:
                self.num_arrivals += 1
                self.num_sessions += entry.session is not None
                self.span = entry.arrival_time
            self.prompt_lengths[entry.prompt_tokens] += 1
            self.output_lengths[entry.max_tokens] += 1
            yield entry
