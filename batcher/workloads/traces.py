"""Recorded traces by the name of their format, and lengths taken from them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Literal

from batcher.workloads.azure import COLUMNS, azure_rows
from batcher.workloads.mooncake import mooncake_rows
from batcher.workloads.rows import WorkloadError, WorkloadRow
from batcher.workloads.trace_checks import NumberedLine, TraceChecks
from batcher.workloads.vllm import vllm_rows

Side = Literal["prompt", "output"]
TraceReader = Callable[[Iterable[NumberedLine], TraceChecks, str], Iterator[WorkloadRow]]

TRACES: dict[str, TraceReader] = {
    "azure": azure_rows,
    "mooncake": mooncake_rows,
    "vllm": vllm_rows,
}
_MARKS = {"azure": COLUMNS[0], "mooncake": '"hash_ids"', "vllm": '"input_toks"'}


def read_lengths(lines: Iterable[NumberedLine], source: str, side: Side) -> list[int]:
    """Return the lengths of one side of a trace, or those in a file of one number a line.

    Raises:
        WorkloadError: there is none in it, or a line is not what it has to be.
    """
    checks = TraceChecks(source)
    numbered = iter(lines)
    head = list(islice(numbered, 1))
    first = head[0][1].decode(errors="replace") if head else ""
    name = next((name for name, mark in _MARKS.items() if mark in first), None)
    together = chain(head, numbered)
    if name is None:
        lengths = [_read_number(line, number, checks) for number, line in together]
    else:
        rows = TRACES[name](together, checks, "")
        lengths = [row.prompt_tokens if side == "prompt" else row.max_tokens for row in rows]
    if not lengths:
        raise WorkloadError(f"{source}: there are no lengths in it")
    return lengths


def _read_number(line: bytes, number: int, checks: TraceChecks) -> int:
    text = line.decode(errors="backslashreplace").strip()
    try:
        value = int(text)
    except ValueError:
        raise checks.error(
            number,
            f"{text[:40]!r} is not a whole number, and the file no {', '.join(TRACES)} trace",
        ) from None
    return checks.length(value, number, "length")
