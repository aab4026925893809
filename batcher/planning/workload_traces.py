"""Recorded traces as workloads: Azure, Mooncake, and logs of vLLM runs.

All have ascending times, and lengths.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.request import MAX_LENGTH, MAX_TIME

DEFAULT_NAME = "r"
_ENTRIES_PER_BLOCK = 256


class WorkloadError(BatchdecodeError):
    """An option of a workload or a line of a trace is invalid."""


class LengthSegment(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """`length` tokens of a prompt; the same seed and length are the same tokens everywhere."""

    length: int
    seed: int | str
    type: Literal["system"] | None = None


class WorkloadEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A line of a requests file; think_time: None for the first turn of a session."""

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
        return sum(segment.length for segment in self.prompt)


def encode_entries(entries: Iterable[WorkloadEntry]) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode_lines
    remaining = iter(entries)
    while block := list(islice(remaining, _ENTRIES_PER_BLOCK)):
        yield encode(block)


class LengthCounts(Counter[int]):
    """Lengths with their counts."""

    @property
    def sum(self) -> int:
        return sum(length * count for length, count in self.items())

    def percentile(self, percent: int) -> int:
        """Return the least length that `percent` % of the lengths do not exceed."""
        needed, seen = self.total() * percent, 0
        for length, count in sorted(self.items()):
            seen += count * 100
            if seen >= needed:
                return length
        raise ValueError(percent)


class WorkloadSummary:
    """Counts of entries.

    num_arrivals: entries that wait for no other turn.  span: the last arrival time.
    """

    def __init__(self) -> None:
        self.num_requests = self.num_sessions = self.num_arrivals = 0
        self.span = 0.0
        self.prompt_lengths, self.output_lengths = LengthCounts(), LengthCounts()

    @property
    def mean_rate(self) -> float | None:
        """Arrivals (of sessions, if any) per second; None if all arrive at once."""
        return (self.num_arrivals - 1) / self.span if self.span else None

    def observe(self, entries: Iterable[WorkloadEntry]) -> Iterator[WorkloadEntry]:
        for entry in entries:
            self.num_requests += 1
            if entry.think_time is None:
                self.num_arrivals += 1
                self.num_sessions += entry.session is not None
                self.span = entry.arrival_time
            self.prompt_lengths[entry.prompt_tokens] += 1
            self.output_lengths[entry.max_tokens] += 1
            yield entry


NumberedLine = tuple[int, bytes]  # from 1

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # of a Mooncake trace
_DIGITS = 9  # decimals of times: traces are recorded in nanoseconds at best
# A day, a time, up to nine decimals of a second (some of these traces have seven), and a zone.
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


class TraceEntryChecks:
    """Checks of the entries of the trace `source`; num_raised: lengths of 0 that became 1."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.num_raised = 0
        self._first: float | None = None
        self._last = 0.0

    def arrival_time(self, value: float, unit: float, number: int, field: str) -> float:
        """Return the seconds since the first entry; this one is at `value` / `unit` seconds."""
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
        """Return a length in tokens; 0 becomes 1, the least of a prompt and an output."""
        if not 0 <= value <= MAX_LENGTH:
            raise self.error(number, f"{field} {value}: expected 0 to {MAX_LENGTH:,} tokens")
        self.num_raised += value == 0
        return max(value, 1)

    def whole(self, text: str, number: int, wrong: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self.error(number, wrong) from None

    def error(self, number: int, message: str) -> WorkloadError:
        return WorkloadError(f"{self.source}:{number}: {message}")


class TraceRow(NamedTuple):
    """A request of a trace; time, prompt and output: with the names of their fields.

    unit: of time, per second.  hash_ids: of the blocks of its prompt, if known.
    """

    line: int
    request_id: str | None
    time: tuple[str, float]
    unit: float
    prompt: tuple[str, int]
    output: tuple[str, int]
    hash_ids: list[int] | None = None


Rows = Callable[[Iterable[NumberedLine], TraceEntryChecks], Iterator[TraceRow]]


def trace_entries(
    kind: str, lines: Iterable[NumberedLine], checks: TraceEntryChecks, name: str = DEFAULT_NAME
) -> Iterator[WorkloadEntry]:
    """Yield the requests of a trace of a kind of TRACES, or raise a WorkloadError.

    Requests without an id are `name` with a number from 0.  A prompt has a segment for each block,
    whose hash is its seed, or one segment of its own.
    """
    for index, row in enumerate(TRACES[kind](lines, checks)):
        request_id = f"{name}{index}" if row.request_id is None else row.request_id
        arrival_time = checks.arrival_time(row.time[1], row.unit, row.line, row.time[0])
        length = checks.length(row.prompt[1], row.line, row.prompt[0])
        seeds: list[int | str] = [request_id]
        if row.hash_ids is not None:
            num_blocks = -(-row.prompt[1] // BLOCK_TOKENS)
            if len(row.hash_ids) != num_blocks:
                raise checks.error(
                    row.line,
                    f"{len(row.hash_ids):,} hash_ids for input_length {row.prompt[1]:,}: "
                    f"expected {num_blocks:,}, one for each {BLOCK_TOKENS} tokens",
                )
            seeds = [*row.hash_ids] or seeds
        prompt = [LengthSegment(length=BLOCK_TOKENS, seed=seed) for seed in seeds[:-1]]
        rest = length - BLOCK_TOKENS * len(prompt)
        yield WorkloadEntry(
            id=request_id,
            arrival_time=arrival_time,
            prompt=[*prompt, LengthSegment(length=rest, seed=seeds[-1])],
            max_tokens=checks.length(row.output[1], row.line, row.output[0]),
            ignore_eos=True,
        )


def _azure_rows(lines: Iterable[NumberedLine], checks: TraceEntryChecks) -> Iterator[TraceRow]:
    """Yield the rows of an Azure LLM inference trace, CSV with at least AZURE_COLUMNS."""
    rows = (
        (number, [cell.strip() for cell in line.decode(errors="backslashreplace").split(",")])
        for number, line in lines
    )
    number, names = next(rows, (1, [""]))
    for column in AZURE_COLUMNS:
        if column not in names:
            expected = f"expected a first line {','.join(AZURE_COLUMNS)}"
            raise checks.error(number, f"no column {column}: {expected}")
    places = [names.index(column) for column in AZURE_COLUMNS]
    for number, cells in rows:
        if len(cells) <= max(places):
            raise checks.error(number, f"{len(cells)} columns: expected {', '.join(AZURE_COLUMNS)}")
        timestamp, *texts = (cells[place] for place in places)
        match = _TIMESTAMP.fullmatch(timestamp)
        day, time, fraction, zone = match.groups() if match else ("", "", "", "")
        try:
            whole = datetime.fromisoformat(f"{day}T{time}{zone or 'Z'}")  # UTC by default
        except ValueError:
            wrong = f"{AZURE_COLUMNS[0]} {timestamp!r}: "
            expected = "expected a time such as 2023-11-16 18:15:46.6805900"
            raise checks.error(number, wrong + expected) from None
        prompt, output = (
            (field, checks.whole(text, number, f"{field} {text!r}: expected a number of tokens"))
            for field, text in zip(AZURE_COLUMNS[1:], texts, strict=True)
        )
        nanoseconds = (whole - _EPOCH) // _SECOND * 10**9 + int((fraction or "").ljust(9, "0"))
        yield TraceRow(number, None, (AZURE_COLUMNS[0], nanoseconds), 10**9, prompt, output)


class MooncakeLine(Struct, gc=False):
    """A line of a Mooncake trace; timestamp: in milliseconds."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


