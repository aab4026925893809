"""What llguidance says of a grammar it cannot compile, in our words and with the place."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from batcher.decoding.constraints.source import ConstraintSource
from batcher.errors import GrammarError, Path

_PLACE = re.compile(r"\A(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # the lines of the grammar around the place
_INTERNALS = re.compile(r"\n<.*", re.DOTALL)
_REGEX_ERROR = re.compile(
    r"regex parse error:\n    (?P<regex>.*)\n    (?P<caret> *)\^+\nerror: (?P<what>.*)"
)
_INVALID_REGEX = re.compile(r'\Ainvalid regex ".*" \(in regex\): (?P<what>.*)\Z', re.DOTALL)
_IN_REGEX = re.compile(r" in regex /.*/\Z", re.DOTALL)
_UNSUPPORTED = re.compile(r'\AUnimplemented keys: \["(?P<keys>.*)"\]\Z', re.DOTALL)
_ONE_OF = re.compile(r"\AoneOf constraints are not supported.*\Z", re.DOTALL)
_TOO_DEEP = re.compile(r"\Afailed to parse .*recursion limit exceeded.*\Z")
_NESTED = "the schema is nested too deeply"
_MAX_CANDIDATES = 500  # parts of a schema that are tried on their own to find the fault


def grammar_error(
    source: ConstraintSource, said: str, error_of_schema: Callable[[Any], str]
) -> GrammarError:
    """Return the error that tells what llguidance `said` of `source`.

    error_of_schema: what llguidance says of a schema alone, "" if nothing; it finds the place.
    """
    if source.kind == "json_schema":
        message = _schema_message(said)
        if message == _NESTED:  # each part of it would be as well, down to some depth
            return GrammarError(("json_schema",), message)
        path = _path_of_fault(json.loads(source.text), message, error_of_schema)
        return GrammarError(("json_schema", *path), message)
    message, line, column = _split(said)
    if source.kind == "regex":
        return GrammarError(("regex",), _regex_message(source.text, message))
    if source.kind != "lark" or line is None:  # of other kinds it is a grammar the user never saw
        return GrammarError((source.kind,), _regex_message(None, message))
    num_lines = source.text.count("\n") + 1
    place = f"line {line}, column {column}" if line <= num_lines else "the end"
    return GrammarError(("lark",), f"{place}: {_regex_message(None, message)}")


def _split(said: str) -> tuple[str, int | None, int | None]:
    """Return what is wrong, and the line and the column where."""
    place = _PLACE.match(said)
    message = _INTERNALS.sub("", _EXCERPT.sub("", said[place.end() :] if place else said)).strip()
    message = message.removeprefix("panic: ")
    return (message, int(place[1]), int(place[2])) if place else (message, None, None)


def _regex_message(regex: str | None, message: str) -> str:
    """Return `message`; if it is about a regex, what is wrong with it and where."""
    if match := _REGEX_ERROR.search(message):
        offset = len(match["caret"])
        if regex is None:
            return f"in the regex '{match['regex']}', offset {offset}: {match['what']}"
        return f"offset {_offset(regex, match['regex'], offset)}: {match['what']}"
    if match := _INVALID_REGEX.match(message):
        return _IN_REGEX.sub("", match["what"])
    return message


def _offset(regex: str, escaped: str, offset: int) -> int:
    """Return where in `regex` is what stands at `offset` of the form in which it was compiled."""
    before = escaped[:offset]
    original = before.replace("\\/", "/").replace("\\n", "\n")  # what the escaping may have changed
    return len(original) if regex.startswith(original) else offset


def _schema_message(said: str) -> str:
    message = _split(said)[0].removeprefix("failed to compile JSON schema: ")
    if match := _UNSUPPORTED.match(message):
        keys = match["keys"].replace('", "', ", ")
        return f"not supported in a schema: {keys}"
    if _TOO_DEEP.match(message):
        return _NESTED
    if _ONE_OF.match(message):
        return "oneOf whose alternatives are not told apart is not supported; anyOf is"
    return _regex_message(None, message)


def _path_of_fault(schema: Any, message: str, error_of_schema: Callable[[Any], str]) -> Path:
    """Return the path of the innermost part of `schema` that has the same fault on its own."""
    found: Path = ()
    for number, (path, part) in enumerate(_parts(schema, ())):
        if number == _MAX_CANDIDATES:
            break
        is_within = path[: len(found)] == found  # of several, the first is followed inwards
        if is_within and _schema_message(error_of_schema(part)) == message:
            found = path
    return found


def _parts(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield every object within `value` that may be a schema, the outer ones first."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
        if path:
            yield path, value
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from _parts(item, (*path, key))
