"""Results as lines of JSON, in two forms that hold the same: our own and OpenAI Batch rows.

A line of our own holds one result, a row all results of a request.
"""

import msgspec
from msgspec import Struct

from batcher.errors import RUN_ERROR_CODES, BatchdecodeError
from batcher.formats.diagnostics import Problem
from batcher.request import (
    ConstraintCheck,
    ConstraintOutcome,
    ErrorInfo,
    FinishReason,
    Result,
    Segment,
    StepTimes,
    StopReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)

OK, BAD_REQUEST, SERVER_ERROR = 200, 400, 500
TOKEN_PREFIX = "token_id:"  # noqa: S105 - a token of text; vLLM writes ids like this, too


class RowUsage(Usage, frozen=True):
    """The sums of a row: its prompt once, and the tokens of all its choices."""

    total_tokens: int


class ChoiceLogprobs(Struct, frozen=True):
    """The logprobs of the tokens, in the form of OpenAI's completions; tokens as `token_id:17`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class Extras(Struct, frozen=True, omit_defaults=True):
    """What a result holds and OpenAI's choices have no place for."""

    index: int
    tokens: list[int]
    usage: Usage
    slot: int | None
    steps: StepTimes
    error: ErrorInfo | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    segments: list[Segment] | None = None
    constraint: ConstraintOutcome | None = None
    constraint_check: ConstraintCheck | None = None


class Choice(Struct, frozen=True):
    """One result; index: its place in the row."""

    index: int
    text: str
    finish_reason: FinishReason
    stop_reason: StopReason
    logprobs: ChoiceLogprobs | None
    batchdecode: Extras


class Completion(Struct, frozen=True):
    """The answer in a row; `created` is 0, since the same input gives the same bytes."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: RowUsage


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


def encode_openai_row(results: list[Result], model: str) -> bytes:
    r"""Return all results of a request, one or more, as an OpenAI Batch row, "\n" included.

    model: the name the body shows.
    """
    request_id = results[0].id
    error = next((result.error for result in results if result.error is not None), None)
    prompt_tokens = results[0].usage.prompt_tokens
    completion_tokens = sum(result.usage.completion_tokens for result in results)
    completion = Completion(
        id=f"cmpl-{request_id}",
        object="text_completion",
        created=0,
        model=model,
        choices=[_make_choice(place, result) for place, result in enumerate(results)],
        usage=RowUsage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens),
    )
    response = Response(_status_code(error), f"req-{request_id}", completion)
    row = ResultRow(f"batch_req_{request_id}", request_id, response, error)
    return _encoder.encode(row) + b"\n"


def decode_result_line(line: bytes) -> list[Result]:
    """Return the results that a line of either form holds, one or more.

    Raises:
        BatchdecodeError: it is neither.
    """
    try:
        return [_result_decoder.decode(line)]
    except ValueError as error:
        reason = error
    try:
        results = _results_of_row(_row_decoder.decode(line))
    except ValueError:
        results = []
    if not results:
        raise BatchdecodeError(f"not a result: {reason}")
    return results


def make_rejected_result(request_id: str, problems: list[Problem]) -> Result:
    """Return the result of a line that is no request, for the first of its problems."""
    first = problems[0]
    more = len(problems) - 1
    message = first.message
    if more:
        message += f" (and {more} more problem{'s' if more > 1 else ''} in this line)"
    return Result(
        id=request_id,
        index=0,
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


def _make_choice(place: int, result: Result) -> Choice:
    return Choice(
        index=place,
        text=result.text,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        logprobs=None if result.logprobs is None else _make_logprobs(result.logprobs),
        batchdecode=msgspec.convert(result, Extras, from_attributes=True),
    )


def _make_logprobs(logprobs: list[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        tokens=[f"{TOKEN_PREFIX}{item.token}" for item in logprobs],
        token_logprobs=[item.logprob for item in logprobs],
        top_logprobs=[
            {f"{TOKEN_PREFIX}{other.token}": other.logprob for other in item.top}
            for item in logprobs
        ],
    )


def _results_of_row(row: ResultRow) -> list[Result]:
    return [
        Result(
            id=row.custom_id,
            text=choice.text,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=None if choice.logprobs is None else _read_logprobs(choice.logprobs),
            **msgspec.structs.asdict(choice.batchdecode),
        )
        for choice in row.response.body.choices
    ]


def _read_logprobs(logprobs: ChoiceLogprobs) -> list[TokenLogprob]:
    """Return what `_make_logprobs` made these of.

    Raises:
        ValueError: it did not.
    """
    columns = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    return [
        TokenLogprob(
            _read_token(token),
            logprob,
            [TopLogprob(_read_token(other), value) for other, value in top.items()],
        )
        for token, logprob, top in columns
    ]


def _read_token(text: str) -> int:
    return int(text.removeprefix(TOKEN_PREFIX))
