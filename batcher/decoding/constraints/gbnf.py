r"""From GBNF, the grammars of llama.cpp, to the Lark of llguidance, language for language.

llguidance splits text into lexemes, always the longest, before it parses; GBNF has no lexemes.  So
the translation leaves the lexer nothing to choose: a grammar without recursion becomes one lexeme,
and in one with recursion every lexeme is a single character.  The syntax is that of llama.cpp's
grammars/README.md, but for token references (`<think>`, `<[1000]>`).
"""

import json
import re
from collections import OrderedDict
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from batcher.decoding.grammars import place_in

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_BAR = re.compile(rf"(?>{_BLANK_LINES.pattern})\|{_BLANK_LINES.pattern}")
_LINE_END = re.compile(r"\r\n|\r|\n|\Z")
_TIMES = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"\\(?:([nrt\\\"\[\]])|x([\dA-Fa-f]{2})|u([\dA-Fa-f]{4})|U([\dA-Fa-f]{8}))")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_MAX_DIGITS = 9  # of how often an item is repeated
_MAX_NESTING = 25  # groups within groups; llguidance takes hardly more
_LAST_SCALAR = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class GbnfError(Exception):
    """What is wrong with a grammar, and where."""

    def __init__(self, text: str, offset: int, message: str) -> None:
        super().__init__(f"{place_in(text, offset)}: {message}")


class _Reference(NamedTuple):
    """A rule's name where another rule uses it."""

    name: str
    offset: int


_Parts = list[str | _Reference]  # Lark, but for the names of rules


def gbnf_to_lark(text: str) -> str:
    """Return the Lark grammar of the same language, with a rule `start`.

    Raises:
        GbnfError: `text` is not GBNF, or needs what is not supported.
    """
    rules = _Parser(text).rules()
    for parts in rules.values():
        for part in parts:
            if isinstance(part, _Reference) and part.name not in rules:
                raise GbnfError(text, part.offset, f"no rule is called '{part.name}'")
    if "root" not in rules:
        raise GbnfError(text, len(text), "no rule is called 'root'")
    used = _reachable(rules, "root")
    if "root" not in _finite(rules, used):
        raise GbnfError(
            text, 0, "no text keeps this grammar: its rules lead to one another forever"
        )
    prefix = "rule_" if _is_recursive(rules, used) else "TERMINAL_"  # case tells rules from lexemes
    names = {name: f"{prefix}{number}" for number, name in enumerate(used)}
    lines = [f"start: {names['root']}"]
    for name in used:
        written = [part if isinstance(part, str) else names[part.name] for part in rules[name]]
        lines.append(f"{names[name]}: {' '.join(written)}")
    return "\n".join(lines)


def _used_by(parts: _Parts) -> list[str]:
    """Return the names of the rules that `parts` use."""
    return [part.name for part in parts if isinstance(part, _Reference)]


def _reachable(rules: dict[str, _Parts], first: str) -> list[str]:
    """Return the names of `first` and of the rules it leads to."""
    found, known = [first], {first}
    for name in found:  # which grows
        new = [used for used in dict.fromkeys(_used_by(rules[name])) if used not in known]
        found += new
        known.update(new)
    return found


def _is_recursive(rules: dict[str, _Parts], names: list[str]) -> bool:
    """Return whether any of the rules called `names` leads back to itself."""
    try:
        TopologicalSorter({name: _used_by(rules[name]) for name in names}).prepare()
    except CycleError:
        return True
    return False


def _finite(rules: dict[str, _Parts], names: list[str]) -> set[str]:
    """Return which of the rules called `names` are kept by some text that ends."""
    users: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for used in _used_by(rules[name]):
            users[used].append(name)
    finite: set[str] = set()
    waiting = OrderedDict.fromkeys(reversed(names))  # what others use tends to come first
    while waiting:
        name, _ = waiting.popitem(last=False)
        if name not in finite and _ends(rules[name], finite):
            finite.add(name)
            waiting.update(dict.fromkeys(users[name]))
    return finite


def _ends(parts: _Parts, finite: set[str]) -> bool:
    """Return whether `parts` can be written out with no other rules than those of `finite`."""
    # of each open group: whether an alternative before this one ends, and this one so far, and
    # that without its last item
    groups = [(False, True, True)]
    for part in parts:
        before, now, without_last = groups[-1]
        if part == "(":
            groups.append((False, True, True))
        elif part == ")":
            groups.pop()
            outer, so_far, _ = groups[-1]
            groups[-1] = (outer, so_far and (before or now), so_far)
        elif part == "|":
            groups[-1] = (before or now, True, True)
        elif isinstance(part, _Reference):
            groups[-1] = (before, now and part.name in finite, now)
        elif part in {"*", "?"} or part.startswith("{0,"):
            groups[-1] = (before, without_last, without_last)
    [(before, now, _)] = groups
    return before or now


