"""What a request is given that must not depend on the batch, and where two such things differ."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from msgspec import Struct

from batcher.result import (
    NUM_DIGITS,
    ErrorInfo,
    Result,
    TokenLogprob,
)

Outputs = Mapping[tuple[str, int], Result]
"""By id of the request and index of the output."""

_SAME = ("text", "finish_reason", "stop_reason", "segments", "constraint", "constraint_check")
_UNIT = 1.5 * 10.0**-NUM_DIGITS  # of a told number the last digit may be rounded either way


class Difference(Struct, frozen=True, kw_only=True):
    """The first thing that is not the same: in which output, which field, and both values.

    position: of the first token that differs, None if the field is not about tokens.
    alone_tokens, here_tokens: all tokens of the output.  alone_error, here_error: why it ended
    early, if it did; then the rest follows from it.
    """

    id: str
    index: int
    field: str
    position: int | None
    alone: Any
    here: Any
    alone_tokens: list[int]
    here_tokens: list[int]
    alone_error: ErrorInfo | None = None
    here_error: ErrorInfo | None = None


def first_difference(order: Sequence[str], alone: Outputs, here: Outputs) -> Difference | None:
    """Return the first difference, None if there is none.

    order: the ids of the requests, in the order in which they are looked at.
    """
    places = {request_id: place for place, request_id in enumerate(order)}
    keys = sorted(alone.keys() | here.keys(), key=lambda key: (places[key[0]], key[1]))
    for key in keys:
        one, other = alone.get(key), here.get(key)
        if one is None or other is None:
            return _difference(key, "result", None, _presence(one), _presence(other), one, other)
        for field, position, value, other_value in _compare(one, other):
            return _difference(key, field, position, value, other_value, one, other)
    return None


def _compare(one: Result, other: Result) -> Iterator[tuple[str, int | None, Any, Any]]:
    """Yield what is not the same: field, position, both values; tokens first."""
    for position, (token, other_token) in enumerate(zip_longest(one.tokens, other.tokens)):
        if token != other_token:
            yield "tokens", position, token, other_token
            return
    for field in _SAME:
        value, other_value = getattr(one, field), getattr(other, field)
        if value != other_value:
            yield field, None, value, other_value
    codes = [None if result.error is None else result.error.code for result in (one, other)]
    if codes[0] != codes[1]:
        yield "error", None, codes[0], codes[1]
    pairs = zip_longest(one.logprobs or (), other.logprobs or ())
    for position, (told, other_told) in enumerate(pairs):
        if not _are_told_alike(told, other_told):
            yield "logprobs", position, told, other_told
    for field in ("cumulative_logprob", "score"):
        value, other_value = getattr(one, field), getattr(other, field)
        if not _are_close(value, other_value, max(len(one.tokens), 1)):
            yield field, None, value, other_value


def _are_told_alike(one: TokenLogprob | None, other: TokenLogprob | None) -> bool:
    """Whether both name the same tokens, and equal logarithms up to the digits that are told."""
    if one is None or other is None:
        return one is other
    tops = list(zip_longest(one.top, other.top))
    if any(top is None or other_top is None for top, other_top in tops):
        return False
    entries = [(one, other), *tops]
    return all(a.token == b.token and _are_close(a.logprob, b.logprob, 1) for a, b in entries)


def _are_close(one: float | None, other: float | None, num_terms: int) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _UNIT * num_terms


def _presence(result: Result | None) -> str:
    return "none" if result is None else result.finish_reason


def _difference(
    key: tuple[str, int],
    field: str,
    position: int | None,
    value: Any,
    other_value: Any,
    one: Result | None,
    other: Result | None,
) -> Difference:
    return Difference(
        id=key[0],
        index=key[1],
        field=field,
        position=position,
        alone=value,
        here=other_value,
        alone_tokens=[] if one is None else one.tokens,
        here_tokens=[] if other is None else other.tokens,
        alone_error=None if one is None else one.error,
        here_error=None if other is None else other.error,
    )
