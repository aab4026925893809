"""Makes llguidance's matchers, within limits that keep one grammar from stalling a run."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from batcher.decoding.constraints.lark import json_schema_grammar, lark_grammar
from batcher.decoding.constraints.messages import grammar_error
from batcher.decoding.constraints.source import ConstraintSource
from batcher.errors import GrammarError
from batcher.request import ConstraintField

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


def compile_source(
    tokenizer: "LLTokenizer", source: ConstraintSource
) -> "LLMatcher | GrammarError":
    """Return the matcher of a constraint at the start of an output, or why there is none.

    The caller's thread has to have a stack of STACK_SIZE: see `with_large_stack`.
    """
    try:
        matcher = _make_matcher(tokenizer, lark_grammar(source), source.kind)
    except GrammarError as error:
        return error
    if not matcher.is_error():
        return matcher
    return grammar_error(
        source, matcher.get_error(), lambda schema: _schema_error(tokenizer, schema)
    )


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


def _make_matcher(tokenizer: "LLTokenizer", grammar: str, kind: ConstraintField) -> "LLMatcher":
    """Return a matcher of a Lark grammar made of a constraint of `kind`; it may be in error."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an optional dependency

    limits = LLParserLimits(max_items_in_row=_max_items(grammar, kind), verbose_errors=False)
    grammars = LLMatcher.grammar_from_lark(grammar)
    return LLMatcher(tokenizer, grammars, log_level=0, limits=limits)


def _schema_error(tokenizer: "LLTokenizer", schema: dict[str, Any]) -> str:
    """Return what llguidance says of a JSON schema, "" if it compiles it."""
    try:
        return _make_matcher(tokenizer, json_schema_grammar(schema), "json_schema").get_error()
    except GrammarError as error:
        return str(error)


def _max_items(grammar: str, kind: ConstraintField) -> int:
    """Return how long a row of Earley items may become before the output fails."""
    if kind == "json_schema":
        return _MAX_ITEMS
    num_choices = sum(grammar.count(mark) for mark in "|\n{")  # in a grammar, and a schema in it
    return min(_MIN_ITEMS + _ITEMS_PER_CHOICE * num_choices, _MAX_ITEMS)
