"""OpenAI Batch rows: what a row may hold, beside the fields of a request.

Rule: an option that would change the output and is not supported is an error, never ignored.
"""

from typing import Any, Literal

from msgspec import Struct

from batcher.request import Request

COMPLETIONS_URL = "/v1/completions"

# The values that ask for nothing but what is done anyway; null always is one of them.
SUPPORTED_VALUES: dict[str, type[str] | tuple[object, ...]] = {
    "model": str,
    "user": str,
    "suffix": ("",),
    "stream": (False,),
    "stream_options": (),
}


class CompletionBody(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a row: the fields of a request but its id, and the options above."""

    id: None = None  # custom_id is the id; this takes away the one a body would inherit
    model: Any = None
    user: Any = None
    suffix: Any = None
    stream: Any = None
    stream_options: Any = None


class BatchRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of an OpenAI Batch file."""

    custom_id: str | None = None
    method: Literal["POST"]
    url: Literal["/v1/completions"]
    body: CompletionBody


def is_supported(option: str, value: object) -> bool:
    """Return whether `value` of an option of SUPPORTED_VALUES changes nothing."""
    if value is None:
        return True
    supported = SUPPORTED_VALUES[option]
    if isinstance(supported, type):
        return isinstance(value, supported)
    is_bool = isinstance(value, bool)  # true equals 1 in Python
    return any(isinstance(other, bool) == is_bool and other == value for other in supported)


def has_only_supported_options(body: CompletionBody) -> bool:
    """Return whether all options of `body` are such that `is_supported` takes them."""
    for option in SUPPORTED_VALUES:
        value = getattr(body, option)
        if value is not None and not is_supported(option, value):
            return False
    return True
