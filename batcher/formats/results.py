"""Results as lines of JSON, in two forms that hold the same: our own and OpenAI Batch rows."""

import msgspec
from msgspec import Struct

from batcher.errors import RUN_ERROR_CODES, BatchdecodeError
from batcher.formats.diagnostics import Problem
from batcher.request import ErrorInfo, FinishReason, Result, StepTimes, StopReason, Usage

OK, BAD_REQUEST, SERVER_ERROR = 200, 400, 500


class RowUsage(Usage, frozen=True):
    """Usage with the sum that OpenAI's rows have."""

    total_tokens: int


class Choice(Struct, frozen=True):
    """The generated text; always the only one of its row."""

    index: int
    text: str
    finish_reason: FinishReason
    stop_reason: StopReason
    logprobs: None


class Extras(Struct, frozen=True):
    """What a result holds and OpenAI's rows have no place for."""

    index: int
    tokens: list[int]
    slot: int | None
    steps: StepTimes


class Completion(Struct, frozen=True):
    """The answer in a row; `created` is 0, since the same input gives the same bytes."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: RowUsage
    batchdecode: Extras


class Response(Struct, frozen=True):
    """The HTTP answer a row pretends to be; 400 is a bad request, 500 a failure of the model."""

    status_code: int
    request_id: str
    body: Completion


class ResultRow(Struct, frozen=True):
    """One line of the output file of an OpenAI Batch."""

    id: str
    custom_id: str
    response: Response
    error: ErrorInfo | None


_encoder = msgspec.json.Encoder()
_result_decoder = msgspec.json.Decoder(Result)
_row_decoder = msgspec.json.Decoder(ResultRow)


def encode_result(result: Result) -> bytes:
    r"""Return `result` as a line of our own form, "\n" included."""
    return _encoder.encode(result) + b"\n"


def encode_openai_row(result: Result, model: str) -> bytes:
    r"""Return `result` as an OpenAI Batch row, "\n" included; model: the name the body shows."""
    usage, number = result.usage, f"{result.index:08d}"
    error = result.error
    total = usage.prompt_tokens + usage.completion_tokens
    completion = Completion(
        id=f"cmpl-{number}",
        object="text_completion",
        created=0,
        model=model,
        choices=[Choice(0, result.text, result.finish_reason, result.stop_reason, None)],
        usage=RowUsage(usage.prompt_tokens, usage.completion_tokens, total),
        batchdecode=Extras(result.index, result.tokens, result.slot, result.steps),
    )
    response = Response(_status_code(error), f"req-{number}", completion)
    return _encoder.encode(ResultRow(f"batch_req_{number}", result.id, response, error)) + b"\n"


def decode_result_line(line: bytes) -> Result:
    """Return the result that a line of either form holds.

    Raises:
        BatchdecodeError: it is neither.
    """
    try:
        return _result_decoder.decode(line)
    except ValueError as error:
        reason = error
    try:
        return _result_of_row(_row_decoder.decode(line))
    except (ValueError, IndexError):
        raise BatchdecodeError(f"not a result: {reason}") from None


def make_rejected_result(request_id: str, index: int, problems: list[Problem]) -> Result:
    """Return the result of a line that is no request, for the first of its problems."""
    first = problems[0]
    more = len(problems) - 1
    message = first.message
    if more:
        message += f" (and {more} more problem{'s' if more > 1 else ''} in this line)"
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
        error=ErrorInfo(first.code, message, first.line, first.column, first.field),
    )


def _status_code(error: ErrorInfo | None) -> int:
    if error is None:
        return OK
    return SERVER_ERROR if error.code in RUN_ERROR_CODES else BAD_REQUEST


def _result_of_row(row: ResultRow) -> Result:
    body = row.response.body
    choice, extras = body.choices[0], body.batchdecode
    return Result(
        id=row.custom_id,
        index=extras.index,
        text=choice.text,
        tokens=extras.tokens,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        usage=Usage(body.usage.prompt_tokens, body.usage.completion_tokens),
        slot=extras.slot,
        steps=extras.steps,
        error=row.error,
    )
