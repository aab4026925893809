"""Mooncake traces: JSON lines with a hash for each block of a prompt."""

from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
from msgspec import Struct

from batcher.workloads.rows import DEFAULT_NAME, LengthSegment, WorkloadRow
from batcher.workloads.trace_checks import NumberedLine, TraceChecks

BLOCK_TOKENS = 512
_MILLISECONDS = 1000


class MooncakeLine(Struct, gc=False):
    """A line of the trace; timestamp: milliseconds.  Of its other fields nothing is used."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


def mooncake_rows(
    lines: Iterable[NumberedLine], checks: TraceChecks, name: str = DEFAULT_NAME
) -> Iterator[WorkloadRow]:
    """Yield the requests of a Mooncake trace; their ids are `name` and a number from 0 on.

    A prompt has a segment for each of its blocks, with the block's hash for a seed; the last one
    has what is left of the length.

    Raises:
        WorkloadError: a line is not one of such a trace.
    """
    decode = partial(msgspec.json.decode, type=MooncakeLine)
    for index, (number, line) in enumerate(lines):
        try:
            record = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise checks.error(number, str(error)) from None
        request_id = f"{name}{index}"
        yield WorkloadRow(
            id=request_id,
            arrival_time=checks.arrival_time(record.timestamp, _MILLISECONDS, number, "timestamp"),
            prompt=_segments(record, request_id, number, checks),
            max_tokens=checks.length(record.output_length, number, "output_length"),
            ignore_eos=True,
        )


def _segments(
    record: MooncakeLine, request_id: str, number: int, checks: TraceChecks
) -> list[LengthSegment]:
    """Return the segments of a prompt, one for each block.

    Raises:
        WorkloadError: the blocks do not make up the length.
    """
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
