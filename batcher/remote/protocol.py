"""OpenAI's protocol: what a request asks for as a body, and chunks of a stream as an answer.

Rule: a body holds what the row states and nothing else, but for what a stream needs.  What no
server has a field for is refused before anything is sent, see SERVED.
"""

from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct

from batcher.errors import Failure
from batcher.remote.failures import ServerFailure, told_in
from batcher.request import REQUEST_FIELDS, Request, ServerRequest
from batcher.result import (
    LOWEST_LOGPROB,
    NUM_DIGITS,
    FinishReason,
    StopReason,
    TokenLogprob,
    TopLogprob,
)

COMPLETIONS_PATH, CHAT_PATH = "/completions", "/chat/completions"
TOKEN_PREFIX = "token_id:"  # noqa: S105 - a token of text; vLLM writes ids like this

# What the queue acts on itself, what servers know by the same name, and what by another one.
_OURS = ("prompt", "id", "arrival_time", "priority", "deadline", "session", "think_time", "n")
_SENT = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "cache_salt", "mirostat", "mirostat_tau", "mirostat_eta"),
)
_RENAMED = ("stop", "stop_sequence", "stop_token", "logprobs", "json_schema", "extra_body")
_STRUCTURED = {"regex": "regex", "choice": "choice", "lark": "grammar", "gbnf": "grammar"}  # vLLM's
SERVED = frozenset((*_OURS, *_SENT, *_RENAMED, *_STRUCTURED))
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMATS = ("response_format", "structured_outputs", *_GUIDED)


class Body(Struct, frozen=True):
    """What is sent, and to which of the paths of a server."""

    path: str
    fields: dict[str, Any]


def is_chat(request: Request) -> bool:
    """Return whether a request is messages, and no text to go on from."""
    return request.extra_body is not None and "messages" in request.extra_body


def body_of(
    request: Request, index: int, model: str | None, extra_body: dict[str, Any], history: Any
) -> Body:
    """Return what is sent for sample `index` of a request.

    model: goes before the one that the request names.  extra_body: of all requests; that of the
    request goes before it, but null removes a field of any.  history: the text, or the messages,
    that the request goes on from.
    """
    own = request.extra_body or {}
    fields = {"stream": True, "stream_options": {"include_usage": True}, **_asked_for(request, own)}
    if is_chat(request):
        path = CHAT_PATH
        if request.logprobs is not None:
            fields["logprobs"] = True
        if request.logprobs:
            fields["top_logprobs"] = request.logprobs
    else:
        path = COMPLETIONS_PATH
        fields["prompt"] = history + request.prompt if history else request.prompt
        if request.logprobs is not None:
            fields["logprobs"] = request.logprobs
    fields |= extra_body
    fields |= own
    if path == CHAT_PATH and history:
        fields["messages"] = [*history, *fields["messages"]]
    if model is not None:
        fields["model"] = model
    if index:  # samples differ even if a server repeats itself, and a second run gets the same ones
        seed = fields.setdefault("seed", crc32(str(request.id).encode(errors="replace")) >> 1)
        if isinstance(seed, int):
            fields["seed"] = seed + index
    fields |= {name: None for name, value in extra_body.items() if value is None}
    return Body(path, {name: value for name, value in fields.items() if value is not None})


