"""Bodies in and answers out: what of HTTP the endpoints need, with a limit on each of it.

Starlette's own request and responses wait for ever for a body, or for a client that does not read.
"""

import asyncio

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from batcher.serving.errors import BAD_REQUEST, TIMEOUT, TOO_LARGE, ApiError

MAX_BODY_BYTES = 16 * 2**20
READ_SECONDS, WRITE_SECONDS = 30.0, 30.0
MAX_ID_LENGTH = 128

JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client has closed its connection, or reads nothing: nobody is left to answer."""


class Limits(Struct, frozen=True):
    """How large a body may be, and how long a client may take to send it, and to read a part."""

    max_body_bytes: int = MAX_BODY_BYTES
    read_seconds: float = READ_SECONDS
    write_seconds: float = WRITE_SECONDS


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
    stated = Headers(scope=scope).get("content-length")
    if stated is not None and stated.isdecimal() and int(stated) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.read_seconds):
            return await _read(receive, limits)
    except TimeoutError:
        message = f"the body has not come within {limits.read_seconds:g} seconds"
        raise ApiError(TIMEOUT, "body-timeout", message, headers={"connection": "close"}) from None


async def _read(receive: Receive, limits: Limits) -> bytes:
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(BAD_REQUEST, "invalid-body", "the body is cut off, or not valid HTTP")
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > limits.max_body_bytes:
            raise _too_large(limits)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    message = f"the body has more than {limits.max_body_bytes:,} bytes"
    return ApiError(TOO_LARGE, "body-too-large", message, headers={"connection": "close"})


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
        """Answer with JSON that is whole.

        Raises:
            ClientGoneError: the client reads nothing.
        """
        await self._begin(status, {"content-type": JSON, "content-length": str(len(body))})
        await self.add(body, is_last=True)

    async def begin_stream(self) -> None:
        """Answer with events, of which `add` is given one or several at a time."""
        await self._begin(200, {"content-type": EVENTS, "cache-control": "no-cache"})

    async def add(self, part: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body, once what was sent before is read or nearly so.

        Raises:
            ClientGoneError: the client reads nothing.
        """
        message = {"type": "http.response.body", "body": part, "more_body": not is_last}
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGoneError from None

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.has_begun = True
        encoded = [(n.encode(), v.encode()) for n, v in (self.headers | headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
