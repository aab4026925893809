"""The numbers a request may hold: every range is written here and nowhere else."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from batcher.errors import Path
from batcher.request import MAX_INT, MAX_TIME
from batcher.validation.capabilities import ModelCapabilities
from batcher.validation.values import Problems, is_integer, wrong

MAX_SAMPLES = 1024
MAX_SEED = 2**63 - 1


class Range(Struct, frozen=True):
    """The numbers from `smallest`, itself included unless `is_open`, to `largest`.

    is_integer: whether only integers are among them.  unit: what a message adds.
    """

    smallest: int
    largest: int
    is_integer: bool = False
    is_open: bool = False
    unit: str = ""

    @property
    def expected(self) -> str:
        """What a message says of a number that has to be in the range."""
        noun = ("an integer" if self.is_integer else "a number") + self.unit
        if self.is_open:
            return f"{noun} above {self.smallest} and up to {self.largest}"
        return f"{noun} from {self.smallest} to {self.largest}"

    @property
    def type(self) -> Any:
        """The type whose values msgspec takes if they are in the range."""
        kind = int if self.is_integer else float
        if self.is_open:
            return Annotated[kind, Meta(gt=self.smallest, le=self.largest)]
        return Annotated[kind, Meta(ge=self.smallest, le=self.largest)]

    def holds(self, value: float) -> bool:
        """Return whether the number is in the range; NaN is in none."""
        is_above = self.smallest < value if self.is_open else self.smallest <= value
        return is_above and value <= self.largest


RANGES = {
    "max_tokens": Range(0, MAX_INT, is_integer=True),
    "arrival_time": Range(0, int(MAX_TIME), unit=" of seconds"),
    "priority": Range(-MAX_INT, MAX_INT, is_integer=True),
    "deadline": Range(0, int(MAX_TIME), unit=" of seconds"),
    "think_time": Range(0, int(MAX_TIME), unit=" of seconds"),
    "temperature": Range(0, 100),
    "top_k": Range(-1, MAX_INT, is_integer=True),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, is_open=True),
    "mirostat": Range(0, 2, is_integer=True),
    "mirostat_tau": Range(0, 100, is_open=True),
    "mirostat_eta": Range(0, 1, is_open=True),
    "repetition_penalty": Range(0, 100, is_open=True),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "min_tokens": Range(0, MAX_INT, is_integer=True),
    "cfg_scale": Range(0, 100),
    "seed": Range(-MAX_SEED - 1, MAX_SEED, is_integer=True),
    "n": Range(1, MAX_SAMPLES, is_integer=True),
    "best_of": Range(1, MAX_SAMPLES, is_integer=True),
    "logprobs": Range(0, 20, is_integer=True),
    "prompt_logprobs": Range(0, 20, is_integer=True),
    "num_beams": Range(1, MAX_SAMPLES, is_integer=True),
    # A score divides by the length to this power, which has to stay finite.
    "length_penalty": Range(-10, 10),
}
LOGIT_BIAS = Range(-100, 100)
SEGMENT_LENGTH = Range(1, 2**20, is_integer=True)  # tokens


def check_number(value: object, path: Path, allowed: Range) -> Problems:
    """Yield the problem of what is not a number of the range."""
    is_kind = is_integer(value) or (isinstance(value, float) and not allowed.is_integer)
    if not is_kind:
        yield wrong("invalid-type", path, allowed.expected, value)
    elif not allowed.holds(value):  # type: ignore[arg-type]  # known to be a number
        yield wrong("invalid-value", path, allowed.expected, value)


def check_ranged(value: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problem of what is not a number as the field at `path` holds."""
    yield from check_number(value, path, RANGES[str(path[0])])
