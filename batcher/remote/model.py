"""The model of a server: its address, its settings and the models that the server lists."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import meant_server
from batcher.requests.validation import MAX_MODELS, OF_STREAMS

PREFIX = "openai:"
REMOTE_SCHEDULING = frozenset({"policy", "aging"})  # the server decides the rest

Seconds = Annotated[float, Meta(gt=0, le=86400)]


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of requests to a server; times are in seconds.

    max_rate: requests per second.  max_attempts: of a request without a token so far.  backoff: the
    first pause between attempts, which doubles.  connect_timeout: for a connection.
    first_token_timeout: from there to the first token.  idle_timeout: between tokens.  max_wait:
    the longest pause that a server may ask for; else the request fails.  extra_body: merged into
    every body.
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


def address_of(name: str) -> tuple[str, str | None]:
    """Return the URL and the name in `openai:URL[#NAME]`.

    Raises:
        BatchdecodeError: the URL is not usable.
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
            "put no key into the URL of a server, since traces show it: set OPENAI_API_KEY"
        )
    return url.rstrip("/"), model or None


class RemoteModel:
    """A model that a server runs.

    listed: the server's models, if no #NAME is given.
    served_model: the model for requests that name none or an unlisted one; None if the server lists
    several or none.  replaced: the first names that it replaced.
    report: shows a message to the user.  has_refused_waits: whether requests failed because the
    server asked for a longer wait than `max_wait`.
    """

    def __init__(
        self,
        url: str,
        settings: ServerSettings,
        named: str | None = None,
        listed: Sequence[str] = (),
    ) -> None:
        self.url, self.settings, self.listed = url, settings, listed
        self.served_model = listed[0] if len(listed) == 1 else named
        self.replaced: list[str] = []
        self.report: Callable[[str], None] = lambda _: None
        self.has_refused_waits = False
        self.name = f"{PREFIX}{url}"
        if self.served_model is not None:
            self.name += f"#{self.served_model}"

    def model_for(self, named: Any) -> str | None:
        """Return the model that replaces the one that a request names, or None."""
        served = self.served_model
        if served is None or named in self.listed:
            return None
        is_new = named not in (None, served, *self.replaced)
        if is_new and len(self.replaced) < MAX_MODELS:
            self.replaced.append(str(named))
        return served


def settings_of(given: Mapping[str, Any]) -> ServerSettings:
    """Return the settings of a server.

    Raises:
        BatchdecodeError: a setting is unknown or out of range.
    """
    try:
        settings = msgspec.convert(dict(given), ServerSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(f"server: {error}") from None
    extra = settings.extra_body
    for name in sorted(name for name in OF_STREAMS & extra.keys() if extra[name] is not None):
        raise BatchdecodeError(f"the extra body cannot set `{name}`: each output is its own stream")
    return settings
