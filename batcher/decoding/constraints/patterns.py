"""A second look at texts under a regex: through RE2, which has no part in how outputs are made.

Rule: there is none where the meaning of the regex is in doubt.  Digits and word characters are
ASCII, as in RE2 and in ECMA's dialect; dialects draw white space differently.  The patterns that
neither RE2 nor a mask can keep, such as those with look-around, are left to `regex`, for a second.
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache

Test = Callable[[str], bool]
"""Whether a text is, or holds, a match; takes time in proportion to the text."""
Ranges = list[tuple[int, int]]  # of code points, both ends included

_LAST = 0x10FFFF
_HALVES = range(0xD800, 0xE000)
_MAX_GROUPS = 100
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: Ranges = [(0x09, 0x0A), (0x0C, 0x0D), (0x20, 0x20)]
_MORE_SPACES: Ranges = [
    *((code, code) for code in (0x85, 0xA0, 0x1680, 0x180E, 0x202F, 0x205F, 0x3000, 0xFEFF)),
    (0x0B, 0x0B),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
]
# What is sure to be white space, and what may be: in RE2, and in any dialect.
_RE2_SPACES = _SPACES, _SPACES
_ANY_SPACES = _SPACES, [*_SPACES, *_MORE_SPACES]
_CLASSES = {"d": _DIGITS, "w": _WORD}
_CONTROL_CODES = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_CODE_POINT = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_COUNT = re.compile(r"\{[0-9]+(,[0-9]*)?\}|[*+?]")
_ZEROS = re.compile(r"\b0+(?=[0-9])")  # RE2 takes a count that begins with them for a text
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_SIGNS = {"^": r"\A", "$": r"\z", ".": r"[^\n]"}

_MAX_KEPT = 256
_MAX_SECONDS = 1.0
_MAX_LENGTH, _MAX_COPIES = 4096, 20_000  # of a pattern, and of what it has to repeat
_LEAST_COUNT = re.compile(r"\{(\d+)")
_NEVER_MASKED = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # look-around, \b and backreferences


@lru_cache(_MAX_KEPT)
def whole_match(regex: str) -> Test | None:
    """Return what tells whether all of a text matches; None if nothing independent does."""
    return _test(regex, _RE2_SPACES, r"\A(?:%s)\z")


@lru_cache(_MAX_KEPT)
def found_match(regex: str) -> Test | None:
    """Return what tells whether a text holds a match; None if nothing independent does.

    That is how the patterns of schemas are read.
    """
    return _test(regex, _ANY_SPACES, "%s") or _backtracking_match(regex)


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


def _test(regex: str, spaces: tuple[Ranges, Ranges], form: str) -> Test | None:
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(form % _Reading(regex, spaces).in_re2(), options)
    except (_DoubtfulError, re2.error):  # the other: counts above 1,000, or too large
        return None
    return lambda text: compiled.search(text) is not None


class _DoubtfulError(Exception):
    """An expression whose meaning is not the same everywhere."""


class _Reading:
    r"""One pass over a regex, which writes it in the syntax of RE2.

    spaces: what \\s is sure to match, and what it may.  Methods raise a _DoubtfulError at a part
    whose meaning is in doubt.
    """

    def __init__(self, regex: str, spaces: tuple[Ranges, Ranges]) -> None:
        self._regex, self._at, self._depth = regex, 0, 0
        self._spaces = spaces

    def in_re2(self) -> str:
        written = self._choice()
        if self._at < len(self._regex):
            raise _DoubtfulError
        return written

    def _choice(self) -> str:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return "|".join(options)

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._at < len(self._regex) and self._regex[self._at] not in "|)":
            parts.append(self._atom())
            count = _COUNT.match(self._regex, self._at)
            if count is None:
                continue
            self._at = count.end()
            parts.append(_ZEROS.sub("", count[0]))
            self._take("?")  # lazy ones match the same texts
            if self._regex[self._at : self._at + 1] in {"*", "+", "?", "{"}:
                raise _DoubtfulError  # possessive to some, twice to others
        return "".join(parts)

    def _atom(self) -> str:
        if group := _GROUP.match(self._regex, self._at):
            self._at = group.end()
            self._depth += 1
            if self._depth > _MAX_GROUPS:
                raise _DoubtfulError
            inner = self._choice()
            if not self._take(")"):
                raise _DoubtfulError
            self._depth -= 1
            return f"(?:{inner})"
        character = self._next()
        if character in _SIGNS:
            return _SIGNS[character]
        if character == "[":
            return self._set()
        if character in "(*+?{":
            raise _DoubtfulError
        if character == "\\":
            return _one_of(self._escape(in_any=True))
        return _one_of([(ord(character), ord(character))])

    def _set(self) -> str:
        """Return a class in brackets; of one that excludes, what any dialect lets through."""
        is_negated = self._take("^")
        ranges: Ranges = []
        if self._regex[self._at : self._at + 1] == "]":
            raise _DoubtfulError  # empty to some, a bracket to others
        while not self._take("]"):
            item = self._set_item(in_any=not is_negated)
            is_range = self._regex[self._at : self._at + 1] == "-" and (
                self._regex[self._at + 1 : self._at + 2] not in {"]", ""}
            )
            if is_range:
                self._at += 1
                end = self._set_item(in_any=not is_negated)
                if not _is_single(item) or not _is_single(end):  # a class ends no range
                    item = [*item, *end, (ord("-"), ord("-"))]
                elif end < item:
                    raise _DoubtfulError
                else:
                    item = [(item[0][0], end[0][0])]
            ranges += item
        return _one_of(_complement(ranges) if is_negated else ranges)

    def _set_item(self, *, in_any: bool) -> Ranges:
        character = self._next()
        if character == "\\":
            return self._escape(in_any=in_any)
        is_operator = character in "&~-" and self._regex.startswith(character, self._at)
        if character == "[" or is_operator:  # sets of sets, in some dialects
            raise _DoubtfulError
        return [(ord(character), ord(character))]

    def _escape(self, *, in_any: bool) -> Ranges:
        """Return what an escape stands for; in_any: in any dialect, else in all of them."""
        if code := _CODE_POINT.match(self._regex, self._at):
            self._at = code.end()
            number = int(code[code.lastindex or 0], 16)
            if number in _HALVES or number > _LAST:
                raise _DoubtfulError
            return [(number, number)]
        character = self._next()
        if ranges := _CLASSES.get(character.lower()):
            return _complement(ranges) if character.isupper() else ranges
        if character in "sS":
            in_all, any_ = self._spaces
            if character == "S":
                return _complement(in_all if in_any else any_)
            return any_ if in_any else in_all
        if character in _CONTROL_CODES:
            return [(_CONTROL_CODES[character], _CONTROL_CODES[character])]
        if character.isalnum() or not character.isascii():
            raise _DoubtfulError
        return [(ord(character), ord(character))]

    def _next(self) -> str:
        if self._at == len(self._regex):
            raise _DoubtfulError
        self._at += 1
        return self._regex[self._at - 1]

    def _take(self, mark: str) -> bool:
        """Step over `mark` if it comes next, and return whether it did."""
        is_next = self._regex.startswith(mark, self._at)
        self._at += is_next
        return is_next


def _one_of(ranges: Ranges) -> str:
    inside = (rf"\x{{{start:X}}}-\x{{{end:X}}}" for start, end in ranges)
    return f"[{''.join(inside)}]" if ranges else rf"[^\x{{0}}-\x{{{_LAST:X}}}]"


def _complement(ranges: Ranges) -> Ranges:
    """Return the code points that are in none of `ranges`."""
    gaps: Ranges = []
    first = 0
    for start, end in sorted(ranges):
        if start > first:
            gaps.append((first, start - 1))
        first = max(first, end + 1)
    return [*gaps, (first, _LAST)] if first <= _LAST else gaps


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
