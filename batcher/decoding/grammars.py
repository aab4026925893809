"""What an output has to be, as a request states it: a kind of constraint and its text."""

import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from batcher.errors import GrammarError, Path
from batcher.request import ConstraintField, Request
from batcher.requests.validation import constraint_fields_of


class ConstraintSource(Struct, frozen=True, cache_hash=True):
    """A constraint before it is compiled; equal ones are compiled once.

    kind: the field that states it.
    text: the regex or the grammar; of a schema or a list of choices, its JSON.
    """

    kind: ConstraintField
    text: str


def constraint_source(request: Request) -> ConstraintSource | None:
    """Return the constraint of a valid `request`, None if it has none.

    Raises:
        GrammarError: its schema holds half of a character, which no text can.
    """
    fields = constraint_fields_of(request)
    return stated_source(fields[0], getattr(request, fields[0])) if fields else None


def stated_source(field: ConstraintField, stated: Any) -> ConstraintSource:
    """Return the constraint that `field` of a request states.

    Raises:
        GrammarError: a schema holds half of a character, which no text can.
    """
    text = stated if isinstance(stated, str) else canonical_json(stated)
    if not _is_text(text):
        path = (field, *_path_of_half(stated))
        raise GrammarError(path, "a text holds half of a surrogate pair")
    return ConstraintSource(field, text)


def schema_source(schema: Any) -> ConstraintSource:
    """Return a JSON Schema, given as its value, as a constraint."""
    return ConstraintSource("json_schema", canonical_json(schema))


def canonical_json(value: object) -> str:
    """Return `value` as JSON without spaces, keys in their order: properties are written in it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def parts_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path of every object in `value` that may be a schema, and it; outer ones first."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
        yield path, value
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from parts_of(item, (*path, key))


def place_in(text: str, offset: int) -> str:
    """Return where `offset` is in `text`, as a person counts: lines and columns from 1."""
    line_break = text.rfind("\n", 0, offset)  # -1 in the first line
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - line_break}"


def _is_text(text: str) -> bool:
    """Return whether `text` can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path_of_half(schema: Any) -> tuple[str | int, ...]:
    """Return the path of the innermost part of `schema` whose JSON is no text."""
    path: list[str | int] = []
    value: Any = schema
    while isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        faulty = next((key for key, item in items if not _is_text(canonical_json(item))), None)
        if faulty is None:  # a key of this object itself
            break
        path.append(faulty)
        value = value[faulty]
    return tuple(path)