class VllmLine(Struct, gc=False):
    """A line of a vLLM log; queued_ts: in seconds."""

    request_id: str
    input_toks: int
    output_toks: int
    queued_ts: int | float


def _json_rows(kind: type[Struct], unit: float, *names: str) -> Rows:
    def rows(lines: Iterable[NumberedLine], checks: TraceEntryChecks) -> Iterator[TraceRow]:
        decoder = msgspec.json.Decoder(kind)
        for number, line in lines:
            try:
                own = decoder.decode(line)
            except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
                raise checks.error(number, str(error)) from None
            time, prompt, output = ((name, getattr(own, name)) for name in names)
            request_id, hash_ids = getattr(own, "request_id", None), getattr(own, "hash_ids", None)
            yield TraceRow(number, request_id, time, unit, prompt, output, hash_ids)

    return rows


TRACES: dict[str, Rows] = {
    "azure": _azure_rows,
    "mooncake": _json_rows(MooncakeLine, 1000, "timestamp", "input_length", "output_length"),
    "vllm": _json_rows(VllmLine, 1, "queued_ts", "input_toks", "output_toks"),
}
_MARKS = {"azure": AZURE_COLUMNS[0], "mooncake": '"hash_ids"', "vllm": '"input_toks"'}


Side = Literal["prompt", "output"]


def read_lengths(lines: Iterable[NumberedLine], source: str, side: Side) -> list[int]:
    """Return the lengths of one side of a trace, or those of a file with a number per line."""
    checks = TraceEntryChecks(source)
    numbered = iter(lines)
    head = list(islice(numbered, 1))
    first = head[0][1].decode(errors="replace") if head else ""
    kind = next((name for name, mark in _MARKS.items() if mark in first), None)
    together = chain(head, numbered)
    if kind is not None:
        entries = trace_entries(kind, together, checks)
        lengths = [
            entry.prompt_tokens if side == "prompt" else entry.max_tokens for entry in entries
        ]
    else:
        lengths = []
        for number, line in together:
            text = line.decode(errors="backslashreplace").strip()
            known = ", ".join(TRACES)
            wrong = f"{text[:40]!r} is not a whole number, and the file is not a trace of {known}"
            lengths.append(checks.length(checks.whole(text, number, wrong), number, "length"))
    if not lengths:
        raise WorkloadError(f"{source} has no lengths")
    return lengths


def scale_times(entries: Iterable[WorkloadEntry], factor: float) -> Iterator[WorkloadEntry]:
    for entry in entries:
        yield replace(entry, arrival_time=round(entry.arrival_time * factor, _DIGITS))


def factor_for_rate(entries: Iterable[WorkloadEntry], rate: float, source: str) -> float:
    """Return the factor for times with which `entries` arrive at `rate` requests per second."""
    num_entries, last = 0, 0.0
    for entry in entries:
        num_entries, last = num_entries + 1, entry.arrival_time
    if not last:
        raise WorkloadError(
            f"{source}: no rate to scale: all {num_entries:,} requests arrive at once"
        )
    return (num_entries - 1) / rate / last
