"""The rows of a workload: requests of which only times, lengths and shared parts are known."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import msgspec
from msgspec import Struct

from batcher.errors import BatchdecodeError

MAX_LENGTH = 2**20  # tokens of one prompt or one output
DEFAULT_NAME = "r"
_ROWS_PER_BLOCK = 256


class WorkloadError(BatchdecodeError):
    """An option of a workload, or a line of a trace, is not what it has to be."""


class LengthSegment(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A part of a prompt: `length` tokens that `seed` stands for.

    The same seed and length are the same tokens, wherever they come.
    """

    length: int
    seed: int | str
    type: Literal["system"] | None = None


class WorkloadRow(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A line of a requests file, with the fields that workloads set.

    arrival_time and think_time are in seconds.  think_time: None for what waits for no other turn
    of its session.
    """

    id: str
    session: str | None = None
    arrival_time: float
    think_time: float | None = None
    prompt: list[LengthSegment]
    max_tokens: int
    ignore_eos: bool

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt as the row has it, without what a session brings along."""
        return sum(segment.length for segment in self.prompt)


def encode_rows(rows: Iterable[WorkloadRow]) -> Iterator[bytes]:
    """Yield `rows` as lines of JSON, in blocks of whole lines."""
    encode = msgspec.json.Encoder().encode_lines
    remaining = iter(rows)
    while block := list(islice(remaining, _ROWS_PER_BLOCK)):
        yield encode(block)
