"""The address of a server, and the settings of requests to it."""

import math
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import meant_server

PREFIX = "openai:"
REMOTE_SCHEDULING = frozenset({"policy", "aging"})  # all else a server decides itself

Seconds = Annotated[float, Meta(gt=0, le=86400)]


class ServerAddress(NamedTuple):
    """Where a server is, without a slash at the end, and which of its models is meant, if told."""

    url: str
    model: str | None


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a server is asked; all times are in seconds.

    max_rate: requests in a second, at most.  max_attempts: how often a request is sent, as long as
    no token has come.  backoff: before the second attempt; twice as long before each other one.
    connect_timeout: for a connection.  first_token_timeout: from there to the first token.
    idle_timeout: from a token to the next one.  max_wait: of the pauses that a server asks for; a
    request that has to wait longer fails.  extra_body: goes into every body.
    """

    max_rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 5
    backoff: Annotated[float, Meta(ge=0, le=60)] = 1.0
    connect_timeout: Seconds = 10.0
    first_token_timeout: Seconds = 600.0
    idle_timeout: Seconds = 120.0
    max_wait: Annotated[float, Meta(ge=0)] = math.inf
    extra_body: dict[str, Any] = {}


def is_server(name: str) -> bool:
    return name.startswith(PREFIX)


def address_of(name: str) -> ServerAddress:
    """Return what `openai:URL` or `openai:URL#NAME` says.

    Raises:
        BatchdecodeError: it is no such address.
    """
    url, _, model = name.removeprefix(PREFIX).partition("#")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        is_usable = has_port = False
    if not is_usable or not has_port or parts.query or any(c <= " " for c in url):
        meant = meant_server(url) or f"{PREFIX}http://127.0.0.1:8000/v1"
        raise BatchdecodeError(f"--model {PREFIX}URL[#NAME] needs a URL such as {meant}")
    if parts.username is not None or parts.password is not None:
        raise BatchdecodeError(
            "the URL of a server holds no key, as traces show it: set OPENAI_API_KEY"
        )
    return ServerAddress(url.rstrip("/"), model or None)
