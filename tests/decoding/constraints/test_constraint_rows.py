"""What a constrained row allows: exactly the tokens that keep the constraint, EOS where it ends."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from constrained import (
    NUM_WORDS,
    compiler,
    follow,
    forced_token,
    ids_allowed,
    may_end,
    must_end,
    random_outputs,
    source,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.decoding import constraints, grammars
from batcher.decoding.constraints import allowed_tokens
from batcher.decoding.verification import Look
from batcher.errors import InvariantError
from batcher.models.tokenizers import EOS_TOKEN_ID, byte_id

TINY = [b"", b"a", b"b", b"ab", b"ba", b"a", b"abc", b"c", b"\xc3", b"\xa9", b"\xc3\xa9", b""]


def row_of(kind, constraint, token_bytes=None, **settings):
    settings |= {} if token_bytes is None else {"token_bytes": token_bytes}
    return compiler(**settings).compile(source(kind, constraint)).new_row()


CHOICES = st.lists(st.text("abé", max_size=4), min_size=1, max_size=4, unique=True)


@settings(deadline=None)  # the first constraint starts a process
@given(CHOICES, st.data())
def test_a_mask_holds_the_tokens_that_brute_force_finds(choices, data):
    """With tokens twice in the vocabulary, tokens that are halves of characters, and more bits."""
    row = row_of("choice", choices, TINY, vocab_size=40)
    whole = [choice.encode() for choice in choices]
    output = b""
    while True:
        expected = {
            token_id
            for token_id, token in enumerate(TINY)
            if token and any(choice.startswith(output + token) for choice in whole)
        }
        is_whole = output in whole
        assert set(ids_allowed(row, 40)) == expected | ({0} if is_whole else set())
        assert may_end(row) == is_whole
        assert must_end(row) == (is_whole and not expected)
        assert forced_token(row) == (min(expected) if len(expected) == 1 and not is_whole else None)
        assert row.failure is None
        if not expected:
            return
        token = data.draw(st.sampled_from(sorted(expected)))
        row.advance(token)
        output += TINY[token]


def test_without_an_eos_token_a_row_at_its_end_allows_nothing():
    row = row_of("regex", "ab?", [b"x", b"a", b"b"], vocab_size=9, eos_token_ids=())
    assert ids_allowed(row, 9) == [1]
    row.advance(1)
    assert (ids_allowed(row, 9), may_end(row), must_end(row)) == ([2], True, False)
    row.advance(2)
    assert (ids_allowed(row, 9), may_end(row), must_end(row), row.failure) == ([], True, True, None)


def test_an_eos_beyond_the_tokenizer_ends_outputs():
    row = row_of("regex", "a", [b"a"], vocab_size=70, eos_token_ids=(65,))
    assert ids_allowed(row, 70) == [0]
    row.advance(0)
    assert ids_allowed(row, 70) == [65]


def test_tokens_without_text_and_broken_ones_are_never_allowed():
    tokens = [b"", b"a", b"", b"\xff", b"\xff[2]", b"\x00"]
    row = row_of("regex", r"(?s:.)*", tokens)
    assert ids_allowed(row, 6) == [0, 1, 5]


@pytest.mark.parametrize("token", [0, 2, 11, 5000])
def test_a_token_that_is_not_allowed_is_a_bug_of_the_caller(token):
    row = row_of("regex", "a|", TINY)
    with pytest.raises(InvariantError, match=f"not allow token {token}"):
        row.advance(token)


def test_a_row_without_a_way_out_says_why_and_allows_nothing():
    row = row_of("lark", 'start: "a" x\nx: "b" | /[^\\s\\S]/ "c"', [b"", b"a", b"c"])
    row.advance(1)
    assert ids_allowed(row, 3) == []
    assert not may_end(row)
    assert not must_end(row)
    assert forced_token(row) is None
    assert row.failure == "the grammar allows nothing here"


@pytest.mark.parametrize("least", [0, constraints.MIN_POOLED_VOCABULARY])
def test_masks_of_many_rows_are_those_of_each_row_alone(monkeypatch, least):
    monkeypatch.setattr(constraints, "MIN_POOLED_VOCABULARY", least)
    words = compiler()
    kinds = [("regex", "[a-z]+"), ("choice", ["x", "yes"]), ("json_schema", True)]
    made = [words.compile(source(*kind)).new_row() for kind in kinds * 3]
    follow(made[4], "y")
    follow(made[6], "qed")
    masks = allowed_tokens(made, NUM_WORDS)
    assert masks.shape == (9, NUM_WORDS)
    assert masks.dtype == np.bool_
    assert masks.flags.c_contiguous
    for row, mask in zip(made, masks, strict=True):
        assert mask.nonzero()[0].tolist() == ids_allowed(row)
    assert allowed_tokens([], NUM_WORDS).shape == (0, NUM_WORDS)


@pytest.mark.parametrize(
    ("kind", "constraint", "regex"),
    [
        ("regex", "( the cat| the)?( on the mat)*[.!]", "( the cat| the)?( on the mat)*[.!]"),
        ("choice", [" the cat", " the", "cat é"], "( the cat| the|cat é)"),
        ("lark", 'start: (" the" | /[a-e]/)+ "."', "( the|[a-e])+[.]"),
        ("gbnf", 'root ::= " t" root | "he" root | [.]', "( t|he)*[.]"),
        ("gbnf", 'root ::= (" the" | [a-e])+ "."', "( the|[a-e])+[.]"),
    ],
)
def test_random_outputs_of_words_and_bytes_keep_their_constraint(kind, constraint, regex):
    compiled = compiler().compile(source(kind, constraint))
    outputs = random_outputs(compiled, 40, seed=5)
    assert len(set(outputs)) > 2
    for output in outputs:
        assert re.fullmatch(regex, output.decode())
        assert compiled.verifier.look(output).problem is None


GRAMMARS = [
    ("choice", ["the cat sat", "the cat ran", "a dog", "the catalogue"]),
    ("choice", ["the book is", "the boat is", "a dog"]),  # " book" goes on where " bo" is forced
    ("regex", r"(item [0-9]: (yes|no), the cat sat on the mat\n){2,3}"),
    ("regex", r" ?[a-f]+(é|è)?"),
    ("json_schema", {"type": "object", "properties": {"a": {"enum": [1, "two"]}, "b": {}}}),
    ("gbnf", 'root ::= "(" (" "? root)+ ")" | [a-c]+'),
]


def plain_mask(matcher):
    """The ids that llguidance allows next, asked for nothing but that."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [token for token in range(NUM_WORDS) if bits >> token & 1]


