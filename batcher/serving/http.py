"""Requests over HTTP: access, limits and bodies.

Rule: a body holds what that of an OpenAI Batch row may, and is read and checked like one.  It may
also say how the answer is delivered.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from batcher.decoding.grammars import place_in
from batcher.request import CONSTRAINT_FIELDS, Request
from batcher.requests.json_spans import NOT_JSON, JsonError, find_doubles, parse
from batcher.requests.lines import BadLine, RequestParser, find_too_many
from batcher.requests.openai import SPELLINGS, Form
from batcher.requests.problems import Problem
from batcher.requests.result_rows import SERVER_ERROR
from batcher.requests.validation import show

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 400, 401, 403, 404
TIMEOUT, TOO_LARGE, TOO_MANY, UNAVAILABLE = 408, 413, 429, 503
RETRY_AFTER = "1"  # seconds
JSON = "application/json"
MAX_HEAD_BYTES = 64 * 2**10
MAX_QUICK_BYTES = 16 * 2**10  # of a body that is read in the event loop
MAX_PROMPTS = 2048


class ApiError(Exception):
    """An error answer; param: the field that is wrong; json: the body, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= SERVER_ERROR else "invalid_request_error"
        if status == TOO_MANY:
            kind = "rate_limit_error"
        body = {"message": message, "type": kind, "param": param}
        body["code"] = "context_length_exceeded" if code == "prompt-too-long" else code
        self.json = msgspec.json.encode({"error": body})


def of_problems(problems: Sequence[Problem], place: str = "") -> ApiError:
    """Return the answer to an invalid body: its first problem; place: which prompt is wrong."""
    first = problems[0]
    param = None if first.field is None else first.field.removeprefix("body.")
    said = first.message + (f" ({first.hint})" if first.hint else "")
    return ApiError(BAD_REQUEST, first.code, place + said.replace("`body.", "`"), param)


def engine_failed() -> ApiError:
    return ApiError(UNAVAILABLE, "engine-failed", "the engine of this server has failed")


class ClientGoneError(Exception):
    """The client has closed its connection or does not read its answer."""


class Limits(Struct, frozen=True):
    """Limits on the size of a body, and on the time to send it and to read a part of the answer."""

    max_body_bytes: int = 16 * 2**20
    read_seconds: float = 30.0
    write_seconds: float = 30.0


# -- access ----------------------------------------------------------------------------------------

_NO_KEY_NEEDED = ("/health", "/metrics")
_PORT = re.compile(r":\d*$")


class Access(Struct, frozen=True):
    """api_key: required except for /health and /metrics.

    origins: of pages that may send requests; "*" allows any.  hosts: names of this server if it has
    no key; None allows any.
    """

    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None


class Gate:
    """ASGI middleware that refuses requests without access.

    A browser lets any page send requests to this machine.  Without a key, a server therefore
    answers only its own pages and those of --allow-origin.  On loopback it answers to no other name
    either, since a page can give its own name the address of this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if (error := self._refusal(scope)) is not None:
            app = Response(error.json, error.status, {"connection": "close", **error.headers}, JSON)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, access = Headers(scope=scope), self._access
        if access.api_key is not None:
            kind, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip(" \t").encode("latin-1")
            is_right = secrets.compare_digest(key, access.api_key.encode())  # in constant time
            if scope["path"] in _NO_KEY_NEEDED or (is_right and kind.lower() == "bearer"):
                return None
            message = "this server needs its key in the header `Authorization: Bearer KEY`"
            bearer = {"www-authenticate": "Bearer"}
            return ApiError(UNAUTHORIZED, "invalid_api_key", message, headers=bearer)
        if "*" in access.origins:
            return None
        hosts, hint = headers.getlist("host"), "allow it with --allow-origin"
        for host in hosts:
            if access.hosts is not None and _PORT.sub("", host).lower() not in access.hosts:
                message = f"`Host` is {host!r}; {hint} http://{host}, or use a key"
                return ApiError(FORBIDDEN, "host-not-allowed", message, "Host")
        for origin in headers.getlist("origin"):
            if origin not in access.origins and origin.partition("://")[2] not in hosts:
                message = f"`Origin` is {origin!r}; {hint} {origin}, or use a key"
                return ApiError(FORBIDDEN, "origin-not-allowed", message, "Origin")
        return None


# -- bodies ----------------------------------------------------------------------------------------


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the body of a request, or raise an ApiError: it is too large, too slow or cut off."""

    def too_large() -> ApiError:
        message = f"the body has more than {limits.max_body_bytes:,} bytes"
        return ApiError(TOO_LARGE, "body-too-large", message, headers=hang_up)

    hang_up, request = {"connection": "close"}, HttpRequest(scope, receive)
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limits.max_body_bytes:
        raise too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise too_large()
        return bytes(body)
    except ClientDisconnect:
        message = "the body is cut off, or not valid HTTP"
        raise ApiError(BAD_REQUEST, "invalid-body", message) from None
    except TimeoutError:
        message = f"the body did not arrive within {limits.read_seconds:g} seconds"
        raise ApiError(TIMEOUT, "body-timeout", message, headers=hang_up) from None


class Delivery(Struct, frozen=True):
    """How the answer is delivered: whole or as a stream of chunks, with or without token ids."""

    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool | None] | None = None
    return_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))


