"""Translates each kind of constraint to Lark for llguidance, and its errors to messages.

Outputs of a JSON schema have no white space, so that a model cannot fill its output with blanks and
most of the punctuation is forced; `x-guidance` in a schema changes that. Limits keep one grammar
from stalling a run.
"""

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from batcher.errors import GrammarError, Path
from batcher.request import ConstraintField, Request
from batcher.requests.validation import constraint_fields_of, is_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class ConstraintSource(Struct, frozen=True, cache_hash=True):
    """A constraint before it is compiled.

    kind: the field of the request.
    text: the regex or the grammar; the JSON of a schema or a list of choices.
    """

    kind: ConstraintField
    text: str


def constraint_source(request: Request) -> ConstraintSource | None:
    """Return the constraint of a valid `request`, or None."""
    fields = constraint_fields_of(request)
    return stated_source(fields[0], getattr(request, fields[0])) if fields else None


def stated_source(field: ConstraintField, stated: Any) -> ConstraintSource:
    """Return the constraint of a field; raise a GrammarError if it is not valid text."""
    text = stated if isinstance(stated, str) else canonical_json(stated)
    if not is_text(text):
        raise GrammarError((field,), "a text holds half of a surrogate pair")
    return ConstraintSource(field, text)


def schema_source(schema: Any) -> ConstraintSource:
    return ConstraintSource("json_schema", canonical_json(schema))