def check_walk(compiled, matcher, rng, num_tokens):
    """Let a row, and forks of it, go on at random beside a matcher that reads every token."""
    row = compiled.new_row()
    for _ in range(num_tokens):
        allowed = plain_mask(matcher)
        assert ids_allowed(row) == allowed
        forced = row.forced_tokens(rng.choice([1, 3, 100]))
        assert bool(forced) == (len(allowed) == 1 and allowed != [EOS_TOKEN_ID])
        if forced and rng.random() < 0.8:
            taken = forced[: rng.randint(1, len(forced))]
            for token in taken:
                assert plain_mask(matcher) == [token]
                matcher.consume_token(token)
            row.advance_forced(len(taken))
            continue
        if rng.random() < 0.2:
            row = row.fork()
        tokens = [token for token in allowed if token != EOS_TOKEN_ID]
        if not tokens:
            break
        token = rng.choice(tokens)
        matcher.consume_token(token)
        row.advance(token)


@pytest.mark.parametrize("run", [1, 3, constraints.MAX_RUN])
@pytest.mark.parametrize(("kind", "constraint"), GRAMMARS)
def test_rows_allow_what_llguidance_allows(monkeypatch, kind, constraint, run):
    monkeypatch.setattr(constraints, "MAX_RUN", run)
    words = compiler()
    compiled = words.compile(source(kind, constraint))
    alone = grammars.compile_source(words._llguidance_tokenizer, source(kind, constraint))
    rng = random.Random(kind)
    for _ in range(5):
        check_walk(compiled, alone.deep_copy(), rng, 60)


