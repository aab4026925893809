"""Tables of fields: records with annotations that say everything about their fields.

Rule: ranges, defaults and descriptions are read from the annotation, here.
"""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import fields, replace

from batcher.errors import BatchdecodeError

_UNIONS = (Union, UnionType)
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text, in quotes if need be",
    dict: "an object",
    list: "a list",
}


Number = TypeVar("Number", int, float)


def read_number(text: str, kind: type[Number]) -> Number:
    """Return the ASCII number that `text` is, without `_`; raise a ValueError."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return kind(text)


class Range(Struct, frozen=True):
    """Numbers from `smallest`, included unless `is_open`, to `largest`; unit: for messages."""

    smallest: int
    largest: int
    is_integer: bool = False
    is_open: bool = False
    unit: str = ""

    @property
    def expected(self) -> str:
        noun = ("an integer" if self.is_integer else "a number") + self.unit
        if self.is_open:
            return f"{noun} above {self.smallest} and up to {self.largest}"
        return f"{noun} from {self.smallest} to {self.largest}"

    def holds(self, value: float) -> bool:
        """Return whether the number is in the range; NaN is not."""
        is_above = self.smallest < value if self.is_open else self.smallest <= value
        return is_above and value <= self.largest


def range_in_words(smallest: float | None, largest: float | None) -> str:
    """Return `from 1 to 1,048,576`, `from 1` or `up to 64`; empty if neither is given."""
    if smallest is None:
        return "" if largest is None else f"up to {_in_words(largest)}"
    return f"from {_in_words(smallest)}" + ("" if largest is None else f" to {_in_words(largest)}")


def expected_of(kind: Any) -> str:
    """Describe the non-null values of a type for an error: `an integer from 1 to 64`."""
    if get_origin(kind) in _UNIONS:
        return " or ".join(expected_of(part) for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        *names, last = map(str, get_args(kind))
        return f"{', '.join(names)} or {last}" if names else last
    if get_origin(kind) is not Annotated:
        base = get_origin(kind) or kind
        return _EXPECTED.get(base, f"a {base.__name__}")
    words, limits = expected_of(get_args(kind)[0]), get_args(kind)[1:]
    for limit in (part for part in limits if isinstance(part, Meta)):
        if limit.gt is not None:
            most = f" and up to {_in_words(limit.le)}" if limit.le is not None else ""
            return f"{words} above {_in_words(limit.gt)}{most}"
        words = f"{words} {range_in_words(limit.ge, limit.le)}".rstrip()
    return words


def check_types(record: Struct, facts: Mapping[str, "FieldFacts"]) -> None:
    """Raise a BatchdecodeError if a field in `facts` has a value of the wrong type."""
    for name, field in facts.items():
        value = getattr(record, name)
        try:
            convert(value, field.type)
        except (ValidationError, UnicodeEncodeError) as error:  # the other: a lone surrogate
            message = f"{name} must be {expected_of(field.type)}, not {value!r}"
            raise BatchdecodeError(message) from error


def _in_words(number: float) -> str:
    text = f"{number:,.6f}" if isinstance(number, float) else f"{number:,}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class FieldFacts(Struct, frozen=True, kw_only=True):
    """A field of any record; words: its description, in Markdown."""

    words: str = ""
    name: str = ""
    type: Any = None
    default: Any = None

    @property
    def parts(self) -> list[Any]:
        return parts_of(self.type)


class Field(FieldFacts, frozen=True):
    """A field of a request.

    shape: its type and default in words, if the type does not say it.  unit: of a number.  idle:
    values without effect, besides the default.  needs_logits: whether a model that returns only
    tokens cannot serve it.  excludes: fields it cannot go with, and why; this field is to be left
    out.  needs: the field without which it has no effect, and how to give that one.
    """

    shape: str | None = None
    unit: str = ""
    idle: tuple[object, ...] = ()
    needs_logits: bool = False
    excludes: dict[str, str] = {}
    needs: tuple[str, str] | None = None

    @property
    def range(self) -> Range | None:
        part, *others = self.parts
        return None if others else range_of(part, self.unit)

    @property
    def choices(self) -> list[object] | None:
        return choices_of(self.type)

    def asks(self, value: object) -> bool:
        return value != self.default and value not in self.idle


def parts_of(kind: Any) -> list[Any]:
    """Return the members of a union, None left out; of any other type the type itself."""
    parts = get_args(kind) if get_origin(kind) in _UNIONS else [kind]
    return [part for part in parts if part is not NoneType]


def choices_of(kind: Any) -> list[object] | None:
    """Return the values of bools and Literals; None if the type has others."""
    found: list[object] = []
    for part in parts_of(kind):
        if part is bool:
            found += [True, False]
        elif get_origin(part) is Literal:
            found += get_args(part)
        else:
            return None
    return found


def range_of(kind: Any, unit: str = "") -> Range | None:
    """Return the numbers of a type that is annotated with its limits, None of any other."""
    if get_origin(kind) is not Annotated or get_args(kind)[0] not in {int, float}:
        return None
    number, limits = get_args(kind)[:2]
    is_open = limits.gt is not None
    return Range(
        int(limits.gt if is_open else limits.ge),
        int(limits.le),
        is_integer=number is int,
        is_open=is_open,
        unit=f" of {unit}" if unit else "",
    )


def fields_of(record: type[Struct]) -> dict[str, Any]:
    """Return the fields of a record by their names, read from its annotations.

    An annotation has the description, the shape, and the rest in a Field or another FieldFacts.
    """
    hints = get_type_hints(record, include_extras=True)
    found = {}
    for field in fields(record):
        kind, *given = get_args(hints[field.name])
        limits = [part for part in given if isinstance(part, Meta)]
        facts = next((part for part in given if isinstance(part, FieldFacts)), Field())
        texts = [part for part in given if isinstance(part, str)]
        found[field.name] = replace(
            facts,
            name=field.name,
            type=Annotated[(kind, *limits)] if limits else kind,
            default=field.default,
            **dict(zip(("words", "shape"), texts, strict=False)),
        )
    return found
