"""The fast way to be sure of a request: one conversion in C, for all but the rare fields.

Rule: it may leave a good request to the slow way, and never accepts a bad one.
"""

from functools import cache
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from batcher.request import Request
from batcher.validation.capabilities import LOGIT_FIELDS, ModelCapabilities
from batcher.validation.ranges import RANGES
from batcher.validation.values import DEFAULTS, is_text, largest_token

_MAX_PLAIN_STOPS = 16  # in each dimension: three fields of 16 x 16 stay below MAX_STOP_LENGTH

# Numbers that contradict no other field as long as the fields not named here have their defaults.
_FREE_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "think_time",
)


def token_type(capabilities: ModelCapabilities) -> Any:
    """Return the type of the token ids that may be named."""
    return Annotated[int, Meta(ge=0, le=largest_token(capabilities))]


def plain_types(capabilities: ModelCapabilities) -> dict[str, Any]:
    """Return a type for each field that every request may have: bad values do not convert to it.

    Beside that, `has_plain_stops` has to be true.
    """
    numbers = {name: RANGES[name].type for name in ("max_tokens", "arrival_time", "priority")}
    return _text_types(token_type(capabilities)) | numbers | {"ignore_eos": bool}


def has_plain_stops(fields: Any) -> bool:
    """Return whether the stops of an object of `plain_types` are each of one kind, and text."""
    return (fields.stop_sequence is None or _is_plain_stop(fields.stop_sequence)) and (
        fields.stop is None or _is_plain_stop(fields.stop)
    )


def plain_copy(request: Request, capabilities: ModelCapabilities) -> Request | None:
    """Return an equal request with lists of its own; None if a closer look at it is needed."""
    checked = _checked_type(capabilities.vocab_size, capabilities.gives_logits)
    if type(request) is not Request and request.__struct_fields__ != Request.__struct_fields__:
        return None  # a type of the caller's, of which nothing is known
    try:
        copy = msgspec.convert(astuple(request), checked)  # quicker than by the names of fields
    except (msgspec.ValidationError, UnicodeEncodeError):  # the other: a lone surrogate
        return None
    is_good = (
        request.heal is False
        and request.early_stopping is False
        and _is_list_or_text(request.prompt)
        and (request.id is None or is_text(request.id))
        and (request.stop_token is None or type(request.stop_token) in {int, list})
        and (request.stop_sequence is request.stop is None or has_plain_stops(request))
        and (
            (request.session is None and request.cache_salt is None and request.deadline is None)
            or _has_plain_company(request)
        )
        and (request.think_time == 0 or request.session is not None)
        and capabilities.can_encode(request.prompt)
    )
    return copy if is_good else None


@cache
def _checked_type(vocab_size: int | None, gives_logits: bool) -> type[Request]:  # noqa: FBT001 - a cache key
    """Return a type that no bad request converts to, but for what `plain_copy` adds.

    The conversion runs in C: it costs less than one pass over the prompt in Python.
    """
    types = {name: _only(default) for name, default in DEFAULTS.items()}
    types |= {name: RANGES[name].type for name in _FREE_NUMBERS}
    types |= {name: RANGES[name].type | None for name in ("logprobs", "deadline")}
    types |= dict.fromkeys(("session", "cache_salt"), Annotated[str, Meta(min_length=1)] | None)
    if not gives_logits:
        types |= {name: _only(DEFAULTS[name]) for name in LOGIT_FIELDS}
    types |= plain_types(ModelCapabilities(vocab_size=vocab_size)) | {"echo": bool}
    checked = msgspec.defstruct(
        "CheckedRequest",
        list(types.items()),
        bases=(Request,),
        frozen=True,
        gc=False,
        array_like=True,
    )
    return cast(type[Request], checked)


def _only(default: float | str | None) -> Any:
    """Return a type that has this value alone; bool, which cannot be narrowed, for a bool."""
    if default is None or isinstance(default, bool):
        return type(default)
    if isinstance(default, str):
        return Literal[default]
    return Annotated[type(default), Meta(ge=default, le=default)]


def _text_types(token_id: Any) -> dict[str, Any]:
    """Return the types of the fields that hold text or token ids."""
    token_ids = Annotated[list[token_id], Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)]
    text = Annotated[str, Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)]
    texts = Annotated[list[text], Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)]
    sequences = Annotated[
        list[token_id | text | token_ids], Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)
    ]
    return {
        "id": str | None,
        "prompt": str | list[token_id],
        "stop_token": token_id | token_ids | None,
        "stop_sequence": text | sequences | None,
        "stop": text | texts | None,
    }


def _has_plain_company(request: Request) -> bool:
    """Return whether the names of session and salt are text, and the deadline is not too early."""
    is_in_time = request.deadline is None or request.deadline >= request.arrival_time
    return is_in_time and is_text(request.session or "") and is_text(request.cache_salt or "")


def _is_list_or_text(prompt: object) -> bool:
    return type(prompt) is list or (type(prompt) is str and is_text(prompt))


def _is_plain_stop(stop: object) -> bool:
    """Return whether a stop that converts to its type is of one kind and free of surrogates."""
    if type(stop) is not list:
        return type(stop) is str and stop.isascii()
    kinds = set(map(type, stop))
    return len(kinds) == 1 and (
        kinds <= {int, list} or (str in kinds and all(map(str.isascii, stop)))
    )