@pytest.mark.parametrize(
    ("kind", "constraint", "message"),
    [
        ("lark", 'start: e\ne: e e | "a" | "b"', "Parser Error: Current row has 3"),
        pytest.param(
            *("json_schema", {"type": "string", "minLength": 1_000_000}),
            "lexer error: too many states",
            marks=pytest.mark.heavy,
        ),
    ],
)
def test_a_row_that_reaches_a_limit_fails_alone(kind, constraint, message, monkeypatch):
    monkeypatch.setattr(grammars, "_MIN_ITEMS", 300)
    row = row_of(kind, constraint)
    while row.failure is None:
        row.advance(next(token for token in reversed(ids_allowed(row)) if token))
    assert row.failure.startswith(message)
    assert (row.packed_mask(), forced_token(row)) == (b"", None)


def test_a_schema_of_many_optional_properties_is_followed():
    properties = {f"p{number}": {"type": "integer"} for number in range(600)}
    compiled = compiler().compile(source("json_schema", {"properties": properties}))
    row = follow(compiled.new_row(), '{"p7":1,"p599":2}')
    assert may_end(row)
    assert row.failure is None
    assert compiled.verifier.look(b'{"p7":1,"p599":2}') == Look(problem=None)


def test_a_grammar_with_many_choices_may_have_long_rows():
    rules = " | ".join(f"r{number}" for number in range(700))
    lines = [f'r{number}: "{number}" "x" | "{number}" "y"' for number in range(700)]
    row = row_of("lark", "\n".join([f"start: rest+\nrest: {rules}", *lines]))
    follow(row, "7x699y")
    assert may_end(row)


NUM_OUTPUTS = 20  # of each schema
# What ends a string, an object or an array is drawn more often, or outputs would not end.
WEIGHTS = {byte_id('"'): 40, byte_id("}"): 40, byte_id("]"): 20, EOS_TOKEN_ID: 60}

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 12}, "number": {"type": "integer"}},
    "required": ["street", "number"],
    "additionalProperties": False,
}
SCHEMAS = [
    {"type": "object", "properties": {"to": ADDRESS, "from": ADDRESS}, "required": ["to"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
    {"const": {"kind": "fixed", "values": [1, 2.5, "é"]}},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}( [0-9]+)?$"},
    {"type": "array", "items": {"type": "string", "format": "uuid"}, "minItems": 1, "maxItems": 2},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 3.25},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {
                "type": "object",
                "properties": {"k": {"const": "b"}, "n": {"type": "integer"}},
                "required": ["k", "n"],
            },
        ]
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "object", "properties": {"größe": {"enum": ["é", "€", "😀"]}}, "required": ["größe"]},
    {"type": "string", "maxLength": 30, "pattern": r"^(?:\S+\s+){0,5}\S+$"},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "maximum": 12.5},
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,2}$": {"type": "null"}, "^[^a-z]": {"const": 0.1}},
        "additionalProperties": False,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_output_parses_and_keeps_its_schema(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    constraint = compiler().compile(source("json_schema", schema))
    outputs = random_outputs(constraint, NUM_OUTPUTS, seed=len(str(schema)), weights=WEIGHTS)
    assert len(outputs) == NUM_OUTPUTS
    for output in outputs:
        validator.validate(json.loads(output.decode()))
        assert constraint.verifier.look(output) == Look(problem=None)


def test_outputs_have_no_white_space_unless_the_schema_asks_for_it():
    plain = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    spaced = plain | {"x-guidance": {"item_separator": ", "}}
    assert random_outputs(compiler().compile(source("json_schema", plain)), 1, 0) == [b"[1,1]"]
    assert random_outputs(compiler().compile(source("json_schema", spaced)), 1, 0) == [b"[1, 1]"]
