"""Constraints are compiled once each, and refused where that takes too much."""

import os
import select
import sys

import pytest
from constrained import compiler, follow, language, must_end, source

from batcher import Request, decode
from batcher.decoding.grammars import ConstraintSource, constraint_source
from batcher.decoding.verification import TRIALS, Enforceable, Trials
from batcher.errors import BatchdecodeError, GrammarError

DEEP = {"type": "null"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}

REFUSED = [
    # kind, constraint, path after the field, message
    ("regex", "a(?=b)", (), "offset 1: look-around, including look-ahead and look-behind, is not"),
    ("regex", "ab(c", (), "offset 2: unclosed group"),
    ("regex", "é(\\/[", (), "offset 4: unclosed character class"),
    ("regex", r"(a)\1", (), "offset 3: backreferences are not supported"),
    ("regex", r"\bfoo", (), "lookarounds not supported yet; WordUnicode"),
    ("regex", "a\\", (), r"offset 1: a '\' with nothing after it"),
    (
        "regex",
        r"[^\s\S]",
        (),
        "no output can satisfy the constraint: the grammar allows nothing here",
    ),
    ("lark", 'start: "a" foo', (), 'line 1, column 8: unknown name: "foo"'),
    ("lark", '\nstart: "a"\nb: "c', (), "line 3, column 6: lexer error"),
    ("lark", "start: /a(b/", (), "line 1, column 8: in the regex 'a(b', offset 1: unclosed group"),
    ("lark", "", (), "no start rule found"),
    ("lark", 'start: "<b>"\n  <eos>', (), "line 2, column 3: <eos>: references to tokens are not"),
    ("lark", "start: /<a>/ <[7]>", (), "line 1, column 14: <[7]>: references to tokens are not"),
    ("lark", 'start[max_tokens=3]: "a"', (), "line 1, column 7: max_tokens belongs to the request"),
    ("gbnf", 'root ::= "a" |\n  b', (), "line 2, column 3: no rule is called 'b'"),
    ("json_schema", False, (), "the schema `false` allows no output"),
    (
        "json_schema",
        {"$defs": {"x": {"pattern": "a(b"}}, "$ref": "#/$defs/x"},
        ("$defs", "x"),
        "in the regex 'a(b', offset 1: unclosed group",
    ),
    ("json_schema", DEEP, (), "the schema is nested too deeply"),
    (
        "json_schema",
        {"$ref": "#"},
        (),
        "no output can satisfy the constraint: the grammar allows nothing here",
    ),
    ("json_schema", {"type": "str"}, (), "Invalid type: str"),
    ("json_schema", {"$ref": "#/nope"}, (), "Pointer '/nope' does not exist"),
    ("json_schema", {"$ref": "http://a/b"}, (), "Resource 'http://a/b' is not present"),
    (
        "json_schema",
        {"type": "integer", "minimum": 5, "maximum": 3},
        (),
        "Unsatisfiable schema: minimum (5) is greater than maximum (3)",
    ),
    (
        "json_schema",
        {"x-guidance": {"lenient": True}},
        ("x-guidance", "lenient"),
        "x-guidance has no option 'lenient' here; known: item_separator, key_separator, ",
    ),
    ("json_schema", {"x-guidance": 3}, ("x-guidance",), "x-guidance has to be an object"),
]


@pytest.mark.parametrize(("kind", "constraint", "path", "message"), REFUSED)
def test_a_constraint_that_cannot_be_compiled_says_what_and_where(kind, constraint, path, message):
    with pytest.raises(GrammarError) as caught:
        compiler().compile(source(kind, constraint))
    assert isinstance(caught.value, BatchdecodeError)
    assert caught.value.path == (kind, *path)
    assert str(caught.value).startswith(message)
    assert "llguidance" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "constraint", "output"),
    [
        ("lark", 'start: "<eos>" /<[3]>/ // <eos>, max_tokens=3\n# <[3]>', "<eos><3>"),
        ("lark", 'start: "a\\"<b>" max_tokens\nmax_tokens: /c/', 'a"<b>c'),
        ("lark", "%llguidance {}\nstart: /a/", "a"),
        ("regex", "a\\\\", "a\\"),
        ("regex", "a/b\nc", "a/b\nc"),
        ("choice", ["<|endoftext|>"], "<|endoftext|>"),
        ("json_schema", {"const": "<|endoftext|>"}, '"<|endoftext|>"'),
    ],
)
def test_text_that_looks_like_something_else_is_text(kind, constraint, output):
    row = compiler().compile(source(kind, constraint)).new_row()
    assert must_end(follow(row, output))


@pytest.mark.parametrize(("kind", "constraint"), [("regex", "(a"), ("json_schema", False)])
def test_a_constraint_that_cannot_be_compiled_is_tried_once(kind, constraint):
    ours = compiler()
    for _ in range(3):
        with pytest.raises(GrammarError):
            ours.compile(source(kind, constraint))
    assert ours.num_misses == 1


