"""Logs of vLLM runs: JSON lines with the lengths of each request and when it was queued."""

from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
from msgspec import Struct

from batcher.workloads.rows import DEFAULT_NAME, LengthSegment, WorkloadRow
from batcher.workloads.trace_checks import NumberedLine, TraceChecks


class VllmLine(Struct, gc=False):
    """A line of the log; queued_ts: seconds.  Of its other fields nothing is used."""

    request_id: str
    input_toks: int
    output_toks: int
    queued_ts: int | float


def vllm_rows(
    lines: Iterable[NumberedLine],
    checks: TraceChecks,
    name: str = DEFAULT_NAME,  # noqa: ARG001 - as all traces have it; these requests have ids
) -> Iterator[WorkloadRow]:
    """Yield the requests of a vLLM log, which keep their ids.

    Raises:
        WorkloadError: a line is not one of such a log.
    """
    decode = partial(msgspec.json.decode, type=VllmLine)
    for number, line in lines:
        try:
            record = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise checks.error(number, str(error)) from None
        length = checks.length(record.input_toks, number, "input_toks")
        yield WorkloadRow(
            id=record.request_id,
            arrival_time=checks.arrival_time(record.queued_ts, 1, number, "queued_ts"),
            prompt=[LengthSegment(length=length, seed=record.request_id)],
            max_tokens=checks.length(record.output_toks, number, "output_toks"),
            ignore_eos=True,
        )
