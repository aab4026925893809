"""What a request is given that must not depend on the batch, and where two such things differ."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from msgspec import Struct

from batcher.request import Request
from batcher.result import NUM_DIGITS, ErrorInfo, Result, TokenLogprob

Key = tuple[str, int]
"""The id of a request and the index of one of its outputs."""
Outputs = Mapping[Key, Result]
Unlike = tuple[str, int | None, Any, Any]
"""A field that is not the same, the position of a token if it is about one, and both values."""

_SAME = (
    *("text", "finish_reason", "stop_reason", "limit"),
    *("segments", "constraint", "constraint_check", "constraint_verified"),
)
_UNIT = 1.5 * 10.0**-NUM_DIGITS  # of a told number the last digit may be rounded either way


class StreamedOutput(NamedTuple):
    """What token events have told of an output."""

    tokens: list[int]
    texts: list[str]


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
    for key in sorted(alone.keys() | here.keys(), key=lambda key: (places[key[0]], key[1])):
        one, other = alone.get(key), here.get(key)
        found: Iterable[Unlike] = [("result", None, _presence(one), _presence(other))]
        if one is not None and other is not None:
            found = _compare(one, other)
        for field, position, value, other_value in found:
            return Difference(
                id=key[0],
                index=key[1],
                field=field,
                position=position,
                alone=value,
                here=other_value,
                alone_tokens=[] if one is None else one.token_ids,
                here_tokens=[] if other is None else other.token_ids,
                alone_error=None if one is None else one.error,
                here_error=None if other is None else other.error,
            )
    return None


def stream_difference(
    requests: Sequence[Request], alone: Outputs, here: Outputs, told: Mapping[Key, StreamedOutput]
) -> Difference | None:
    """Return the first output `here` that token events have not `told` as its result does."""
    streamed = {
        request.id: request
        for request in requests
        if request.best_of is None and request.num_beams == 1 and request.output_limit
    }
    for key, result in here.items():
        request = streamed.get(key[0])
        if request is None:
            continue
        tokens, texts = told.get(key, StreamedOutput([], []))
        streamed_text, text = "".join(texts), result.text
        if result.segments is not None:  # without the markers, as it is streamed
            text = "".join(segment.text for segment in result.segments)
        if tokens != result.tokens or not (streamed_text == text or request.echo):
            return Difference(
                id=key[0],
                index=key[1],
                field="stream",
                position=None,
                alone=alone[key].text,
                here=streamed_text,
                alone_tokens=alone[key].token_ids,
                here_tokens=tokens,
                alone_error=alone[key].error,
            )
    return None


def _compare(one: Result, other: Result) -> Iterator[Unlike]:
    """Yield what is not the same, tokens first."""
    for position, (token, other_token) in enumerate(zip_longest(one.token_ids, other.token_ids)):
        if token != other_token:
            yield "tokens", position, token, other_token
            return
    same = [(field, getattr(one, field), getattr(other, field)) for field in _SAME]
    codes = [None if result.error is None else result.error.code for result in (one, other)]
    for field, value, other_value in [*same, ("error", codes[0], codes[1])]:
        if value != other_value:
            yield field, None, value, other_value
    pairs = zip_longest(one.logprobs or (), other.logprobs or ())
    for position, (told, other_told) in enumerate(pairs):
        if not _are_told_alike(told, other_told):
            yield "logprobs", position, told, other_told
    for field in ("cumulative_logprob", "score"):
        value, other_value = getattr(one, field), getattr(other, field)
        if not _are_close(value, other_value, max(len(one.token_ids), 1)):
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
