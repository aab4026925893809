"""What llguidance enforces of a constraint, and a second look at outputs by independent means.

Decoding follows tokens through llguidance's masks.  Here a choice is looked up, JSON is validated
by `jsonschema`, with numbers that are exact, and a regex matched by RE2.  Rule: only what these
refute breaks a constraint; where there are none, as for grammars, the output goes unchecked, and
its result says so.
"""

import atexit
import json
import math
import pathlib
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import Struct

from batcher.decoding.grammars import (
    NESTED,
    ConstraintSource,
    compile_source,
    grammar_error,
    matcher_of,
    parts_of,
    schema_source,
    with_large_stack,
    with_literal_dashes,
)
from batcher.errors import BatchdecodeError, Failure, GrammarError, Path
from batcher.result import ConstraintCheck, ConstraintOutcome

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Texts under a regex, through RE2, which has no part in how outputs are made.
#
# Rule: there is no second look where the meaning of the regex is in doubt.  Digits and word
# characters are ASCII, as in RE2 and in ECMA's dialect; dialects draw white space differently.
# Patterns that neither RE2 nor a mask can keep, such as look-around, are left to `regex`, for a
# second.

Test = Callable[[str], bool]
"""Whether a text is, or holds, a match; takes time in proportion to the text."""

_ESCAPE = (  # of a character, but for halves of one, or of a class
    r"\\(?:[dDwWsStnvfr]|x[\dA-Fa-f]{2}|u(?![dD][89a-fA-F])[\dA-Fa-f]{4}"
    r"|u(?!\{0*[dD][89a-fA-F]..\})\{[\dA-Fa-f]{1,6}\}|[ -/:-@[-`{-~])"
)
_ITEM = rf"(?:{_ESCAPE}|(?!&&|~~|--)[^\\\[\]])"  # of a set; those left out make sets of sets
_TOKEN = re.compile(
    rf"(?P<escape>{_ESCAPE})|\[(?P<negation>\^?+)(?P<items>{_ITEM}+)\]"
    # lazy counts match the same texts; after a count, others are possessive to some
    r"|(?P<count>\{[0-9]+(?:,[0-9]*)?\}|[*+?])\??(?![*+?{])"
    r"|(?P<group>\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?)))|(?P<sign>[|)^$.])|(?P<literal>[^\\\[(*+?{])",
    re.ASCII | re.DOTALL,
)
_RANGE = re.compile(rf"({_ITEM})(?:-(?!\Z)({_ITEM}))?", re.ASCII | re.DOTALL)
_CLASSES = {rf"\{name}" for name in "dDwWsS"}
_SIGNS = {"^": r"\A", "$": r"\z", ".": r"[^\n]"}
_ZEROS = re.compile(r"\b0+(?=[0-9])")  # RE2 takes a count that begins with them for a text
# what may be white space in any dialect, and what is none in all of them; RE2's \s is in all
_ANY_SPACES = (
    r"\t-\r \x{85}\x{A0}\x{1680}\x{180E}\x{2000}-\x{200A}\x{2028}\x{2029}"
    r"\x{202F}\x{205F}\x{3000}\x{FEFF}"
)
_NO_SPACES = (
    r"\x{0}-\x{8}\x{E}-\x{1F}!-\x{84}\x{86}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{180D}"
    r"\x{180F}-\x{1FFF}\x{200B}-\x{2027}\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}"
    r"\x{3001}-\x{FEFE}\x{FF00}-\x{10FFFF}"
)

_MAX_KEPT = 256
_MAX_SECONDS = 1.0
_MAX_LENGTH, _MAX_COPIES = 4096, 20_000  # of a pattern, and of what it has to repeat
_LEAST_COUNT = re.compile(r"\{(\d+)")
_NEVER_MASKED = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # look-around, \b and backreferences


@lru_cache(_MAX_KEPT)
def whole_match(regex: str) -> Test | None:
    """Return what decides whether all of a text matches; None if nothing independent does."""
    compiled = _compiled(regex, {})
    return compiled and (lambda text: compiled.fullmatch(text) is not None)


