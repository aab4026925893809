"""A second look at an output, by means that have no part in how it was made.

Decoding follows tokens through llguidance's masks.  Here a choice is looked up, JSON is validated
by `jsonschema`, and a regex matched by RE2.  Rule: only what these refute breaks a constraint;
where there are none, as for grammars, the output goes unchecked, and its result says so.
"""

import json
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from batcher.decoding.constraints.json_checks import JsonCheck, UndecidedError
from batcher.decoding.constraints.patterns import whole_match
from batcher.decoding.constraints.source import ConstraintSource

_NUM_SHOWN = 20  # bytes of an output in a message


class Look(NamedTuple):
    """What the second look has found; problem: what breaks the constraint, None if nothing does.

    is_decided: whether there was anything independent to look with; if not, problem is None.
    """

    problem: str | None
    is_decided: bool = True


UNDECIDED = Look(None, is_decided=False)


class Verifier:
    """Checks the outputs of one constraint."""

    def __init__(self, source: ConstraintSource) -> None:
        self._source = source

    def look(self, output: bytes) -> Look:
        """Return what is wrong with an output as a whole."""
        return self._look(output)

    def can_begin(self, output: bytes) -> bool:
        """Return False if it is sure that no whole output begins like this one."""
        if self._source.kind != "choice":
            return True
        return any(choice.startswith(output) for choice in self._choices)

    @cached_property
    def _look(self) -> Callable[[bytes], Look]:
        """What looks; made for the first output."""
        match self._source.kind:
            case "choice":
                return self._look_up
            case "json_schema":
                return self._validate
            case "regex":
                return self._match
        return lambda _: UNDECIDED

    @cached_property
    def _choices(self) -> list[bytes]:
        return [text.encode() for text in json.loads(self._source.text)]

    @cached_property
    def _json_check(self) -> JsonCheck:
        return JsonCheck(self._source.text)

    def _look_up(self, output: bytes) -> Look:
        return Look(None if output in self._choices else f"{_shown(output)} is none of the choices")

    def _validate(self, output: bytes) -> Look:
        try:
            return Look(self._json_check.problem(output))
        except UndecidedError:
            return UNDECIDED

    def _match(self, output: bytes) -> Look:
        test = whole_match(self._source.text)
        if test is None:
            return UNDECIDED
        try:
            is_match = test(output.decode())
        except UnicodeDecodeError:
            is_match = False
        return Look(None if is_match else f"{_shown(output)} does not match")


def _shown(output: bytes) -> str:
    """Return the beginning of `output` for a message."""
    text = output[:_NUM_SHOWN].decode(errors="replace")
    return repr(text + "…" if len(output) > _NUM_SHOWN else text)
