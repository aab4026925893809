"""Who may enter, bodies in and answers out: what the endpoints need of HTTP, each with a limit.

Starlette's own request and responses wait for ever for a body, or for a client that does not read.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from batcher.errors import RUN_ERROR_CODES
from batcher.requests.problems import Problem
from batcher.requests.result_rows import SERVER_ERROR, status_of
from batcher.result import ErrorInfo

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 400, 401, 403, 404
TIMEOUT, TOO_LARGE, TOO_MANY, HEADERS_TOO_LARGE, UNAVAILABLE = 408, 413, 429, 431, 503
RETRY_AFTER = "1"  # seconds: by then a step or many have been made

# Of these the text is that of a model, which knows all requests of the batch.
_MAY_TELL_OF_OTHERS = {"model-error", "call-timeout"}


class ApiError(Exception):
    """An answer to a request that is no completion.

    status: that of the answer.  param: the field it is about.  json: in OpenAI's shape.
    """

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
    """Return the answer to a body that is not valid: the first of its problems.

    place: which of several prompts is wrong.
    """
    first = problems[0]
    param = None if first.field is None else first.field.removeprefix("body.")
    said = first.message + (f" ({first.hint})" if first.hint else "")
    return ApiError(BAD_REQUEST, first.code, place + said.replace("`body.", "`"), param)


def of_result(error: ErrorInfo) -> ApiError:
    """Return the answer to a request that has failed; none tells of another request."""
    message = error.message
    if error.code in _MAY_TELL_OF_OTHERS:
        message = RUN_ERROR_CODES[error.code]
    return ApiError(status_of(error.code), error.code, message)


def engine_failed() -> ApiError:
    return ApiError(UNAVAILABLE, "engine-failed", "the engine of this server has failed")


MAX_ID_LENGTH = 128
JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client has closed its connection, or reads nothing: nobody is left to answer."""


class Limits(Struct, frozen=True):
    """How large a body may be, and how long a client may take to send it, and to read a part."""

    max_body_bytes: int = 16 * 2**20
    read_seconds: float = 30.0
    write_seconds: float = 30.0


def given_id(scope: Scope) -> str | None:
    """Return what a client calls its request, None if it does not say.

    Raises:
        ApiError: that is too long, or nothing that can be printed.
    """
    given = Headers(scope=scope).get("x-request-id")
    if not given:
        return None
    if len(given) > MAX_ID_LENGTH or not (given.isascii() and given.isprintable()):
        message = f"`X-Request-Id` has at most {MAX_ID_LENGTH} characters, all of them ASCII"
        raise ApiError(BAD_REQUEST, "invalid-value", message, "X-Request-Id")
    return given


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it is too large, takes too long, or is cut off.
    """

    def too_large() -> ApiError:
        message = f"the body has more than {limits.max_body_bytes:,} bytes"
        return ApiError(TOO_LARGE, "body-too-large", message, headers=hang_up)

    hang_up = {"connection": "close"}
    stated = Headers(scope=scope).get("content-length")
    if stated is not None and stated.isdecimal() and int(stated) > limits.max_body_bytes:
        raise too_large()
    try:
        async with asyncio.timeout(limits.read_seconds):
            parts, num_bytes, has_more = [], 0, True
            while has_more:
                part = await receive()
                if part["type"] == "http.disconnect":
                    cut = "the body is cut off, or not valid HTTP"
                    raise ApiError(BAD_REQUEST, "invalid-body", cut)
                parts.append(part.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > limits.max_body_bytes:
                    raise too_large()
                has_more = part.get("more_body", False)
            return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        message = f"the body has not come within {limits.read_seconds:g} seconds"
        raise ApiError(TIMEOUT, "body-timeout", message, headers=hang_up) from None


class Answer:
    """The answer to one request: its head, and its body in one or more parts.

    headers: to be sent with it.
    has_begun: whether the head is on its way, so that the status cannot be changed any more.
    """

    def __init__(self, send: Send, limits: Limits) -> None:
        self.headers: dict[str, str] = {}
        self.has_begun = False
        self._send, self._limits = send, limits

    async def give(self, status: int, body: bytes) -> None:
        """Answer with JSON that is whole."""
        await self.begin(status, {"content-type": JSON, "content-length": str(len(body))})
        await self.add(body, is_last=True)

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        self.has_begun = True
        encoded = [(n.encode(), v.encode()) for n, v in (self.headers | headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def add(self, part: bytes, *, is_last: bool = False) -> None:
        """Send a part once the one before is read or nearly so, or raise a ClientGoneError."""
        message = {"type": "http.response.body", "body": part, "more_body": not is_last}
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGoneError from None


MAX_HEAD_BYTES = 64 * 2**10
_NO_KEY_NEEDED = ("/health", "/metrics")
_PORT = re.compile(r":\d*$")


class Access(Struct, frozen=True):
    """api_key: required for all but /health and /metrics.

    origins: of pages that may send requests, "*" for any.  hosts: the names that a server without
    a key answers to; None for any.
    """

    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None


class Gate:
    """An ASGI application in front of another one, which only gets requests that may enter.

    A browser lets any page send requests to this machine.  Without a key, a server therefore
    answers only its own pages and those of --allow-origin.  On loopback it answers to no other name
    either, since a page can give its own name the address of this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check(scope, self._access)
        except ApiError as error:
            headers = {"connection": "close", **error.headers}
            await Response(error.json, error.status, headers, JSON)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _check(scope: Scope, access: Access) -> None:
    headers = Headers(scope=scope)
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes + len(scope["path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
        message = f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes"
        raise ApiError(HEADERS_TOO_LARGE, "headers-too-large", message)
    if access.api_key is not None:
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip(" \t").encode("latin-1")
        is_right = secrets.compare_digest(key, access.api_key.encode())  # takes as long for any
        if scope["path"] not in _NO_KEY_NEEDED and not (is_right and kind.lower() == "bearer"):
            message = "this server needs its key in the header `Authorization: Bearer KEY`"
            bearer = {"www-authenticate": "Bearer"}
            raise ApiError(UNAUTHORIZED, "invalid_api_key", message, headers=bearer)
        return
    if "*" in access.origins:
        return
    hosts = headers.getlist("host")
    for host in hosts:
        if access.hosts is not None and _PORT.sub("", host).lower() not in access.hosts:
            message = (
                f"`Host` is {host!r}; allow it with --allow-origin http://{host}, or use a key"
            )
            raise ApiError(FORBIDDEN, "host-not-allowed", message, "Host")
    for origin in headers.getlist("origin"):
        if origin not in access.origins and origin.partition("://")[2] not in hosts:
            message = f"`Origin` is {origin!r}; allow it with --allow-origin {origin}, or use a key"
            raise ApiError(FORBIDDEN, "origin-not-allowed", message, "Origin")
