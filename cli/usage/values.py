"""What the value of an option may be, in words: for help, and for a value that is something else.

Rule: a message about a value goes on behind the name of what was given: `must be ..., not ...`.
"""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer._click import types

from batcher.fields import range_in_words, read_number

from ..screen.terminal import cut_middle, listed

_ANY_COUNT = 2**31 - 1  # help does not say that there may be no more
_NUMBERS = (types.IntParamType, types.FloatParamType)
_MAX_SHOWN = 60  # characters of a wrong value


class WordedType(types.ParamType):
    """A type of typer's, which refuses in our words what it does not hold; NaN is in no range.

    allowed: what it holds.  range: the numbers it holds as help says them, empty for all.
    choices: its values, if they are stated one by one.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.name = kind.name
        self.choices: Sequence[str] = getattr(kind, "choices", ())
        smallest, largest = getattr(kind, "min", None), getattr(kind, "max", None)
        self.allowed = _allowed(kind, range_in_words(smallest, largest), self.choices)
        self.range = range_in_words(smallest, None if largest == _ANY_COUNT else largest)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return `value` as what the type holds.

        Raises:
            typer.BadParameter: it does not hold that.
        """
        try:
            if isinstance(value, str) and isinstance(self._kind, _NUMBERS):
                read_number(value, float)
            converted = self._kind.convert(value, param, ctx)
        except (typer.BadParameter, ValueError):
            raise _refused(self.allowed, value, self.choices) from None
        if isinstance(converted, float) and math.isnan(converted):
            raise _refused(self.allowed, value)
        return converted


def worded(kind: Any) -> Any:
    """Return a type of typer's, with messages of ours if it does not hold every text."""
    return WordedType(kind) if _allowed(kind, "", getattr(kind, "choices", ())) else kind


def _refused(allowed: str, value: object, choices: Sequence[str] = ()) -> typer.BadParameter:
    shown = cut_middle(str(value) if _is_number(value) else repr(value), _MAX_SHOWN, "...")
    near = get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return typer.BadParameter(f"must be {allowed}, not {shown}{hint}")


def _allowed(kind: Any, numbers: str, choices: Sequence[str]) -> str:
    """Return what a type of typer's holds, empty for all texts; numbers: its range in words."""
    if choices:
        return listed(choices)
    if isinstance(kind, types.BoolParamType):
        return "true or false"
    if isinstance(kind, types.IntParamType):
        return f"an integer {numbers}".rstrip()
    return f"a number {numbers}".rstrip() if isinstance(kind, types.FloatParamType) else ""


def _is_number(value: object) -> bool:
    try:
        read_number(str(value), float)
    except ValueError:
        return False
    return True
