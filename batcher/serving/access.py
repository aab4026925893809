"""Which requests may enter: the size of their head, their key, and the page that sends them.

A browser lets any page send requests to this machine.  Without a key, a server therefore answers
no page but its own and those of --allow-origin; one on loopback answers to no other name, either,
since a page can give its own name the address of this machine (DNS rebinding).
"""

import re
import secrets

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from batcher.serving.errors import FORBIDDEN, HEADERS_TOO_LARGE, UNAUTHORIZED, ApiError
from batcher.serving.http import JSON

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
    """An ASGI application in front of another one, which only gets requests that may enter."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it and close its connection."""
        try:
            _check(scope, self._access)
        except ApiError as error:
            headers = {"connection": "close", **error.headers}
            await Response(error.json, error.status, headers, JSON)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _check(scope: Scope, access: Access) -> None:
    """Raise an ApiError if a request may not enter."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes + len(scope["path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
        message = f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes"
        raise ApiError(HEADERS_TOO_LARGE, "headers-too-large", message)
    if access.api_key is None:
        _check_page(scope, access)
    elif scope["path"] not in _NO_KEY_NEEDED:
        _check_key(scope, access.api_key)


def _check_key(scope: Scope, api_key: str) -> None:
    """Raise an ApiError if a request lacks the key; takes the same time for any other key."""
    kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    is_right = secrets.compare_digest(given.strip(" \t").encode("latin-1"), api_key.encode())
    if not (is_right and kind.lower() == "bearer"):
        message = "this server needs its key in the header `Authorization: Bearer KEY`"
        headers = {"www-authenticate": "Bearer"}
        raise ApiError(UNAUTHORIZED, "invalid_api_key", message, headers=headers)


def _check_page(scope: Scope, access: Access) -> None:
    """Raise an ApiError if a request is for another host, or from a page of another origin."""
    if "*" in access.origins:
        return
    headers = Headers(scope=scope)
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
