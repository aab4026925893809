"""OpenAI's protocol: a request as a body, and the chunks of its answer as a Reply.

Rule: a body holds what the row states, and what a stream needs.  Fields that no server knows are
refused before anything is sent, see SERVED.  An answer that a server cut short, refused or mangled
is a ServerFailure; its partial text is kept.  Content of an unknown form is an error.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, cast
from zlib import crc32

import msgspec
from msgspec import Meta, Struct

from batcher.decoding.grammars import ConstraintSource, constraint_source, stated_source
from batcher.errors import FieldProblem, GrammarError
from batcher.events import RetryReason
from batcher.request import REQUEST_FIELDS, ConstraintField, Request, ServerRequest
from batcher.requests.openai import CONSTRAINT_SPELLINGS, Fields, Given, find_given
from batcher.requests.result_rows import read_token
from batcher.requests.validation import ModelCapabilities, check_field
from batcher.result import LOWEST_LOGPROB, NUM_DIGITS, FinishReason, TokenLogprob, TopLogprob

MAX_SHOWN = 500  # characters of a server's message
OVERLOADED = {429, 503, 529}
REPEATABLE = OVERLOADED | {408, 409, 425, 500, 502, 504, *range(520, 528)}  # of Cloudflare, too
UNAUTHORIZED, FORBIDDEN = 401, 403

_TOO_LONG = ("context_length", "context length", "exceed_context_size", "maximum context")
_FILTERED = ("content_filter", "content_policy", "moderation", "flagged")
_NEVER = "insufficient_quota"  # a 429 where waiting does not help
_WORDS = (
    *("message", "msg", "error", "errors", "detail", "status_msg", "base_resp", "metadata", "raw"),
)
_STATUS = re.compile("[45][0-9][0-9]")
_TITLE = re.compile("<title[^<>]*>([^<]*)", re.IGNORECASE)  # of a page
_TAG = re.compile("<[^<>]*>")


class ServerFailure(Exception):  # noqa: N818 - mostly returned, not raised
    """Why an attempt has no answer.

    code: one of RUN_ERROR_CODES or FIT_ERROR_CODES.  is_worth_retry: whether another attempt may
    succeed.  retry_after: the wait in seconds that the server asks for.  status: of an HTTP error.
    """

    def __init__(
        self,
        reason: RetryReason,
        message: str,
        *,
        code: str = "server-error",
        is_worth_retry: bool = True,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason: RetryReason = reason
        self.code, self.is_worth_retry = code, is_worth_retry
        self.retry_after, self.status = retry_after, status

    def note(self, more: str) -> "ServerFailure":
        self.args = (f"{self}{more}",)
        return self

    @property
    def is_final(self) -> bool:
        return self.status == UNAUTHORIZED


def refusal(status: int, body: bytes, retry_after: float | None = None) -> ServerFailure:
    said = error_text(body)
    words, code = said.lower(), "server-error"
    if any(mark in words for mark in _TOO_LONG):
        code = "prompt-too-long"
    elif status not in REPEATABLE and any(mark in words for mark in _FILTERED):
        code = "content-filter"
    return ServerFailure(
        "overload" if status in OVERLOADED else "answer",
        f"HTTP {status}: {said}" if said else f"HTTP {status}",
        code=code,
        is_worth_retry=status in REPEATABLE and code == "server-error" and _NEVER not in words,
        retry_after=retry_after,
        status=status,
    )


def error_text(body: bytes) -> str:
    """Return the message in the body of an error, on one line, cut to MAX_SHOWN."""
    text = body.decode("utf-8", "replace")
    try:
        parts = list(_texts_in(json.loads(text)))
    except (ValueError, RecursionError):
        is_page = text.lstrip().startswith("<")
        parts = (_TITLE.findall(text) or [_TAG.sub(" ", text)]) if is_page else []
    said = " ".join(" ".join(dict.fromkeys(parts) or [text]).split())
    return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}…"


def _texts_in(error: Any) -> Iterator[str]:
    """Yield the texts of an error in the forms of OpenAI, vLLM, FastAPI, OpenRouter and Gemini."""
    if isinstance(error, str):
        yield error
    elif isinstance(error, list):
        for part in error:
            yield from _texts_in(part)
    elif isinstance(error, dict):
        place = error.get("loc")
        if isinstance(place, list):
            yield f"{'.'.join(map(str, place))}: {error.get('msg')}"
        else:
            yield from _texts_in([error.get(name) for name in _WORDS])
        kinds = (error.get("code"), error.get("type"))
        yield from (f"({kind})" for kind in kinds if isinstance(kind, str))


# -- the body of a request -------------------------------------------------------------------------

# Fields that the queue uses, fields with the same name in a body, and fields with another one.
_OURS = ("prompt", "id", "arrival_time", "priority", "deadline", "session", "think_time", "n")
_SENT = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "cache_salt", "mirostat", "mirostat_tau", "mirostat_eta"),
    "include_stop_str_in_output",
)
_RENAMED = ("stop", "stop_sequence", "stop_token", "logprobs", "json_schema", "extra_body")
_STRUCTURED = {"regex": "regex", "choice": "choice", "lark": "grammar", "gbnf": "grammar"}  # vLLM's
SERVED = frozenset((*_OURS, *_SENT, *_RENAMED, *_STRUCTURED))


def is_chat(request: Request) -> bool:
    return request.extra_body is not None and "messages" in request.extra_body


def body_of(
    request: Request, index: int, model: str | None, extra_body: dict[str, Any], history: Any
) -> dict[str, Any]:
    """Return the body for sample `index` of a request.

    model: replaces the model that the request names.  extra_body: of the run; it overrides the
    fields of a request, but not its own extra_body; null removes a field.
    history: text or messages of the session's earlier turns.
    """
    own = request.extra_body or {}
    stated = request.stated if isinstance(request, ServerRequest) else frozenset()
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for name in _SENT:
        value = getattr(request, name)
        if name in stated or REQUEST_FIELDS[name].asks(value):
            fields[name] = value
    if "max_completion_tokens" in own:
        fields.pop("max_tokens", None)
    if stops := [*listed(request.stop_sequence), *listed(request.stop)]:
        fields["stop"] = stops if request.stop_sequence else request.stop
    if stop_tokens := listed(request.stop_token):
        fields["stop_token_ids"] = stop_tokens
    if own.keys().isdisjoint(CONSTRAINT_SPELLINGS):
        schema: Any = request.json_schema
        if schema == {"type": "object"}:
            fields["response_format"] = {"type": "json_object"}
        elif schema is not None:
            named = {"name": "output", "schema": {} if schema is True else schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        for name, key in _STRUCTURED.items():
            if (value := getattr(request, name)) is not None:
                fields["structured_outputs"] = {key: value}
    fields |= own
    chats, num_top = is_chat(request), request.logprobs
    if not chats:
        fields["prompt"] = history + request.prompt if history else request.prompt
    if num_top is not None:
        fields["logprobs"] = True if chats else num_top
    if num_top and chats:
        fields["top_logprobs"] = num_top
    fields |= extra_body
    fields |= {name: value for name, value in own.items() if name not in stated}
    if chats and history:
        fields["messages"] = [*history, *fields["messages"]]
    if model is not None:
        fields["model"] = model
    if index:  # samples differ, and are the same in a second run, even on a deterministic server
        seed = fields.setdefault("seed", crc32(str(request.id).encode(errors="replace")) >> 1)
        if isinstance(seed, int):
            fields["seed"] = seed + index
    fields |= {name: None for name, value in extra_body.items() if value is None}
    return {name: value for name, value in fields.items() if value is not None}


def listed(stops: Any) -> list[Any]:
    if stops is None:
        return []
    return stops if isinstance(stops, list) else [stops]


# -- the answer ------------------------------------------------------------------------------------

MAX_COUNT = 2**31  # of tokens, and of ids
CALLING = ("tool_calls", "function_call")
ENDS: dict[str, FinishReason] = {  # any other reason is an error
    **dict.fromkeys(("stop", *CALLING, "eos", "eos_token", "stop_sequence"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "model_length"), "length"),
}
_KINDS = {"thinking": "reasoning", "reasoning": "reasoning", "refusal": "refusal"}
_KEEPS_STOP = ("include_stop_str_in_output", "no_stop_trim")  # of vLLM, and of SGLang


class _Message(Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(_Message):
    index: Any = 0
    text: Any = None
    delta: _Message | None = None
    message: _Message | None = None
    logprobs: Any = None
    token_ids: list[Annotated[int, Meta(ge=0, lt=MAX_COUNT)]] | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    error: Any = None


class StreamEvent(Struct):
    """One event of a stream, or a whole answer."""

    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None


_ERRORS = ("message", "msg", "detail", "errors", "base_resp")  # of answers without choices
_decode = msgspec.json.Decoder(StreamEvent).decode


def read_chunk(data: str, *, is_error: bool = False, is_whole: bool = False) -> StreamEvent:
    """Return the chunk in an event of a stream.

    is_error: whether the event's name says so.  is_whole: whether `data` is a whole answer.

    Raises:
        ServerFailure: `data` is not a chunk, or is an error.
    """
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        what = "the answer" if is_whole else "an event of the stream"
        why = f" ({error})" if isinstance(error, msgspec.ValidationError) else ""
        message = f"{what} is not in OpenAI's form{why}: {error_text(data.encode())}"
        is_cut = data.startswith("{") and not data.rstrip().endswith("}")
        raise ServerFailure("answer", message, is_worth_retry=is_cut or not is_whole) from None
    is_error |= bool(chunk.error) or chunk.object == "error" or (is_whole and not chunk.choices)
    if not is_error and chunk.choices is not None:
        return chunk
    given = json.loads(data)
    if not is_error and not any(given.get(name) for name in _ERRORS):
        return chunk
    holders = [holder for holder in (given.get("error"), given) if isinstance(holder, dict)]
    found = (str(holder.get(name)) for holder in holders for name in ("code", "status"))
    usual = "400" if is_whole else "500"  # of a stream another attempt may help
    status = next(filter(_STATUS.fullmatch, found), usual)
    failure = refusal(int(status), json.dumps(given).encode())
    said = str(failure).removeprefix(f"HTTP {status}").removeprefix(": ")
    failure.args, failure.status = (f"the server sent an error: {said}",), None
    failure.is_worth_retry &= "invalid_request" not in said
    raise failure


class _Call:
    """A call of a tool or function; kind: OpenAI's type of the tool, function or custom."""

    def __init__(self, call_id: str | None = None, kind: str = "function") -> None:
        self.call_id, self.kind, self.name = call_id, kind, ""
        self._arguments: list[str] = []

    def add(self, name: str, arguments: str) -> None:
        if name != self.name:  # some servers repeat it in each part
            self.name += name
        self._arguments.append(arguments)

    def continues(self, call_id: str | None, name: str, arguments: str) -> bool:
        """Return whether a part belongs to this call.

        Another call has a name, and either another id, or follows complete arguments.
        """
        has_other_id = bool(call_id and self.call_id and call_id != self.call_id)
        if name and arguments and not has_other_id:
            with suppress(ValueError, RecursionError):  # the arguments are not complete
                json.loads("".join(self._arguments))
                return False
        return not (name and has_other_id)

    @property
    def called(self) -> dict[str, str]:
        words = "input" if self.kind == "custom" else "arguments"
        return {"name": self.name, words: "".join(self._arguments)}


