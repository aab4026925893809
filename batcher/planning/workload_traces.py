"""Recorded traces as workloads: of Azure, of Mooncake, and logs of vLLM runs.

What all have in common: times that do not go back, and lengths.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.request import MAX_TIME

# The entries of a workload: requests of which only times, lengths and shared parts are known.

MAX_LENGTH = 2**20  # tokens of one prompt or one output
DEFAULT_NAME = "r"
_ENTRIES_PER_BLOCK = 256


class WorkloadError(BatchdecodeError):
    """An option of a workload, or a line of a trace, is not what it has to be."""


class LengthSegment(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A part of a prompt: `length` tokens that `seed` stands for.

    The same seed and length are the same tokens everywhere.
    """

    length: int
    seed: int | str
    type: Literal["system"] | None = None


class WorkloadEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A line of a requests file, with the fields that workloads set; times in seconds.

    think_time: None for what waits for no other turn of its session.
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
        """The length of the prompt, without the history of its session."""
        return sum(segment.length for segment in self.prompt)


def encode_entries(entries: Iterable[WorkloadEntry]) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode_lines
    remaining = iter(entries)
    while block := list(islice(remaining, _ENTRIES_PER_BLOCK)):
        yield encode(block)


class LengthCounts(Counter[int]):
    """How often each length comes."""

    @property
    def sum(self) -> int:
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
        """Arrivals per second, of sessions if there are any; None if all come at once."""
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


T = TypeVar("T")
NumberedLine = tuple[int, bytes]
"""A line of a file and its number, from 1 on, as errors tell it."""

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # of a Mooncake trace
_DIGITS = 9  # of times, after the point: traces are recorded in nanoseconds at best
_NANOSECONDS, _MILLISECONDS = 10**9, 1000
# A day, a time, up to nine digits of a second (some of these traces have seven), and a zone.
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


class TraceEntryChecks:
    """Checks the entries of one trace, in their order.

    source: how errors call the file.  num_raised: how many lengths were 0, and became 1.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.num_raised = 0
        self._first: float | None = None
        self._last = 0.0

    def arrival_time(self, value: float, unit: float, number: int, field: str) -> float:
        """Return the seconds from the first entry to this one, at `value` / `unit` seconds."""
        if self._first is None:
            self._first = value
        elif value < self._last:
            back = (self._last - value) / unit
            raise self.error(
                number, f"{field} goes back by {back:.9g} s: sort the trace by {field}"
            )
        self._last = value
        time = (value - self._first) / unit
        if not time <= MAX_TIME:
            raise self.error(number, f"{field} is {time:g} s after the first; at most {MAX_TIME:g}")
        return round(time, _DIGITS)

    def length(self, value: int, number: int, field: str) -> int:
        """Return a length in tokens; 0 becomes 1, as a model is given one and gives one."""
        if not 0 <= value <= MAX_LENGTH:
            raise self.error(number, f"{field} {value}: expected 0 to {MAX_LENGTH:,} tokens")
        self.num_raised += value == 0
        return max(value, 1)

    def error(self, number: int, message: str) -> WorkloadError:
        return WorkloadError(f"{self.source}:{number}: {message}")


def azure_entries(
    lines: Iterable[NumberedLine], checks: TraceEntryChecks, name: str = DEFAULT_NAME
) -> Iterator[WorkloadEntry]:
    """Yield the requests of an Azure LLM inference trace, CSV with at least AZURE_COLUMNS.

    Their ids are `name` and a number from 0 on.

    Raises:
        WorkloadError: a line is not one of such a trace.
    """
    numbered = iter(lines)
    number, header = next(numbered, (1, b""))
    names = _split(header)
    for column in AZURE_COLUMNS:
        if column not in names:
            expected = f"expected a first line {','.join(AZURE_COLUMNS)}"
            raise checks.error(number, f"no column {column}: {expected}")
    places = [names.index(column) for column in AZURE_COLUMNS]
    for index, (number, line) in enumerate(numbered):
        cells = _split(line)
        if len(cells) <= max(places):
            raise checks.error(number, f"{len(cells)} columns: expected {', '.join(AZURE_COLUMNS)}")
        timestamp, prompt, output = (cells[place] for place in places)
        nanoseconds = _parse_timestamp(timestamp, number, checks)
        request_id = f"{name}{index}"
        length = _parse_length(prompt, number, AZURE_COLUMNS[1], checks)
        yield WorkloadEntry(
            id=request_id,
            arrival_time=checks.arrival_time(nanoseconds, _NANOSECONDS, number, AZURE_COLUMNS[0]),
            prompt=[LengthSegment(length=length, seed=request_id)],
            max_tokens=_parse_length(output, number, AZURE_COLUMNS[2], checks),
            ignore_eos=True,
        )


def _split(line: bytes) -> list[str]:
    return [cell.strip() for cell in line.decode(errors="backslashreplace").split(",")]


def _parse_timestamp(text: str, number: int, checks: TraceEntryChecks) -> int:
    """Return the nanoseconds since 1970; a time without a zone is UTC."""
    match = _TIMESTAMP.fullmatch(text)
    day, time, fraction, zone = match.groups() if match else ("", "", "", "")
    try:
        whole = datetime.fromisoformat(f"{day}T{time}{zone or 'Z'}")
    except ValueError:
        raise checks.error(
            number,
            f"{AZURE_COLUMNS[0]} {text!r}: expected a time as in 2023-11-16 18:15:46.6805900",
        ) from None
    return (whole - _EPOCH) // _SECOND * _NANOSECONDS + int((fraction or "").ljust(9, "0"))


def _parse_length(
    text: str, number: int, field: str, checks: TraceEntryChecks, expected: str = ""
) -> int:
    try:
        value = int(text)
    except ValueError:
        expected = expected or f"{field} {text!r}: expected a number of tokens"
        raise checks.error(number, expected) from None
    return checks.length(value, number, field)


class MooncakeLine(Struct, gc=False):
    """A line of a Mooncake trace; timestamp: milliseconds.  Of its other fields nothing is used."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