def test_the_cache_forgets_what_was_used_longest_ago(monkeypatch):
    monkeypatch.setattr("batcher.decoding.constraints.MAX_CACHED", 2)
    ours = compiler()
    for regex in ("a", "b", "a", "c", "a", "b"):
        ours.compile(source("regex", regex))
    assert ours.num_misses == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"json_schema": {}}, ("json_schema", "{}")),
        ({"json_schema": True}, ("json_schema", "true")),
        ({"json_schema": False}, ("json_schema", "false")),
        ({"json_schema": {"b": "é", "a": [1]}}, ("json_schema", '{"b":"é","a":[1]}')),
        ({"choice": ["x", ""]}, ("choice", '["x",""]')),
        ({"regex": ""}, ("regex", "")),
        ({"lark": "start: /a/"}, ("lark", "start: /a/")),
        ({"gbnf": 'root ::= "a"'}, ("gbnf", 'root ::= "a"')),
    ],
)
def test_the_constraint_of_a_request(fields, expected):
    found = constraint_source(Request(prompt="p", **fields))
    assert found == (expected and ConstraintSource(*expected))


def test_without_llguidance_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BatchdecodeError, match=r"pip install 'batchdecode\[grammar\]'"):
        compiler().compile(source("regex", "a"))


def test_half_a_character_in_a_schema_is_refused():
    with pytest.raises(GrammarError, match="half of a surrogate pair") as caught:
        constraint_source(Request(prompt="p", json_schema={"a": [{"const": "\ud800"}]}))
    assert caught.value.path == ("json_schema",)


def chain(num_rules, rule, last):
    return "\n".join([*(rule.format(n, n + 1) for n in range(num_rules)), last.format(num_rules)])


def definitions(num_rules, link):
    names = {f"d{n}": link(f"#/$defs/d{n + 1}") for n in range(num_rules)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{num_rules}": {"type": "null"}}}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "constraint", "output"),
    [
        ("lark", "start: r0\n" + chain(5000, 'r{}: r{} "a"', 'r{}: "b"'), b"b" + b"a" * 5000),
        ("lark", "start: R0\n" + chain(5000, 'R{}: R{} "a"', 'R{}: "b"'), b"b" + b"a" * 5000),
        (
            "gbnf",
            "root ::= r0\n" + chain(3000, 'r{} ::= r{} "a"', 'r{} ::= "b"'),
            b"b" + b"a" * 3000,
        ),
        ("json_schema", definitions(3300, lambda ref: {"$ref": ref}), b"null"),
        ("json_schema", definitions(3300, lambda ref: {"allOf": [{"$ref": ref}]}), b"null"),
        ("json_schema", definitions(2300, lambda ref: {"properties": {"a": {"$ref": ref}}}), b"{}"),
    ],
    ids=["rules", "terminals", "gbnf", "refs", "allOf", "properties"],
)
def test_long_chains_of_rules_are_compiled(kind, constraint, output):
    compiled = compiler().compile(source(kind, constraint))
    row = compiled.new_row()
    assert row.fork().failure is None
    assert language(kind, constraint)(output)


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        ("lark", "start: r0\n" + chain(7_500, "r{}: r{}", 'r{}: "b"')),
        ("gbnf", "root ::= r0\n" + chain(7_500, "r{} ::= r{}", 'r{} ::= "b"')),
        ("json_schema", definitions(7_500, lambda ref: {"$ref": ref})),
    ],
)
def test_a_grammar_that_might_exhaust_the_stack_is_refused(kind, constraint):
    with pytest.raises(GrammarError, match="more than 7,000 rules and braces") as caught:
        compiler().compile(source(kind, constraint))
    assert caught.value.path == (kind,)


SLOW = source("json_schema", {"multipleOf": 99_999})  # a second, 50 MB
HUGE = source("json_schema", {"multipleOf": 99_999_999})
GOOD = source("regex", "[ab]+")


@pytest.fixture
def fresh():
    """Trials that remember nothing."""
    own = Trials()
    yield own
    own.close()


def test_what_takes_too_long_is_refused_and_the_next_one_is_not(fresh):
    message = "it takes more than 0.1 seconds to compile; see --grammar-timeout"
    with pytest.raises(GrammarError, match=message) as caught:
        fresh.make(SLOW, 0.1)
    assert caught.value.path == ("json_schema",)
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)


@pytest.mark.heavy
def test_what_takes_too_much_memory_is_refused_and_the_next_one_is_not(fresh):
    with pytest.raises(GrammarError, match="it takes more than 128 MiB of memory to compile"):
        fresh.make(HUGE, 100)
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)


def test_a_trial_that_was_interrupted_leaves_no_answer_for_the_next(fresh, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fresh.make(source("regex", "(a"), 10)
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)


def test_a_process_that_has_died_is_replaced(fresh):
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)
    os.kill(fresh._process.pid, 9)
    fresh._process.wait()
    assert fresh.make(source("regex", "c"), 10) == Enforceable(source("regex", "c"))


def test_a_request_without_a_constraint_starts_no_process(monkeypatch):
    monkeypatch.setattr(TRIALS, "make", lambda *_: pytest.fail("tried"))
    assert decode([Request(prompt="a"), Request(prompt="b", temperature=1.0, stop=".")])
