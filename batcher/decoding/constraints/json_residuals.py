"""Which beginnings of JSON under a schema go on alike: those that stand at the same place in it.

What may follow is settled by the objects and arrays that are open, and by what has been written of
the member or the item that has begun; what those before it hold makes no difference.  That is so
for schemas of the keywords that are known here.  Of a string counts how long it is, if that is
limited, and what its pattern leaves; what has escapes or is not ASCII counts as it is written.
"""

from typing import Any

from msgspec import Struct

from batcher.decoding.constraints.regex_residuals import RegexResidual, RegexResiduals, has_edge
from batcher.decoding.constraints.regexes import Alternation, Anchor, DoubtfulError, read_regex

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema"}
_OF_CONTAINERS = {"properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_TEXTS = {"minLength", "maxLength", "pattern"}
_AS_WRITTEN = {"enum", "const", "format"}
_KNOWN = {"type", "$defs", "definitions", "$ref"}.union(
    _ANNOTATIONS, _OF_CONTAINERS, _OF_NUMBERS, _OF_TEXTS, _AS_WRITTEN
)
_SCALARS = (str, int, float, type(None))
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_SPACE, _NUM_ASCII = 0x20, 0x80

# Where in a value an output stands; true, false and null are read as numbers are.
_BEGIN, _IN_NUMBER, _IN_TEXT, _IN_ESCAPE, _AFTER_NAME, _AFTER_VALUE = range(6)


class _Schema(Struct, eq=False):
    """What a schema says of the values that it allows, as far as it is needed here.

    members: those that are named, others: what the other members are.
    has_length: whether texts are limited; pattern: what they match; is_as_written: whether there is
    more to them than that.
    """

    members: dict[bytes, "_Schema"] = {}
    others: "_Schema | None" = None
    items: "_Schema | None" = None
    has_count: bool = False
    has_length: bool = False
    pattern: RegexResiduals | None = None
    is_as_written: bool = False


_ANYTHING = _Schema()
_ANYTHING.others = _ANYTHING.items = _ANYTHING


class _Open(Struct, frozen=True, cache_hash=True):
    """An object or an array that has begun.

    names: of its members so far; None of an array.  count: of commas, if items are counted.
    """

    schema: _Schema
    names: tuple[bytes, ...] | None = None
    count: int = 0


class JsonResidual(Struct, frozen=True, cache_hash=True):
    """Where an output stands in its JSON.

    opened: the objects and arrays that it is in, the outermost first.
    place: where in a value, or a name, it is.  lead: the byte before that, where it has not begun.
    schema: of the text that it is in, if that is no name.  left, length: what the text's pattern
    leaves, and how long it is.  written: the text, or the number, as far as that is not told yet.
    """

    opened: tuple[_Open, ...] = ()
    place: int = _BEGIN
    lead: int = 0
    schema: _Schema | None = None
    left: RegexResidual | None = None
    length: int = 0
    written: bytes = b""


class JsonResiduals:
    """What may follow the beginnings of JSON under one schema."""

    def __init__(self, root: _Schema) -> None:
        self.start = JsonResidual()
        self._root = root

    def after(self, residual: JsonResidual, text: bytes) -> JsonResidual | None:
        """Return what may follow `text`, which `residual` allows; None if that is not told."""
        after: JsonResidual | None = residual
        for byte in text:
            if after is None:
                break
            after = self._after(after, byte)
        return after

    def _after(self, before: JsonResidual, byte: int) -> JsonResidual | None:
        opened, place = before.opened, before.place
        if place in {_IN_TEXT, _IN_ESCAPE}:
            return _after_in_text(before, byte)
        if byte == _QUOTE:
            return self._at_text(before)
        if byte in b"{[":
            schema = self._value_schema(opened)
            names = () if byte == b"{"[0] else None
            return JsonResidual((*opened, _Open(schema, names)), lead=byte)
        if byte in b"}],:":
            return _after_mark(before, byte)
        if byte <= _SPACE:  # there is none between values, unless options say so
            return None
        return JsonResidual(opened, _IN_NUMBER, written=before.written + bytes([byte]))

    def _at_text(self, before: JsonResidual) -> JsonResidual:
        """Return where a text, or a name, begins."""
        opened = before.opened
        if opened and opened[-1].names is not None and before.lead != _COLON:
            return JsonResidual(opened, _IN_TEXT)
        schema = self._value_schema(opened)
        left = None if schema.pattern is None else schema.pattern.start
        return JsonResidual(opened, _IN_TEXT, schema=schema, left=left)

    def _value_schema(self, opened: tuple[_Open, ...]) -> _Schema:
        """Return the schema of a value that begins."""
        if not opened:
            return self._root
        schema, names = opened[-1].schema, opened[-1].names
        found = schema.items if names is None else schema.members.get(names[-1], schema.others)
        return _ANYTHING if found is None else found


def _after_mark(before: JsonResidual, byte: int) -> JsonResidual | None:
    """Return what may follow a mark between values."""
    if not before.opened:
        return None
    *outer, inner = before.opened
    if byte == _COLON:
        if inner.names is None or _BACKSLASH in before.written:  # it may be written in other ways
            return None
        inner = _Open(inner.schema, (*inner.names, before.written))
    elif byte == _COMMA:
        if inner.names is None and inner.schema.has_count:
            inner = _Open(inner.schema, None, inner.count + 1)
    else:
        return JsonResidual(tuple(outer), _AFTER_VALUE)
    return JsonResidual((*outer, inner), lead=byte)


def _after_in_text(before: JsonResidual, byte: int) -> JsonResidual:
    """Return what may follow a byte of a text, or of a name."""
    opened, schema, left, length = before.opened, before.schema, before.left, before.length
    if before.place == _IN_TEXT and byte == _QUOTE:
        if schema is None:
            return JsonResidual(opened, _AFTER_NAME, written=before.written)
        return JsonResidual(opened, _AFTER_VALUE)
    is_plain = _SPACE <= byte < _NUM_ASCII and byte != _BACKSLASH and not before.written
    if is_plain and schema is not None and not schema.is_as_written:
        if schema.pattern is not None and left is not None:
            left = schema.pattern.after(left, bytes([byte]))
        if schema.pattern is None or left is not None:
            length += schema.has_length
            return JsonResidual(opened, _IN_TEXT, schema=schema, left=left, length=length)
    is_escape = before.place == _IN_TEXT and byte == _BACKSLASH
    place = _IN_ESCAPE if is_escape else _IN_TEXT
    written = before.written + bytes([byte])
    return JsonResidual(opened, place, 0, schema, before.left, length, written)


def json_residuals_of(schema: Any) -> JsonResiduals | None:
    """Return those of a valid JSON schema, None if it says more than is known here."""
    try:
        return JsonResiduals(_Reading(schema).read(schema))
    except (DoubtfulError, RecursionError):  # the other: nested too deeply
        return None


class _Reading:
    """One pass over a schema; what is referred to is read once."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._known: dict[str, _Schema] = {}

    def read(self, schema: Any) -> _Schema:
        """Return what a part of the schema says.

        Raises:
            DoubtfulError: more than is known here.
        """
        if isinstance(schema, bool) or not schema:
            return _ANYTHING
        if not isinstance(schema, dict) or not schema.keys() <= _KNOWN:
            raise DoubtfulError
        if "$ref" in schema:
            return self._referred(schema)
        made = _Schema()
        self._fill(made, schema)
        return made

    def _fill(self, made: _Schema, schema: dict[str, Any]) -> None:
        values = [*schema.get("enum", ()), schema.get("const")]
        if not all(isinstance(value, _SCALARS) for value in values):
            raise DoubtfulError
        for name, part in schema.get("properties", {}).items():
            made.members[name.encode()] = self.read(part)
        made.others = self.read(schema.get("additionalProperties", True))
        made.items = self.read(schema.get("items", True))
        made.has_count = "minItems" in schema or "maxItems" in schema
        made.has_length = "minLength" in schema or "maxLength" in schema
        made.is_as_written = not _AS_WRITTEN.isdisjoint(schema)
        if "pattern" in schema:
            made.pattern = _of_whole_text(schema["pattern"])
            made.is_as_written |= made.pattern is None

    def _referred(self, schema: dict[str, Any]) -> _Schema:
        """Return what the schema says that another one is."""
        name = schema["$ref"]
        if not schema.keys() <= {"$ref", *_ANNOTATIONS, "$defs", "definitions"}:
            raise DoubtfulError
        if name not in self._known:
            kind, _, key = name.removeprefix("#/").partition("/")
            found = self._whole.get(kind, {}).get(key) if kind in {"$defs", "definitions"} else None
            if not isinstance(found, dict) or "$ref" in found or not found.keys() <= _KNOWN:
                raise DoubtfulError
            self._known[name] = _Schema()
            self._fill(self._known[name], found)
        return self._known[name]


def _of_whole_text(pattern: str) -> RegexResiduals | None:
    """Return what a pattern leaves of texts; None if it does not tell where they begin and end."""
    try:
        [nodes] = read_regex(pattern).options
    except (DoubtfulError, ValueError):  # the other: several, and the signs are part of one
        return None
    inner = Alternation((nodes[1:-1],))
    is_whole = nodes[:1] == (Anchor(is_end=False),) and nodes[-1:] == (Anchor(is_end=True),)
    return RegexResiduals(inner) if is_whole and not has_edge(inner) else None