def mooncake_entries(
    lines: Iterable[NumberedLine], checks: TraceEntryChecks, name: str = DEFAULT_NAME
) -> Iterator[WorkloadEntry]:
    """Yield the requests of a Mooncake trace, JSON lines.

    Their ids are `name` and a number from 0 on.  A prompt has a segment for each of its blocks,
    with the block's hash for a seed; the last one has what is left of the length.

    Raises:
        WorkloadError: a line is not one of such a trace.
    """
    for index, (number, record) in enumerate(_records(lines, MooncakeLine, checks)):
        request_id = f"{name}{index}"
        yield WorkloadEntry(
            id=request_id,
            arrival_time=checks.arrival_time(record.timestamp, _MILLISECONDS, number, "timestamp"),
            prompt=_segments(record, request_id, number, checks),
            max_tokens=checks.length(record.output_length, number, "output_length"),
            ignore_eos=True,
        )


def _segments(
    record: MooncakeLine, request_id: str, number: int, checks: TraceEntryChecks
) -> list[LengthSegment]:
    """Return the segments of a prompt, one for each block."""
    length = checks.length(record.input_length, number, "input_length")
    hash_ids = record.hash_ids
    num_blocks = -(-record.input_length // BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise checks.error(
            number,
            f"{len(hash_ids):,} hash_ids for input_length {record.input_length:,}: "
            f"expected {num_blocks:,}, one for each {BLOCK_TOKENS} tokens",
        )
    if not hash_ids:
        return [LengthSegment(length=length, seed=request_id)]
    segments = [LengthSegment(length=BLOCK_TOKENS, seed=seed) for seed in hash_ids[:-1]]
    rest = length - BLOCK_TOKENS * len(segments)
    return [*segments, LengthSegment(length=rest, seed=hash_ids[-1])]


class VllmLine(Struct, gc=False):
    """A line of a vLLM log; queued_ts: seconds.  Of its other fields nothing is used."""

    request_id: str
    input_toks: int
    output_toks: int
    queued_ts: int | float


def vllm_entries(
    lines: Iterable[NumberedLine],
    checks: TraceEntryChecks,
    name: str = DEFAULT_NAME,  # noqa: ARG001 - as all traces have it; these requests have ids
) -> Iterator[WorkloadEntry]:
    """Yield the requests of the log of a vLLM run, JSON lines; they keep their ids.

    Raises:
        WorkloadError: a line is not one of such a log.
    """
    for number, record in _records(lines, VllmLine, checks):
        length = checks.length(record.input_toks, number, "input_toks")
        yield WorkloadEntry(
            id=record.request_id,
            arrival_time=checks.arrival_time(record.queued_ts, 1, number, "queued_ts"),
            prompt=[LengthSegment(length=length, seed=record.request_id)],
            max_tokens=checks.length(record.output_toks, number, "output_toks"),
            ignore_eos=True,
        )


def _records(
    lines: Iterable[NumberedLine], kind: type[T], checks: TraceEntryChecks
) -> Iterator[tuple[int, T]]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in lines:
        try:
            yield number, decoder.decode(line)
        except (ValueError, RecursionError) as error:  # the other: nested too deeply
            raise checks.error(number, str(error)) from None


Side = Literal["prompt", "output"]
TraceReader = Callable[[Iterable[NumberedLine], TraceEntryChecks, str], Iterator[WorkloadEntry]]

TRACES: dict[str, TraceReader] = {
    "azure": azure_entries,
    "mooncake": mooncake_entries,
    "vllm": vllm_entries,
}
_MARKS = {"azure": AZURE_COLUMNS[0], "mooncake": '"hash_ids"', "vllm": '"input_toks"'}


def read_lengths(lines: Iterable[NumberedLine], source: str, side: Side) -> list[int]:
    """Return the lengths of one side of a trace, or those in a file of one number a line."""
    checks = TraceEntryChecks(source)
    numbered = iter(lines)
    head = list(islice(numbered, 1))
    first = head[0][1].decode(errors="replace") if head else ""
    name = next((name for name, mark in _MARKS.items() if mark in first), None)
    together = chain(head, numbered)
    if name is None:
        lengths = []
        for number, line in together:
            text = line.decode(errors="backslashreplace").strip()
            wrong = (
                f"{text[:40]!r} is not a whole number, and the file no {', '.join(TRACES)} trace"
            )
            lengths.append(_parse_length(text, number, "length", checks, wrong))
    else:
        entries = TRACES[name](together, checks, "")
        lengths = [
            entry.prompt_tokens if side == "prompt" else entry.max_tokens for entry in entries
        ]
    if not lengths:
        raise WorkloadError(f"{source}: there are no lengths in it")
    return lengths


def scale_times(entries: Iterable[WorkloadEntry], factor: float) -> Iterator[WorkloadEntry]:
    for entry in entries:
        yield replace(entry, arrival_time=round(entry.arrival_time * factor, _DIGITS))


def factor_for_rate(entries: Iterable[WorkloadEntry], rate: float, source: str) -> float:
    """Return the factor for times by which `entries` come at `rate`, in requests per second."""
    num_entries, last = 0, 0.0
    for entry in entries:
        num_entries, last = num_entries + 1, entry.arrival_time
    if not last:
        raise WorkloadError(
            f"{source}: no rate to scale: all of its {num_entries:,} requests come at once"
        )
    return (num_entries - 1) / rate / last