class Reply:
    """The answer so far to a request that was sent as a body with these fields.

    The text ends at the first stop, even if the server sends more.

    num_tokens: by the usage in a chunk, else one for each chunk with text.
    token_ids: None if some are unknown.  prompt_tokens: None until the usage comes.
    finish_reason: the server's word; None until it comes.
    """

    def __init__(self, request: Request, fields: dict[str, Any]) -> None:
        self._request, self._fields = request, fields
        self.num_tokens = 0
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] | None = []
        stops = (request.stop_sequence, request.stop, fields.get("stop"))
        texts = [stop for given in stops for stop in listed(given)]
        self._stops = [*dict.fromkeys(stop for stop in texts if isinstance(stop, str) and stop)]
        ids = [*listed(request.stop_token), *listed(fields.get("stop_token_ids"))]
        self._stop_ids = [stop for stop in ids if isinstance(stop, int)]
        self._keeps_stop = True in (fields.get(name) for name in _KEEPS_STOP)
        self._num_held = max(map(len, self._stops), default=1) - 1  # characters that may begin one
        self._held = ""
        self._num_taken, self._num_ids_taken = 0, 0  # parts of the text, and token ids
        self._has_stopped = self._has_deltas = False
        self._said: dict[str, list[str]] = {"text": [], "reasoning": [], "refusal": []}
        self._calls: list[_Call] = []
        self._latest: dict[Any, _Call] = {}  # by the index that a server gives
        self._by_id: dict[tuple[Any, str], _Call] = {}
        self._function_call: _Call | None = None

    @property
    def text(self) -> str:
        return "".join(self._said["text"]) + self._held

    @property
    def reasoning(self) -> str | None:
        return "".join(self._said["reasoning"]) or None

    @property
    def refusal(self) -> str | None:
        return "".join(self._said["refusal"]) or None

    @property
    def tool_calls(self) -> list[dict[str, Any]] | None:
        return [{"id": c.call_id, "type": c.kind, c.kind: c.called} for c in self._calls] or None

    @property
    def function_call(self) -> dict[str, str] | None:
        return None if self._function_call is None else self._function_call.called

    @property
    def is_blank(self) -> bool:
        has_said = self._held or any(self._said.values()) or self._calls or self._function_call
        return not (has_said or self.num_tokens)

    @property
    def is_over(self) -> bool:
        return self._has_stopped or self.finish_reason is not None

    @property
    def outcome(self) -> FinishReason:
        if self._has_stopped:
            return "stop"
        return ENDS.get((self.finish_reason or "").lower(), "error")

    @property
    def constraint(self) -> ConstraintSource | None:
        """The constraint of the request, or of the body in a server's words."""
        capabilities = ModelCapabilities()
        with suppress(GrammarError):  # half of a character
            if (stated := constraint_source(self._request)) is not None:
                return stated
            for given in find_given(Fields(self._fields, capabilities), _CONSTRAINTS):
                if isinstance(given, Given):
                    field = REQUEST_FIELDS[given.field]
                    if not any(check_field(field, given.value, capabilities)):
                        return stated_source(cast(ConstraintField, given.field), given.value)
        return None

    def end(self, *, is_whole: bool) -> None:
        """Take the text that was held back; is_whole: the server has ended the answer."""
        if is_whole and self.finish_reason is None and not self.is_blank:
            self.finish_reason = "stop"  # which not all servers send
        self._said["text"] += [self._held] if self._held else []
        self._held = ""

    def take_new(self) -> tuple[list[int] | None, str]:
        """Return the token ids, or None, and the text since the last call."""
        ids, texts = self.token_ids, self._said["text"]
        own = None if ids is None else ids[self._num_ids_taken :]
        text = "".join(texts[self._num_taken :])
        self._num_taken, self._num_ids_taken = len(texts), len(ids or ())
        return own, text

    def find_lack(self) -> ServerFailure | None:
        """Return why the answer is not complete, or None."""
        if not self.is_over:
            return ServerFailure("connection", "the stream broke off before its end")
        code, is_worth_retry = "server-error", False
        reason = "" if self._has_stopped else (self.finish_reason or "").lower()
        if reason == "content_filter":
            code, message = "content-filter", "the server's content filter has broken it off"
        elif self.outcome == "error":
            message = f"the server ended the answer with finish_reason {self.finish_reason!r:.500}"
            is_worth_retry = True
        elif reason in CALLING and not (self.text or self._calls or self._function_call):
            message, is_worth_retry = f"the answer is empty, with finish_reason {reason!r}", True
        elif self.refusal is not None:
            said = error_text(self.refusal.encode(errors="replace"))
            code, message = "refusal", f"the model refused to answer: {said}"
        elif self._request.logprobs is not None and self.text and not self.logprobs:
            message = "the answer lacks the `logprobs` that were asked for"
        else:
            return None
        return ServerFailure("answer", message, code=code, is_worth_retry=is_worth_retry)

    def take(self, chunk: StreamEvent) -> int:
        """Add a chunk; return its number of tokens.

        Text that may be the beginning of a stop is held back until `end`.
        """
        before = self.num_tokens
        for choice in chunk.choices or ():
            if not (isinstance(choice.index, int) and choice.index > 0):  # one choice was asked for
                self._take_choice(choice)
        usage = chunk.usage if isinstance(chunk.usage, dict) else {}
        for ours, theirs in (("prompt_tokens",) * 2, ("num_tokens", "completion_tokens")):
            if type(count := usage.get(theirs)) is int and 0 <= count < MAX_COUNT:
                setattr(self, ours, count)
        return max(self.num_tokens - before, 0)

    def _take_choice(self, choice: _Choice) -> None:
        whole = None if self._has_deltas else choice.message  # some servers repeat it at the end
        said: _Message = choice.delta or whole or choice
        parts = [*_said_in(said.content or choice.text)]
        thought = said.reasoning or said.reasoning_content  # some servers send both
        for kind, content in (("reasoning", thought), ("refusal", said.refusal)):
            parts += ((kind, words) for _, words in _said_in(content))
        text = "".join(words for kind, words in parts if kind == "text")
        for kind, words in parts:
            if kind != "text":
                self._said[kind].append(words)
        calls = said.tool_calls or []
        for call in calls if isinstance(calls, list) else [calls]:
            self._take_call(call)
        if isinstance(said.function_call, dict):
            self._function_call = self._function_call or _Call()
            self._function_call.add(*_called(said.function_call))
        logprobs = _read_logprobs(choice.logprobs) if choice.logprobs else []
        self.logprobs += logprobs
        ids, has_any = choice.token_ids, bool(parts or said.tool_calls or said.function_call)
        known = [one.token for one in logprobs if isinstance(one.token, int)]
        if ids is None and logprobs and len(known) == len(logprobs):
            ids = known
        self._has_deltas |= has_any and said is choice.delta
        num_tokens = len(logprobs) or int(has_any) if ids is None else len(ids)
        if num_tokens and ids is None:
            self.token_ids = None
        elif ids and self.token_ids is not None:
            self.token_ids += ids
        self.num_tokens += num_tokens
        reason, stop = choice.finish_reason, choice.stop_reason
        if isinstance(reason, dict):  # SGLang's own form
            stop, why = reason.get("matched"), (reason.get("type"), reason.get("message"))
            reason = ": ".join(word for word in why if isinstance(word, str))
        if choice.error:  # OpenRouter's form
            reason = f"error: {error_text(msgspec.json.encode(choice.error))}"
        if reason and not (self.finish_reason and self.outcome == "error"):  # an error stays one
            self.finish_reason = str(reason)
        if stop in (*self._stops, *self._stop_ids) and not self._has_stopped:
            self.stop_reason = stop
        self._take_text(text)

    def _take_text(self, text: str) -> None:
        """Add text up to a stop: the first to end, then the longest, then the first in order."""
        if self._has_stopped:
            self.token_ids = None if text else self.token_ids
            return
        held = self._held + text
        is_early = self.num_tokens <= self._request.min_tokens  # no stop counts yet
        found = ((held.find(stop), stop) for stop in (() if is_early else self._stops))
        ends = [(start + len(stop), -len(stop), stop) for start, stop in found if start >= 0]
        if ends:
            end, length, self.stop_reason = min(ends, key=lambda found: found[:2])
            self._has_stopped, self._held = True, ""
            if end < len(held):
                self.token_ids = None
            sure_text = held[: end if self._keeps_stop else end + length]
        else:
            sure = len(held) if is_early else max(len(held) - self._num_held, 0)
            sure_text, self._held = held[:sure], held[sure:]
        self._said["text"] += [sure_text] if sure_text else []

    def _take_call(self, call: Any) -> None:
        # Servers number calls (some all 0), give them ids, or both.
        if not isinstance(call, dict):
            raise ServerFailure("answer", f"a tool call has no known form: {call!r:.80}")
        index, call_id = call.get("index"), str(call.get("id") or "") or None
        index = index if isinstance(index, int) else None
        kind = "custom" if isinstance(call.get("custom"), dict) else "function"
        function = call.get(kind)
        name, arguments = _called(function if isinstance(function, dict) else call)
        last = self._calls[-1] if self._calls and index is None else None
        known = self._by_id.get((index, call_id or "")) or self._latest.get(index, last)
        if known is None or not known.continues(call_id, name, arguments):
            known = _Call(call_id, kind)
            self._calls.append(known)
        known.call_id = known.call_id or call_id
        known.add(name, arguments)
        self._latest[index] = known
        if call_id is not None:
            self._by_id[index, call_id] = known


