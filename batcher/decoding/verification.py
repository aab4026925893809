"""A second look at an output, by means that have no part in how it was made.

Decoding follows tokens through llguidance's masks.  Here a choice is looked up, JSON is validated
by `jsonschema`, with numbers that are exact, and a regex matched by RE2.  Rule: only what these
refute breaks a constraint; where there are none, as for grammars, the output goes unchecked, and
its result says so.
"""

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

from batcher.decoding.constraints.patterns import Test, found_match, whole_match
from batcher.decoding.grammars import ConstraintSource, parts_of
from batcher.errors import Failure, Path
from batcher.result import ConstraintCheck, ConstraintOutcome

_NUM_SHOWN = 20  # bytes of an output in a message
_MAX_LOOKS = 100_000  # at a part of an output with a part of a schema
_MAX_EXPONENT = 5000  # of a number that is divided
_LATEST = "https://json-schema.org/draft/2020-12/schema"
DIALECTS = {  # without http or https, which are mistaken for each other
    "//json-schema.org/draft-03/schema": "Draft3Validator",
    "//json-schema.org/draft-04/schema": "Draft4Validator",
    "//json-schema.org/draft-06/schema": "Draft6Validator",
    "//json-schema.org/draft-07/schema": "Draft7Validator",
    "//json-schema.org/draft/2019-09/schema": "Draft201909Validator",
    "//json-schema.org/draft/2020-12/schema": "Draft202012Validator",
    "//json-schema.org/schema": "Draft202012Validator",
}


class UndecidedError(Exception):
    """Nothing can be said of an output: what it means, or how it is to be checked, is open."""


