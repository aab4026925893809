"""What a request asks for that this model, or this batch, cannot give."""

import pytest

from batcher.errors import BatchdecodeError, GrammarError
from batcher.request import CONSTRAINT_FIELDS, REQUEST_FIELDS, Request, Transition
from batcher.requests.validation import (
    ModelCapabilities,
    find_problems,
    logit_fields_of,
    num_slots_needed,
)

TOKENS_ONLY = ModelCapabilities(vocab_size=512, gives_logits=False)


def summary(capabilities, **fields):
    problems = find_problems(Request(**{"prompt": "a"} | fields), capabilities)
    return [(problem.code, problem.field) for problem in problems]


NEEDS_LOGITS = [
    {"temperature": 0.5},
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 1},
    {"presence_penalty": -1},
    {"logit_bias": {"5": 1}},
    {"allowed_token_ids": [5]},
    {"bad_words": ["x"]},
    {"min_tokens": 1},
    {"cfg_scale": 2},
    {"logprobs": 0},
    {"num_beams": 2},
    {"json_schema": {}},
    {"regex": ""},
    {"choice": ["x"]},
    {"lark": "start: /x/"},
    {"gbnf": 'root ::= "x"'},
    {"heal": True},
]
NEEDS_TOKENS = [
    {},
    {"seed": 5, "echo": True},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5},  # of no effect without temperature
    {"logit_bias": {}, "bad_words": []},
    {"states": {"a": [Transition("x", None)]}},
]


def test_each_field_that_needs_logits_is_here():
    assert [name for fields in NEEDS_LOGITS for name in fields] == [
        name for name, field in REQUEST_FIELDS.items() if field.needs_logits
    ]


@pytest.mark.parametrize("fields", NEEDS_LOGITS, ids=repr)
def test_a_model_that_gives_only_tokens_is_told_what_it_cannot_serve(fields):
    (name,) = fields
    assert logit_fields_of(Request(prompt="a", **fields)) == [name]
    assert summary(TOKENS_ONLY, **fields) == [("unsupported-model", name)]
    assert summary(ModelCapabilities(vocab_size=512), **fields) == []


@pytest.mark.parametrize("fields", NEEDS_TOKENS, ids=repr)
def test_everything_else_it_serves(fields):
    assert logit_fields_of(Request(prompt="a", **fields)) == []
    assert summary(TOKENS_ONLY, **fields) == []


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, 1),
        ({"temperature": 1, "n": 8}, 1),
        ({"num_beams": 4, "n": 2}, 4),
        ({"cfg_scale": 0, "temperature": 1, "n": 3}, 2),
    ],
    ids=repr,
)
def test_a_request_needs_its_beams_or_a_sample_and_its_negative_prompt_at_once(fields, needed):
    assert num_slots_needed(Request(prompt="a", **fields)) == needed
    assert summary(ModelCapabilities(num_slots=needed), **fields) == []
    if needed > 1:
        name = "num_beams" if "num_beams" in fields else "cfg_scale"
        few = ModelCapabilities(num_slots=needed - 1)
        [problem] = find_problems(Request(prompt="a", **fields), few)
        assert (problem.code, problem.field) == ("too-few-slots", name)
        assert f" needs {needed} slots at once, and the batch has {needed - 1}" in problem.message


@pytest.mark.parametrize("fields", NEEDS_LOGITS, ids=repr)
def test_a_constraint_needs_an_end_of_sequence_token(fields):
    (name,) = fields
    expected = [("unsupported-model", name)] if name in CONSTRAINT_FIELDS else []
    assert summary(ModelCapabilities(has_eos=False), **fields) == expected


def test_a_constraint_is_compiled_and_says_what_is_wrong_where():
    seen = []

    def check(kind, value):
        seen.append((kind, value))
        if kind == "json_schema":
            raise GrammarError((kind, "properties", "a", "items"), "no such type")
        if value == "(":
            raise GrammarError((kind,), "unbalanced parenthesis at 1")

    capabilities = ModelCapabilities(check_constraint=check)
    assert summary(capabilities, regex="a") == []
    assert summary(capabilities, regex=5) == [("invalid-type", "regex")]
    (problem,) = find_problems(Request(prompt="", regex="("), capabilities)
    assert (problem.code, problem.field) == ("invalid-grammar", "regex")
    assert problem.message == "`regex`: unbalanced parenthesis at 1"
    assert [*dict.fromkeys(seen)] == [("regex", "a"), ("regex", "(")]
    (problem,) = find_problems(Request(prompt="", json_schema={}), capabilities)
    assert problem.message == "`json_schema.properties.a.items`: no such type"


def test_where_nothing_can_be_compiled_a_constraint_cannot_be_served():
    def check(*_):
        raise BatchdecodeError("install batchdecode[grammar]")

    (problem,) = find_problems(
        Request(prompt="", gbnf="x"), ModelCapabilities(check_constraint=check)
    )
    assert (problem.code, problem.field) == ("unsupported-model", "gbnf")
    assert problem.message == "`gbnf`: install batchdecode[grammar]"
