"""The quick way to be sure of a request: one conversion in C, for all but the rare fields.

Rule: it may leave a good request to the slow way, and never accepts a bad one.
"""

from copy import deepcopy
from functools import cache
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta
from msgspec.structs import astuple, replace

from batcher.errors import EncodingError, FieldProblem
from batcher.request import (
    CONSTRAINT_FIELDS,
    PLAIN_FIELDS,
    REQUEST_FIELDS,
    Request,
    ServerRequest,
    Text,
)
from batcher.requests.validation import (
    check_field,
    constraint_fields_of,
    find_uncompiled,
    find_untold,
    look_closely,
)
from batcher.requests.values import ModelCapabilities, is_text

_WITHOUT_PARTS = {str, int, float, bool, type(None)}
_KINDS_OF_IDS = ({int}, {list})
_MAX_STOPS = 16  # in each dimension: three fields of 16 x 16 stay below MAX_STOP_LENGTH

# Fields with a rule of their own, beside their type and what they exclude or need.
_RULED = {"n", "best_of", "min_tokens", "num_beams", "cfg_scale", "prompt_logprobs", "heal"}


def _free_fields() -> set[str]:
    """Return the fields that are right if their type is, while all others have their defaults."""
    simple = {
        name
        for name, field in REQUEST_FIELDS.items()
        if field.range is not None or field.choices is not None or field.parts == [Text]
        if field.needs is None and name not in {*_RULED, *CONSTRAINT_FIELDS}
    }
    free = {name for name in simple if simple.isdisjoint(REQUEST_FIELDS[name].excludes)}
    return free.union(PLAIN_FIELDS)


FREE_FIELDS = _free_fields()


def checked_copy(request: Request, capabilities: ModelCapabilities) -> Request | list[FieldProblem]:
    """Return an equal request with lists of its own, or what is wrong with `request`."""
    copy = quick_copy(request, capabilities)
    if copy is not None:
        return copy
    problems = _look(request, capabilities)
    if problems:
        return problems
    values = zip(request.__struct_fields__, astuple(request), strict=True)  # quicker than deepcopy
    parts = {name: _copy(value) for name, value in values if type(value) not in _WITHOUT_PARTS}
    return replace(request, **parts)


def _copy(value: Any) -> Any:
    """Return what deepcopy does of a valid value, which holds itself nowhere, sooner."""
    kind = type(value)
    if kind in _WITHOUT_PARTS:
        return value
    if kind is list:
        return [_copy(part) for part in value]
    if kind is dict:
        return {name: _copy(part) for name, part in value.items()}
    return deepcopy(value)


