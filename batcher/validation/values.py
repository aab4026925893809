"""The checks of single values that fields have in common, and how a message shows a value."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from batcher.errors import FieldProblem, Path
from batcher.request import (
    MAX_INT,
    PromptSegment,
    Request,
    Transition,
)
from batcher.validation.capabilities import ModelCapabilities

MAX_SHOWN = 40  # characters of a value or a name that a message quotes
HUGE = 10**MAX_SHOWN

# All fields have one but the prompt, the first.
DEFAULTS = dict(zip(Request.__struct_fields__[1:], Request.__struct_defaults__, strict=True))

Problems = Iterator[FieldProblem]
Check = Callable[[Any, Path, ModelCapabilities], Problems]


def show(value: object) -> str:
    """Return `value` as a message quotes it: JSON where that is short, else its kind."""
    if isinstance(value, str):
        return f'"{cut(value)}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < HUGE else "a huge integer"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, dict | PromptSegment | Transition):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"


def cut(text: str) -> str:
    """Return `text`, or its beginning if it is too long for a message."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def quote(path: Path) -> str:
    """Return the field at `path` as a message names it."""
    return f"`{FieldProblem('', path, '').field}`"


def wrong(code: str, path: Path, expected: str, value: object) -> FieldProblem:
    """Return the problem that `value` is not what is expected at `path`."""
    hint = None
    is_number = "integer" in expected or "number" in expected
    if isinstance(value, str) and is_number and value.isdecimal():
        hint = "remove the quotes"
    return FieldProblem(code, path, f"{quote(path)} must be {expected}, not {show(value)}", hint)


def check_flag(value: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problem of what is neither true nor false."""
    if not isinstance(value, bool):
        yield wrong("invalid-type", path, "true or false", value)


def check_string(value: object, path: Path, expected: str) -> Problems:
    """Yield the problem of what is no text."""
    if not isinstance(value, str):
        yield wrong("invalid-type", path, expected, value)
    elif not is_text(value):
        message = f"{quote(path)} holds a lone surrogate, which stands for no character"
        yield FieldProblem("invalid-text", path, message)


def check_strings(values: object, path: Path) -> Problems:
    """Yield the problems of what is no list of texts."""
    if not isinstance(values, list):
        yield wrong("invalid-type", path, "a list of strings", values)
        return
    for index, value in enumerate(values):
        yield from check_string(value, (*path, index), "a string")


def check_text_or_tokens(
    value: object, path: Path, capabilities: ModelCapabilities, if_several: str
) -> Problems:
    """Yield the problems of what is neither text nor token ids.

    if_several: what helps whoever gives a list of texts or of lists.
    """
    if not isinstance(value, list):
        yield from check_string(value, path, "a string or a list of token ids")
        return
    are_several = all(isinstance(item, str | list) for item in value)
    for problem in check_token_ids(value, path, capabilities):
        is_bare = are_several and problem.hint is None
        yield replace(problem, hint=if_several) if is_bare else problem


def check_token_ids(values: list[Any], path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the first bad token id of a list: where one is wrong, a thousand may be."""
    largest = largest_token(capabilities)
    for index, value in enumerate(values):
        if not is_integer(value) or not 0 <= value <= largest:
            yield from check_token_id(value, (*path, index), capabilities)
            return


def check_token_id(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problem of what is no token id of the model."""
    largest = largest_token(capabilities)
    if not is_integer(value):
        yield wrong("invalid-type", path, "a token id, an integer", value)
    elif not 0 <= value <= largest:  # type: ignore[operator]  # known to be an int
        yield wrong("unknown-token", path, f"a token id from 0 to {largest}", value)


def largest_token(capabilities: ModelCapabilities) -> int:
    """Return the largest token id that may be named."""
    return MAX_INT if capabilities.vocab_size is None else capabilities.vocab_size - 1


def is_integer(value: object) -> bool:
    """Return whether `value` is an int, which true and false are not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: str) -> bool:
    """Return whether `value` can be written as UTF-8: lone surrogates cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
