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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from batcher.requests.problems import Problem
from batcher.requests.result_rows import SERVER_ERROR

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 400, 401, 403, 404
TIMEOUT, TOO_LARGE, TOO_MANY, HEADERS_TOO_LARGE, UNAVAILABLE = 408, 413, 429, 431, 503
RETRY_AFTER = "1"  # seconds: by then a step or many have been made


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


def engine_failed() -> ApiError:
    return ApiError(UNAVAILABLE, "engine-failed", "the engine of this server has failed")


JSON = "application/json"


class ClientGoneError(Exception):
    """The client has closed its connection, or reads nothing: nobody is left to answer."""


class Limits(Struct, frozen=True):
    """How large a body may be, and how long a client may take to send it, and to read a part."""

    max_body_bytes: int = 16 * 2**20
    read_seconds: float = 30.0
    write_seconds: float = 30.0


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it is too large, takes too long, or is cut off.
    """

    def too_large() -> ApiError:
        message = f"the body has more than {limits.max_body_bytes:,} bytes"
        return ApiError(TOO_LARGE, "body-too-large", message, headers=hang_up)

    hang_up, request = {"connection": "close"}, Request(scope, receive)
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

    async def begin(self, status: int, **headers: str) -> None:
        self.has_begun = True
        named = self.headers | {name.replace("_", "-"): text for name, text in headers.items()}
        encoded = [(name.encode(), text.encode()) for name, text in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def give(self, status: int, body: bytes) -> None:
        """Answer with JSON that is whole."""
        await self.begin(status, content_type=JSON, content_length=str(len(body)))
        await self.add(body, is_last=True)

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
        app: ASGIApp = self._app
        if (error := self._refusal(scope)) is not None:
            app = Response(error.json, error.status, {"connection": "close", **error.headers}, JSON)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, access = Headers(scope=scope), self._access
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes + len(scope["path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
            message = f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes"
            return ApiError(HEADERS_TOO_LARGE, "headers-too-large", message)
        if access.api_key is not None:
            kind, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip(" \t").encode("latin-1")
            is_right = secrets.compare_digest(key, access.api_key.encode())  # takes as long for any
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
