"""Fields that contradict each other, and what a model or a batch cannot do."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError, GrammarError
from batcher.request import CONSTRAINT_FIELDS, REQUEST_FIELDS, Request, Transition
from batcher.requests.validation import (
    ModelCapabilities,
    find_problems,
    logit_fields_of,
    look_closely,
    num_slots_needed,
    quick_copy,
)

EXCLUSIONS = [
    (name, other, why)
    for name, field in REQUEST_FIELDS.items()
    for other, why in field.excludes.items()
]
NEEDS = [(name, *field.needs) for name, field in REQUEST_FIELDS.items() if field.needs]
SAMPLED = {"temperature": 1.0}
BEAMS = {"num_beams": 4}
CONSTRAINTS = {
    "json_schema": True,
    "regex": "a",
    "choice": ["a"],
    "lark": "start: /a/",
    "gbnf": 'root ::= "a"',
}

# (the fields, the fields that are blamed)
CONFLICTS = [
    (BEAMS | {"n": 5}, ["n"]),
    ({"early_stopping": "never"}, ["early_stopping"]),
    ({"n": 2, "best_of": 3}, ["n", "best_of"]),
    (SAMPLED | {"n": 3, "best_of": 2}, ["best_of"]),
    ({"mirostat": 2}, ["mirostat"]),
    ({"min_tokens": 17}, ["min_tokens"]),
    ({"min_tokens": 1, "max_tokens": 0}, ["min_tokens"]),
    (CONSTRAINTS, ["regex", "choice", "lark", "gbnf"]),
    ({"prompt": "", "heal": True}, ["heal"]),
    ({"arrival_time": 5, "deadline": 4.5}, ["deadline"]),
]

HARMONIES = [
    BEAMS | {"n": 4, "top_k": -1, "early_stopping": True, "length_penalty": 0},
    SAMPLED | {"n": 3, "best_of": 3},
    SAMPLED | {"mirostat": 1, "top_k": -1},
    {"max_tokens": 5, "min_tokens": 5},
    {"cfg_scale": 2, "negative_prompt": ""},
    {"logprobs": 0, "logprobs_mode": "processed"},
    {"prompt": [5], "heal": True},
    {"session": "s", "max_tokens": 0, "logprobs": 2, "regex": "a"},
    {"session": "s", "arrival_time": 5, "deadline": 5, "think_time": 9, "cache_salt": "x"},
]


# A value of each field that asks for something, and what it needs beside it to be of effect.
ASKING = {
    "max_tokens": {"max_tokens": 3},
    "stop_token": {"stop_token": 5},
    "stop_sequence": {"stop_sequence": [5, 6]},
    "stop": {"stop": "x"},
    "ignore_eos": {"ignore_eos": True},
    "arrival_time": {"arrival_time": 1.0},
    "priority": {"priority": 1},
    "deadline": {"deadline": 9.0},
    "session": {"session": "s"},
    "think_time": {"think_time": 1.0, "session": "s"},
    "cache_salt": {"cache_salt": "x"},
    "temperature": SAMPLED,
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "mirostat": {"mirostat": 1} | SAMPLED,
    "mirostat_tau": {"mirostat_tau": 3.0, "mirostat": 1} | SAMPLED,
    "mirostat_eta": {"mirostat_eta": 0.5, "mirostat": 1} | SAMPLED,
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 1.0},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "bad_words": {"bad_words": ["x"]},
    "min_tokens": {"min_tokens": 2},
    "cfg_scale": {"cfg_scale": 2.0},
    "negative_prompt": {"negative_prompt": "x", "cfg_scale": 2.0},
    "seed": {"seed": 3},
    "n": {"n": 2} | SAMPLED,
    "best_of": {"best_of": 2} | SAMPLED,
    "logprobs": {"logprobs": 1},
    "logprobs_mode": {"logprobs_mode": "processed", "logprobs": 1},
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "num_beams": BEAMS,
    "length_penalty": {"length_penalty": 2.0} | BEAMS,
    "early_stopping": {"early_stopping": True} | BEAMS,
    "heal": {"heal": True},
    "states": {"states": {"a": [Transition("x", None)]}},
    "initial_state": {"states": {"a": [Transition("x", None)]}, "initial_state": "a"},
    "speculate": {"speculate": False},
    "draft_tokens": {"draft_tokens": 2},
    **{name: {name: value} for name, value in CONSTRAINTS.items()},
}


def test_every_field_is_among_those_that_ask():
    beside = {"id", "prompt", "extra_body"}  # the last is for servers alone
    assert beside | ASKING.keys() == set(Request.__struct_fields__)


def test_of_every_pair_of_fields_those_in_the_table_are_refused_and_no_others():
    excluded = {frozenset((name, other)): name for name, other, _ in EXCLUSIONS}
    for one, other in itertools.combinations(ASKING, 2):
        fields = ASKING[one] | ASKING[other]
        pairs = map(frozenset, itertools.combinations(fields, 2))
        assert set(blamed(fields)) == {excluded[pair] for pair in pairs if pair in excluded}, fields


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need[0])
def test_a_field_needs_those_without_which_it_has_no_effect(need):
    needed, other, _ = need
    fields = {name: value for name, value in ASKING[needed].items() if name != other}
    assert needed in blamed(fields)


def rows_of(heading):
    """The rows of a table in the docs, one for each pair of fields."""
    page = (Path(__file__).parents[2] / "docs" / "reference/requests-and-results.md").read_text()
    table = page.split(f"| {heading} |\n", 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[1:]:
        names, others, text = line.strip("| ").split(" | ")
        for name, other in itertools.product(names.split(", "), others.split(", ")):
            yield name.strip("`"), other.strip("`"), text


def test_the_docs_have_every_pair():
    assert sorted(rows_of("field | with | reason")) == sorted(EXCLUSIONS)
    assert sorted(rows_of("field | without | remedy")) == sorted(NEEDS)


def blamed(fields):
    problems = find_problems(Request(**{"prompt": "a"} | fields), ModelCapabilities(vocab_size=512))
    assert all(problem.code == "conflicting-fields" for problem in problems)
    assert all(f"`{problem.field}`" in problem.message for problem in problems)
    return [problem.field for problem in problems]


@pytest.mark.parametrize(("fields", "names"), CONFLICTS, ids=lambda value: str(value)[:50])
def test_a_contradiction_is_a_problem_of_one_of_its_fields(fields, names):
    assert blamed(fields) == names
    assert quick_copy(Request(**{"prompt": "a"} | fields), ModelCapabilities()) is None


@pytest.mark.parametrize("fields", HARMONIES, ids=repr)
def test_what_goes_together_has_no_problem(fields):
    assert blamed(fields) == []


def test_a_field_that_is_wrong_by_itself_contradicts_nothing():
    request = Request(prompt="", max_tokens=-1, min_tokens=20, n="2", num_beams=0, mirostat=1)
    problems = find_problems(request, ModelCapabilities())
    assert [(p.code, p.field) for p in problems] == [
        ("invalid-value", "max_tokens"),
        ("invalid-type", "n"),
        ("invalid-value", "num_beams"),
        ("conflicting-fields", "mirostat"),
    ]


FEW = {
    "temperature": st.sampled_from([0.0, 1.0, -1.0]),
    "mirostat": st.sampled_from([0, 2, 3]),
    "top_k": st.sampled_from([0, -1, 5, -2]),
    "top_p": st.sampled_from([1.0, 0.5]),
    "n": st.integers(0, 3),
    "best_of": st.none() | st.integers(0, 3),
    "num_beams": st.integers(0, 3),
    "min_tokens": st.sampled_from([0, 5, 20]),
    "max_tokens": st.sampled_from([5, 20]),
    "logprobs": st.none() | st.integers(-1, 3),
    "logprobs_mode": st.sampled_from(["raw", "processed"]),
    "cfg_scale": st.sampled_from([1.0, 2.0]),
    "negative_prompt": st.sampled_from([None, "x"]),
    "regex": st.sampled_from([None, "x", "\ud800", 5]),
    "choice": st.sampled_from([None, ["x"], [], ["a", 5], "a"]),
    "json_schema": st.sampled_from([None, True, {}, {"const": float("nan")}, [True]]),
    "gbnf": st.sampled_from([None, 'root ::= "a"', ""]),
    "ignore_eos": st.booleans(),
    "heal": st.booleans(),
    "early_stopping": st.sampled_from([False, True, "never"]),
    "seed": st.integers(-5, 5),
    "session": st.sampled_from([None, "s", "", 5, "\ud800"]),
    "think_time": st.sampled_from([0.0, 0, 2.0, -1.0]),
    "arrival_time": st.sampled_from([0.0, 5.0]),
    "deadline": st.sampled_from([None, 0, 3.0, 5, -1.0]),
    "cache_salt": st.sampled_from([None, "s", "", "\ud800"]),
}


@given(st.fixed_dictionaries({"prompt": st.sampled_from(["", "a"])}, optional=FEW), st.booleans())
def test_the_fast_way_accepts_nothing_that_the_slow_way_refuses(fields, gives_logits):
    request, capabilities = (
        Request(**fields),
        ModelCapabilities(vocab_size=512, gives_logits=gives_logits),
    )
    problems = look_closely(request, capabilities)
    assert find_problems(request, capabilities) == problems
    if quick_copy(request, capabilities) is not None:
        assert problems == []


# Values that need no logits, alone or without temperature.
NEEDS_TOKENS = [
    {"seed": 5, "echo": True},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5},
    {"logit_bias": {}, "bad_words": []},
    {"states": {"a": [Transition("x", None)]}},
]


def summary(capabilities, **fields):
    problems = find_problems(Request(**{"prompt": "a"} | fields), capabilities)
    return [(problem.code, problem.field) for problem in problems]


@pytest.mark.parametrize("name", ASKING)
def test_a_field_that_needs_logits_or_an_end_of_sequence_is_refused_without(name):
    fields = ASKING[name]
    needed = [n for n in REQUEST_FIELDS if n in fields and REQUEST_FIELDS[n].needs_logits]
    assert logit_fields_of(Request(prompt="a", **fields)) == needed
    tokens_only = ModelCapabilities(vocab_size=512, gives_logits=False)
    assert summary(tokens_only, **fields) == [("unsupported-model", name) for name in needed]
    assert summary(ModelCapabilities(vocab_size=512), **fields) == []
    expected = [("unsupported-model", name)] if name in CONSTRAINT_FIELDS else []
    assert summary(ModelCapabilities(has_eos=False), **fields) == expected


def test_fields_that_need_tokens_only():
    for fields in NEEDS_TOKENS:
        tokens_only = ModelCapabilities(vocab_size=512, gives_logits=False)
        assert summary(tokens_only, **fields) == []


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
