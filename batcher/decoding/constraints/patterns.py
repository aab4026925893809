"""A second look at texts under a regex: through RE2, which has no part in how outputs are made.

Rule: there is none where the meaning of the regex is in doubt: see regexes.py.  The patterns that
neither RE2 nor a mask can keep, such as those with look-around, are left to `regex`, for a second.
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache

from batcher.decoding.constraints.regexes import (
    ANY_SPACES,
    LAST,
    RE2_SPACES,
    Alternation,
    Anchor,
    Characters,
    DoubtfulError,
    Node,
    Nodes,
    Ranges,
    Repeat,
    read_regex,
)

Test = Callable[[str], bool]
"""Whether a text is, or holds, a match; takes time in proportion to the text."""

_QUANTIFIERS = {(0, None): "*", (1, None): "+", (0, 1): "?"}
_MAX_KEPT = 256
_MAX_SECONDS = 1.0
_MAX_LENGTH, _MAX_COPIES = 4096, 20_000  # of a pattern, and of what it has to repeat
_LEAST_COUNT = re.compile(r"\{(\d+)")
_NEVER_MASKED = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # look-around, \b and backreferences


@lru_cache(_MAX_KEPT)
def whole_match(regex: str) -> Test | None:
    """Return what tells whether all of a text matches; None if nothing independent does."""
    return _test(regex, RE2_SPACES, lambda read: rf"\A(?:{read})\z")


@lru_cache(_MAX_KEPT)
def found_match(regex: str) -> Test | None:
    """Return what tells whether a text holds a match; None if nothing independent does.

    That is how the patterns of schemas are read.
    """
    return _test(regex, ANY_SPACES, lambda read: read) or _backtracking_match(regex)


def _backtracking_match(pattern: str) -> Test | None:
    """Return what tells whether a text holds a match of a pattern that masks cannot keep.

    It raises a TimeoutError where that takes a second.
    """
    if not _NEVER_MASKED.search(pattern) or len(pattern) > _MAX_LENGTH:
        return None
    if math.prod(max(1, int(count)) for count in _LEAST_COUNT.findall(pattern)) > _MAX_COPIES:
        return None  # the library makes copies of what has to be repeated
    import regex  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    try:
        compiled = regex.compile(pattern, regex.ASCII)
    except (regex.error, RecursionError):
        return None
    return lambda text: compiled.search(text, timeout=_MAX_SECONDS) is not None


def _test(regex: str, spaces: tuple[Ranges, Ranges], enclose: Callable[[str], str]) -> Test | None:
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(enclose(_written(read_regex(regex, spaces))), options)
    except (DoubtfulError, re2.error):  # the other: counts above 1,000, or too large
        return None
    return lambda text: compiled.search(text) is not None


def _written(choice: Alternation) -> str:
    """Return an expression in the syntax of RE2."""
    return "|".join(map(_sequence, choice.options))


def _sequence(nodes: Nodes) -> str:
    return "".join(map(_node, nodes))


def _node(node: Node) -> str:
    match node:
        case Characters(ranges):
            inside = (rf"\x{{{start:X}}}-\x{{{end:X}}}" for start, end in ranges)
            return f"[{''.join(inside)}]" if ranges else rf"[^\x{{0}}-\x{{{LAST:X}}}]"
        case Anchor(is_end):
            return r"\z" if is_end else r"\A"
        case Repeat(body, least, most):
            count = f"{{{least},{'' if most is None else most}}}"
            return _node(body) + _QUANTIFIERS.get((least, most), count)
        case Alternation():
            return f"(?:{_written(node)})"
