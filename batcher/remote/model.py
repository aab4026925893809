"""The model of a server: its address, its settings and the models that the server lists."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from batcher.errors import BatchdecodeError
from batcher.remote.settings import PREFIX, ServerAddress, ServerSettings, address_of
from batcher.requests.validation import MAX_MODELS, OF_STREAMS, ModelCapabilities

_EXTRA = "a server needs httpx and httpx-sse: pip install 'batchdecode[http]'"


class RemoteModel:
    """A model that a server runs.

    listed: the models that the server lists; empty if it lists none or #NAME names one.
    served_model: the model for requests that name none, or another one than those listed; None if
    the server lists several or none.  replaced: the first models that it was used instead of.
    report: shows a message to the user.  has_refused_waits: whether requests failed because the
    server asked for a longer wait than `max_wait`.
    """

    def __init__(
        self, address: ServerAddress, settings: ServerSettings, listed: Sequence[str] = ()
    ) -> None:
        self.address, self.settings, self.listed = address, settings, listed
        self.served_model = listed[0] if len(listed) == 1 else address.model
        self.replaced: list[str] = []
        self.report: Callable[[str], None] = lambda _: None
        self.has_refused_waits = False
        self.name = f"{PREFIX}{address.url}"
        if self.served_model is not None:
            self.name += f"#{self.served_model}"

    def model_for(self, named: Any) -> str | None:
        """Return the model to use instead of the one that a request names, or None."""
        served = self.served_model
        if served is None or named in self.listed:
            return None
        is_new = named not in (None, served, *self.replaced)
        if is_new and len(self.replaced) < MAX_MODELS:
            self.replaced.append(str(named))
        return served

    @property
    def traced_settings(self) -> dict[str, Any]:
        return {"extra_body": self.settings.extra_body} if self.settings.extra_body else {}

    def capabilities(self, num_slots: int) -> ModelCapabilities:
        """Return what requests are checked against; the server checks what depends on the model."""
        from batcher.remote.protocol import SERVED  # noqa: PLC0415 - if there is a server

        def check_constraint(*_: object) -> None:  # the server checks the constraint itself
            from batcher.decoding.constraints import need_grammar_packages  # noqa: PLC0415 - slow

            need_grammar_packages()

        several = () if self.served_model or "model" in self.settings.extra_body else self.listed
        return ModelCapabilities(
            num_slots=num_slots,
            served=SERVED,
            models=tuple(several),
            check_constraint=check_constraint,
        )


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
        raise BatchdecodeError(f"the extra body has `{name}`: each output is a stream of its own")
    return settings


def remote_model_of(name: str, given: Mapping[str, Any]) -> RemoteModel:
    """Return the model that `openai:URL[#NAME]` names; without a name, the server lists its models.

    Raises:
        BatchdecodeError: there is no such server, or a setting is none; or what HTTP needs is not
            installed.
    """
    address, settings = address_of(name), settings_of(given)
    try:
        from batcher.remote.client import list_models  # noqa: PLC0415 - optional
    except ImportError as error:
        raise BatchdecodeError(f"{_EXTRA} ({error.name} is missing)") from None
    return RemoteModel(address, settings, list_models(address, settings))