@lru_cache(_MAX_KEPT)
def found_match(pattern: str) -> Test | None:
    """Return what decides whether a text holds a match; None if nothing independent does.

    That is how the patterns of schemas are read.  For a pattern that masks cannot keep it raises a
    TimeoutError where it takes a second.
    """
    compiled = _compiled(pattern, {r"\s": _ANY_SPACES, r"^\S": _NO_SPACES})
    if compiled:
        return lambda text: compiled.search(text) is not None
    if not _NEVER_MASKED.search(pattern) or len(pattern) > _MAX_LENGTH:
        return None
    if math.prod(max(1, int(count)) for count in _LEAST_COUNT.findall(pattern)) > _MAX_COPIES:
        return None  # the library makes copies of what has to be repeated
    import regex  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    try:
        slow = regex.compile(pattern, regex.ASCII)
    except (regex.error, RecursionError):
        return None
    return lambda text: slow.search(text, timeout=_MAX_SECONDS) is not None


def _compiled(regex: str, spaces: dict[str, str]) -> Any:
    r"""Return a regex, compiled by RE2; None if it is too large, or its meaning is in doubt.

    spaces: what is written in a set for \s and, after ^ in a negated set, for \S.
    """
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    def item(text: str, negation: str = "") -> str:
        """Return an item of a set as RE2 writes it in one."""
        if text[0] != "\\" or not text[1].isalnum():
            return rf"\x{{{ord(text[-1]):X}}}"
        if text[1] in "xu":
            return rf"\x{{{text[2:].strip('{}')}}}"
        return spaces.get(text if text[1] == "s" and not negation else negation + text, text)

    written, at = [], 0
    while at < len(regex):
        token = _TOKEN.match(regex, at)
        if token is None:
            return None
        at = token.end()
        if token["items"]:
            parts = []
            for low, high in _RANGE.findall(token["items"]):
                first, last = item(low, token["negation"]), high and item(high, token["negation"])
                is_range = high and not {low[:2], high[:2]} & _CLASSES  # a class ends no range
                parts.append(f"{first}-{last}" if is_range else first)
                parts += ["" if is_range or not high else rf"\-{last}"]
            written.append(f"[{token['negation']}{''.join(parts)}]")
        elif token["count"]:
            written.append(_ZEROS.sub("", token["count"]))
        elif token["sign"]:
            written.append(_SIGNS.get(token["sign"], token["sign"]))
        else:
            written.append("(?:" if token["group"] else f"[{item(token[0])}]")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile("".join(written), options)
    except re2.error:  # counts above 1,000, or too large
        return None


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


class Look(NamedTuple):
    """What the second look found; problem: what breaks the constraint, if it is decided."""

    problem: str | None
    is_decided: bool = True


UNDECIDED = Look(None, is_decided=False)


class UndecidedError(Exception):
    """Nothing can be said of an output: what it means, or how it is to be checked, is open."""


