"""From what a person says of a server to what is known of it before anything is asked."""

from collections.abc import Mapping
from typing import Any

import msgspec

from batcher.errors import BatchdecodeError
from batcher.remote.settings import PREFIX, ServerAddress, ServerSettings, address_of
from batcher.validation import OF_STREAMS, ModelCapabilities

_EXTRA = "a server needs httpx and httpx-sse: pip install 'batchdecode[http]'"


class RemoteModel:
    """The model of a server, as far as requests and traces speak of it.

    served_model: what the server calls it; None if each request names one, or none is needed.
    """

    def __init__(
        self, address: ServerAddress, settings: ServerSettings, served_model: str | None
    ) -> None:
        self.address, self.settings, self.served_model = address, settings, served_model
        self.name = f"{PREFIX}{address.url}"
        if served_model is not None:
            self.name += f"#{served_model}"

    @property
    def told_settings(self) -> dict[str, Any]:
        """What a trace tells of it: what decides an answer."""
        return {"extra_body": self.settings.extra_body} if self.settings.extra_body else {}

    def capabilities(self, num_slots: int) -> ModelCapabilities:
        """Return what requests are checked against; what the model knows, the server checks."""
        from batcher.remote.protocol import SERVED  # noqa: PLC0415 - if there is a server

        return ModelCapabilities(num_slots=num_slots, served=SERVED)


def settings_of(given: Mapping[str, Any]) -> ServerSettings:
    """Return the settings that a person gives.

    Raises:
        BatchdecodeError: one is none, or out of its range.
    """
    try:
        settings = msgspec.convert(dict(given), ServerSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(f"server: {error}") from None
    for name in sorted(OF_STREAMS & settings.extra_body.keys()):
        raise BatchdecodeError(f"the extra body has `{name}`: each output is asked for by itself")
    return settings


def remote_model_of(name: str, given: Mapping[str, Any], *, asks: bool = True) -> RemoteModel:
    """Return the model that `openai:URL[#NAME]` names.

    asks: whether the server is asked for its model where none is named.

    Raises:
        BatchdecodeError: there is no such server, it has several models, or a setting is none; or
            what HTTP needs is not installed.
    """
    address, settings = address_of(name), settings_of(given)
    if not asks:
        return RemoteModel(address, settings, address.model)
    try:
        from batcher.remote.client import find_model  # noqa: PLC0415 - optional
    except ImportError as error:
        raise BatchdecodeError(f"{_EXTRA} ({error.name} is missing)") from None
    return RemoteModel(address, settings, find_model(address, settings))