def find_problems(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with `request`, to be decoded by that model; [] if nothing is."""
    is_right = quick_copy(request, capabilities) is not None
    return [] if is_right else _look(request, capabilities)


def _look(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with `request`, of which `quick_copy` was not sure.

    One with a constraint has no fault if it has none without it, and the constraint none by itself.
    """
    names = constraint_fields_of(request)
    is_model = capabilities.served is None
    if is_model and len(names) == 1 and request.ignore_eos is False and capabilities.gives_logits:
        [name] = names
        value = getattr(request, name)
        if quick_copy(replace(request, **{name: None}), capabilities) is not None:
            problems = check_field(REQUEST_FIELDS[name], value, capabilities)
            return problems or [*find_uncompiled(name, value, capabilities)]
    return look_closely(request, capabilities)


def quick_copy(request: Request, capabilities: ModelCapabilities) -> Request | None:
    """Return an equal request with lists of its own; None if a closer look at it is needed."""
    if type(request) is not Request and request.__struct_fields__ != Request.__struct_fields__:
        return None  # a type of the caller's, of which nothing is known
    checked = _type_of_tuple(capabilities.vocab_size, capabilities.gives_logits)
    try:
        copy = msgspec.convert(astuple(request), checked)  # quicker than by the names of fields
    except (msgspec.ValidationError, UnicodeEncodeError):  # the other: a lone surrogate
        return None
    prompt, token = request.prompt, request.stop_token
    is_right = (
        request.heal is False
        and request.early_stopping is False
        and (type(prompt) is list or (type(prompt) is str and is_text(prompt)))
        and (request.id is None or is_text(request.id))
        and (token is None or type(token) in {int, list})
        and goes_together(request, capabilities)
    )
    return copy if is_right else None


def checked_type(capabilities: ModelCapabilities) -> type[Request]:
    """Return the type of requests of FREE_FIELDS; one is right if `goes_together` is true of it."""
    base = Request if capabilities.served is None else ServerRequest
    return _make_type(capabilities.vocab_size, base, gives_logits=capabilities.gives_logits)


def goes_together(request: Request, capabilities: ModelCapabilities) -> bool:
    """Return whether the fields of a request, which have their types, go together.

    Stops are of one kind each, names are text, and the prompt can be encoded.
    """
    stop_sequence, stop = request.stop_sequence, request.stop
    if not (
        (stop_sequence is None or _is_uniform(stop_sequence))
        and (stop is None or _is_uniform(stop))
    ):
        return False
    session, salt = request.session, request.cache_salt
    is_right = request.think_time == 0 if session is None else is_text(session)
    if not is_right or not (salt is None or is_text(salt)):
        return False
    if request.deadline is not None and request.deadline < request.arrival_time:
        return False
    served = capabilities.served
    if served is not None and any(find_untold(request, capabilities, served)):
        return False
    if capabilities.encode is not None and isinstance(request.prompt, str):
        try:
            capabilities.encode(request.prompt)
        except EncodingError:
            return False
    return True


def _is_uniform(stop: object) -> bool:
    """Return whether a stop that has its type is of one kind and free of surrogates."""
    if type(stop) is not list:
        return type(stop) is str and stop.isascii()
    kinds = set(map(type, stop))
    return not kinds or kinds in _KINDS_OF_IDS or (kinds == {str} and all(map(str.isascii, stop)))


@cache
def _type_of_tuple(vocab_size: int | None, gives_logits: bool) -> type[Request]:  # noqa: FBT001 - a cache key
    return _make_type(vocab_size, Request, gives_logits=gives_logits, array_like=True)


def _make_type(
    vocab_size: int | None, base: type[Request], *, gives_logits: bool, **config: Any
) -> type[Request]:
    """Return a type that no bad request converts to, but for what `goes_together` tells.

    The conversion runs in C: it costs less than one pass over the prompt in Python.
    """
    types: dict[str, Any] = {}
    for name, field in REQUEST_FIELDS.items():
        is_free = name in FREE_FIELDS and (gives_logits or not field.needs_logits)
        types[name] = field.type if is_free else _only(field.default)
    if base is ServerRequest:
        types["extra_body"] = REQUEST_FIELDS["extra_body"].type
    types |= _text_types(ModelCapabilities(vocab_size=vocab_size).largest_token)
    fields = [
        (name, types[name], *([] if name == "prompt" else [field.default]))
        for name, field in REQUEST_FIELDS.items()
    ]
    made = msgspec.defstruct(
        "CheckedRequest", fields, bases=(base,), frozen=True, gc=False, **config
    )
    return cast(type[Request], made)


def _only(default: Any) -> Any:
    """Return a type that has this value alone; bool, which cannot be narrowed, for a bool."""
    if default is None or isinstance(default, bool):
        return type(default)
    if isinstance(default, str):
        return Literal[default]
    return Annotated[type(default), Meta(ge=default, le=default)]


def _text_types(largest_token: int) -> dict[str, Any]:
    """Return the types of the fields that hold text or token ids, as far as stops are few."""
    some, few = Meta(min_length=1, max_length=_MAX_STOPS), Meta(max_length=_MAX_STOPS)
    token_id: Any = Annotated[int, Meta(ge=0, le=largest_token)]
    token_ids: Any = Annotated[list[token_id], some]
    text: Any = Annotated[str, some]
    return {
        "prompt": str | list[token_id],
        "stop_token": token_id | Annotated[list[token_id], few] | None,
        "stop_sequence": text | Annotated[list[token_id | text | token_ids], few] | None,
        "stop": text | Annotated[list[text], few] | None,
    }
