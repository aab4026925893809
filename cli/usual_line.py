"""A usual command line, read without typer: to import that takes a fifth of what numpy does.

Rule: whatever is not as usual as can be is left to typer, which reads the same declarations.
"""

import re
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .command import Command, Parameter
from .environment import says_something
from .help import REQUIRED

_NUMBERS: dict[Any, re.Pattern[str]] = {
    int: re.compile(r"[0-9]{1,18}"),
    float: re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?"),
}
_USUAL_SETTINGS = {
    *("help", "metavar", "rich_help_panel", "show_default", "hidden", "callback", "min", "max"),
}


class _NotUsual(Exception):  # noqa: N818 - it is no error, but for typer to read
    """Something in the line is rare, or wrong."""


def usual_values(command: Command, arguments: list[str]) -> dict[str, Any] | None:
    """Return the value of each parameter of `command` by name; None if typer is to read the line.

    That is so if the environment says something, if there is a mistake, and if help is asked for.
    """
    if says_something():
        return None
    try:
        texts = _texts(command, arguments)
        if command.is_bare(texts):
            return None
        return {p.name: _value_of(p, texts.get(p.name)) for p in command.parameters}
    except _NotUsual:
        return None


def _texts(command: Command, arguments: list[str]) -> dict[str, str]:
    """Return what a line says of each parameter that is in it; of a flag nothing.

    Raises:
        _NotUsual: there is something else in it, or one of them twice.
    """
    options = {flag: p for p in command.parameters for flag in p.flags}
    positions = [p for p in command.parameters if p.told.is_argument]
    texts: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            parameter, text = positions.pop(0) if positions else None, argument
        else:
            name, equals, text = argument.partition("=")
            parameter = options.get(name)
            is_flag = parameter is not None and _kind_of(parameter) is bool
            if equals and (is_flag or not name.startswith("--")):
                raise _NotUsual
            if not is_flag:
                text = text if equals else next(rest, "")
                if not text or (text.startswith("-") and text != "-"):
                    raise _NotUsual
        if parameter is None or parameter.name in texts:
            raise _NotUsual
        texts[parameter.name] = text
    return texts


def _value_of(parameter: Parameter, text: str | None) -> Any:
    """Return the value of a parameter that has this text, or none.

    Raises:
        _NotUsual: it is not of the right kind, or out of range, or missing.
    """
    kind, settings = _kind_of(parameter), parameter.told.settings
    value = parameter.default if text is None else _read(kind, text, settings)
    if value is None:
        return () if get_origin(kind) is list else None  # as typer has it
    if value is REQUIRED or not settings.keys() <= _USUAL_SETTINGS:
        raise _NotUsual
    callback = settings.get("callback")
    try:
        return value if callback is None else callback(value)
    except Exception as error:  # typer reports it
        raise _NotUsual from error


def _read(kind: Any, text: str, limits: dict[str, Any]) -> Any:
    """Return the value that `text` stands for, or raise _NotUsual."""
    if kind is bool:
        return True
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
    elif kind in _NUMBERS and _NUMBERS[kind].fullmatch(text):
        number = kind(text)
        smallest, largest = limits.get("min"), limits.get("max")
        if (smallest is None or number >= smallest) and (largest is None or number <= largest):
            return number
    raise _NotUsual


def _kind_of(parameter: Parameter) -> Any:
    """Return the type of a parameter, None left out."""
    kind = parameter.kind
    if get_origin(kind) not in {UnionType, Union}:
        return kind
    (kind,) = (part for part in get_args(kind) if part is not type(None))
    return kind