def _asked_for(request: Request, own: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked for of texts and chats alike.

    own: what the request says in the server's words, and is not said again in ours.
    """
    fields: dict[str, Any] = {}
    stated = request.stated if isinstance(request, ServerRequest) else frozenset()
    for name in _SENT:
        value = getattr(request, name)
        if name in stated or REQUEST_FIELDS[name].asks(value):
            fields[name] = value
    if "max_completion_tokens" in own:
        fields.pop("max_tokens", None)
    stops = [stop for given in (request.stop_sequence, request.stop) for stop in _listed(given)]
    if stops:
        fields["stop"] = stops
    if request.stop_token is not None:
        fields["stop_token_ids"] = _listed(request.stop_token)
    if own.keys().isdisjoint(_FORMATS):
        if request.json_schema is not None:
            fields["response_format"] = _response_format(request.json_schema)
        for name, key in _STRUCTURED.items():
            if (value := getattr(request, name)) is not None:
                fields["structured_outputs"] = {key: value}
    return fields


def _listed(stops: Any) -> list[Any]:
    if stops is None:
        return []
    return stops if isinstance(stops, list) else [stops]


def _response_format(schema: Any) -> dict[str, Any]:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    stated = {} if schema is True else schema
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": stated}}


# -- what a stream holds ---------------------------------------------------------------------------


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StreamEvent(Struct):
    """One event of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(StreamEvent).decode
_ENDS: dict[str, FinishReason] = {"length": "length"}  # all others but content_filter are stops


def read_chunk(data: str) -> StreamEvent:
    """Return the chunk that an event of a stream is.

    Raises:
        ServerFailure: it is none, or says that the server has failed.
    """
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        message = f"an event of the stream is no chunk: {error}"
        raise ServerFailure("answer", message) from None
    if chunk.error is not None:
        said = told_in(msgspec.json.encode({"error": chunk.error}))
        raise ServerFailure("answer", f"the stream ended with an error: {said}")
    return chunk


class Reply:
    """What has come of an answer so far.

    num_tokens: as many as were counted: by what a chunk tells, or else one for each with text.
    token_ids: None as soon as one is not told.  prompt_tokens: None until the server tells.
    finish_reason: as the server says it; None until then.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] | None = []
        self._texts: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}

    @property
    def text(self) -> str:
        """What was generated."""
        return "".join(self._texts)

    @property
    def tool_calls(self) -> list[dict[str, Any]] | None:
        """The calls that the model asks for, None for none."""
        return [self._tool_calls[index] for index in sorted(self._tool_calls)] or None

    @property
    def outcome(self) -> FinishReason:
        """How it ended, in our words; one that was filtered, or has no end, is an error."""
        if self.finish_reason is None or self.failure is not None:
            return "error"
        return _ENDS.get(self.finish_reason, "stop")

    @property
    def failure(self) -> Failure | None:
        """Why the server itself broke it off, if it did."""
        if self.finish_reason != "content_filter":
            return None
        return Failure("content-filter", "the server's content filter has broken it off")

    def take(self, chunk: StreamEvent) -> tuple[int, str]:
        """Take in the next chunk; return how many tokens it brings, and the text."""
        before, text = self.num_tokens, ""
        for choice in chunk.choices:
            text += self._take_choice(choice)
        usage = chunk.usage
        if usage is not None:
            if usage.prompt_tokens is not None:
                self.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.num_tokens = usage.completion_tokens
        return max(self.num_tokens - before, 0), text

    def _take_choice(self, choice: _Choice) -> str:
        delta = choice.delta or _Delta()
        text = choice.text or delta.content or ""
        told = _read_logprobs(choice.logprobs) if choice.logprobs else []
        self._texts.append(text)
        self.logprobs += told
        for call in delta.tool_calls or ():
            self._take_call(call)
        ids = choice.token_ids
        if ids is None and told and all(isinstance(one.token, int) for one in told):
            ids = [one.token for one in told if isinstance(one.token, int)]
        if ids is not None:
            num_tokens = len(ids)
        else:
            has_any = bool(text or delta.reasoning_content or delta.tool_calls)
            num_tokens = len(told) or int(has_any)
        if num_tokens and ids is None:
            self.token_ids = None
        elif ids and self.token_ids is not None:
            self.token_ids += ids
        self.num_tokens += num_tokens
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
        return text

    def _take_call(self, part: dict[str, Any]) -> None:
        """Take in a part of a tool call; those of one call go behind each other."""
        index = part.get("index")
        call = self._tool_calls.setdefault(
            index if isinstance(index, int) else len(self._tool_calls),
            {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
        )
        call["id"] = part.get("id") or call["id"]
        function: object = part.get("function")
        if isinstance(function, dict):
            for name in ("name", "arguments"):
                call["function"][name] += str(function.get(name) or "")


def _read_logprobs(logprobs: dict[str, Any]) -> list[TokenLogprob]:
    """Return what a chunk tells of its tokens, in the form of chats or of completions.

    Raises:
        ServerFailure: it is neither.
    """
    try:
        if logprobs.get("content") is not None:
            return [
                _told(
                    _token(one),
                    one["logprob"],
                    [(_token(other), other["logprob"]) for other in one.get("top_logprobs") or ()],
                )
                for one in logprobs["content"]
            ]
        tokens = logprobs.get("tokens") or []
        tops = logprobs.get("top_logprobs") or [None] * len(tokens)
        columns = zip(tokens, logprobs.get("token_logprobs") or (), tops, strict=True)
        return [
            _told(_read(t), value, [(_read(o), v) for o, v in (top or {}).items()])
            for t, value, top in columns
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the stream has logprobs of no known form ({type(error).__name__})"
        raise ServerFailure("answer", message) from None


def _told(token: int | str, logprob: float, top: list[tuple[int | str, float]]) -> TokenLogprob:
    return TokenLogprob(token, _bounded(logprob), [TopLogprob(o, _bounded(v)) for o, v in top])


def _bounded(logprob: float) -> float:
    return max(round(float(logprob), NUM_DIGITS), LOWEST_LOGPROB)


def _token(told: dict[str, Any]) -> int | str:
    """Return the id of a token if it is told, as llama.cpp does, else its text."""
    token_id = told.get("id")
    return token_id if isinstance(token_id, int) and token_id >= 0 else _read(told["token"])


def _read(token: str) -> int | str:
    number = token.removeprefix(TOKEN_PREFIX)
    return int(number) if number != token and number.isdecimal() else token
