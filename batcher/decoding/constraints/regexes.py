"""Regexes as trees, read only as far as their meaning is beyond doubt.

Digits and word characters are ASCII, as in RE2 and in ECMA's dialect.  Of white space, which the
dialects draw differently, what any of them would take is taken.
"""

import re

from msgspec import Struct

LAST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_MAX_DEPTH = 100

Ranges = list[tuple[int, int]]  # of code points, both ends included

_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: Ranges = [(0x09, 0x0A), (0x0C, 0x0D), (0x20, 0x20)]
_MORE_SPACES: Ranges = [
    *((code, code) for code in (0x85, 0xA0, 0x1680, 0x180E, 0x202F, 0x205F, 0x3000, 0xFEFF)),
    (0x0B, 0x0B),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
]
RE2_SPACES = _SPACES, _SPACES
# What every dialect has among spaces, and what any of them has.
ANY_SPACES = _SPACES, [*_SPACES, *_MORE_SPACES]
_CLASSES = {"d": _DIGITS, "w": _WORD}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


class Characters(Struct, frozen=True, cache_hash=True):
    """One character of these."""

    ranges: tuple[tuple[int, int], ...]


class Anchor(Struct, frozen=True, cache_hash=True):
    """The end of the text, or its beginning."""

    is_end: bool


class Repeat(Struct, frozen=True, cache_hash=True):
    """`body` as often as this; most: None without a limit."""

    body: "Node"
    least: int
    most: int | None


class Alternation(Struct, frozen=True, cache_hash=True):
    """One of several sequences."""

    options: tuple["Nodes", ...]


Node = Characters | Anchor | Repeat | Alternation
Nodes = tuple[Node, ...]  # one after the other


class DoubtfulError(Exception):
    """An expression whose meaning is not the same everywhere."""


def read_regex(regex: str, spaces: tuple[Ranges, Ranges] = ANY_SPACES) -> Alternation:
    r"""Return what a regex consists of; spaces: what \\s is sure to match, and what it may.

    Raises:
        DoubtfulError: it has a part that cannot be relied on.
    """
    return _Reading(regex, spaces).result()


def complement(ranges: Ranges) -> Ranges:
    """Return the code points that are in none of `ranges`."""
    gaps: Ranges = []
    first = 0
    for start, end in sorted(ranges):
        if start > first:
            gaps.append((first, start - 1))
        first = max(first, end + 1)
    return [*gaps, (first, LAST)] if first <= LAST else gaps


_SIGNS: dict[str, Node] = {
    "^": Anchor(is_end=False),
    "$": Anchor(is_end=True),
    ".": Characters(tuple(complement([(0x0A, 0x0A)]))),
}


class _Reading:
    """One pass over a regex."""

    def __init__(self, regex: str, spaces: tuple[Ranges, Ranges]) -> None:
        self._regex, self._at, self._depth = regex, 0, 0
        self._spaces = spaces

    def result(self) -> Alternation:
        result = self._choice()
        if self._at < len(self._regex):
            raise DoubtfulError
        return result

    def _choice(self) -> Alternation:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return Alternation(tuple(options))

    def _sequence(self) -> Nodes:
        nodes: list[Node] = []
        while self._at < len(self._regex) and self._regex[self._at] not in "|)":
            nodes.append(self._quantified(self._atom()))
        return tuple(nodes)

    def _quantified(self, atom: Node) -> Node:
        """Return an atom as often as it may stand; lazy ones match the same texts."""
        count = _COUNT.match(self._regex, self._at)
        if count is not None:
            self._at = count.end()
            least = int(count[1])
            most = least if not count[2] else int(count[3]) if count[3] else None
        elif mark := next((mark for mark in _COUNTS if self._take(mark)), None):
            least, most = _COUNTS[mark]
        else:
            return atom
        self._take("?")
        if self._regex[self._at : self._at + 1] in {"*", "+", "?", "{"}:
            raise DoubtfulError  # possessive to some, twice to others
        return Repeat(atom, least, most)

    def _atom(self) -> Node:
        if group := _GROUP.match(self._regex, self._at):
            self._at = group.end()
            return self._group()
        character = self._next()
        if character in _SIGNS:
            return _SIGNS[character]
        if character == "[":
            return self._set()
        if character in "(*+?{":
            raise DoubtfulError
        if character == "\\":
            return Characters(tuple(self._escape(in_any=True)))
        return Characters(((ord(character), ord(character)),))

    def _group(self) -> Alternation:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DoubtfulError
        inner = self._choice()
        if not self._take(")"):
            raise DoubtfulError
        self._depth -= 1
        return inner

    def _set(self) -> Characters:
        """Return a class in brackets; of one that excludes, what any dialect lets through."""
        is_negated = self._take("^")
        ranges: Ranges = []
        if self._regex[self._at : self._at + 1] == "]":
            raise DoubtfulError  # empty to some, a bracket to others
        while not self._take("]"):
            item = self._set_item(in_any=not is_negated)
            is_range = self._regex[self._at : self._at + 1] == "-" and (
                self._regex[self._at + 1 : self._at + 2] not in {"]", ""}
            )
            if is_range:
                self._at += 1
                end = self._set_item(in_any=not is_negated)
                if not _is_single(item) or not _is_single(end) or end < item:
                    raise DoubtfulError
                item = [(item[0][0], end[0][0])]
            ranges += item
        return Characters(tuple(complement(ranges) if is_negated else ranges))

    def _set_item(self, *, in_any: bool) -> Ranges:
        character = self._next()
        if character == "\\":
            return self._escape(in_any=in_any)
        is_operator = character in "&~-" and self._regex.startswith(character, self._at)
        if character == "[" or is_operator:  # sets of sets, in some dialects
            raise DoubtfulError
        return [(ord(character), ord(character))]

    def _escape(self, *, in_any: bool) -> Ranges:
        """Return what an escape stands for; in_any: in any dialect, else in all of them."""
        if code := _CODE.match(self._regex, self._at):
            self._at = code.end()
            number = int(code[code.lastindex or 0], 16)
            if number in _SURROGATES or number > LAST:
                raise DoubtfulError
            return [(number, number)]
        character = self._next()
        if ranges := _CLASSES.get(character.lower()):
            return complement(ranges) if character.isupper() else ranges
        if character in "sS":
            in_all, any_ = self._spaces
            if character == "S":
                return complement(in_all if in_any else any_)
            return any_ if in_any else in_all
        if character in _CONTROLS:
            return [(_CONTROLS[character], _CONTROLS[character])]
        if character.isalnum() or not character.isascii():
            raise DoubtfulError
        return [(ord(character), ord(character))]

    def _next(self) -> str:
        if self._at == len(self._regex):
            raise DoubtfulError
        self._at += 1
        return self._regex[self._at - 1]

    def _take(self, mark: str) -> bool:
        """Step over `mark` if it comes next, and return whether it did."""
        is_next = self._regex.startswith(mark, self._at)
        self._at += is_next
        return is_next


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
