"""What makes a request decodable: the rules shared by the Python API and the line parser.

Rule: every check works on any value whatever, because a Request built by hand may hold anything.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from batcher.errors import FieldProblem
from batcher.request import MAX_INT, MAX_TIME, Request

MAX_STOP_LENGTH = 1024  # all stops of one request together, in token ids and UTF-8 bytes
MAX_SHOWN = 40  # characters of a value or a name that a message quotes
_MAX_PLAIN_STOPS = 16  # in each dimension: three fields of 16 x 16 stay below MAX_STOP_LENGTH
STOP_FIELDS = ("stop_token", "stop_sequence", "stop")
HUGE = 10**MAX_SHOWN

Path = tuple[str | int, ...]
Problems = Iterator[FieldProblem]

_SEQUENCE_KINDS = (
    "a list of token ids, a list of such lists, a string or a list of strings",
    "a list of token ids is one sequence, a list of lists or of strings several; do not mix them",
)


def find_problems(request: Request, vocab_size: int | None) -> list[FieldProblem]:
    """Return everything wrong with `request`; [] if nothing is.

    vocab_size: one more than the largest token id the model knows, None if it takes any.
    """
    if plain_copy(request, vocab_size) is not None:
        return []
    return [problem for check in _CHECKS for problem in check(request, vocab_size)]


def show(value: object) -> str:
    """Return `value` as a message quotes it: JSON where that is short, else its kind."""
    if isinstance(value, str):
        cut = value if len(value) <= MAX_SHOWN else value[:MAX_SHOWN] + "…"
        return f'"{cut}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < HUGE else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


@cache
def _checked_type(vocab_size: int | None) -> type[Request]:
    """Return a type that no bad request converts to, but for what `plain_copy` adds.

    The conversion runs in C: it costs less than one pass over the prompt in Python.
    """
    token_id = Annotated[int, Meta(ge=0, le=_largest_token(vocab_size))]
    token_ids = Annotated[list[token_id], Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)]
    text = Annotated[str, Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)]
    texts = Annotated[list[text], Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)]
    sequences = Annotated[
        list[token_id | text | token_ids], Meta(min_length=1, max_length=_MAX_PLAIN_STOPS)
    ]
    types: dict[str, Any] = {
        "id": str | None,
        "prompt": str | list[token_id],
        "max_tokens": Annotated[int, Meta(ge=0, le=MAX_INT)],
        "stop_token": token_id | token_ids | None,
        "stop_sequence": text | sequences | None,
        "stop": text | texts | None,
        "ignore_eos": bool,
        "arrival_time": Annotated[float, Meta(ge=0, le=MAX_TIME)],
        "priority": Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)],
    }
    fields = list(types.items())
    checked = msgspec.defstruct("CheckedRequest", fields, bases=(Request,), frozen=True, gc=False)
    return cast(type[Request], checked)


def plain_copy(request: Request, vocab_size: int | None) -> Request | None:
    """Return an equal request with lists of its own; None if a closer look at it is needed."""
    try:
        copy = msgspec.convert(request, _checked_type(vocab_size), from_attributes=True)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the other: a lone surrogate
        return None
    is_good = (
        _is_list_or_text(request.prompt)
        and (request.id is None or _is_text(request.id))
        and (request.stop_token is None or type(request.stop_token) in {int, list})
        and (request.stop_sequence is None or _is_plain_stop(request.stop_sequence))
        and (request.stop is None or _is_plain_stop(request.stop))
    )
    return copy if is_good else None


def _is_list_or_text(prompt: object) -> bool:
    return type(prompt) is list or (type(prompt) is str and _is_text(prompt))


def _is_plain_stop(stop: object) -> bool:
    """Return whether a stop that converts to its type is of one kind and free of surrogates."""
    if type(stop) is not list:
        return type(stop) is str and stop.isascii()
    (kind, *others) = {type(item) for item in stop}
    return not others and (kind in {int, list} or (kind is str and all(map(str.isascii, stop))))


def _check_id(request: Request, _: int | None) -> Problems:
    if request.id is not None:
        yield from _check_string(request.id, ("id",), "a string")


def _check_prompt(request: Request, vocab_size: int | None) -> Problems:
    prompt: object = request.prompt
    if isinstance(prompt, list):
        yield from _check_token_ids(prompt, ("prompt",), vocab_size)
    else:
        yield from _check_string(prompt, ("prompt",), "a string or a list of token ids")


def _check_max_tokens(request: Request, _: int | None) -> Problems:
    yield from _check_integer(request.max_tokens, ("max_tokens",), 0)


def _check_priority(request: Request, _: int | None) -> Problems:
    yield from _check_integer(request.priority, ("priority",), -MAX_INT)


def _check_ignore_eos(request: Request, _: int | None) -> Problems:
    value: object = request.ignore_eos
    if not isinstance(value, bool):
        yield _wrong("invalid-type", ("ignore_eos",), "true or false", value)


def _check_arrival_time(request: Request, _: int | None) -> Problems:
    value: object = request.arrival_time
    expected = f"a number of seconds from 0 to {MAX_TIME:.0f}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield _wrong("invalid-type", ("arrival_time",), expected, value)
    elif not 0 <= value <= MAX_TIME:
        yield _wrong("invalid-value", ("arrival_time",), expected, value)


def _check_stop_token(request: Request, vocab_size: int | None) -> Problems:
    stop: object = request.stop_token
    if stop is None:
        return
    if isinstance(stop, list):
        yield from _check_not_empty(stop, ("stop_token",))
        yield from _check_token_ids(stop, ("stop_token",), vocab_size)
    elif _is_integer(stop):
        yield from _check_token_id(stop, ("stop_token",), vocab_size)
    else:
        expected = "a token id or a list of token ids"
        yield _wrong("invalid-type", ("stop_token",), expected, stop)


def _check_stop_sequence(request: Request, vocab_size: int | None) -> Problems:
    path: Path = ("stop_sequence",)
    stop: object = request.stop_sequence
    if not isinstance(stop, list):
        yield from _check_text_stop(stop, path, _SEQUENCE_KINDS[0])
        return
    yield from _check_not_empty(stop, path)
    kinds = [_kind(item) for item in stop]
    odd = next((i for i, kind in enumerate(kinds) if kind is None or kind is not kinds[0]), None)
    if odd is not None:
        code = "invalid-type" if kinds[odd] is None else "invalid-value"
        expected, hint = _SEQUENCE_KINDS
        found = "a mixed list" if kinds[odd] else f"a list with {show(stop[odd])} in it"
        message = f"`stop_sequence` must be {expected}, not {found}"
        yield FieldProblem(code, (*path, odd), message, hint)
    elif stop and kinds[0] is int:
        yield from _check_token_ids(stop, path, vocab_size)
    elif stop and kinds[0] is str:
        yield from _check_texts(stop, path)
    else:
        for index, item in enumerate(stop):
            yield from _check_not_empty(item, (*path, index))
            yield from _check_token_ids(item, (*path, index), vocab_size)


def _check_stop(request: Request, _: int | None) -> Problems:
    stop: object = request.stop
    if isinstance(stop, list):
        yield from _check_not_empty(stop, ("stop",))
        yield from _check_texts(stop, ("stop",))
    else:
        yield from _check_text_stop(stop, ("stop",), "a string or a list of strings")


def _check_stop_length(request: Request, _: int | None) -> Problems:
    lengths = {name: _stop_length(getattr(request, name)) for name in STOP_FIELDS}
    total = sum(lengths.values())
    if total > MAX_STOP_LENGTH:
        message = (
            f"the stops hold {total} token ids and bytes of text together; "
            f"at most {MAX_STOP_LENGTH} are allowed"
        )
        longest = max(STOP_FIELDS, key=lengths.__getitem__)
        yield FieldProblem("invalid-value", (longest,), message)


def _stop_length(stop: object) -> int:
    """Return the number of token ids and UTF-8 bytes in a stop field of any shape."""
    if isinstance(stop, str):
        return len(stop.encode(errors="replace"))
    if isinstance(stop, list):
        flat = [part for item in stop for part in (item if isinstance(item, list) else [item])]
        return sum(len(x.encode(errors="replace")) if isinstance(x, str) else 1 for x in flat)
    return 0 if stop is None else 1


def _check_text_stop(stop: object, path: Path, expected: str) -> Problems:
    if stop is not None:
        yield from _check_string(stop, path, expected)
        yield from _check_not_empty(stop, path)


def _check_texts(stops: list[object], path: Path) -> Problems:
    for index, stop in enumerate(stops):
        yield from _check_string(stop, (*path, index), "a string")
        yield from _check_not_empty(stop, (*path, index))


def _check_not_empty(stop: object, path: Path) -> Problems:
    if isinstance(stop, str | list) and not stop:
        message = f"{_quote(path)} is empty, so it would match everywhere"
        yield FieldProblem("invalid-value", path, message, "leave the stop out")


def _check_string(value: object, path: Path, expected: str) -> Problems:
    if not isinstance(value, str):
        yield _wrong("invalid-type", path, expected, value)
    elif not _is_text(value):
        message = f"{_quote(path)} holds a lone surrogate, which stands for no character"
        yield FieldProblem("invalid-text", path, message)


def _check_integer(value: object, path: Path, smallest: int) -> Problems:
    expected = f"an integer from {smallest} to {MAX_INT}"
    if not _is_integer(value):
        yield _wrong("invalid-type", path, expected, value)
    elif not smallest <= value <= MAX_INT:  # type: ignore[operator]  # known to be an int
        yield _wrong("invalid-value", path, expected, value)


def _check_token_ids(values: list[Any], path: Path, vocab_size: int | None) -> Problems:
    """Yield the first bad token id of a list: where one is wrong, a thousand may be."""
    largest = _largest_token(vocab_size)
    for index, value in enumerate(values):
        if not _is_integer(value) or not 0 <= value <= largest:
            yield from _check_token_id(value, (*path, index), vocab_size)
            return


def _check_token_id(value: object, path: Path, vocab_size: int | None) -> Problems:
    largest = _largest_token(vocab_size)
    if not _is_integer(value):
        yield _wrong("invalid-type", path, "a token id, an integer", value)
    elif not 0 <= value <= largest:  # type: ignore[operator]  # known to be an int
        yield _wrong("unknown-token", path, f"a token id from 0 to {largest}", value)


def _largest_token(vocab_size: int | None) -> int:
    return MAX_INT if vocab_size is None else vocab_size - 1


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: str) -> bool:
    """Return whether `value` can be written as UTF-8: lone surrogates cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(item: object) -> type | None:
    """Return int, str or list for what a stop_sequence list may hold, None for anything else."""
    if _is_integer(item):
        return int
    return next((kind for kind in (str, list) if isinstance(item, kind)), None)


def _quote(path: Path) -> str:
    return f"`{FieldProblem('', path, '').field}`"


def _wrong(code: str, path: Path, expected: str, value: object) -> FieldProblem:
    hint = None
    if isinstance(value, str) and "integer" in expected and value.isdecimal():
        hint = "remove the quotes"
    return FieldProblem(code, path, f"{_quote(path)} must be {expected}, not {show(value)}", hint)


_CHECKS: tuple[Callable[[Request, int | None], Problems], ...] = (
    _check_id,
    _check_prompt,
    _check_max_tokens,
    _check_stop_token,
    _check_stop_sequence,
    _check_stop,
    _check_stop_length,
    _check_ignore_eos,
    _check_arrival_time,
    _check_priority,
)
