"""What a workload was asked to be, and which options go with which source."""

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches

from batcher.errors import BatchdecodeError

MIN_RATE, MAX_RATE = 1e-6, 1e6  # requests a second
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
MIN_BURSTINESS, MAX_BURSTINESS = 1e-3, 1e6
MIN_PERIOD, MAX_PERIOD = 1e-6, 1e6  # seconds

_LENGTHS = (
    "prompt_tokens",
    "output_tokens",
    "max_prompt_tokens",
    "max_output_tokens",
    "shared_prefix",
    "seed",
    "name",
)
_OPEN = ("rate", "turns", "think_time", *_LENGTHS)
_TRACE = ("file", "rate", "scale")

# What each source takes beside what all take, and of that what it cannot do without.
OPTIONS_OF = {
    "constant": _OPEN,
    "poisson": _OPEN,
    "gamma": ("burstiness", *_OPEN),
    "bursty": ("on", "off", *_OPEN),
    "closed": ("users", "think_time", *_LENGTHS),
    "azure": (*_TRACE, "name"),
    "mooncake": (*_TRACE, "name"),
    "vllm": _TRACE,
}
NEEDED = ("burstiness", "on", "off", "users", "file")
_FOR_ALL = {"source", "requests", "output", "force", "quiet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The options of `batchdecode workload`, None where not given; see docs/workloads.md."""

    source: str
    file: str | None = None
    requests: int | None = None
    rate: float | None = None
    burstiness: float | None = None
    on: float | None = None
    off: float | None = None
    users: int | None = None
    scale: float | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    shared_prefix: str | None = None
    turns: str | None = None
    think_time: str | None = None
    seed: int | None = None
    name: str | None = None
    output: str | None = None
    force: bool = False
    quiet: bool = False


def check_options(options: WorkloadOptions) -> None:
    """Make sure that the options go together.

    Raises:
        BatchdecodeError: they do not.
    """
    source = options.source
    if source not in OPTIONS_OF:
        near = get_close_matches(source, OPTIONS_OF, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BatchdecodeError(f"unknown source {source!r}{hint} (known: {', '.join(OPTIONS_OF)})")
    taken = OPTIONS_OF[source]
    given = [
        field.name
        for field in fields(options)
        if field.name not in _FOR_ALL and getattr(options, field.name) is not None
    ]
    for name in given:
        if name not in taken:
            takes = ", ".join(map(show_option, taken))
            raise BatchdecodeError(f"{source} takes no {show_option(name)} (it takes: {takes})")
    for name in NEEDED:
        if name in taken and name not in given:
            raise BatchdecodeError(f"{source} needs {show_option(name)}")
    if options.rate is not None and options.scale is not None:
        raise BatchdecodeError("--rate and --scale both set the times: give one of them")
    if options.think_time is not None and options.turns is None and "turns" in taken:
        raise BatchdecodeError("--think-time is a pause between turns: give --turns too")


def check_range(value: float, option: str, low: float, high: float) -> float:
    """Return `value`, which is to be between `low` and `high`.

    Raises:
        BatchdecodeError: it is not.
    """
    if math.isnan(value) or not low <= value <= high:
        raise BatchdecodeError(f"{option} {value:g}: expected a number from {low:g} to {high:g}")
    return value


def show_option(name: str) -> str:
    """Return an option as a person gives it."""
    return name.upper() if name == "file" else f"--{name.replace('_', '-')}"
