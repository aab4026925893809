"""From each kind of constraint to llguidance's matcher, by way of its Lark, and what it refuses.

Outputs of a JSON schema are written without white space, so that a model cannot fill its output
with blanks and most of the punctuation is forced; `x-guidance` in a schema changes that.  Limits
keep one grammar from stalling a run.  What llguidance says of a grammar that it cannot compile is
told in our words, with the place.
"""

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from batcher.decoding.constraints.gbnf import GbnfError, gbnf_to_lark
from batcher.decoding.grammars import (
    ConstraintSource,
    canonical_json,
    parts_of,
    place_in,
    schema_source,
)
from batcher.errors import GrammarError, Path

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# How long a row of Earley items may be.  A schema puts all its optional properties in one, four
# items each; it is never ambiguous, and a row of 10,000 takes some 40 ms.
_MAX_ITEMS = 10_000
# In an ambiguous grammar rows grow with the output, and a step takes time as their square: 70 ms at
# 1,000.  They grow as well where a rule ends in itself, and with what there is to choose from.
_MIN_ITEMS, _ITEMS_PER_CHOICE = 2000, 4
# Compiling takes up to 13 KiB of stack for each rule of a chain, of at most 7,000.
STACK_SIZE = 256 * 1024 * 1024
_stack_size_lock = threading.Lock()  # the size is one for the whole process
# A mask has to hold every token that keeps the grammar; by default llguidance leaves in it only
# the tokenizer's own choice where the text is forced.  It stands last: there it outdoes the
# grammar's own options, and moves no line.
_OPTIONS = '\n%llguidance {"no_forcing": true}'
# Rules and schemas lead to one another; llguidance follows by recursion, and ends the process
# where the stack ends.  A rule takes a line at least, and a schema a brace.
_MAX_DEPTH = 7_000  # 8,000 terminals need more than llguidance has; 9,900 keep it busy for minutes
_WHITESPACE_OPTIONS = {
    "item_separator",
    "key_separator",
    "whitespace_flexible",
    "whitespace_pattern",
}
_TRAILING_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_MARK = re.compile(r"\\?([/\n\r\t])|\\.", re.DOTALL)
_DASH = re.compile(r"(\\.)|-(?=\\[dDwWsS])", re.DOTALL)
# How a regex is written between slashes.  Its classes are those of RE2, as far as ASCII goes, where
# llguidance would take Unicode's.
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
    "(?:\\.|[^"\\\n])*"            # texts, regexes and comments: whatever is in them
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
_MAX_CANDIDATES = 500  # parts of a schema that are tried on their own to find the fault


def compile_source(
    tokenizer: "LLTokenizer", source: ConstraintSource
) -> "LLMatcher | GrammarError":
    """Return the matcher of a constraint at the start of an output, or why there is none.

    The caller's thread has to have a stack of STACK_SIZE: see `with_large_stack`.
    """
    try:
        matcher = matcher_of(tokenizer, source)
    except GrammarError as error:
        return error
    return grammar_error(tokenizer, source, matcher.get_error()) if matcher.is_error() else matcher


