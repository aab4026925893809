"""OpenAI's protocol: what a request asks for, as a body.

Rule: a body holds what the row states and nothing else, but for what a stream needs.  What no
server has a field for is refused before anything is sent, see SERVED.
"""

import json
import re
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from msgspec import Struct

from batcher.events import RetryReason
from batcher.request import REQUEST_FIELDS, Request, ServerRequest

# Failures of a server: why an answer is missing or cut off, and whether to retry.

MAX_SHOWN = 500  # characters of what a server says
OVERLOADED = {429, 503, 529}
REPEATABLE = OVERLOADED | {408, 409, 425, 500, 502, 504, *range(520, 528)}  # Cloudflare's last
UNAUTHORIZED, FORBIDDEN = 401, 403

_TOO_LONG = ("context_length", "context length", "exceed_context_size", "maximum context")
_FILTERED = ("content_filter", "content_policy", "moderation", "flagged")
_NEVER = ("insufficient_quota",)  # a 429 that waiting does not mend
_WORDS = (
    "message",
    "msg",
    "error",
    "errors",
    "detail",
    "status_msg",
    "base_resp",
    "metadata",
    "raw",
)
_STATUS = re.compile("[45][0-9][0-9]")
_TITLE = re.compile("<title[^<>]*>([^<]*)", re.IGNORECASE)  # of a page
_TAG = re.compile("<[^<>]*>")


class ServerFailure(Exception):  # noqa: N818 - it is passed on more often than raised
    """Why an attempt has no answer.

    code: one of RUN_ERROR_CODES or FIT_ERROR_CODES.  is_worth_retry: whether the same request may
    be answered later.  retry_after: the seconds that the server asks to wait.
    status: of the answer, if it is an error by that.  is_overlong: whether retry_after is more than
    `max_wait` allows.
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
        self.is_overlong = False

    @property
    def is_final(self) -> bool:
        return self.status == UNAUTHORIZED

    @property
    def is_forbidden(self) -> bool:
        return self.status == FORBIDDEN and self.code == "server-error"


def refusal(status: int, body: bytes, retry_after: float | None) -> ServerFailure:
    said = error_text(body)
    words = said.lower()
    code = "server-error"
    if any(mark in words for mark in _TOO_LONG):
        code = "prompt-too-long"
    elif status not in REPEATABLE and any(mark in words for mark in _FILTERED):
        code = "content-filter"
    is_hopeless = any(mark in words for mark in _NEVER)
    return ServerFailure(
        "overload" if status in OVERLOADED else "answer",
        f"HTTP {status}: {said}" if said else f"HTTP {status}",
        code=code,
        is_worth_retry=status in REPEATABLE and code == "server-error" and not is_hopeless,
        retry_after=retry_after,
        status=status,
    )


def error_within(told: Any, *, is_passing: bool) -> ServerFailure:
    """Return the failure that an error within an answer of status 200 means.

    is_passing: whether another attempt may help, if the error holds no status that says so.
    """
    error = told.get("error") if isinstance(told, dict) else None
    holders = [holder for holder in (error, told) if isinstance(holder, dict)]
    found = (str(holder.get(name)) for holder in holders for name in ("code", "status"))
    usual = 500 if is_passing else 400
    status = next((int(text) for text in found if _STATUS.fullmatch(text)), usual)
    body = json.dumps(told).encode()
    meant, said = refusal(status, body, None), error_text(body)
    return ServerFailure(
        meant.reason,
        f"the server sent an error: {said}",
        code=meant.code,
        is_worth_retry=meant.is_worth_retry and "invalid_request" not in said,
    )


def error_text(body: bytes) -> str:
    """Return what the body of an error says, on one line and not too long."""
    text = body.decode("utf-8", "replace")
    try:
        parts = list(_texts_in(json.loads(text)))
    except (ValueError, RecursionError):
        is_page = text.lstrip().startswith("<")
        parts = (_TITLE.findall(text) or [_TAG.sub(" ", text)]) if is_page else []
    said = " ".join(" ".join(dict.fromkeys(parts) or [text]).split())
    return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}…"


def _texts_in(told: Any) -> Iterator[str]:
    """Yield the texts of an error, whoever wrote it: OpenAI, vLLM, FastAPI, OpenRouter, Gemini."""
    if isinstance(told, str):
        yield told
    elif isinstance(told, list):
        for each in told:
            yield from _texts_in(each)
    elif isinstance(told, dict):
        place = told.get("loc")
        if isinstance(place, list):
            yield f"{'.'.join(map(str, place))}: {told.get('msg')}"
        else:
            for name in _WORDS:
                yield from _texts_in(told.get(name))
        yield from (
            f"({told[name]})" for name in ("code", "type") if isinstance(told.get(name), str)
        )


COMPLETIONS_PATH, CHAT_PATH = "/completions", "/chat/completions"

# What the queue acts on itself, what servers know by the same name, and what by another one.
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
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMATS = ("response_format", "structured_outputs", *_GUIDED)


class Body(Struct, frozen=True):
    """What is sent, and to which of the paths of a server."""

    path: str
    fields: dict[str, Any]


def is_chat(request: Request) -> bool:
    return request.extra_body is not None and "messages" in request.extra_body


def body_of(
    request: Request, index: int, model: str | None, extra_body: dict[str, Any], history: Any
) -> Body:
    """Return what is sent for sample `index` of a request.

    model: goes before the one that the request names.  extra_body: of all requests; it goes before
    the fields of a request, but for those in an extra_body of its own, and null removes any.
    history: the text, or the messages, that the request goes on from.
    """
    own = request.extra_body or {}
    stated = request.stated if isinstance(request, ServerRequest) else frozenset()
    asked: dict[str, Any] = {}
    for name in _SENT:
        value = getattr(request, name)
        if name in stated or REQUEST_FIELDS[name].asks(value):
            asked[name] = value
    if "max_completion_tokens" in own:
        asked.pop("max_tokens", None)
    stops = [stop for given in (request.stop_sequence, request.stop) for stop in listed(given)]
    if stops:
        asked["stop"] = stops if request.stop_sequence else request.stop
    if stop_tokens := listed(request.stop_token):
        asked["stop_token_ids"] = stop_tokens
    if own.keys().isdisjoint(_FORMATS):
        schema: Any = request.json_schema
        if schema == {"type": "object"}:
            asked["response_format"] = {"type": "json_object"}
        elif schema is not None:
            named = {"name": "output", "schema": {} if schema is True else schema}
            asked["response_format"] = {"type": "json_schema", "json_schema": named}
        for name, key in _STRUCTURED.items():
            if (value := getattr(request, name)) is not None:
                asked["structured_outputs"] = {key: value}
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked,
        **own,
    }
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
    fields |= {name: value for name, value in own.items() if name not in stated}
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


def listed(stops: Any) -> list[Any]:
    """Return stops as a list, whether they are given as one, by themselves or not at all."""
    if stops is None:
        return []
    return stops if isinstance(stops, list) else [stops]