def canonical_json(value: object) -> str:
    """Return `value` as JSON without spaces; keys keep their order, which is that of the output."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def parts_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and value of every object that may be a schema, outer ones first."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
        yield path, value
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from parts_of(item, (*path, key))


def place_in(text: str, offset: int) -> str:
    """Return the line and column of `offset` in `text`, from 1."""
    line_break = text.rfind("\n", 0, offset)  # -1 in the first line
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - line_break}"


# GBNF, the grammars of llama.cpp, as Lark of the same language.
#
# llguidance splits text into the longest lexemes before it parses; GBNF has no lexemes.  So the
# translation leaves the lexer no choice: a grammar without recursion becomes one lexeme, and in one
# with recursion every lexeme is a single character.  The syntax is that of llama.cpp's
# grammars/README.md, without token references (`<think>`, `<[1000]>`).

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_BAR = re.compile(rf"(?>{_BLANK_LINES.pattern})\|{_BLANK_LINES.pattern}")
_LINE_END = re.compile(r"\r\n|\r|\n|\Z")
_TIMES = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"\\(?:([nrt\\\"\[\]])|x([\dA-Fa-f]{2})|u([\dA-Fa-f]{4})|U([\dA-Fa-f]{8}))")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_RANGE = re.compile(r"-(?!\])")
_REFERENCE = re.compile(rf"<({_NAME.pattern})>")  # as _Parser writes it
_MAX_DIGITS = 9  # of how often an item is repeated
_MAX_NESTING = 25  # groups within groups; llguidance allows few more
_LAST_SCALAR = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class GbnfError(Exception):
    """An error in a GBNF grammar, with its line and column."""

    def __init__(self, text: str, offset: int, message: str) -> None:
        super().__init__(f"{place_in(text, offset)}: {message}")


def gbnf_to_lark(text: str) -> str:
    """Return Lark of the same language, with a rule `start`; raise a GbnfError."""
    parser = _Parser(text)
    rules = parser.rules()
    uses: dict[str, list[str]] = {name: [] for name in rules}
    for rule, name, offset in parser.references:
        if name not in rules:
            raise GbnfError(text, offset, f"no rule is called '{name}'")
        uses[rule].append(name)
    if "root" not in rules:
        raise GbnfError(text, len(text), "no rule is called 'root'")
    numbers, queue = {"root": 0}, ["root"]  # of the rules that root leads to, in order
    for name in queue:  # it grows
        for other in uses[name]:
            if other not in numbers:
                numbers[other] = len(numbers)
                queue.append(other)
    prefix = "TERMINAL_"  # case tells rules from lexemes
    try:
        TopologicalSorter({name: uses[name] for name in queue}).prepare()
    except CycleError:
        prefix = "rule_"
    lines = [f"start: {prefix}0"]
    for name, number in numbers.items():
        lark = _REFERENCE.sub(lambda match: f"{prefix}{numbers[match[1]]}", rules[name])
        lines.append(f"{prefix}{number}: {lark}")
    return "\n".join(lines)


class _Parser:
    """Parses a grammar by recursive descent, as llama.cpp's src/llama-grammar.cpp does.

    references: (rule, name of the rule that it uses, offset).
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._rule, self._nesting = "", 0
        self.references: list[tuple[str, str, int]] = []

    def rules(self) -> dict[str, str]:
        rules: dict[str, str] = {}
        self._match(_BLANK_LINES)
        while self._at < len(self._text):
            begin, match = self._at, self._match(_NAME)
            if match is None:
                raise self._error("expected the name of a rule")
            self._rule = match[0]
            if self._rule in rules:
                raise GbnfError(self._text, begin, f"a second rule is called '{self._rule}'")
            self._match(_BLANKS)
            if not self._take("::="):
                raise self._error("expected '::='")
            self._match(_BLANK_LINES)
            rules[self._rule] = self._alternatives(_BLANKS)
            if not _LINE_END.match(self._text, self._at):
                raise self._error("expected a character, a rule, a group, '|' or a new line")
            self._match(_BLANK_LINES)
        return rules

    def _alternatives(self, blanks: re.Pattern[str]) -> str:
        found = [self._sequence(blanks)]
        while self._match(_BAR):  # on a line of its own, too
            found.append(self._sequence(blanks))
        return " | ".join(found)

    def _sequence(self, blanks: re.Pattern[str]) -> str:
        items, num_before = [], len(self.references)
        while item := self._item():
            self._match(blanks)
            num_times = 0
            while times := self._match(_TIMES):
                num_times += 1
                if num_times > _MAX_NESTING:
                    message = f"more than {_MAX_NESTING} repetitions of one item"
                    raise GbnfError(self._text, times.start(), message)
                if item[-1] != ")":  # a literal's last character, or one repetition after another
                    item = f"( {item} )"
                repetition = times[0]  # as Lark writes it
                if times[1] is not None:
                    least, most = times[1], times[1] if times[2] is None else times[2]
                    message = ""
                    if max(len(least), len(most)) > _MAX_DIGITS:
                        message = f"a repetition count of more than {_MAX_DIGITS} digits"
                    elif most and int(least) > int(most):
                        message = "a repetition whose maximum is below its minimum"
                    if message:
                        raise GbnfError(self._text, times.start(), message)
                    repetition = f"{{{int(least)},{most}}}"
                item = f"{item} {repetition}"
                if repetition == "{0,0}":
                    item = '""'
                    del self.references[num_before:]
                self._match(blanks)
            items.append(item)
            num_before = len(self.references)
        return " ".join(items) or '""'

    def _item(self) -> str:
        begin = self._at
        if self._take('"'):
            characters = []
            while not self._take('"'):
                characters.append(json.dumps(self._character("a '\"' to close the text")))
            return " ".join(characters) or '""'
        if self._take("["):
            negation, ranges = "^" if self._take("^") else "", ""
            while not self._take("]"):
                offset = self._at
                low = high = self._character("a ']' to close the class")
                if self._match(_RANGE):
                    high = self._character("a ']' to close the class")
                if low > high:
                    raise GbnfError(self._text, offset, "a range whose end comes before its start")
                ranges += f"\\u{{{ord(low):x}}}-\\u{{{ord(high):x}}}"
            if not ranges:
                raise GbnfError(self._text, begin, "a class without characters")
            return f"/[{negation}{ranges}]/"
        if self._take("("):
            self._nesting += 1
            if self._nesting > _MAX_NESTING:
                raise self._error(f"groups nested more than {_MAX_NESTING} deep")
            self._match(_BLANK_LINES)
            alternatives = self._alternatives(_BLANK_LINES)
            if not self._take(")"):
                raise self._error("expected ')'")
            self._nesting -= 1
            return f"( {alternatives} )"
        if self._take("."):
            return "/(?s:.)/"
        if self._text.startswith(("<", "!<"), begin):
            raise self._error("references to tokens are not supported: a constraint is about text")
        name = self._match(_NAME)
        if name is None:
            return ""
        self.references.append((self._rule, name[0], begin))
        return f"<{name[0]}>"

    def _character(self, wanted: str) -> str:
        if not self._text.startswith("\\", self._at):
            if self._at == len(self._text):
                raise self._error(f"expected {wanted}")
            self._at += 1
            return self._text[self._at - 1]
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            raise self._error("invalid escape sequence")
        character = _CONTROLS.get(match[1], match[1])
        if not match[1]:
            number = int(match[2] or match[3] or match[4], 16)
            if number in _SURROGATES or number > _LAST_SCALAR:
                raise self._error("an escape that stands for no character")
            character = chr(number)
        self._at = match.end()
        return character

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match

    def _error(self, message: str) -> GbnfError:
        return GbnfError(self._text, self._at, message)


T = TypeVar("T")

