"""All results of a request as one row of an OpenAI Batch, a completion or a chat."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
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
PerToken = Sequence[PromptLogprob | TokenLogprob]


class RowUsage(Usage, frozen=True):
    """Tokens of a row: the prompt once, and all choices."""

    total_tokens: int


SAID = ("reasoning", "refusal", "tool_calls", "function_call")

if TYPE_CHECKING:
    Extras = Result
else:
    _PLACED = {"id", "text", "finish_reason", "stop_reason", "logprobs"}
    Extras = msgspec.defstruct(
        "Extras",
        [
            (field.name, field.type, *([] if field.required else [field.default]))
            for field in msgspec.structs.fields(Result)
            if field.name not in _PLACED
        ],
        namespace={"__doc__": "Fields of a result that choices lack; messages of chats have SAID."},
        frozen=True,
        omit_defaults=True,
    )


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """The generated text as a message of the assistant, and the tools it calls; see Result."""

    role: Literal["assistant"]
    content: str
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, str] | None = None


class ChatTopLogprob(Struct, frozen=True):
    """One of the most likely tokens; `bytes` is null, as the token is an id."""

    token: str
    logprob: float
    bytes: None = None


class ChatTokenLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    """A generated token, and the most likely tokens at its position."""

    top_logprobs: list[ChatTopLogprob]


class Logprobs(Struct, frozen=True):
    """The logprobs of the tokens, after those of an echoed prompt.

    content: in a chat; the others are for completions.  text_offset: the first character of each
    token in the text.
    """

    tokens: list[str] | UnsetType = UNSET
    token_logprobs: list[float | None] | UnsetType = UNSET
    top_logprobs: list[dict[str, float] | None] | UnsetType = UNSET
    text_offset: list[int] | UnsetType = UNSET
    content: list[ChatTokenLogprob] | UnsetType = UNSET


class Choice(Struct, frozen=True, kw_only=True):
    """One result; index: its place in the row.  text: for completions; message: for chats."""

    index: int
    text: str | UnsetType = UNSET
    message: ChatMessage | UnsetType = UNSET
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    logprobs: Logprobs | None
    batchdecode: Extras
    token_ids: list[int] | UnsetType = UNSET  # only over HTTP, as in vLLM


class Completion(Struct, frozen=True):
    """The answer in a row; `created` is 0, so that equal inputs give equal bytes."""

    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: RowUsage


class Response(Struct, frozen=True):
    """An HTTP answer: the status of a server, 400 for a bad request, or 500."""

    status_code: int
    request_id: str
    body: Completion


class ResultRow(Struct, frozen=True):
    """A line in the output file of an OpenAI Batch."""

    id: str
    custom_id: str
    response: Response
    error: ErrorInfo | None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ResultRow)


def encode_openai_row(results: list[Result], model: str, form: Form, bytes_of: BytesOf) -> bytes:
    """Return all results of a request as an OpenAI Batch row; bytes_of: the bytes of a token."""
    request_id = results[0].id
    error = next((result.error for result in results if result.error is not None), None)
    status = OK if error is None else error.status or status_of(error.code)
    answer = completion_of(results, model, form, bytes_of)
    response = Response(status, f"req-{request_id}", answer)
    row = ResultRow(f"batch_req_{request_id}", request_id, response, error)
    return _encoder.encode(row) + b"\n"


def completion_of(
    results: list[Result],
    model: str,
    form: Form,
    bytes_of: BytesOf,
    created: int = 0,
    *,
    has_token_ids: bool = False,
) -> Completion:
    """Return all results of a request as the body of one answer.

    created: in seconds since 1970.  has_token_ids: add the token ids, as vLLM does.
    """
    is_chat, choices = form == "chat", []
    for place, result in enumerate(results):
        reason: ChatFinishReason = result.finish_reason
        per_token: PerToken | None = result.logprobs
        extras, logprobs = result, None
        message: ChatMessage | UnsetType = UNSET
        if is_chat:
            said = {name: getattr(result, name) for name in SAID}
            message = ChatMessage("assistant", result.text, **said)
            extras = replace(result, **dict.fromkeys(SAID))
            if reason == "stop" and result.tool_calls is not None:
                reason = TOOL_CALLS
            elif reason == "stop" and result.function_call is not None:
                reason = FUNCTION_CALL
        elif form == "echoed completion" and per_token is not None and result.prompt_logprobs:
            per_token = [*result.prompt_logprobs, *per_token]
            extras = replace(result, prompt_logprobs=None)
        if is_chat and result.logprobs is not None:
            logprobs = chat_logprobs(result.logprobs)
        elif per_token is not None:
            logprobs = choice_logprobs(per_token, _offsets(per_token, result.text, bytes_of))
        choices.append(
            Choice(
                index=place,
                text=UNSET if is_chat else result.text,
                message=message,
                finish_reason=reason,
                stop_reason=result.stop_reason,
                logprobs=logprobs,
                batchdecode=msgspec.convert(extras, Extras, from_attributes=True),
                token_ids=(result.tokens or []) if has_token_ids else UNSET,
            )
        )
    answer_id, usage = answer_id_of(results[0].id, form), usage_of(results)
    kind: Literal["text_completion", "chat.completion"] = "text_completion"
    if is_chat:
        kind = "chat.completion"
    return Completion(answer_id, kind, created, model, choices, usage)


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
    try:
        return list(_results_of(_decoder.decode(line)))
    except ValueError:
        return []


def _results_of(row: ResultRow) -> Iterator[Result]:
    for choice in row.response.body.choices:
        fields: dict[str, Any] = asdict(choice.batchdecode)
        per_token: list[PromptLogprob] = []
        found: Any = choice.logprobs or Logprobs([], [], [], [], [])
        if isinstance(choice.message, ChatMessage):
            text: str | UnsetType = choice.message.content
            fields |= {name: getattr(choice.message, name) for name in SAID}
            columns: Any = (found.content,)
        else:
            text, columns = choice.text, (found.tokens, found.token_logprobs, found.top_logprobs)
        if text is UNSET or UNSET in columns:
            raise ValueError("neither a completion nor a chat")
        for item, *more in zip(*columns, strict=True):
            if more:
                logprob, top = more
                per_token.append(_read_logprob(item, logprob, (top or {}).items()))
            else:
                others = [(other.token, other.logprob) for other in item.top_logprobs]
                per_token.append(_read_logprob(item.token, item.logprob, others))
        if per_token and per_token[0].logprob is None:  # of an echoed prompt
            num_prompt = fields["usage"].prompt_tokens
            fields["prompt_logprobs"], per_token = per_token[:num_prompt], per_token[num_prompt:]
        if choice.logprobs is not None:
            fields["logprobs"] = msgspec.convert(
                per_token, list[TokenLogprob], from_attributes=True
            )
        reason = choice.finish_reason
        yield Result(
            id=row.custom_id,
            text=str(text),
            finish_reason="stop" if reason in (TOOL_CALLS, FUNCTION_CALL) else reason,
            stop_reason=choice.stop_reason,
            **fields,
        )


def _read_logprob(
    token: str, logprob: float | None, top: Iterable[tuple[str, float]]
) -> PromptLogprob:
    others = [TopLogprob(read_token(other), value) for other, value in top]
    return PromptLogprob(read_token(token), logprob, others)


def _offsets(per_token: PerToken, text: str, bytes_of: BytesOf) -> list[int]:
    """Return the first character of each token in `text`."""
    decoder, offsets, offset = getincrementaldecoder("utf-8")("replace"), [], 0
    for token in (item.token for item in per_token):
        offsets.append(min(offset, len(text)))
        written = token.encode() if isinstance(token, str) else bytes_of(token)
        offset += len(decoder.decode(written))
    return offsets


def choice_logprobs(per_token: PerToken, offsets: list[int]) -> Logprobs:
    """Return the logprobs of a completion; offsets: the first character of each token."""
    return Logprobs(
        tokens=[_text_of(item.token) for item in per_token],
        token_logprobs=[item.logprob for item in per_token],
        top_logprobs=[
            None if item.logprob is None else {_text_of(o.token): o.logprob for o in item.top}
            for item in per_token
        ],
        text_offset=offsets,
    )


def chat_logprobs(per_token: Iterable[TokenLogprob]) -> Logprobs:
    content = [
        ChatTokenLogprob(
            token=_text_of(item.token),
            logprob=item.logprob,
            top_logprobs=[ChatTopLogprob(_text_of(o.token), o.logprob) for o in item.top],
        )
        for item in per_token
    ]
    return Logprobs(content=content)


def _text_of(token: int | str) -> str:
    return token if isinstance(token, str) else f"{TOKEN_PREFIX}{token}"


def read_token(text: str) -> int | str:
    token = text.removeprefix(TOKEN_PREFIX)
    return int(token) if token != text and token.isdecimal() else text
