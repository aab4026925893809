"""A server's answer: the chunks of a stream, or one whole object, gathered into a Reply.

Rule: what a server cut short, refused or mangled is a ServerFailure that keeps what has come, and
never an answer.  A field of no known form is ignored only if nothing of the answer is in it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from batcher.decoding.grammars import ConstraintSource, constraint_source, stated_source
from batcher.errors import FieldProblem, GrammarError
from batcher.remote.protocol import ServerFailure, error_text, error_within, listed
from batcher.request import REQUEST_FIELDS, ConstraintField, Request
from batcher.requests.openai import CONSTRAINT_SPELLINGS, Fields, Given, find_given
from batcher.requests.result_rows import read_token
from batcher.requests.validation import ModelCapabilities, check_field
from batcher.result import (
    LOWEST_LOGPROB,
    NUM_DIGITS,
    FinishReason,
    StopReason,
    TokenLogprob,
    TopLogprob,
)

MAX_COUNT = 2**31  # of tokens, and of ids
FILTERED = "content_filter"
CALLING = ("tool_calls", "function_call")
ENDS: dict[str, FinishReason] = {  # any other reason is an error
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
}


_Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]


class _Message(Struct):
    """What an answer says, or a part of it."""

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
    token_ids: list[_Count] | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    error: Any = None


class StreamEvent(Struct):
    """One event of a stream, or a whole answer."""

    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    msg: Any = None
    detail: Any = None
    errors: Any = None
    base_resp: Any = None


_decode = msgspec.json.Decoder(StreamEvent).decode


def read_chunk(data: str, *, is_error: bool = False, is_whole: bool = False) -> StreamEvent:
    """Return the chunk that an event of a stream is.

    is_error: the event says that it is one.  is_whole: it is not an event, but all of an answer.

    Raises:
        ServerFailure: it is not a chunk, or an error.
    """
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        what = "the answer" if is_whole else "an event of the stream"
        why = f" ({error})" if isinstance(error, msgspec.ValidationError) else ""
        message = f"{what} is not in OpenAI's form{why}: {error_text(data.encode())}"
        is_cut = data.startswith("{") and not data.rstrip().endswith("}")
        raise ServerFailure("answer", message, is_worth_retry=is_cut or not is_whole) from None
    is_error = is_error or bool(chunk.error) or chunk.object == "error"
    words = chunk.message, chunk.msg, chunk.detail, chunk.errors, chunk.base_resp
    says_why = chunk.choices is None and any(words)
    if is_error or says_why or (is_whole and not chunk.choices):
        raise error_within(json.loads(data), is_passing=not is_whole)
    return chunk


class _Call:
    """A call of a tool or a function, whose parts come one after another.

    kind: function or custom, as OpenAI names the types of tools.
    """

    def __init__(self, call_id: str | None = None, kind: str = "function") -> None:
        self.call_id, self.kind, self.name = call_id, kind, ""
        self._arguments: list[str] = []

    def add(self, name: str, arguments: str) -> None:
        """Take in a further part; some servers repeat the name in each."""
        if name != self.name:
            self.name += name
        self._arguments.append(arguments)

    def goes_on(self, call_id: str | None, name: str, arguments: str) -> bool:
        """Return whether a part belongs to this call.

        Another call has a name, and an id of its own unless the arguments here are complete.
        """
        has_other_id = bool(call_id and self.call_id and call_id != self.call_id)
        return not name or not (has_other_id or (arguments and _is_json(self.called["arguments"])))

    @property
    def called(self) -> dict[str, str]:
        return {"name": self.name, "arguments": "".join(self._arguments)}

    @property
    def as_tool(self) -> dict[str, Any]:
        called = self.called
        if self.kind == "custom":
            called["input"] = called.pop("arguments")
        return {"id": self.call_id, "type": self.kind, self.kind: called}


class Reply:
    """What has come of an answer so far.

    num_tokens: by the usage in a chunk, else one for each chunk with text.
    token_ids: None as soon as some are not known.  prompt_tokens: None until a usage comes.
    finish_reason: in the server's words; None until it comes.
    stops, stop_ids: what the request stops at.  A text that the server lets pass ends here.
    keeps_stop: whether the stop remains in the text.  min_tokens: how many come before a stop
    counts.  constraint: what the answer has to be.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        *,
        keeps_stop: bool = False,
        min_tokens: int = 0,
        constraint: ConstraintSource | None = None,
    ) -> None:
        self.constraint = constraint
        self.num_tokens = 0
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] | None = []
        self._stops, self._stop_ids, self._keeps_stop = stops, stop_ids, keeps_stop
        self._min_tokens = min_tokens
        self._num_held = max(map(len, stops), default=1) - 1  # characters that may begin a stop
        self._held = ""
        self._has_stopped = self._has_deltas = False
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[_Call] = []
        self._latest: dict[Any, _Call] = {}  # by the index that a server gives
        self._by_id: dict[tuple[Any, str], _Call] = {}
        self._function_call: _Call | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts) + self._held

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) or None

    @property
    def refusal(self) -> str | None:
        return "".join(self._refusal) or None

    @property
    def tool_calls(self) -> list[dict[str, Any]] | None:
        return [call.as_tool for call in self._calls] or None

    @property
    def function_call(self) -> dict[str, str] | None:
        return None if self._function_call is None else self._function_call.called

    @property
    def is_blank(self) -> bool:
        said = self._held or self._texts or self._reasoning or self._refusal or self._calls
        return not (said or self.num_tokens or self._function_call)

    @property
    def is_over(self) -> bool:
        return self._has_stopped or self.finish_reason is not None

    @property
    def outcome(self) -> FinishReason:
        if self._has_stopped:
            return "stop"
        return ENDS.get((self.finish_reason or "").lower(), "error")

    def end(self) -> None:
        """Take note that the server says that this is all; not all servers say why."""
        if self.finish_reason is None and not self.is_blank:
            self.finish_reason = "stop"

    def find_lack(self, *, wants_logprobs: bool) -> ServerFailure | None:
        """Return why this is not the whole of an answer, None if it is."""
        if not self.is_over:
            return ServerFailure("connection", "the stream broke off before its end")
        code, is_worth_retry = "server-error", False
        reason = "" if self._has_stopped else (self.finish_reason or "").lower()
        lacks_calls = reason in CALLING and not (self.text or self._calls or self._function_call)
        if reason == FILTERED:
            code, message = "content-filter", "the server's content filter has broken it off"
        elif self.outcome == "error":
            message = f"the server ended the answer with finish_reason {self.finish_reason!r:.500}"
            is_worth_retry = True
        elif lacks_calls:
            message, is_worth_retry = f"the answer is empty, with finish_reason {reason!r}", True
        elif self.refusal is not None:
            said = error_text(self.refusal.encode(errors="replace"))
            code, message = "refusal", f"the model refused to answer: {said}"
        elif wants_logprobs and self.text and not self.logprobs:
            message = "the answer lacks the `logprobs` that were asked for"
        else:
            return None
        return ServerFailure("answer", message, code=code, is_worth_retry=is_worth_retry)

    def take(self, chunk: StreamEvent) -> tuple[int, str]:
        """Take in the next chunk; return how many tokens it brings, and the text.

        The text lacks what may be the beginning of a stop; `flush` returns that at the end.
        """
        before, text = self.num_tokens, ""
        for choice in chunk.choices or ():
            if not (isinstance(choice.index, int) and choice.index > 0):  # one was asked for
                text += self._take_choice(choice)
        usage = chunk.usage if isinstance(chunk.usage, dict) else {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        num_prompt, num_tokens = (
            count if type(count) is int and 0 <= count < MAX_COUNT else None for count in counts
        )
        self.prompt_tokens = self.prompt_tokens if num_prompt is None else num_prompt
        self.num_tokens = self.num_tokens if num_tokens is None else num_tokens
        return max(self.num_tokens - before, 0), text

    def flush(self) -> str:
        """Return the text that was kept back, as no stop has come of it."""
        text, self._held = self._held, ""
        if text:
            self._texts.append(text)
        return text

    def _take_choice(self, choice: _Choice) -> str:
        whole = None if self._has_deltas else choice.message  # which some send again at the end
        said: _Message = choice.delta or whole or choice
        parts = [*_said_in(said.content or choice.text)]
        thought = _said_in(said.reasoning or said.reasoning_content)  # some servers send both
        parts += (("reasoning", text) for _, text in thought)
        parts += (("refusal", text) for _, text in _said_in(said.refusal))
        self._reasoning += (text for kind, text in parts if kind == "reasoning")
        self._refusal += (text for kind, text in parts if kind == "refusal")
        calls = said.tool_calls or []
        for call in calls if isinstance(calls, list) else [calls]:
            if not isinstance(call, dict):
                raise ServerFailure("answer", f"a tool call has no known form: {call!r:.80}")
            # Servers number calls, give them ids, or both; some number all 0, or repeat names.
            index, call_id = call.get("index"), str(call.get("id") or "") or None
            index = index if isinstance(index, int) else None
            kind = "custom" if isinstance(call.get("custom"), dict) else "function"
            function = call.get(kind)
            name, arguments = _called(function if isinstance(function, dict) else call)
            last = self._calls[-1] if self._calls and index is None else None
            known = self._by_id.get((index, call_id or "")) or self._latest.get(index, last)
            if known is None or not known.goes_on(call_id, name, arguments):
                known = _Call(call_id, kind)
                self._calls.append(known)
            known.call_id = known.call_id or call_id
            known.add(name, arguments)
            self._latest[index] = known
            if call_id is not None:
                self._by_id[index, call_id] = known
        if isinstance(said.function_call, dict):
            self._function_call = self._function_call or _Call()
            self._function_call.add(*_called(said.function_call))
        told = _read_logprobs(choice.logprobs) if choice.logprobs else []
        self.logprobs += told
        ids = choice.token_ids
        if ids is None and told and all(isinstance(one.token, int) for one in told):
            ids = [one.token for one in told if isinstance(one.token, int)]
        has_any = bool(parts or said.tool_calls or said.function_call)
        self._has_deltas |= has_any and said is choice.delta
        num_tokens = len(told) or int(has_any) if ids is None else len(ids)
        if num_tokens and ids is None:
            self.token_ids = None
        elif ids and self.token_ids is not None:
            self.token_ids += ids
        self.num_tokens += num_tokens
        reason: Any = choice.finish_reason
        stop: Any = choice.stop_reason
        if isinstance(reason, dict):  # SGLang's own form
            stop, words = reason.get("matched"), (reason.get("type"), reason.get("message"))
            reason = ": ".join(word for word in words if isinstance(word, str))
        if choice.error:  # OpenRouter's form
            reason = f"error: {error_text(msgspec.json.encode(choice.error))}"
        if reason and not (self.finish_reason and self.outcome == "error"):  # which nothing mends
            self.finish_reason = str(reason)
        if stop in (*self._stops, *self._stop_ids) and not self._has_stopped:
            self.stop_reason = stop
        text = "".join(text for kind, text in parts if kind == "text")
        if self._has_stopped:
            self.token_ids = None if text else self.token_ids
            return ""
        # Of several stops the first to end counts, then the longest, then the first in their order.
        held = self._held + text
        is_early = self.num_tokens <= self._min_tokens  # no stop counts yet
        found = ((held.find(stop), stop) for stop in (() if is_early else self._stops))
        ends = [(start + len(stop), -len(stop), stop) for start, stop in found if start >= 0]
        if ends:
            end, length, stop = min(ends, key=lambda found: found[:2])
            self._has_stopped, self.stop_reason, self._held = True, stop, ""
            if end < len(held):
                self.token_ids = None
            sure_text = held[: end if self._keeps_stop else end + length]
        else:
            sure = len(held) if is_early else max(len(held) - self._num_held, 0)
            sure_text, self._held = held[:sure], held[sure:]
        if sure_text:
            self._texts.append(sure_text)
        return sure_text


_KEEPS_STOP = ("include_stop_str_in_output", "no_stop_trim")  # of vLLM, and of SGLang


def reply_to(request: Request, fields: dict[str, Any]) -> Reply:
    """Return what takes in the answer to a request that was sent as a body with these fields."""
    stops = [*listed(request.stop_sequence), *listed(request.stop), *listed(fields.get("stop"))]
    stop_ids = [*listed(request.stop_token), *listed(fields.get("stop_token_ids"))]
    return Reply(
        [*dict.fromkeys(stop for stop in stops if isinstance(stop, str) and stop)],
        [stop for stop in stop_ids if isinstance(stop, int)],
        keeps_stop=True in (fields.get(name) for name in _KEEPS_STOP),
        min_tokens=request.min_tokens,
        constraint=_constraint_of(request, fields),
    )


def _read_other(name: str, value: Any, fields: Fields) -> Iterator[Given | FieldProblem]:
    """Read a constraint by a name of llama.cpp, SGLang or TGI, which writes its type beside it."""
    if isinstance(value, dict) and "value" in value:
        name, value = str(value.get("type")), value["value"]
    read = CONSTRAINT_SPELLINGS.get(_SPELLED.get(name, name))
    if read is not None:  # of another type, the server knows it
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


def _constraint_of(request: Request, fields: dict[str, Any]) -> ConstraintSource | None:
    capabilities = ModelCapabilities()
    read = find_given(Fields(fields, capabilities), _CONSTRAINTS)
    try:
        stated = constraint_source(request)
        found = (
            stated_source(cast(ConstraintField, g.field), g.value)
            for g in read
            if isinstance(g, Given)
            and not any(check_field(REQUEST_FIELDS[g.field], g.value, capabilities))
        )
        return stated or next(found, None)
    except GrammarError:  # half of a character, which the server will not understand either
        return None


_KINDS = {"thinking": "reasoning", "reasoning": "reasoning", "refusal": "refusal"}


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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _called(function: dict[str, Any]) -> tuple[str, str]:
    arguments = function.get("arguments", function.get("input"))
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return str(function.get("name") or ""), arguments


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
            _told(read_token(t), value, [(read_token(o), v) for o, v in (top or {}).items()])
            for t, value, top in columns
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the stream has logprobs of no known form ({type(error).__name__})"
        raise ServerFailure("answer", message) from None


def _told(token: int | str, logprob: float, top: list[tuple[int | str, float]]) -> TokenLogprob:
    def bounded(value: float) -> float:
        return max(round(float(value), NUM_DIGITS), LOWEST_LOGPROB)

    return TokenLogprob(token, bounded(logprob), [TopLogprob(o, bounded(v)) for o, v in top])


def _token(told: dict[str, Any]) -> int | str:
    """Return the id of a token if it is told, as llama.cpp does, else its text."""
    token_id = told.get("id")
    return token_id if isinstance(token_id, int) and token_id >= 0 else read_token(told["token"])