class JsonCheck:
    """Checks outputs against one schema, given as its JSON."""

    def __init__(self, text: str) -> None:
        import attrs  # noqa: PLC0415 - an optional dependency, as those below
        import jsonschema  # noqa: PLC0415 - slow to import, too
        from jsonschema import validators  # noqa: PLC0415 - as above
        from referencing import Registry  # noqa: PLC0415 - as above

        self._num_looks, self._validator = 0, None
        schema = json.loads(text, parse_float=Decimal)
        name = DIALECTS.get(dialect_of(schema))
        if name is None:
            return
        base = getattr(jsonschema, name)
        keywords = {**base.VALIDATORS, **_KEYWORDS}
        if isinstance(schema, dict) and "$schema" not in schema:  # it may be of an older dialect
            older = jsonschema.Draft7Validator.VALIDATORS
            keywords |= {name: older[name] for name in ("dependencies", "additionalItems")}
            keywords["items"] = partial(_items, older["items"], keywords["items"])
        if '"patternProperties"' in text:
            keywords |= _UNEVALUATED

        def is_number(_: object, value: object) -> bool:
            return isinstance(value, int | Decimal) and not isinstance(value, bool)

        def is_integer(_: object, value: Any) -> bool:
            return is_number(_, value) and value == Decimal(value).to_integral_value()

        made: Any = validators.extend(  # type: ignore[no-untyped-call]  # its stub has no types
            base,
            {keyword: partial(self._look_at_part, check) for keyword, check in keywords.items()},
            type_checker=base.TYPE_CHECKER.redefine_many(
                {"number": is_number, "integer": is_integer}
            ),
        )
        made.evolve = attrs.evolve  # a `$schema` within would make it another class
        self._validator = made(schema, registry=Registry())  # one that fetches nothing

    def look(self, output: bytes) -> Look:
        repeated: list[str] = []  # names that an object has twice; the last value of each counts

        def refuse_constant(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        def last_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            value = dict(pairs)
            if len(value) < len(pairs):
                repeated.extend(name for name, _ in pairs)
            return value

        try:
            value = json.loads(
                output.decode(),
                parse_int=Decimal,
                parse_float=Decimal,
                parse_constant=refuse_constant,
                object_pairs_hook=last_of_each,
            )
        except ValueError as error:
            return Look(f"not JSON that can be read: {error}")
        except (ArithmeticError, RecursionError):
            return UNDECIDED
        if self._validator is None:
            return UNDECIDED
        self._num_looks = 0
        try:
            first = next(self._validator.iter_errors(value), None)
        except Exception:  # noqa: BLE001 - whatever an odd schema makes of the library
            return UNDECIDED
        if first is None:  # whoever takes the first value of a name may read something else
            return UNDECIDED if repeated else Look(None)
        if first.validator is None:  # the schema false
            return Look(f"`{first.json_path}` holds what the schema does not allow")
        return Look(f"`{first.json_path}` does not keep `{first.validator}` of the schema")

    def _look_at_part(self, check: Callable[..., Any], *arguments: Any) -> Any:
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            raise UndecidedError
        return check(*arguments)


def dialect_of(schema: Any) -> str:
    """Return the key in DIALECTS of what a schema says that it is written in."""
    stated = schema.get("$schema") if isinstance(schema, dict) else None
    address = str(stated or _LATEST).partition(":")[2].rstrip("#")
    return address.replace("/hyper-schema", "/schema")


def _pattern_test(pattern: str) -> Test:
    test = found_match(pattern)
    if test is None:
        raise UndecidedError
    return test


def _keeps(kind: str, holds: Callable[[Any, Any], bool]) -> Callable[..., Iterator[Any]]:
    """Return the check of a keyword of values of that kind; holds: of what it states and one."""

    def check(validator: Any, stated: Any, value: Any, _: Any) -> Iterator[Any]:
        from jsonschema import ValidationError  # noqa: PLC0415 - an optional dependency

        if validator.is_type(value, kind) and not holds(stated, value):
            yield ValidationError(f"not as {stated} states")

    return check


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


def _is_multiple(divisor: Any, value: Any) -> bool:
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MAX_EXPONENT:
        raise UndecidedError
    return not Fraction(value) % Fraction(divisor)


def _undecided(*_: Any) -> Iterator[Any]:
    raise UndecidedError


_KEYWORDS: dict[str, Callable[..., Any]] = {
    "pattern": _keeps("string", lambda pattern, value: _pattern_test(pattern)(value)),
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _keeps("number", _is_multiple),
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


class Judgement(NamedTuple):
    """What a result says of an output and its constraint; failure: that the output breaks it."""

    constraint: ConstraintOutcome | None = None
    check: ConstraintCheck | None = None
    failure: Failure | None = None


class Verifier:
    """Checks the outputs of one constraint."""

    def __init__(self, source: ConstraintSource) -> None:
        self._source = source

    @cached_property
    def _choices(self) -> list[bytes]:
        return [text.encode() for text in json.loads(self._source.text)]

    @cached_property
    def _json_check(self) -> JsonCheck:
        return JsonCheck(self._source.text)

    def look(self, output: bytes) -> Look:
        shown = output[:_NUM_SHOWN].decode(errors="replace")
        shown = repr(shown + "…" if len(output) > _NUM_SHOWN else shown)
        match self._source.kind:
            case "choice":
                is_kept = output in self._choices
                return Look(None if is_kept else f"{shown} is none of the choices")
            case "json_schema":
                return self._json_check.look(output)
            case "regex":
                test = whole_match(self._source.text)
                if test is None:
                    return UNDECIDED
                try:
                    is_kept = test(output.decode())
                except UnicodeDecodeError:
                    is_kept = False
                return Look(None if is_kept else f"{shown} does not match")
            case _:
                return UNDECIDED

    def can_begin(self, output: bytes) -> bool:
        """Return False if it is sure that no whole output begins like this one."""
        is_choice = self._source.kind == "choice"
        return not is_choice or any(choice.startswith(output) for choice in self._choices)

    def judge(
        self, output: bytes, look: Look, *, is_ended: bool, accepts: Callable[[], bool]
    ) -> Judgement:
        """Return what a result says of an output.

        is_ended: by the model, not cut.  accepts: decides of one that was cut, if `look` does not.
        """
        is_whole = look.problem is None if look.is_decided else is_ended or accepts()
        problem = look.problem if is_ended or not self.can_begin(output) else None
        message = f"the output breaks its constraint: {problem}"
        return Judgement(
            "complete" if is_whole else "incomplete",
            None if look.is_decided or not is_whole else "none",
            None if problem is None else Failure("constraint-error", message),
        )


# -- what llguidance can enforce of a constraint ---------------------------------------------------
#
# A loosened JSON schema allows every output of the schema, and more: the keywords that llguidance
# cannot enforce are left out, and named. Which of its outputs keep the schema only the check of a
# whole one decides; what that cannot decide is refused. llguidance's own option
# `lenient` ignores the keywords that it does not know and takes `oneOf` as `anyOf`; the rest is
# done here. One thing is narrower than stated: of the bounds of int64, the lower leaves out the
# 1,024 integers next to it, which llguidance cannot write.

_INT64 = {True: -(2**63) + 1024, False: 2**63 - 1}  # its bounds, as llguidance can keep them
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 2**32 - 1  # which llguidance can read; no output has as many
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_WITH_NAMES = {"properties", "patternProperties", "$defs", "definitions"}
# These are values, or schemas that an output need not keep: they are left as they are.
_NOT_LOOSENED = {
    *("const", "enum", "default", "examples"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
}
_BESIDE_REF = {  # these constrain nothing
    *("$ref", "$defs", "definitions", "$id", "id", "$schema", "$anchor", "$comment"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
}
_MAX_TRIES = 16  # to compile a schema, each looser than the one before
_SIZE = "min/maxProperties"  # in a warning, after which maxProperties is kept in part
_CIRCLE = re.compile(r"circular references with sibling keys are not supported: \S*?(#\S*)")
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")

Schema = dict[str, Any]
Change = Callable[[Schema, Path], Schema]


class Enforceable(Struct, frozen=True):
    """What of a constraint is compiled, and the keywords of a schema that are left out."""

    source: ConstraintSource
    unenforced: tuple[str, ...] = ()


def _loosened(
    tokenizer: "LLTokenizer", source: ConstraintSource
) -> tuple[ConstraintSource, tuple[str, ...]]:
    """Return what llguidance can enforce of a schema, loosened no further than it has to be."""
    left_out: set[str] = set()
    schema = _changed(json.loads(source.text), partial(_as_is_read, left_out))
    matcher = matcher_of(tokenizer, schema_source(schema))
    tried: list[str] = []
    while len(tried) < _MAX_TRIES:
        warnings = [text for text in matcher.get_grammar_warnings() if _SIZE in text]
        fault = matcher.get_error() or next(iter(warnings), "")
        name, change = "", cast(Any, partial(_without_what_fails, tokenizer))
        if circle := _CIRCLE.search(fault):
            is_anywhere = circle[1] in tried
            name, change = circle[1], partial(_without_circle, circle[1], is_anywhere=is_anywhere)
        elif "intersection" in fault:
            name, change = "$ref", partial(_without_circle, "", is_anywhere=False)
        elif "minProperties (" in fault or _SIZE in fault:
            # llguidance does not count the optional ones of `properties`
            name, change = "size", partial(_without, {"minProperties"})
        if not fault or (name in tried and not circle):
            break
        tried.append(name)
        schema = _changed(schema, partial(change, left_out))
        matcher = matcher_of(tokenizer, schema_source(schema))
    if matcher.is_error():
        raise grammar_error(tokenizer, schema_source(schema), matcher.get_error())
    matcher.compute_bitmask()
    for warning in matcher.get_grammar_warnings():  # or of an unknown format, an annotation
        if keys := _UNKNOWN_KEYS.search(warning):
            left_out |= {*json.loads(keys[1])}
        elif "oneOf" in warning:
            left_out.add("oneOf")
        elif _SIZE in warning:
            left_out.add("maxProperties")
    unenforced = tuple(sorted(left_out))
    if unenforced and (doubt := find_doubt(json.loads(source.text))):
        path, what = doubt
        message = f"nothing here can check {what}, so that {', '.join(unenforced)} cannot be kept"
        raise GrammarError(("json_schema", *path), message)
    return schema_source(schema), unenforced


def _changed(schema: Any, change: Change, path: Path = ()) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {}
    for name, value in change(schema, path).items():
        here = (*path, name)
        if name in _NOT_LOOSENED:
            made[name] = value
        elif isinstance(value, list):
            made[name] = [_changed(part, change, (*here, at)) for at, part in enumerate(value)]
        elif name in _WITH_NAMES and isinstance(value, dict):
            made[name] = {at: _changed(part, change, (*here, at)) for at, part in value.items()}
        else:
            made[name] = _changed(value, change, here)
    return made


def _without(names: set[str], left_out: set[str], schema: Schema, _: Path) -> Schema:
    left_out |= names & schema.keys()
    return {name: value for name, value in schema.items() if name not in names}


def _without_what_fails(
    tokenizer: "LLTokenizer", left_out: set[str], schema: Schema, path: Path
) -> Schema:
    alone = {name: schema[name] for name in {"pattern", "multipleOf"} & schema.keys()}
    if isinstance(patterns := schema.get("patternProperties"), dict):
        alone["patternProperties"] = dict.fromkeys(patterns, True)  # which may overlap
    failing = {
        name
        for name, value in alone.items()
        if not find_doubt({name: value})
        and matcher_of(tokenizer, schema_source({name: value})).is_error()
    }
    if "patternProperties" in failing:  # which says what is additional
        failing.add("additionalProperties")
    return _without(failing, left_out, schema, path)


def _without_circle(
    reference: str, left_out: set[str], schema: Schema, _: Path, *, is_anywhere: bool
) -> Schema:

    def is_it(part: Any) -> bool:
        return isinstance(part, dict) and "$ref" in part and str(part["$ref"]).endswith(reference)

    made = schema.copy()
    if is_it(schema) and (is_anywhere or not schema.keys() <= _BESIDE_REF):
        del made["$ref"]
    if isinstance(parts := schema.get("allOf"), list):
        made["allOf"] = [part for part in parts if not is_it(part)]
    if made != schema:
        left_out.add("$ref")
    return made


def _as_is_read(left_out: set[str], schema: Schema, path: Path) -> Schema:
    """Write a schema as llguidance reads it right, and without the bounds that it cannot keep.

    Its dialect by name, its patterns with dashes escaped, its integers without a fraction.
    """
    made = schema.copy()
    if "$schema" in schema:
        del made["$schema"]
        dialect = dialect_of(schema)
        if dialect in DIALECTS and "draft" in dialect and not path:  # one for all of it
            made["$schema"] = ("http:" if "/draft-0" in dialect else "https:") + dialect
    if schema.get("uniqueItems") is False:
        del made["uniqueItems"]
    for name in ("const", "enum"):
        if name in schema:
            made[name] = _exact_value(schema[name], (*path, name))
    if isinstance(pattern := schema.get("pattern"), str):
        made["pattern"] = with_literal_dashes(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        made["patternProperties"] = {with_literal_dashes(at): named[at] for at in named}
    for name in _COUNTS:
        count = schema.get(name)
        if isinstance(count, float) and count.is_integer():
            count = made[name] = int(count)
        if isinstance(count, int) and count > _MAX_COUNT:
            made[name] = _MAX_COUNT
    kinds = schema.get("type")
    is_integer = kinds == "integer" or (isinstance(kinds, list) and "number" not in kinds)
    for name in _BOUNDS:
        bound, is_low = schema.get(name), "inimum" in name
        if isinstance(bound, float) and bound.is_integer():
            bound = made[name] = int(bound)
        if not isinstance(bound, int) or _is_exact(bound):
            continue
        if is_integer and is_low == (bound > 0):  # all within would be beyond 2^53
            raise _inexact(bound, (*path, name))
        if is_integer and abs(bound) < 2**64 and abs(float(bound)) == 2**63:
            made[name] = _INT64[is_low]
            continue
        left_out.add(name)
        wider = 2**63
        if abs(bound) < 2**63:
            wider = int(math.nextafter(float(bound), -math.inf if is_low else math.inf))
        if _is_exact(wider):
            made[name] = wider
        else:
            del made[name]
    return made


def _exact_value(value: Any, path: Path) -> Any:
    """Return what an output has to be with its integers written as such."""
    if isinstance(value, dict):
        return {name: _exact_value(part, (*path, name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_exact_value(part, (*path, at)) for at, part in enumerate(value)]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not _is_exact(value) and value != _INT64[False]:
        raise _inexact(value, path)
    return value


def _is_exact(number: int) -> bool:
    return abs(number) < 2**63 and int(float(number)) == number


def _inexact(number: int, path: Path) -> GrammarError:
    shown = str(number) if abs(number) < 10**40 else "this integer"
    message = f"{shown} cannot be exact: an integer beyond 2^53 has to be a double below 2^63"
    return GrammarError(("json_schema", *path), f"{message}; use a string, `choice` or `regex`")


# -- the helper process ----------------------------------------------------------------------------
#
# llguidance counts most of what it does and gives up by itself, but not all of it, and what runs
# inside a process cannot be stopped there.  The time is that of the processor: the load of the
# machine decides nothing.
#
# A task is a line in, an answer a line out.  A task is [kind, text, seconds of processor time,
# bytes of memory]; the answer has the text and unenforced of what can be enforced, or the path and
# message of an error.

BASE_MEMORY = 128 * 2**20  # bytes
MEMORY_PER_CHARACTER = 64  # bytes
_MAX_REMEMBERED = 256
_PATIENCE = 20  # how many times the timeout may pass on the wall, on a machine that is busy
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from batcher.decoding.verification import serve; serve()"
)
_STATUS = pathlib.Path("/proc/self/status")


class Trials:
    """Tries constraints in a process of its own; those that have passed are not tried again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.make = lru_cache(_MAX_REMEMBERED)(self._try)
        atexit.register(self.close)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _try(self, source: ConstraintSource, timeout: float) -> Enforceable:
        """Return what can be enforced of a constraint; timeout: seconds of processor time."""
        max_bytes = BASE_MEMORY + MEMORY_PER_CHARACTER * len(source.text)
        task = json.dumps([source.kind, source.text, timeout, max_bytes]).encode() + b"\n"
        with self._lock:
            process = self._started()
            answer, is_late = b"", False
            try:
                tasks, output = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
                with suppress(BrokenPipeError):  # it may end before it has read all of the task
                    tasks.write(task)
                    tasks.flush()
                is_late = not select.select([output], [], [], _PATIENCE * timeout)[0]
                if not is_late:
                    answer = output.readline()
                    if not answer:
                        process.wait()
            finally:
                if not answer:  # nor will there be, if this was interrupted
                    self.close()
        if not answer:
            why = f"{max_bytes // 2**20} MiB of memory to compile"
            if is_late or process.returncode == -signal.SIGPROF:
                why = f"{timeout:g} seconds to compile; see --grammar-timeout"
            raise GrammarError((source.kind,), f"it takes more than {why}")
        found = json.loads(answer)
        if "message" in found:
            raise GrammarError(tuple(found["path"]), found["message"])
        return Enforceable(ConstraintSource(source.kind, found["text"]), tuple(found["unenforced"]))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our program
                    [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # beyond the reach of Ctrl-C
                )
            except OSError as error:
                raise BatchdecodeError(f"no process to compile constraints in: {error}") from error
        return self._process


TRIALS = Trials()


def serve() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with_large_stack(_answer_all)


def _answer_all() -> None:
    from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        kind, text, seconds, max_bytes = json.loads(line)
        if _STATUS.exists():  # so much more than the process has
            status = _STATUS.read_text().splitlines()
            [held] = [line.split()[1] for line in status if line.startswith("VmData:")]
            limit = int(held) * 1024 + max_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        source, unenforced = ConstraintSource(kind, text), tuple[str, ...]()
        try:
            if kind == "json_schema":
                source, unenforced = _loosened(tokenizer, source)
            else:
                compile_source(tokenizer, source)
            answer: dict[str, object] = {"text": source.text, "unenforced": unenforced}
        except GrammarError as error:
            answer = {"path": error.path, "message": str(error)}
        except RecursionError:
            answer = {"path": (kind,), "message": NESTED}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
