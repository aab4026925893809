"""All results of a request as one row of an OpenAI Batch: of a completion, or of a chat."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from batcher.errors import CLIENT_FAULTS, RUN_ERROR_CODES
from batcher.requests.openai import Form
from batcher.result import (
    ErrorInfo,
    FinishReason,
    PromptLogprob,
    Result,
    StopReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)

OK, BAD_REQUEST, SERVER_ERROR = 200, 400, 500
TOOL_CALLS: Literal["tool_calls"] = "tool_calls"
FUNCTION_CALL: Literal["function_call"] = "function_call"
ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]
TOKEN_PREFIX = "token_id:"  # noqa: S105 - a token of text; vLLM writes ids like this, too

BytesOf = Callable[[int], bytes]  # of a token


class RowUsage(Usage, frozen=True):
    """The sums of a row: its prompt once, and the tokens of all its choices."""

    total_tokens: int


SAID = ("reasoning", "refusal", "tool_calls", "function_call")

if TYPE_CHECKING:
    Extras = Result
else:
    Extras = msgspec.defstruct(
        "Extras",
        [
            (field.name, field.type, *([] if field.required else [field.default]))
            for field in msgspec.structs.fields(Result)
            if field.name not in {"id", "text", "finish_reason", "stop_reason", "logprobs"}
        ],
        namespace={
            "__doc__": "What a result holds and OpenAI's choices have no place for; SAID is in "
            "messages of chats."
        },
        frozen=True,
        omit_defaults=True,
    )


class ChoiceLogprobs(Struct, frozen=True):
    """The logprobs of the tokens, those of the prompt first if it is echoed; see docs.

    text_offset: where in the text each token begins, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One result of a completion; index: its place in the row."""

    index: int
    text: str
    finish_reason: FinishReason
    stop_reason: StopReason
    logprobs: ChoiceLogprobs | None
    batchdecode: Extras
    token_ids: list[int] | UnsetType = UNSET  # over HTTP alone, as vLLM has them


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """What was generated, as what the assistant says, and the tools it calls; see Result."""

    role: Literal["assistant"]
    content: str
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, str] | None = None


class ChatTopLogprob(Struct, frozen=True):
    """One of the most likely tokens; `bytes` is null, as the id stands for the token."""

    token: str
    logprob: float
    bytes: None = None


class ChatTokenLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    """A generated token, and the most likely ones where it stands."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """The logprobs of the tokens of a message."""

    content: list[ChatTokenLogprob]


class ChatChoice(Struct, frozen=True):
    """One result of a chat; index: its place in the row."""

    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    logprobs: ChatLogprobs | None
    batchdecode: Extras
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """The answer in a row; `created` is 0, since the same input gives the same bytes."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: RowUsage


class ChatCompletion(Struct, frozen=True):
    """The answer in a row of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: RowUsage


class Response(Struct, frozen=True):
    """The HTTP answer a row pretends to be: a server's status, or 400 for a bad request, or 500."""

    status_code: int
    request_id: str
    body: Completion


class ChatResponse(Struct, frozen=True):
    """The HTTP answer that a row of a chat pretends to be."""

    status_code: int
    request_id: str
    body: ChatCompletion


class ResultRow(Struct, frozen=True):
    """One line of the output file of an OpenAI Batch."""

    id: str
    custom_id: str
    response: Response
    error: ErrorInfo | None


class ChatResultRow(Struct, frozen=True):
    """One line of the output file of an OpenAI Batch of chats."""

    id: str
    custom_id: str
    response: ChatResponse
    error: ErrorInfo | None


_encoder = msgspec.json.Encoder()
_row_decoder = msgspec.json.Decoder(ResultRow)
_chat_decoder = msgspec.json.Decoder(ChatResultRow)


def encode_openai_row(results: list[Result], model: str, form: Form, bytes_of: BytesOf) -> bytes:
    r"""Return all results of a request, one or more, as an OpenAI Batch row, "\n" included.

    model: the name the body shows.  bytes_of: the bytes that a token stands for.
    """
    request_id = results[0].id
    error = next((result.error for result in results if result.error is not None), None)
    row_id, http_id = f"batch_req_{request_id}", f"req-{request_id}"
    status = OK if error is None else error.status or status_of(error.code)
    answer = completion_of(results, model, form, bytes_of)
    row: ResultRow | ChatResultRow
    if isinstance(answer, ChatCompletion):
        row = ChatResultRow(row_id, request_id, ChatResponse(status, http_id, answer), error)
    else:
        row = ResultRow(row_id, request_id, Response(status, http_id, answer), error)
    return _encoder.encode(row) + b"\n"


def completion_of(
    results: list[Result],
    model: str,
    form: Form,
    bytes_of: BytesOf,
    created: int = 0,
    *,
    has_token_ids: bool = False,
) -> Completion | ChatCompletion:
    """Return all results of a request as the body of one answer; arguments: as above.

    created: when, in seconds since 1970.  has_token_ids: whether choices tell them as vLLM does.
    """
    answer_id, usage = answer_id_of(results[0].id, form), usage_of(results)
    all_ids = [(result.tokens or []) if has_token_ids else UNSET for result in results]
    if form == "chat":
        chats = [_chat_choice(*one) for one in zip(count(), results, all_ids, strict=False)]
        return ChatCompletion(answer_id, "chat.completion", created, model, chats, usage)
    is_echoed = form == "echoed completion"
    choices = [
        _choice(place, result, ids, bytes_of, is_echoed)
        for place, result, ids in zip(count(), results, all_ids, strict=False)
    ]
    return Completion(answer_id, "text_completion", created, model, choices, usage)


def answer_id_of(request_id: str, form: Form) -> str:
    return f"chatcmpl-{request_id}" if form == "chat" else f"cmpl-{request_id}"