class _Parser:
    """Reads a grammar by recursive descent, as llama.cpp's src/llama-grammar.cpp does."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._nesting = 0

    def rules(self) -> dict[str, _Parts]:
        """Return every rule by its name."""
        rules: dict[str, _Parts] = {}
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            begin = self._at
            name = self._name()
            if name in rules:
                raise GbnfError(self._text, begin, f"a second rule is called '{name}'")
            self._skip(_BLANKS)
            if not self._take("::="):
                raise self._error("expected '::='")
            self._skip(_BLANK_LINES)
            rules[name] = self._alternatives(_BLANKS)
            if not _LINE_END.match(self._text, self._at):
                raise self._error("expected a character, a rule, a group, '|' or a new line")
            self._skip(_BLANK_LINES)
        return rules

    def _alternatives(self, blanks: re.Pattern[str]) -> _Parts:
        """Read `a b | c`; `blanks` are those that do not end it."""
        parts = self._sequence(blanks)
        while match := _BAR.match(self._text, self._at):  # on a line of its own, too
            self._at = match.end()
            parts += ["|", *self._sequence(blanks)]
        return parts

    def _sequence(self, blanks: re.Pattern[str]) -> _Parts:
        parts: _Parts = []
        while item := self._item():
            self._skip(blanks)
            num_times = 0
            while times := _TIMES.match(self._text, self._at):
                num_times += 1
                if num_times > _MAX_NESTING:
                    raise self._error(f"more than {_MAX_NESTING} repetitions of one item")
                if item[-1] != ")":  # a literal's last character, or one repetition after another
                    item = ["(", *item, ")"]
                repetition = self._times(times)
                item = ['""'] if repetition == "{0,0}" else [*item, repetition]
                self._skip(blanks)
            parts += item
        return parts or ['""']

    def _item(self) -> _Parts:
        """Read one literal, class, group, rule or `.`; return nothing if none is next."""
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return [self._character_class()]
        if self._take("("):
            return self._group()
        if self._take("."):
            return ["/(?s:.)/"]
        if self._text.startswith(("<", "!<"), self._at):
            raise self._error("references to tokens are not supported: a constraint is about text")
        if _NAME.match(self._text, self._at):
            offset = self._at
            return [_Reference(self._name(), offset)]
        return []

    def _group(self) -> _Parts:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise self._error(f"groups nested more than {_MAX_NESTING} deep")
        self._skip(_BLANK_LINES)
        parts = self._alternatives(_BLANK_LINES)
        if not self._take(")"):
            raise self._error("expected ')'")
        self._nesting -= 1
        return ["(", *parts, ")"]

    def _literal(self) -> _Parts:
        characters: _Parts = []
        while not self._take('"'):
            characters.append(json.dumps(self._character("a '\"' to close the text")))
        return characters or ['""']

    def _character_class(self) -> str:
        """Read `^a-z_]` and return the regex of that class, every character by its number."""
        begin = self._at - 1
        negation = "^" if self._take("^") else ""
        ranges = []
        while not self._take("]"):
            offset = self._at
            low = high = self._character("a ']' to close the class")
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character("a ']' to close the class")
            if low > high:
                raise GbnfError(self._text, offset, "a range whose end comes before its start")
            ranges.append(f"\\u{{{ord(low):x}}}-\\u{{{ord(high):x}}}")
        if not ranges:
            raise GbnfError(self._text, begin, "a class without characters")
        return f"/[{negation}{''.join(ranges)}]/"

    def _character(self, wanted: str) -> str:
        """Read one character, escaped or not."""
        if not self._text.startswith("\\", self._at):
            if self._at == len(self._text):
                raise self._error(f"expected {wanted}")
            self._at += 1
            return self._text[self._at - 1]
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            raise self._error("an escape that does not exist")
        if match[1]:
            character = _CONTROLS.get(match[1], match[1])
        else:
            number = int(match[2] or match[3] or match[4], 16)
            if number in _SURROGATES or number > _LAST_SCALAR:
                raise self._error("an escape that stands for no character")
            character = chr(number)
        self._at = match.end()
        return character

    def _times(self, match: re.Match[str]) -> str:
        """Read how often an item is repeated, and return it as Lark writes it."""
        if match[1] is None:
            self._at = match.end()
            return match[0]
        least, most = match[1], match[1] if match[2] is None else match[2]
        if max(len(least), len(most)) > _MAX_DIGITS:
            raise self._error(f"a repetition count of more than {_MAX_DIGITS} digits")
        if most and int(least) > int(most):
            raise self._error("a repetition whose maximum is below its minimum")
        self._at = match.end()
        return f"{{{int(least)},{most}}}"

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error("expected the name of a rule")
        self._at = match.end()
        return match[0]

    def _take(self, token: str) -> bool:
        """Move past `token` if it is next."""
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _skip(self, blanks: re.Pattern[str]) -> None:
        match = blanks.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _error(self, message: str) -> GbnfError:
        return GbnfError(self._text, self._at, message)