# Longest row of Earley items.  A schema has all its optional properties in one, four items each; it
# is never ambiguous, and a row of 10,000 takes about 40 ms.
_MAX_ITEMS = 10_000
# In an ambiguous grammar rows grow with the output, and a step takes quadratic time: 70 ms at
# 1,000.
# They also grow with right recursion and with the number of choices.
_MIN_ITEMS, _ITEMS_PER_CHOICE = 2000, 4
# Compiling takes up to 13 KiB of stack per rule of a chain of at most _MAX_DEPTH.
STACK_SIZE = 256 * 1024 * 1024
_stack_size_lock = threading.Lock()  # the size is one for the whole process
# By default llguidance masks all but the tokenizer's own choice where the text is forced.  At the
# end this option overrides the grammar's own options and moves no line.
_OPTIONS = '\n%llguidance {"no_forcing": true}'
# llguidance follows rules and schemas recursively, and a stack overflow ends the process.  A rule
# takes at least a line, a schema a brace.
_MAX_DEPTH = 7_000  # 8,000 terminals are over a limit of llguidance; 9,900 take minutes
_WHITESPACE_OPTIONS = {
    "item_separator",
    "key_separator",
    "whitespace_flexible",
    "whitespace_pattern",
}
_TRAILING_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_MARK = re.compile(r"\\?([/\n\r\t])|\\.", re.DOTALL)
_DASH = re.compile(r"(\\.)|-(?=\\[dDwWsS])", re.DOTALL)
# A regex between slashes, with ASCII classes where llguidance has Unicode ones.
_MARKS = {
    "/": r"\/",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\t\n\f\r ]",
    r"\S": r"[^\t\n\f\r ]",
}
_LARK_TOKENS = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"            # texts, comments and regexes, which are skipped
    | //[^\n]* | \#[^\n]*
    | /(?:\\.|[^/\\\n])+/
    | (?P<reference><[^<>\s]*>)    # <|name|>, <[3]>
    | (?P<limit>\bmax_tokens\s*=)
    """,
    re.VERBOSE,
)
_PLACE = re.compile(r"\A(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # the lines of the grammar around the place
_INTERNALS = re.compile(r"\n<.*", re.DOTALL)
_REGEX_ERROR = re.compile(
    r"regex parse error:\n    (?P<regex>.*)\n    (?P<caret> *)\^+\nerror: (?P<what>.*)"
)
_INVALID_REGEX = re.compile(r'\Ainvalid regex ".*" \(in regex\): (?P<what>.*)\Z', re.DOTALL)
_IN_REGEX = re.compile(r" in regex /.*/\Z", re.DOTALL)
_TOO_DEEP = re.compile(r"\Afailed to parse .*recursion limit exceeded.*\Z")
NESTED = "the schema is nested too deeply"
_MAX_CANDIDATES = 500  # parts of a schema that are compiled to find the fault


def compile_source(tokenizer: "LLTokenizer", source: ConstraintSource) -> "LLMatcher":
    """Return the matcher of a constraint, or raise a GrammarError; call under with_large_stack."""
    matcher = matcher_of(tokenizer, source)
    if matcher.is_error():
        raise grammar_error(tokenizer, source, matcher.get_error())
    return matcher


def matcher_of(tokenizer: "LLTokenizer", source: ConstraintSource) -> "LLMatcher":
    """Return the matcher of a constraint at the start of an output; it may be in error."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an optional dependency

    grammar, max_items = _lark_grammar(source), _MAX_ITEMS
    if source.kind != "json_schema":
        num_choices = sum(grammar.count(mark) for mark in "|\n{")  # and those of a schema in it
        max_items = min(_MIN_ITEMS + _ITEMS_PER_CHOICE * num_choices, _MAX_ITEMS)
    limits = LLParserLimits(max_items_in_row=max_items, verbose_errors=False)
    made = LLMatcher.grammar_from_lark(grammar)
    return LLMatcher(tokenizer, made, log_level=0, limits=limits)


