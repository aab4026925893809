"""Results as lines of JSON, in two equivalent forms: our own and OpenAI Batch rows.

A line of our own holds one result, a row (see result_rows.py) all results of a request.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from batcher.errors import BatchdecodeError
from batcher.events import TokenEvent
from batcher.result import ErrorInfo, Result, StepTimes, Usage

if TYPE_CHECKING:
    from batcher.requests.problems import Problem

_encoder = msgspec.json.Encoder()
_result_decoder = msgspec.json.Decoder(Result)


def encode_result(result: Result) -> bytes:
    return _encoder.encode(result) + b"\n"


def encode_results(results: Iterable[Result]) -> bytes:
    return _encoder.encode_lines(results)


def encode_tokens(events: Iterable[TokenEvent]) -> bytes:
    return _encoder.encode_lines(events)


def decode_result_line(line: bytes) -> list[Result]:
    """Return the results in a line of either form, or raise a BatchdecodeError."""
    try:
        return [_result_decoder.decode(line)]
    except msgspec.ValidationError:
        reason = "a field of a result is missing or has the wrong type"
    except ValueError:
        reason = "it is not JSON"
    from batcher.requests.result_rows import results_of_row  # noqa: PLC0415 - only for OpenAI rows

    results = results_of_row(line)
    if not results:
        raise BatchdecodeError(f"not a result: {reason}")
    return results


def is_result(line: bytes) -> bool:
    try:
        return bool(decode_result_line(line))
    except (BatchdecodeError, RecursionError):
        return False


def make_rejected_result(request_id: str, problems: "list[Problem]") -> Result:
    first = problems[0]
    more = len(problems) - 1
    message = first.message
    if more:
        message += f" (and {more} more problem{'s' if more > 1 else ''} in this line)"
    error = ErrorInfo(first.code, message, first.line, first.column, first.field)
    return make_lost_result(request_id, 0, error)


def make_lost_result(request_id: str, index: int, error: ErrorInfo) -> Result:
    return Result(
        id=request_id,
        index=index,
        text="",
        tokens=[],
        finish_reason="error",
        stop_reason=None,
        usage=Usage(0, 0),
        slot=None,
        steps=StepTimes(None, None, None, None),
        error=error,
    )