class JsonCheck:
    """Checks outputs against one schema, given as its JSON."""

    def __init__(self, schema: str) -> None:
        self._num_looks = 0
        self._validator = self._make_validator(schema)

    def problem(self, output: bytes) -> str | None:
        """Return what is wrong with an output, None if nothing is.

        Raises:
            UndecidedError: that cannot be told.
        """
        repeated: list[str] = []
        try:
            value = _read(output, repeated)
        except ValueError as error:
            return f"not JSON that can be read: {error}"
        if self._validator is None:
            raise UndecidedError
        self._num_looks = 0
        try:
            first = next(self._validator.iter_errors(value), None)
        except Exception as error:  # whatever an odd schema makes of the library
            raise UndecidedError from error
        if first is None:
            if repeated:  # whoever takes the first value of a name may read something else
                raise UndecidedError
            return None
        if first.validator is None:  # the schema false
            return f"`{first.json_path}` holds what the schema does not allow"
        return f"`{first.json_path}` does not keep `{first.validator}` of the schema"

    def _make_validator(self, text: str) -> Any:
        """Return what checks values against a schema; None if it is of a dialect unknown here."""
        import attrs  # noqa: PLC0415 - an optional dependency, as those below
        import jsonschema  # noqa: PLC0415 - slow to import, too
        from jsonschema import validators  # noqa: PLC0415 - as above
        from referencing import Registry  # noqa: PLC0415 - as above

        schema = json.loads(text, parse_float=Decimal)
        name = DIALECTS.get(dialect_of(schema))
        if name is None:
            return None
        base = getattr(jsonschema, name)
        keywords = {**base.VALIDATORS, **_KEYWORDS}
        if isinstance(schema, dict) and "$schema" not in schema:  # it may be of an older dialect
            older = jsonschema.Draft7Validator.VALIDATORS
            keywords |= {name: older[name] for name in ("dependencies", "additionalItems")}
            keywords["items"] = partial(_items, older["items"], keywords["items"])
        if '"patternProperties"' in text:
            keywords |= _UNEVALUATED
        made: Any = validators.extend(  # type: ignore[no-untyped-call]  # its stub has no types
            base,
            {keyword: partial(self._look, check) for keyword, check in keywords.items()},
            type_checker=base.TYPE_CHECKER.redefine_many(
                {"number": lambda _, value: _is_number(value), "integer": _is_integer}
            ),
        )
        made.evolve = attrs.evolve  # a `$schema` within would make it another class
        return made(schema, registry=Registry())  # one that fetches nothing

    def _look(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Do what `check` does, unless so much has been done already that an end is not near."""
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            raise UndecidedError
        return check(*arguments)


def dialect_of(schema: Any) -> str:
    """Return the key in DIALECTS of what a schema says that it is written in."""
    stated = schema.get("$schema") if isinstance(schema, dict) else None
    address = str(stated or _LATEST).partition(":")[2].rstrip("#")
    return address.replace("/hyper-schema", "/schema")


def _read(output: bytes, repeated: list[str]) -> Any:
    """Return the value that is written in `output`, its numbers as Decimals.

    repeated: gets the names that an object has twice; the last value of each counts.

    Raises:
        ValueError: it is no JSON.
        UndecidedError: it cannot be read here.
    """
    try:
        return json.loads(
            output.decode(),
            parse_int=Decimal,
            parse_float=Decimal,
            parse_constant=_refuse_constant,
            object_pairs_hook=partial(_last_of_each, repeated),
        )
    except (ArithmeticError, RecursionError) as error:
        raise UndecidedError from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _last_of_each(repeated: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated.extend(name for name, _ in pairs)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_integer(_: object, value: object) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _pattern_test(pattern: str) -> Test:
    test = found_match(pattern)
    if test is None:
        raise UndecidedError
    return test


def _pattern(validator: Any, pattern: str, value: Any, _: Any) -> Iterator[Any]:
    from jsonschema import ValidationError  # noqa: PLC0415 - an optional dependency

    if validator.is_type(value, "string") and not _pattern_test(pattern)(value):
        yield ValidationError(f"does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, _: Any) -> Iterator[Any]:
    if not validator.is_type(value, "object"):
        return
    for pattern, schema in patterns.items():
        test = _pattern_test(pattern)
        for name, part in value.items():
            if test(name):
                yield from validator.descend(part, schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(value, "object"):
        return
    named = schema.get("properties", {})
    tests = [_pattern_test(pattern) for pattern in schema.get("patternProperties", {})]
    for name, part in value.items():
        if name not in named and not any(test(name) for test in tests):
            yield from validator.descend(part, rest, path=name)


def _items(
    in_turn: Callable[..., Any], all_: Callable[..., Any], validator: Any, items: Any, *rest: Any
) -> Iterator[Any]:
    yield from (in_turn if isinstance(items, list) else all_)(validator, items, *rest) or ()


def _multiple_of(validator: Any, divisor: Any, value: Any, _: Any) -> Iterator[Any]:
    from jsonschema import ValidationError  # noqa: PLC0415 - an optional dependency

    if not validator.is_type(value, "number"):
        return
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MAX_EXPONENT:
        raise UndecidedError
    if Fraction(value) % Fraction(divisor):
        yield ValidationError(f"not a multiple of {divisor}")


def _undecided(*_: Any) -> Iterator[Any]:
    raise UndecidedError


_KEYWORDS: dict[str, Callable[..., Any]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
}
# The library looks for patterns here by itself, and may take any time.
_UNEVALUATED = {"unevaluatedProperties": _undecided, "unevaluatedItems": _undecided}


def find_doubt(schema: Any) -> tuple[Path, str] | None:
    """Return where a schema has something that JsonCheck cannot decide, and what that is."""
    if dialect_of(schema) not in DIALECTS:
        return ("$schema",), f"a schema of the dialect {schema['$schema']!r}"
    has_patterns = False
    for path, part in parts_of(schema):
        named = part.get("patternProperties")
        patterns = [*named] if isinstance(named, dict) else []
        has_patterns |= bool(patterns)
        for pattern in [part.get("pattern"), *patterns]:
            if isinstance(pattern, str) and found_match(pattern) is None:
                return path, f"the pattern {pattern!r}"
    for path, part in parts_of(schema) if has_patterns else ():
        for name in _UNEVALUATED & part.keys():
            return (*path, name), f"`{name}` beside patternProperties"
    return None


class Look(NamedTuple):
    """What the second look has found; problem: what breaks the constraint, None if nothing does.

    is_decided: whether there was anything independent to look with; if not, problem is None.
    """

    problem: str | None
    is_decided: bool = True


UNDECIDED = Look(None, is_decided=False)


class Judgement(NamedTuple):
    """What a result says of an output and its constraint; failure: that the output breaks it."""

    constraint: ConstraintOutcome | None = None
    check: ConstraintCheck | None = None
    failure: Failure | None = None


class Verifier:
    """Checks the outputs of one constraint."""

    def __init__(self, source: ConstraintSource) -> None:
        self._source = source

    def look(self, output: bytes) -> Look:
        """Return what is wrong with an output as a whole."""
        match self._source.kind:
            case "choice":
                is_kept: bool | None = output in self._choices
                problem = f"{_shown(output)} is none of the choices"
            case "json_schema":
                try:
                    return Look(self._json_check.problem(output))
                except UndecidedError:
                    return UNDECIDED
            case "regex":
                is_kept = self._is_match(output)
                problem = f"{_shown(output)} does not match"
            case _:
                return UNDECIDED
        return UNDECIDED if is_kept is None else Look(None if is_kept else problem)

    def can_begin(self, output: bytes) -> bool:
        """Return False if it is sure that no whole output begins like this one."""
        if self._source.kind != "choice":
            return True
        return any(choice.startswith(output) for choice in self._choices)

    def judge(
        self, output: bytes, look: Look, *, is_ended: bool, accepts: Callable[[], bool]
    ) -> Judgement:
        """Return what a result says of an output.

        look: what `look` returned.  is_ended: the model ended the output; if not, it was cut.
        accepts: decides of an output that was cut, if the look does not.
        """
        is_whole = look.problem is None if look.is_decided else is_ended or accepts()
        problem = look.problem if is_ended or not self.can_begin(output) else None
        message = f"the output breaks its constraint: {problem}"
        return Judgement(
            "complete" if is_whole else "incomplete",
            None if look.is_decided or not is_whole else "none",
            None if problem is None else Failure("constraint-error", message),
        )

    @cached_property
    def _choices(self) -> list[bytes]:
        return [text.encode() for text in json.loads(self._source.text)]

    @cached_property
    def _json_check(self) -> JsonCheck:
        return JsonCheck(self._source.text)

    def _is_match(self, output: bytes) -> bool | None:
        """Return whether all of an output matches the regex, None if nothing here can tell."""
        test = whole_match(self._source.text)
        try:
            return test and test(output.decode())
        except UnicodeDecodeError:
            return False


def _shown(output: bytes) -> str:
    """Return the beginning of `output` for a message."""
    text = output[:_NUM_SHOWN].decode(errors="replace")
    return repr(text + "…" if len(output) > _NUM_SHOWN else text)
