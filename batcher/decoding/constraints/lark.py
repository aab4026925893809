"""From each kind of constraint to the one language that is compiled, llguidance's Lark.

Outputs of a JSON schema are written without white space, so that a model cannot fill its output
with blanks and most of the punctuation is forced; `x-guidance` in a schema changes that.
"""

import json
import re
from typing import Any

from batcher.decoding.constraints.gbnf import GbnfError, gbnf_to_lark
from batcher.decoding.constraints.source import ConstraintSource, canonical_json, place_in
from batcher.errors import GrammarError

# A mask has to hold every token that keeps the grammar; by default llguidance leaves in it only
# the tokenizer's own choice where the text is forced.  It stands last: there it outdoes the
# grammar's own options, and moves no line.
_OPTIONS = '\n%llguidance {"no_forcing": true}'
_MAX_DEPTH = 7_000  # 8,000 terminals need more than llguidance has; 9,900 keep it busy for minutes
_WHITESPACE_OPTIONS = {
    "item_separator",
    "key_separator",
    "whitespace_flexible",
    "whitespace_pattern",
}
_TRAILING_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
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


def lark_grammar(source: ConstraintSource) -> str:
    """Return the Lark grammar of a constraint, ready for llguidance.

    Raises:
        GrammarError: `source` states nothing that llguidance could be given.
    """
    match source.kind:
        case "json_schema":
            grammar = json_schema_grammar(json.loads(source.text))
        case "choice":
            # one lexeme, so one automaton: a rule would try each of the texts at each token
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source.text)]
            grammar = f"start: CHOICE\nCHOICE: {' | '.join(texts)}"
        case "regex":
            grammar = _regex_grammar(source.text)
        case "lark":
            _check_lark(source.text)
            grammar = source.text
        case "gbnf":
            try:
                grammar = gbnf_to_lark(source.text)
            except GbnfError as error:
                raise GrammarError(("gbnf",), str(error)) from error
    if source.kind not in {"choice", "regex"}:
        _check_depth(source, grammar)
    return grammar + _OPTIONS


def _check_depth(source: ConstraintSource, grammar: str) -> None:
    """Raise GrammarError if rules or schemas might lead to one another too deeply to be compiled.

    llguidance follows them by recursion, and ends the process where the stack ends.  A rule takes
    a line at least, and a schema a brace.
    """
    if grammar.count("\n") + grammar.count("{") > _MAX_DEPTH:
        message = f"more than {_MAX_DEPTH:,} rules and braces are not supported"
        raise GrammarError((source.kind,), message)


def json_schema_grammar(schema: dict[str, Any] | bool) -> str:  # noqa: FBT001 - true and false are schemas
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
    options = {"whitespace_flexible": False, **options}
    return f"start: %json {canonical_json({**fields, 'x-guidance': options})}"


def _regex_grammar(regex: str) -> str:
    """Return the Lark grammar of a regex.

    Raises:
        GrammarError: it ends in the middle of an escape.
    """
    from llguidance import LLMatcher  # noqa: PLC0415 - an optional dependency

    if _TRAILING_ESCAPE.search(regex):
        raise GrammarError(("regex",), f"offset {len(regex) - 1}: a '\\' with nothing after it")
    grammar: str = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    return grammar


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
