"""Find the place of a syntax error, a key or a value in a line of JSON.

Only lines that failed come here, so the text is read twice: by the standard parser for the values,
then by a scanner that skips everything else in C.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from batcher.errors import Path

NOT_JSON = "not JSON: "  # how messages about bad JSON begin
MAX_DIGITS = 4300  # of an integer, the limit of Python

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SPACE = re.compile(r"[ \t\n\r]*+")
_TOKEN = re.compile(rf"[\s,:]*+({_STRING}|[\[\]{{}}]|[^\s,:\[\]{{}}]++)")
_BRACKET = re.compile(rf"{_STRING}|[\[\]{{}}]")
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # which is one character
_CHARACTER = re.compile(rf"{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\.|.", re.DOTALL)
_SURROGATE = re.compile(rf"{_PAIR}|(\\u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.")
_REFUSED = re.compile(rf"{_STRING}|(-?Infinity|NaN|-?[0-9]{{{MAX_DIGITS + 1},}}(?![0-9.eE]))")


class TextSpan(NamedTuple):
    """The characters `start` to `end` of a line, end exclusive."""

    start: int
    end: int


class JsonError(Exception):
    """The text is not JSON that a request may have; `span` is the place."""

    def __init__(self, code: str, message: str, span: TextSpan) -> None:
        self.code, self.message, self.span = code, message, span
        super().__init__(message)


def parse(text: str) -> object:
    """Return the value of `text`; the last of equal keys counts.

    Raises:
        JsonError: the text is not JSON, nests too deeply, or holds NaN, Infinity, an integer of
            more than MAX_DIGITS digits or a lone surrogate.
    """
    try:
        value: object = json.loads(text, parse_int=_parse_int, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise _syntax_error(text, error) from None
    except _RefusedNumberError as error:
        start, end = next(m.span(1) for m in _REFUSED.finditer(text) if m.group(1))
        raise JsonError("invalid-json", str(error), TextSpan(start, end)) from None
    except RecursionError:
        raise JsonError("invalid-json", "nested too deeply", find_value(text, ())) from None
    for match in _SURROGATE.finditer(text):
        if match.group(1):
            message = f"{match.group(1)} is a lone surrogate, not a character"
            raise JsonError("invalid-text", message, TextSpan(*match.span(1)))
    return value


def find_members(text: str, start: int) -> Iterator[tuple[str | int, TextSpan, TextSpan]]:
    """Yield the members of the value at `start`: name or index, its place, place of the value."""
    start = _skip_space(text, start)
    if text[start] not in "[{":
        return
    is_object, position, index, key_span = text[start] == "{", start + 1, 0, None
    while (token := _TOKEN.match(text, position)) is not None:
        first, position = token.span(1)
        if text[first] in "]}":
            return
        if is_object and key_span is None:
            key_span = TextSpan(first, position)
            continue
        if text[first] in "[{":
            position = _end_of_nested(text, first)
        name: str | int = index if key_span is None else json.loads(text[slice(*key_span)])
        value_span = TextSpan(first, position)
        yield name, key_span or value_span, value_span
        index, key_span = index + 1, None


def find_value(text: str, path: Path) -> TextSpan:
    """Return the place of the value at `path`, or of the last value on the way to it."""
    start = _skip_space(text, 0)
    span = TextSpan(start, max(len(text.rstrip()), start + 1))
    for key in path:
        members = (value for name, _, value in find_members(text, span.start) if name == key)
        found = next(members, None)
        if found is None:
            return span
        if isinstance(key, str):  # the last of equal names counts
            found = [found, *members][-1]
        span = found
    return span


def find_character(text: str, string: TextSpan, index: int) -> TextSpan:
    """Return the place of a character of a string in `text`, or of the end of the string."""
    characters = _CHARACTER.finditer(text, string.start + 1, string.end - 1)
    found = next(islice(characters, index, None), None)
    return TextSpan(string.end - 1, string.end) if found is None else TextSpan(*found.span())


def find_key(text: str, path: Path) -> TextSpan:
    """Return the first place of the last name on `path`, or the place of its parent."""
    holder = find_value(text, path[:-1])
    found = (key for name, key, _ in find_members(text, holder.start) if name == path[-1])
    return next(found, holder)


def read_distinct(line: str | bytes) -> object:
    """Return the value of `line`; raise a ValueError if an object has two equal names."""
    return json.loads(line, parse_int=len, object_pairs_hook=_make_distinct)


def find_doubles(text: str) -> Iterator[tuple[Path, TextSpan, TextSpan]]:
    """Yield path, place and first place of each name that an object has twice."""
    with suppress(ValueError):
        read_distinct(text)
        return
    unseen: list[tuple[Path, int]] = [((), 0)]
    while unseen:
        path, start = unseen.pop()
        first: dict[str | int, TextSpan] = {}
        for name, key, value in find_members(text, start):
            if name in first:
                yield (*path, name), key, first[name]
            first.setdefault(name, key)
            if text[value.start] in "[{":
                unseen.append(((*path, name), value.start))


def _make_distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError
    return made


class _RefusedNumberError(Exception):
    pass


def _refuse(constant: str) -> object:
    raise _RefusedNumberError(f"{constant} is not a JSON number")


def _parse_int(digits: str) -> int:
    num_digits = len(digits.lstrip("-"))
    if num_digits > MAX_DIGITS:
        raise _RefusedNumberError(
            f"an integer has {num_digits:,} digits; at most {MAX_DIGITS:,} are allowed"
        )
    return int(digits)


def _syntax_error(text: str, error: json.JSONDecodeError) -> JsonError:
    length = len(text.rstrip())
    if error.pos >= length:
        end = TextSpan(length, length + 1)
        return JsonError("invalid-json", "the line ends before the JSON object does", end)
    place, message = error.pos, error.msg.removesuffix(" at").removesuffix(" starting")
    before = text[: error.pos].rstrip(" \t\n\r")
    is_comma = error.msg.startswith("Illegal trailing comma")  # since Python 3.13
    if is_comma or (text[place] in "]}" and before.endswith(",")):
        place = place if is_comma else len(before) - 1
        message = "remove the comma before the closing bracket"
    elif text[place] == "'":
        message = "use double quotes for names and strings, not single ones"
    message = f"{NOT_JSON}{message[0].lower()}{message[1:]}"
    return JsonError("invalid-json", message, TextSpan(place, place + 1))


def _end_of_nested(text: str, start: int) -> int:
    depth = 0
    for match in _BRACKET.finditer(text, start):
        bracket = text[match.start()]
        if bracket != '"':
            depth += 1 if bracket in "[{" else -1
            if depth == 0:
                return match.end()
    return len(text)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
