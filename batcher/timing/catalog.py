"""Named records in YAML, shipped with the project or in a file of your own.

Rule: an unknown field, a missing one or a wrong value is an error that says what is allowed.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import yaml
from msgspec import Meta

from batcher.errors import BatchdecodeError
from batcher.plain_yaml import plain_events, read_text

_MAX_NEAR = 3  # suggested names
R = TypeVar("R", bound=msgspec.Struct)

# The description of a type is what errors expect; `| None` adds ", or null".
Amount = Annotated[float, Meta(ge=0, le=1e9, description="a number from 0 to 1e9")]
Positive = Annotated[float, Meta(gt=0, le=1e9, description="a number above 0, up to 1e9")]
Count = Annotated[int, Meta(ge=1, le=2**40, description="a whole number of at least 1")]
Stages = Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")]
Points = Annotated[
    tuple[tuple[Count, Annotated[float, Meta(ge=1e-9, le=1e9)]], ...],
    Meta(
        description="pairs of a whole number of at least 1 and a number from 1e-9 to 1e9, "
        "like [[16, 9.5], [32, 10]]"
    ),
]
Flag = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(description="text, in quotes if necessary")]

_ENTRY = re.compile(r"`\$\[(\d+)\]")
_MAX_SHOWN = 40  # characters of a wrong value
FILE_SUFFIXES = (".yaml", ".yml", ".json")


class CatalogError(BatchdecodeError):
    """A file of records, or a record in it, is not usable."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - as yaml has it
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="expected a name", problem_mark=key.start_mark)
            line = key.start_mark.line + 1
            if lines.setdefault(key.value, line) != line:
                problem = f"{key.value} is already set in line {lines[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep=deep)


_UniqueKeyLoader.add_implicit_resolver(  # 5e-6, which is a number everywhere but in YAML 1.1
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@cache
def shipped(file: str) -> dict[str, Any]:
    return _loaded(files("batcher.timing").joinpath(file).read_text("utf-8"), file)


def read_mapping(path: str) -> dict[str, Any]:
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CatalogError(f"cannot read {path}: {reason}") from None
    if not path.endswith(".json"):
        with _at(path):
            deque(plain_events(text), maxlen=0)  # raises if the YAML is not plain
    return _loaded(text, path)


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        raise CatalogError(f"{where}: {error.problem}") from None
    except RecursionError:
        raise CatalogError(f"{place}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise CatalogError(f"{place}: {error}") from None


def _loaded(text: str, place: str) -> dict[str, Any]:
    with _at(place):
        if place.endswith(".json"):
            content = msgspec.json.decode(text)
        else:
            content = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    if content is None:
        raise CatalogError(f"{place} is empty")
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CatalogError(f"{place}: expected a mapping of names to values")
    return content


def load(name: str, record: type[R], file: str, kind: str) -> R:
    if name.endswith(FILE_SUFFIXES):
        return as_record(read_mapping(name), record, name)
    return as_record(find(name, shipped(file), kind), record, f"{file}: {name}")


def hint_at(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the nearest of `known`, or ""."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def find(name: str, records: dict[str, Any], kind: str) -> Any:
    if name in records:
        return records[name]
    close = [known for known in records if name and known.startswith(name.lower())]
    close = close or get_close_matches(name, records, n=1, cutoff=0.5)
    hint = f" (did you mean {' or '.join(close[:_MAX_NEAR])}?)" if close else ""
    raise CatalogError(f"unknown {kind} {name}{hint}; known: {', '.join(records)}")


class Place:
    """The place of `keys` (names in mappings, numbers in lists) in a YAML file.

    As text it is the file, the line and `what`; only then is the file read again for the line.
    """

    def __init__(self, path: str, what: str, *keys: str | int) -> None:
        self._path, self._what, self._keys = path, what, keys

    def __str__(self) -> str:
        where = self._path
        try:
            part: Any = yaml.compose(read_text(self._path), Loader=yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):  # the file has changed
            part = None
        for key in self._keys:
            kind = None if part is None else part.id
            if kind == "mapping":
                entries = {name.value: (name, value) for name, value in reversed(part.value)}
                found = entries.get(str(key))
            else:
                is_there = kind == "sequence" and isinstance(key, int) and key < len(part.value)
                found = (part.value[key], part.value[key]) if is_there else None
            if found is None:
                break
            where, part = f"{self._path}:{found[0].start_mark.line + 1}", found[1]
        return f"{where}: {self._what}"

    def at(self, key: str | int) -> "Place":
        return Place(self._path, self._what, *self._keys, key)


def as_record(values: Any, record: type[R], place: str | Place) -> R:
    """Return `values` as a record, or raise a CatalogError that names their `place`."""
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    if not isinstance(values, dict):
        raise CatalogError(f"{place}: expected {', '.join(fields)}, each with a value")
    for key in values:
        if key not in fields:
            hint = hint_at(str(key), fields)
            where = _within(place, key)
            raise CatalogError(f"{where}: unknown field {key}{hint}; allowed: {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.required and name not in values]
    if missing:
        needed = ", ".join(name for name, field in fields.items() if field.required)
        raise CatalogError(f"{place}: {', '.join(missing)} missing; required: {needed}")
    return record(
        **{name: _value(fields[name], v, _within(place, name)) for name, v in values.items()}
    )


def _within(place: str | Place, name: Any) -> str | Place:
    return place.at(str(name)) if isinstance(place, Place) else place


def _value(field: Any, value: Any, place: str | Place) -> Any:
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        kinds = get_args(field.type)
        is_optional = NoneType in kinds
        meta = (kinds[0] if is_optional else field.type).__metadata__[-1]
        expected = f"{meta.description}{', or null' * is_optional}"
        entry = _ENTRY.search(str(error))  # only the wrong entry of a list, which may be long
        shown = repr(value[int(entry[1])] if entry else value)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
        raise CatalogError(f"{place}: {field.name}: expected {expected}, not {shown}") from None