class ClientRequest(Struct, frozen=True):
    """A valid body; requests: one for each prompt, equal otherwise."""

    requests: list[Request]
    form: Form
    delivery: Delivery


# Fields of files, or of a clock that all clients share.
_NOT_OF_CLIENTS = {
    "arrival_time": "a request arrives when the server receives it",
    "think_time": "a request arrives when the server receives it",
    "deadline": "the server has a clock of its own",
    "session": "sessions work only in files: send all messages so far",
}
_EXPECTED = {
    "stream": "true or false",
    "stream_options": "an object with `include_usage`, true or false",
    "return_token_ids": "true or false",
}

# Constraints are compiled, which is slow.
_SLOW = {*CONSTRAINT_FIELDS, *SPELLINGS} - {"messages", "max_completion_tokens"}


class BodyReader:
    """Reads bodies; model: the name that they may give.

    asks_tokenizer: whether the parser encodes texts.
    """

    def __init__(self, parser: RequestParser, model: str, *, asks_tokenizer: bool) -> None:
        self._parser, self._model, self._asks_tokenizer = parser, model, asks_tokenizer

    def is_quick(self, fields: dict[str, Any]) -> bool:
        return not (self._asks_tokenizer or _has_prompts(fields)) and _SLOW.isdisjoint(fields)

    def check_model(self, name: object) -> None:
        if isinstance(name, str) and name != self._model:
            message = f"the model {name!r} does not exist; this server has {self._model!r}"
            raise ApiError(NOT_FOUND, "model_not_found", message, "model")

    def read(self, url: str, fields: dict[str, Any]) -> ClientRequest:
        """Return the requests in the body with these `fields`, sent to `url`.

        Raises:
            ApiError: the body is not valid, or not for this server.
        """
        for name, why in _NOT_OF_CLIENTS.items():
            if fields.get(name) is not None:
                message = f"`{name}` is not for requests over HTTP: {why}"
                raise ApiError(BAD_REQUEST, "unsupported-option", message, name)
        delivery = _take_delivery(fields)
        self.check_model(fields.get("model"))
        bodies = [fields]
        if _has_prompts(fields):
            if (num_prompts := len(fields["prompt"])) > MAX_PROMPTS:
                message = f"`prompt` has {num_prompts} prompts; at most {MAX_PROMPTS} are allowed"
                raise ApiError(BAD_REQUEST, "invalid-value", message, "prompt")
            bodies = [fields | {"prompt": prompt} for prompt in fields["prompt"]]
        requests = []
        for place, body in enumerate(bodies):
            parsed = self._parser.parse_body(url, body)
            if isinstance(parsed, BadLine):
                raise of_problems(parsed.problems, f"prompt {place}: " if place else "")
            requests.append(parsed.request)
        if delivery.stream and requests[0].echo:
            message = "`stream` cannot be used with `echo`: a stream has only generated text"
            raise ApiError(BAD_REQUEST, "conflicting-fields", message, "echo")
        return ClientRequest(requests, parsed.form, delivery)


def _has_prompts(fields: dict[str, Any]) -> bool:
    prompts = fields.get("prompt")
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the object in `data`, or raise an ApiError with the place of the mistake."""
    if not data.strip():
        raise ApiError(BAD_REQUEST, "invalid-json", "the body is empty; it is a JSON object")
    too_many = find_too_many(data, 1)
    if too_many is not None:
        raise of_problems([too_many])
    try:
        fields = msgspec.json.decode(data)
        if isinstance(fields, dict) and len(fields) < data.count(b":"):  # else no key is doubled
            text = data.decode()
            for path, span, first in find_doubles(text):
                places = f"{place_in(text, first.start)}, and {place_in(text, span.start)}"
                message = f"field `{path[-1]}` is given twice ({places})"
                raise ApiError(BAD_REQUEST, "duplicate-field", message, str(path[0]))
    except (ValueError, RecursionError):
        raise ApiError(BAD_REQUEST, "invalid-json", _why_no_json(data)) from None
    if not isinstance(fields, dict):
        names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        message = f"the body is a JSON object, not {names.get(type(fields), 'a number')}"
        raise ApiError(BAD_REQUEST, "invalid-json", message)
    return fields


def _why_no_json(data: bytes) -> str:
    try:
        text = data.decode()
        parse(text)
    except UnicodeDecodeError as error:
        return f"the body is not UTF-8 from byte {error.start} on: {error.reason}"
    except JsonError as error:
        reason = error.message.removeprefix(NOT_JSON).replace("the line ends", "it ends")
        return f"the body is not JSON: {reason} ({place_in(text, error.span.start)})"
    return "the body is not JSON"


def _take_delivery(fields: dict[str, Any]) -> Delivery:
    given = {name: fields.pop(name) for name in _EXPECTED if name in fields}
    for name, value in given.items():
        try:
            msgspec.convert({name: value}, Delivery)
        except msgspec.ValidationError:
            more = "and nothing else" if isinstance(value, dict) else f"not {show(value)}"
            message = f"`{name}` must be {_EXPECTED[name]}, {more}"
            raise ApiError(BAD_REQUEST, "invalid-type", message, name) from None
    delivery = msgspec.convert(given, Delivery)
    if delivery.stream_options is not None and not delivery.stream:
        message = "`stream_options` has no effect without `stream`; give true"
        raise ApiError(BAD_REQUEST, "conflicting-fields", message, "stream_options")
    return delivery
