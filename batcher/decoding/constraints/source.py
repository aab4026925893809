"""What an output has to be, as a request states it: a kind of constraint and its text."""

import json
from typing import Literal

from msgspec import Struct

from batcher.request import Request

Kind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]


class ConstraintSource(Struct, frozen=True, cache_hash=True):
    """A constraint before it is compiled; equal ones are compiled once.

    text: the regex or the grammar; of a schema or a list of choices, its JSON.
    """

    kind: Kind
    text: str


def constraint_source(request: Request) -> ConstraintSource | None:
    """Return the constraint of a valid `request`, None if it has none."""
    if request.json_schema is not None:
        return ConstraintSource("json_schema", canonical_json(request.json_schema))
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
