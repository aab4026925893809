"""What an output has to be, as a request states it: a kind of constraint and its text."""

import json
from typing import Any, Literal

from msgspec import Struct

from batcher.errors import GrammarError
from batcher.request import Request

Kind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]


class ConstraintSource(Struct, frozen=True, cache_hash=True):
    """A constraint before it is compiled; equal ones are compiled once.

    text: the regex or the grammar; of a schema or a list of choices, its JSON.
    """

    kind: Kind
    text: str


def constraint_source(request: Request) -> ConstraintSource | None:
    """Return the constraint of a valid `request`, None if it has none.

    Raises:
        GrammarError: its schema holds half of a character, which no text can.
    """
    if request.json_schema is not None:
        text = canonical_json(request.json_schema)
        if not _is_text(text):
            path = _path_of_fault(request.json_schema)
            raise GrammarError(("json_schema", *path), "a text holds half of a surrogate pair")
        return ConstraintSource("json_schema", text)
    if request.choice is not None:
        return ConstraintSource("choice", canonical_json(request.choice))
    if request.regex is not None:
        return ConstraintSource("regex", request.regex)
    if request.lark is not None:
        return ConstraintSource("lark", request.lark)
    if request.gbnf is not None:
        return ConstraintSource("gbnf", request.gbnf)
    return None


def canonical_json(value: object) -> str:
    """Return `value` as JSON without spaces, keys in their order: properties are written in it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_text(text: str) -> bool:
    """Return whether `text` can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path_of_fault(schema: Any) -> tuple[str | int, ...]:
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
