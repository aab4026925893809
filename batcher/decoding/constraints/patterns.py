"""A second reading of regexes: through RE2, which shares nothing with what outputs were made by.

Rule: an expression is read only as far as its meaning is beyond doubt; for the rest there is no
second reading.  Where the dialects (ECMA's in schemas, Rust's) draw a class differently, which they
do outside ASCII alone, what either would take is taken.
"""

import re
from collections.abc import Callable
from functools import lru_cache

Test = Callable[[str], bool]
"""Whether a text is, or holds, a match; takes time in proportion to the text."""

_Ranges = list[tuple[int, int]]  # of code points, both ends included

_LAST = 0x10FFFF
_NON_ASCII = (0x80, _LAST)
_DIGITS: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: _Ranges = [(0x09, 0x0D), (0x20, 0x20)]
_MORE_SPACES: _Ranges = [
    *((code, code) for code in (0x85, 0xA0, 0x1680, 0x180E, 0x202F, 0x205F, 0x3000, 0xFEFF)),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
]
# For each class what every dialect has in it, and what any of them has.
_CLASSES: dict[str, tuple[_Ranges, _Ranges]] = {
    "d": (_DIGITS, [*_DIGITS, _NON_ASCII]),
    "w": (_WORD, [*_WORD, _NON_ASCII]),
    "s": (_SPACES, [*_SPACES, *_MORE_SPACES]),
}
_SIGNS = {"^": r"\A", "$": r"\z", ".": r"[^\n]"}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_SURROGATES = range(0xD800, 0xE000)
_MAX_DEPTH = 100
_MAX_KEPT = 256


@lru_cache(_MAX_KEPT)
def whole_match(regex: str) -> Test | None:
    """Return what tells whether all of a text matches; None if nothing independent does."""
    return _test(regex, lambda read: rf"\A(?:{read})\z")


@lru_cache(_MAX_KEPT)
def found_match(regex: str) -> Test | None:
    """Return what tells whether a text holds a match; None if nothing independent does."""
    return _test(regex, lambda read: read)


def _test(regex: str, enclose: Callable[[str], str]) -> Test | None:
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(enclose(_Reading(regex).result()), options)
    except (_DoubtfulError, re2.error):  # the other: counts above 1,000, or too large
        return None
    return lambda text: compiled.search(text) is not None


class _DoubtfulError(Exception):
    """An expression whose meaning is not the same everywhere."""


class _Reading:
    """One pass over a regex, which writes it anew for RE2."""

    def __init__(self, regex: str) -> None:
        self._regex, self._at, self._depth = regex, 0, 0

    def result(self) -> str:
        """Return the expression in the syntax of RE2.

        Raises:
            _DoubtfulError: it has a part that cannot be relied on.
        """
        result = self._alternatives()
        if self._at < len(self._regex):
            raise _DoubtfulError
        return result

    def _alternatives(self) -> str:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return "|".join(parts)

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._at < len(self._regex) and self._regex[self._at] not in "|)":
            parts.append(self._atom() + self._quantifier())
        return "".join(parts)

    def _quantifier(self) -> str:
        """Return how often the atom before may stand; lazy ones match the same texts."""
        count = _COUNT.match(self._regex, self._at)
        if count is not None:
            self._at = count.end()
            quantifier = count[0]
        else:
            quantifier = next((mark for mark in "*+?" if self._take(mark)), "")
        if quantifier:
            self._take("?")
        if self._regex[self._at : self._at + 1] in {"*", "+", "?", "{"}:
            raise _DoubtfulError  # possessive to some, twice to others
        return quantifier

    def _atom(self) -> str:
        if group := _GROUP.match(self._regex, self._at):
            self._at = group.end()
            return self._group()
        character = self._next()
        if character in _SIGNS:
            return _SIGNS[character]
        if character == "[":
            return self._set()
        if character in "(*+?{":
            raise _DoubtfulError
        is_escape = character == "\\"
        return _written(self._escape(in_any=True) if is_escape else [(ord(character),) * 2])

    def _group(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _DoubtfulError
        inner = self._alternatives()
        if not self._take(")"):
            raise _DoubtfulError
        self._depth -= 1
        return f"(?:{inner})"

    def _set(self) -> str:
        """Return a class in brackets; of one that excludes, what any dialect lets through."""
        is_negated = self._take("^")
        ranges: _Ranges = []
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
                if not _is_single(item) or not _is_single(end) or end < item:
                    raise _DoubtfulError
                item = [(item[0][0], end[0][0])]
            ranges += item
        return _written(_complement(ranges) if is_negated else ranges)

    def _set_item(self, *, in_any: bool) -> _Ranges:
        character = self._next()
        if character == "\\":
            return self._escape(in_any=in_any)
        is_operator = character in "&~-" and self._regex.startswith(character, self._at)
        if character == "[" or is_operator:  # sets of sets, in some dialects
            raise _DoubtfulError
        return [(ord(character), ord(character))]

    def _escape(self, *, in_any: bool) -> _Ranges:
        """Return what an escape stands for; in_any: in any dialect, else in all of them."""
        if code := _CODE.match(self._regex, self._at):
            self._at = code.end()
            number = int(code[code.lastindex or 0], 16)
            if number in _SURROGATES or number > _LAST:
                raise _DoubtfulError
            return [(number, number)]
        character = self._next()
        if character.lower() in _CLASSES:
            in_all, any_ = _CLASSES[character.lower()]
            if character.isupper():
                return _complement(in_all if in_any else any_)
            return any_ if in_any else in_all
        if character in _CONTROLS:
            return [(_CONTROLS[character], _CONTROLS[character])]
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


def _is_single(ranges: _Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _complement(ranges: _Ranges) -> _Ranges:
    """Return the code points that are in none of `ranges`."""
    gaps: _Ranges = []
    first = 0
    for start, end in sorted(ranges):
        if start > first:
            gaps.append((first, start - 1))
        first = max(first, end + 1)
    return [*gaps, (first, _LAST)] if first <= _LAST else gaps


def _written(ranges: _Ranges) -> str:
    """Return a class of RE2's."""
    if not ranges:
        return rf"[^\x{{0}}-\x{{{_LAST:X}}}]"
    inside = (rf"\x{{{start:X}}}-\x{{{end:X}}}" for start, end in ranges)
    return f"[{''.join(inside)}]"