def with_large_stack(function: Callable[[], T]) -> T:
    """Return the result of `function`, called in a thread with a stack of STACK_SIZE."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - slow to import

    with ThreadPoolExecutor(1) as pool:
        with _stack_size_lock:
            usual = threading.stack_size(STACK_SIZE)
            try:
                future = pool.submit(function)  # starts the thread
            finally:
                threading.stack_size(usual)
        return future.result()


def _lark_grammar(source: ConstraintSource) -> str:
    match source.kind:
        case "json_schema":
            schema = json.loads(source.text)
            if schema is False:
                raise GrammarError(("json_schema",), "the schema `false` allows no output")
            fields = {} if schema is True else schema
            given = fields.get("x-guidance", {})
            if not isinstance(given, dict):
                message = "x-guidance has to be an object"
                raise GrammarError(("json_schema", "x-guidance"), message)
            unknown = next((name for name in given if name not in _WHITESPACE_OPTIONS), None)
            if unknown is not None:
                known = ", ".join(sorted(_WHITESPACE_OPTIONS))
                message = f"x-guidance has no option '{unknown}' here; known: {known}"
                raise GrammarError(("json_schema", "x-guidance", unknown), message)
            options = {"lenient": True, "whitespace_flexible": False, **given}
            grammar = f"start: %json {canonical_json({**fields, 'x-guidance': options})}"
        case "choice":
            # one lexeme, so one automaton: a rule would try each text at each token
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source.text)]
            grammar = f"start: CHOICE\nCHOICE: {' | '.join(texts)}"
        case "regex":
            if _TRAILING_ESCAPE.search(source.text):
                place = f"offset {len(source.text) - 1}"
                raise GrammarError(("regex",), f"{place}: a '\\' with nothing after it")
            grammar = f"start: /{_lark_regex(source.text)}/"
        case "lark":
            grammar = source.text
            for match in _LARK_TOKENS.finditer(grammar):  # a constraint is about text
                message = "max_tokens belongs to the request, not to a rule"
                if match["reference"]:
                    message = f"{match['reference']}: references to tokens are not supported"
                elif not match["limit"]:
                    continue
                place = place_in(grammar, match.start())
                raise GrammarError(("lark",), f"{place}: {message}")
        case "gbnf":
            try:
                grammar = gbnf_to_lark(source.text)
            except GbnfError as error:
                raise GrammarError(("gbnf",), str(error)) from error
    is_nested = source.kind not in {"choice", "regex"}
    if is_nested and grammar.count("\n") + grammar.count("{") > _MAX_DEPTH:
        message = f"more than {_MAX_DEPTH:,} rules and braces are not supported"
        raise GrammarError((source.kind,), message)
    return grammar + _OPTIONS


def ascii_classes(regex: str) -> str:
    """Return a regex to put between slashes, with ASCII classes."""
    return _MARK.sub(lambda match: _MARKS.get(match[1] or match[0], match[0]), regex)


def _lark_regex(regex: str) -> str:
    return ascii_classes(with_literal_dashes(regex))


def with_literal_dashes(regex: str) -> str:
    r"""Escape a dash before a class, as in `[+-\d]`; llguidance would start a range there."""
    return _DASH.sub(lambda match: match[1] or r"\-", regex)


def grammar_error(tokenizer: "LLTokenizer", source: ConstraintSource, said: str) -> GrammarError:
    if source.kind == "json_schema":
        message = _schema_message(said)
        if message == NESTED:  # so are its parts
            return GrammarError(("json_schema",), message)
        path = _path_of_fault(tokenizer, json.loads(source.text), message)
        return GrammarError(("json_schema", *path), message)
    message, line, column = _split(said)
    if source.kind == "regex":
        return GrammarError(("regex",), _regex_message(source.text, message))
    if source.kind != "lark" or line is None:  # others are Lark that the user never saw
        return GrammarError((source.kind,), _regex_message(None, message))
    num_lines = source.text.count("\n") + 1
    place = f"line {line}, column {column}" if line <= num_lines else "the end"
    return GrammarError(("lark",), f"{place}: {_regex_message(None, message)}")


def _split(said: str) -> tuple[str, int | None, int | None]:
    place = _PLACE.match(said)
    message = _INTERNALS.sub("", _EXCERPT.sub("", said[place.end() :] if place else said)).strip()
    message = message.removeprefix("panic: ")
    return (message, int(place[1]), int(place[2])) if place else (message, None, None)


def _regex_message(regex: str | None, message: str) -> str:
    if match := _REGEX_ERROR.search(message):
        offset = len(match["caret"])
        if regex is None:
            return f"in the regex '{match['regex']}', offset {offset}: {match['what']}"
        ends = range(len(regex) + 1)
        before = bisect_left(ends, offset, key=lambda end: len(_lark_regex(regex[:end])))
        return f"offset {before}: {match['what']}"
    if match := _INVALID_REGEX.match(message):
        return _IN_REGEX.sub("", match["what"])
    return message


def _schema_message(said: str) -> str:
    message = _split(said)[0].removeprefix("failed to compile JSON schema: ")
    if _TOO_DEEP.match(message):
        return NESTED
    return _regex_message(None, message).partition("\n")[0]  # the rest is a trace of llguidance


def _path_of_fault(tokenizer: "LLTokenizer", schema: Any, message: str) -> Path:
    found: Path = ()
    for path, part in islice(parts_of(schema), 1, _MAX_CANDIDATES):
        if path[: len(found)] != found:  # follow the first fault inwards
            continue
        try:
            said = matcher_of(tokenizer, schema_source(part)).get_error()
        except GrammarError as error:
            said = str(error)
        if _schema_message(said) == message:
            found = path
    return found