def _read_other(name: str, value: Any, fields: Fields) -> Iterator[Given | FieldProblem]:
    """Read a constraint of llama.cpp, SGLang or TGI; TGI's is an object with type and value."""
    if isinstance(value, dict) and "value" in value:
        name, value = str(value.get("type")), value["value"]
    read = CONSTRAINT_SPELLINGS.get(_SPELLED.get(name, name))
    if read is not None:  # the server knows other types
        yield from read(name, value, fields)


_SPELLED = {
    **dict.fromkeys(("json", "json_schema", "json_object"), "guided_json"),
    **dict.fromkeys(("grammar", "ebnf"), "guided_grammar"),
    "regex": "guided_regex",
}
_CONSTRAINTS = {
    **CONSTRAINT_SPELLINGS,
    **dict.fromkeys((*_SPELLED, "response_format"), _read_other),
}


def _said_in(content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        if content:
            yield "text", content
    elif isinstance(content, list):
        for part in content:
            yield from _said_in(part)
    elif isinstance(content, dict):
        kind = str(content.get("type"))
        for _, text in _said_in(content.get(kind, content.get("text"))):
            yield _KINDS.get(kind, "text"), text
    elif content is not None:
        raise ServerFailure("answer", f"the content {content!r:.80} is not text")


def _called(function: dict[str, Any]) -> tuple[str, str]:
    arguments = function.get("arguments", function.get("input"))
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return str(function.get("name") or ""), arguments


def _read_logprobs(logprobs: dict[str, Any]) -> list[TokenLogprob]:
    """Return the logprobs of a chunk, in the form of chats or of completions."""

    def bounded(value: float) -> float:
        return max(round(float(value), NUM_DIGITS), LOWEST_LOGPROB)

    def pair(item: dict[str, Any]) -> tuple[int | str, float]:
        token = item.get("id")  # llama.cpp's
        if not isinstance(token, int) or token < 0:
            token = read_token(item["token"])
        return token, bounded(item["logprob"])

    try:
        if (content := logprobs.get("content")) is not None:
            return [
                TokenLogprob(
                    *pair(one),
                    [TopLogprob(*pair(other)) for other in one.get("top_logprobs") or ()],
                )
                for one in content
            ]
        tokens = [read_token(token) for token in logprobs.get("tokens") or []]
        given = logprobs.get("top_logprobs") or [None] * len(tokens)
        tops = [
            [TopLogprob(read_token(other), bounded(value)) for other, value in (top or {}).items()]
            for top in given
        ]
        values = map(bounded, logprobs.get("token_logprobs") or ())
        return [TokenLogprob(*one) for one in zip(tokens, values, tops, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the stream has logprobs of no known form ({type(error).__name__})"
        raise ServerFailure("answer", message) from None
