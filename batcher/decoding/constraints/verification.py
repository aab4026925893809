"""A second look at an output: its bytes against its constraint, apart from how it was made.

Decoding follows tokens through masks; here every byte goes alone through a parser of its own.  A
JSON output is read by `json` besides, and a choice is only looked up.
"""

import json
from functools import cache
from typing import TYPE_CHECKING

from batcher.decoding.constraints.lark import lark_grammar
from batcher.decoding.constraints.matchers import make_matcher
from batcher.decoding.constraints.source import ConstraintSource
from batcher.errors import InvariantError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_SHOWN = 20  # bytes of an output in a message


class Verifier:
    """Checks the outputs of one constraint."""

    def __init__(self, source: ConstraintSource) -> None:
        self._source = source
        self._start: LLMatcher | None = None

    def broken_by(self, output: bytes) -> str | None:
        """Return what breaks the constraint in a finished output, None if it keeps it."""
        problem = self._mismatch(output, is_whole=True)
        if problem is None and self._source.kind == "json_schema":
            return _json_problem(output)
        return problem

    def broken_by_prefix(self, output: bytes) -> str | None:
        """Return what keeps an output that was cut off from ever being whole, None if nothing."""
        return self._mismatch(output, is_whole=False)

    def _mismatch(self, output: bytes, *, is_whole: bool) -> str | None:
        if self._source.kind == "choice":
            choices = [text.encode() for text in json.loads(self._source.text)]
            if output in choices:
                return None
            if not is_whole and any(choice.startswith(output) for choice in choices):
                return None
            return f"{_shown(output)} is none of the choices"
        matcher = self._matcher()
        num_kept = matcher.try_consume_tokens(list(output))
        if num_kept < len(output):
            return f"byte {num_kept}: {_shown(output[num_kept:])} cannot stand there"
        if is_whole and not matcher.is_accepting():
            return f"byte {len(output)}: the output ends too early"
        return None

    def _matcher(self) -> "LLMatcher":
        """Return a matcher of single bytes at the start of an output."""
        if self._start is None:
            grammar = lark_grammar(self._source)
            self._start = make_matcher(_byte_tokenizer(), grammar, self._source.kind)
            if self._start.is_error():
                raise InvariantError(f"compiled once, but not again: {self._start.get_error()}")
        return self._start.deep_copy()


@cache
def _byte_tokenizer() -> "LLTokenizer":
    """Return the tokenizer whose token ids are the bytes."""
    from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

    return LLTokenizer("byte")


def _json_problem(output: bytes) -> str | None:
    """Return why `output` is not a JSON value, None if it is one."""
    try:
        # numbers stay text: Python limits how long those that it converts may be
        json.loads(output, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        return f"not JSON that can be read: {error}"
    return None


def _shown(output: bytes) -> str:
    """Return the beginning of `output` for a message."""
    text = output[:_NUM_SHOWN].decode(errors="replace")
    return repr(text + "…" if len(output) > _NUM_SHOWN else text)