def usage_of(results: Sequence[Result]) -> RowUsage:
    prompt_tokens = sum({result.id: result.usage.prompt_tokens for result in results}.values())
    completion_tokens = sum(result.usage.completion_tokens for result in results)
    return RowUsage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def status_of(error_code: str) -> int:
    is_ours = error_code in RUN_ERROR_CODES and error_code not in CLIENT_FAULTS
    return SERVER_ERROR if is_ours else BAD_REQUEST


def results_of_row(line: bytes) -> list[Result]:
    for decoder in (_row_decoder, _chat_decoder):
        try:
            return list(_results_of(decoder.decode(line)))
        except ValueError:
            pass
    return []


def _results_of(row: ResultRow | ChatResultRow) -> Iterable[Result]:
    for choice in row.response.body.choices:
        fields: dict[str, Any] = asdict(choice.batchdecode)
        told: list[PromptLogprob] = []
        if isinstance(choice, ChatChoice):
            for item in choice.logprobs.content if choice.logprobs is not None else ():
                others = [(other.token, other.logprob) for other in item.top_logprobs]
                told.append(_read_logprob(item.token, item.logprob, others))
            text = choice.message.content
            fields |= {name: getattr(choice.message, name) for name in SAID}
        else:
            text, found = choice.text, choice.logprobs
            columns: tuple[list[Any], ...] = ()
            if found is not None:
                columns = found.tokens, found.token_logprobs, found.top_logprobs
            for token, logprob, top in zip(*columns, strict=True):
                told.append(_read_logprob(token, logprob, (top or {}).items()))
            if told and told[0].logprob is None:  # of an echoed prompt
                num_prompt = fields["usage"].prompt_tokens
                fields["prompt_logprobs"], told = told[:num_prompt], told[num_prompt:]
        if choice.logprobs is not None:
            fields["logprobs"] = msgspec.convert(told, list[TokenLogprob], from_attributes=True)
        reason = choice.finish_reason
        yield Result(
            id=row.custom_id,
            text=text,
            finish_reason="stop" if reason in (TOOL_CALLS, FUNCTION_CALL) else reason,
            stop_reason=choice.stop_reason,
            **fields,
        )


def _read_logprob(
    token: str, logprob: float | None, top: Iterable[tuple[str, float]]
) -> PromptLogprob:
    others = [TopLogprob(read_token(other), value) for other, value in top]
    return PromptLogprob(read_token(token), logprob, others)


# -- completions -----------------------------------------------------------------------------------


def _choice(
    place: int,
    result: Result,
    token_ids: list[int] | UnsetType,
    bytes_of: BytesOf,
    is_echoed: bool,  # noqa: FBT001 - of this file
) -> CompletionChoice:
    extras = msgspec.convert(result, Extras, from_attributes=True)
    logprobs = None
    if result.logprobs is not None:
        told: list[PromptLogprob | TokenLogprob] = [*result.logprobs]
        if is_echoed and result.prompt_logprobs is not None:
            told = [*result.prompt_logprobs, *result.logprobs]
            if result.prompt_logprobs:
                extras = replace(extras, prompt_logprobs=None)
        end = len(result.text)
        decoder = getincrementaldecoder("utf-8")("replace")
        offsets, offset = [], 0
        for token in (item.token for item in told):
            offsets.append(min(offset, end))
            text = token.encode() if isinstance(token, str) else bytes_of(token)
            offset += len(decoder.decode(text))
        logprobs = choice_logprobs(told, offsets)
    return CompletionChoice(
        index=place,
        text=result.text,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        logprobs=logprobs,
        batchdecode=extras,
        token_ids=token_ids,
    )


def choice_logprobs(
    told: Sequence[PromptLogprob | TokenLogprob], offsets: list[int]
) -> ChoiceLogprobs:
    """Return the logprobs of tokens in a completion; offsets: where in the text each begins."""
    return ChoiceLogprobs(
        tokens=[_text_of(item.token) for item in told],
        token_logprobs=[item.logprob for item in told],
        top_logprobs=[
            None if item.logprob is None else {_text_of(o.token): o.logprob for o in item.top}
            for item in told
        ],
        text_offset=offsets,
    )


# -- chats -----------------------------------------------------------------------------------------


def _chat_choice(place: int, result: Result, token_ids: list[int] | UnsetType) -> ChatChoice:
    reason: ChatFinishReason = result.finish_reason
    if reason == "stop" and result.tool_calls is not None:
        reason = TOOL_CALLS
    elif reason == "stop" and result.function_call is not None:
        reason = FUNCTION_CALL
    logprobs = None if result.logprobs is None else chat_logprobs(result.logprobs)
    return ChatChoice(
        index=place,
        message=ChatMessage(
            role="assistant",
            content=result.text,
            **{name: getattr(result, name) for name in SAID},
        ),
        finish_reason=reason,
        stop_reason=result.stop_reason,
        logprobs=logprobs,
        batchdecode=msgspec.convert(
            replace(result, **dict.fromkeys(SAID)), Extras, from_attributes=True
        ),
        token_ids=token_ids,
    )


def chat_logprobs(told: Iterable[TokenLogprob]) -> ChatLogprobs:
    content = [
        ChatTokenLogprob(
            token=_text_of(item.token),
            logprob=item.logprob,
            top_logprobs=[ChatTopLogprob(_text_of(o.token), o.logprob) for o in item.top],
        )
        for item in told
    ]
    return ChatLogprobs(content)


def _text_of(token: int | str) -> str:
    return token if isinstance(token, str) else f"{TOKEN_PREFIX}{token}"


def read_token(text: str) -> int | str:
    token = text.removeprefix(TOKEN_PREFIX)
    return int(token) if token != text and token.isdecimal() else text