def matcher_of(tokenizer: "LLTokenizer", source: ConstraintSource) -> "LLMatcher":
    """Return the matcher of a constraint at the start of an output; it may be in error.

    Raises:
        GrammarError: `source` states nothing that llguidance could be given.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an optional dependency

    grammar, max_items = _lark_grammar(source), _MAX_ITEMS
    if source.kind != "json_schema":
        num_choices = sum(grammar.count(mark) for mark in "|\n{")  # and those of a schema in it
        max_items = min(_MIN_ITEMS + _ITEMS_PER_CHOICE * num_choices, _MAX_ITEMS)
    limits = LLParserLimits(max_items_in_row=max_items, verbose_errors=False)
    made = LLMatcher.grammar_from_lark(grammar)
    return LLMatcher(tokenizer, made, log_level=0, limits=limits)


def with_large_stack(function: Callable[[], T]) -> T:
    """Return what `function` does, called in a thread with a stack of STACK_SIZE."""
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
    """Return the Lark grammar of a constraint, ready for llguidance.

    Raises:
        GrammarError: `source` states nothing that llguidance could be given.
    """
    match source.kind:
        case "json_schema":
            grammar = _json_schema_grammar(json.loads(source.text))
        case "choice":
            # one lexeme, so one automaton: a rule would try each of the texts at each token
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source.text)]
            grammar = f"start: CHOICE\nCHOICE: {' | '.join(texts)}"
        case "regex":
            if _TRAILING_ESCAPE.search(source.text):
                place = f"offset {len(source.text) - 1}"
                raise GrammarError(("regex",), f"{place}: a '\\' with nothing after it")
            grammar = f"start: /{_lark_regex(source.text)}/"
        case "lark":
            _check_lark(source.text)
            grammar = source.text
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


def _json_schema_grammar(schema: dict[str, Any] | bool) -> str:  # noqa: FBT001 - true and false are schemas
    """Return the Lark grammar of a JSON schema.

    Raises:
        GrammarError: it allows nothing, or its `x-guidance` is not one that is known here.
    """
    if schema is False:
        raise GrammarError(("json_schema",), "the schema false allows no output at all")
    fields = {} if schema is True else schema
    options = fields.get("x-guidance", {})
    if not isinstance(options, dict):
        raise GrammarError(("json_schema", "x-guidance"), "x-guidance has to be an object")
    for name in options:
        if name not in _WHITESPACE_OPTIONS:
            known = ", ".join(sorted(_WHITESPACE_OPTIONS))
            raise GrammarError(
                ("json_schema", "x-guidance", name),
                f"x-guidance has no option '{name}' here; known: {known}",
            )
    options = {"lenient": True, "whitespace_flexible": False, **options}
    return f"start: %json {canonical_json({**fields, 'x-guidance': options})}"


def _lark_regex(regex: str) -> str:
    """Return `regex` as Lark has it between slashes."""
    return _MARK.sub(
        lambda match: _MARKS.get(match[1] or match[0], match[0]), with_literal_dashes(regex)
    )


def with_literal_dashes(regex: str) -> str:
    r"""Return `regex` with a dash before a class, as in `[+-\d]`, as the character that it is.

    llguidance writes `[+-[0-9]]` there, and takes that for a range up to the inner bracket.
    """
    return _DASH.sub(lambda match: match[1] or r"\-", regex)


def _check_lark(grammar: str) -> None:
    """Make sure that a grammar does not speak of tokens: a constraint is about text alone.

    Raises:
        GrammarError: it does.
    """
    for match in _LARK_TOKENS.finditer(grammar):
        if match["reference"]:
            message = f"{match['reference']}: references to tokens are not supported"
        elif match["limit"]:
            message = "max_tokens belongs to the request, not to a rule"
        else:
            continue
        raise GrammarError(("lark",), f"{place_in(grammar, match.start())}: {message}")


def grammar_error(tokenizer: "LLTokenizer", source: ConstraintSource, said: str) -> GrammarError:
    """Return the error that shows what llguidance `said` of `source`."""
    if source.kind == "json_schema":
        message = _schema_message(said)
        if message == NESTED:  # each part of it would be as well, down to some depth
            return GrammarError(("json_schema",), message)
        path = _path_of_fault(tokenizer, json.loads(source.text), message)
        return GrammarError(("json_schema", *path), message)
    message, line, column = _split(said)
    if source.kind == "regex":
        return GrammarError(("regex",), _regex_message(source.text, message))
    if source.kind != "lark" or line is None:  # of other kinds it is a grammar the user never saw
        return GrammarError((source.kind,), _regex_message(None, message))
    num_lines = source.text.count("\n") + 1
    place = f"line {line}, column {column}" if line <= num_lines else "the end"
    return GrammarError(("lark",), f"{place}: {_regex_message(None, message)}")


def _split(said: str) -> tuple[str, int | None, int | None]:
    """Return what is wrong, and the line and the column where."""
    place = _PLACE.match(said)
    message = _INTERNALS.sub("", _EXCERPT.sub("", said[place.end() :] if place else said)).strip()
    message = message.removeprefix("panic: ")
    return (message, int(place[1]), int(place[2])) if place else (message, None, None)


def _regex_message(regex: str | None, message: str) -> str:
    """Return `message`; if it is about a regex, what is wrong with it and where."""
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
    return _regex_message(None, message).partition("\n")[0]  # the rest is where llguidance was


def _path_of_fault(tokenizer: "LLTokenizer", schema: Any, message: str) -> Path:
    """Return the path of the innermost part of `schema` that has the same fault on its own."""
    found: Path = ()
    for path, part in islice(parts_of(schema), 1, _MAX_CANDIDATES):
        if path[: len(found)] != found:  # of several, the first is followed inwards
            continue
        try:
            said = matcher_of(tokenizer, schema_source(part)).get_error()
        except GrammarError as error:
            said = str(error)
        if _schema_message(said) == message:
            found = path
    return found
