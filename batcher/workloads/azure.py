"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens."""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from batcher.workloads.rows import DEFAULT_NAME, LengthSegment, WorkloadRow
from batcher.workloads.trace_checks import NumberedLine, TraceChecks

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NANOSECONDS = 10**9
# A day, a time, up to nine digits of a second (some of these traces have seven), and a zone.
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def azure_rows(
    lines: Iterable[NumberedLine], checks: TraceChecks, name: str = DEFAULT_NAME
) -> Iterator[WorkloadRow]:
    """Yield the requests of an Azure trace; their ids are `name` and a number from 0 on.

    Raises:
        WorkloadError: a line is not one of such a trace.
    """
    numbered = iter(lines)
    places = _find_columns(next(numbered, (1, b"")), checks)
    for index, (number, line) in enumerate(numbered):
        cells = _split(line)
        if len(cells) <= max(places):
            raise checks.error(number, f"{len(cells)} columns: expected {', '.join(COLUMNS)}")
        timestamp, prompt, output = (cells[place] for place in places)
        nanoseconds = _parse_timestamp(timestamp, number, checks)
        request_id = f"{name}{index}"
        length = _parse_length(prompt, number, COLUMNS[1], checks)
        yield WorkloadRow(
            id=request_id,
            arrival_time=checks.arrival_time(nanoseconds, _NANOSECONDS, number, COLUMNS[0]),
            prompt=[LengthSegment(length=length, seed=request_id)],
            max_tokens=_parse_length(output, number, COLUMNS[2], checks),
            ignore_eos=True,
        )


def _split(line: bytes) -> list[str]:
    return [cell.strip() for cell in line.decode(errors="backslashreplace").split(",")]


def _find_columns(header: NumberedLine, checks: TraceChecks) -> list[int]:
    """Return the places of COLUMNS in the first line.

    Raises:
        WorkloadError: one of them is not there.
    """
    number, line = header
    names = _split(line)
    for column in COLUMNS:
        if column not in names:
            raise checks.error(
                number, f"no column {column}: expected a first line {','.join(COLUMNS)}"
            )
    return [names.index(column) for column in COLUMNS]


def _parse_timestamp(text: str, number: int, checks: TraceChecks) -> int:
    """Return the nanoseconds since 1970; a time without a zone is UTC."""
    match = _TIMESTAMP.fullmatch(text)
    day, time, fraction, zone = match.groups() if match else ("", "", "", "")
    try:
        whole = datetime.fromisoformat(f"{day}T{time}{zone or 'Z'}")
    except ValueError:
        raise checks.error(
            number, f"{COLUMNS[0]} {text!r}: expected a time as in 2023-11-16 18:15:46.6805900"
        ) from None
    return (whole - _EPOCH) // _SECOND * _NANOSECONDS + int((fraction or "").ljust(9, "0"))


def _parse_length(text: str, number: int, field: str, checks: TraceChecks) -> int:
    try:
        value = int(text)
    except ValueError:
        raise checks.error(number, f"{field} {text!r}: expected a number of tokens") from None
    return checks.length(value, number, field)
