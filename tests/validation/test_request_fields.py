"""What each field of a request may hold, checked on requests built by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batcher
import cli
from batcher.errors import ERROR_CODES
from batcher.request import MAX_INT, REQUEST_FIELDS, Request, Transition
from batcher.requests.validation import (
    MAX_BAD_WORDS_LENGTH,
    MAX_NAME,
    MAX_STOP_LENGTH,
    ModelCapabilities,
    find_problems,
    initial_state_of,
    quick_copy,
)

CAPABILITIES = ModelCapabilities(vocab_size=512)
RANGES = {name: field.range for name, field in REQUEST_FIELDS.items() if field.range}
ANY_TOKEN = ModelCapabilities()

GOOD = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": "漢字 \U0001f600"},
    {"prompt": [0, 511]},
    {"prompt": "a", "stop_token": [511, 0]},
    {"prompt": "a", "stop": "x", "stop_token": 1, "stop_sequence": [2]},
    {"prompt": "a", "stop": ["x" * 512, "y" * 512]},
    {"prompt": "a", "stop_sequence": [1] * MAX_STOP_LENGTH},
    {"prompt": "a", "arrival_time": 1e15, "ignore_eos": True},
    {"prompt": "a", "temperature": 0.7, "top_k": -1, "top_p": 0, "min_p": 1, "typical_p": 0.5},
    {"prompt": "a", "temperature": 100, "mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 1},
    {"prompt": "a", "top_k": 600, "top_p": 0.5, "min_p": 0.1},  # greedy: without effect
    {"prompt": "a", "logit_bias": {"0": -100, "511": 100.0}},
    {"prompt": "a", "bad_words": ["é" * (MAX_BAD_WORDS_LENGTH // 2)]},
    {"prompt": "a", "seed": -(2**63)},
    {"prompt": "a", "seed": 2**63 - 1, "temperature": 1, "n": 1024, "best_of": 1024},
    {"prompt": "a", "logprobs": 0, "logprobs_mode": "processed", "echo": True},
    {"prompt": "a", "num_beams": 4, "n": 4, "length_penalty": -0.5, "early_stopping": "never"},
    {"prompt": "a", "arrival_time": 2.5, "deadline": 2.5},
    {"prompt": "a", "deadline": 0, "cache_salt": "é"},
    {"prompt": "a", "session": "s", "think_time": 0.5, "n": 1, "temperature": 1, "echo": True},
]

# (the request, the code and the field of its only problem)
BAD = [
    ({"prompt": (1, 2)}, "invalid-type", "prompt"),
    ({"prompt": np.array([1, 2])}, "invalid-type", "prompt"),
    ({"prompt": [1, np.int64(2)]}, "invalid-type", "prompt[1]"),
    ({"prompt": [1, True]}, "invalid-type", "prompt[1]"),
    ({"prompt": [3, 512, 513]}, "unknown-token", "prompt[1]"),
    ({"prompt": [10**400]}, "unknown-token", "prompt[0]"),
    ({"prompt": "a\ud800"}, "invalid-text", "prompt"),
    ({"prompt": "", "id": "\udfff"}, "invalid-text", "id"),
    ({"prompt": "", "stop_token": 512}, "unknown-token", "stop_token"),
    ({"prompt": "", "stop_token": [1] * 1025}, "invalid-value", "stop_token"),
    ({"prompt": "", "stop_sequence": [[1], []]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": [1, "a"]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": [(1, 2)]}, "invalid-type", "stop_sequence[0]"),
    ({"prompt": "", "stop_sequence": [[1, 512]]}, "unknown-token", "stop_sequence[0][1]"),
    ({"prompt": "", "stop_sequence": np.array(["", "a"])}, "invalid-type", "stop_sequence"),
    ({"prompt": "", "stop": ["a", ""]}, "invalid-value", "stop[1]"),
    ({"prompt": "", "stop": "\ud800"}, "invalid-text", "stop"),
    ({"prompt": "", "stop": ["é" * 2049]}, "invalid-value", "stop"),
    ({"prompt": "", "ignore_eos": 1}, "invalid-type", "ignore_eos"),
    ({"prompt": "", "arrival_time": math.nan}, "invalid-value", "arrival_time"),
    ({"prompt": "", "temperature": None}, "invalid-type", "temperature"),
    ({"prompt": "", "logit_bias": []}, "invalid-type", "logit_bias"),
    ({"prompt": "", "logit_bias": {5: 1}}, "unknown-token", "logit_bias"),
    ({"prompt": "", "logit_bias": {"512": 1}}, "unknown-token", "logit_bias.512"),
    ({"prompt": "", "logit_bias": {"٣": 1}}, "unknown-token", "logit_bias.٣"),
    ({"prompt": "", "logit_bias": {"9" * 5000: 1}}, "unknown-token", "logit_bias"),
    ({"prompt": "", "logit_bias": {"5": math.nan}}, "invalid-value", "logit_bias.5"),
    ({"prompt": "", "allowed_token_ids": []}, "invalid-value", "allowed_token_ids"),
    ({"prompt": "", "allowed_token_ids": [512]}, "unknown-token", "allowed_token_ids[0]"),
    ({"prompt": "", "bad_words": ["a", ""]}, "invalid-value", "bad_words[1]"),
    ({"prompt": "", "bad_words": ["é" * 512, "a"]}, "invalid-value", "bad_words"),
    ({"prompt": "", "logprobs_mode": "other"}, "invalid-value", "logprobs_mode"),
    ({"prompt": "", "early_stopping": "always"}, "invalid-value", "early_stopping"),
    ({"prompt": "", "json_schema": {"a": {1}}}, "invalid-value", "json_schema"),
    ({"prompt": "", "json_schema": {"a": [math.inf]}}, "invalid-value", "json_schema"),
    ({"prompt": "", "regex": "\ud800"}, "invalid-text", "regex"),
    ({"prompt": "", "choice": []}, "invalid-value", "choice"),
    ({"prompt": "", "choice": ["x", None]}, "invalid-type", "choice[1]"),
    ({"prompt": "", "lark": ""}, "invalid-value", "lark"),
    ({"prompt": "", "session": ""}, "invalid-value", "session"),
    ({"prompt": "", "session": "\ud800"}, "invalid-text", "session"),
    ({"prompt": "", "cache_salt": ""}, "invalid-value", "cache_salt"),
]


@pytest.mark.parametrize("fields", GOOD, ids=repr)
def test_good_requests_have_no_problems(fields):
    assert find_problems(Request(**fields), CAPABILITIES) == []


@pytest.mark.parametrize(("fields", "code", "field"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_request_has_its_problem(fields, code, field):
    problems = find_problems(Request(**fields), CAPABILITIES)
    assert [(problem.code, problem.field) for problem in problems] == [(code, field)]


# What a request with this value of the field needs beside it, to be valid.
COMPANY = {
    "top_k": {"temperature": 1},
    "mirostat": {"temperature": 1},
    "mirostat_tau": {"temperature": 1, "mirostat": 1},
    "mirostat_eta": {"temperature": 1, "mirostat": 2},
    "min_tokens": {"max_tokens": MAX_INT},
    "n": {"temperature": 1},
    "best_of": {"temperature": 1},
    "length_penalty": {"num_beams": 2},
    "think_time": {"session": "s"},
}


def step(allowed, number, direction):
    """The next number of the kind that is allowed, upwards or downwards."""
    if allowed.is_integer:
        return number + direction
    return math.nextafter(number, direction * math.inf)


@pytest.mark.parametrize("name", RANGES)
def test_a_number_may_be_anything_in_its_range_and_nothing_outside(name):
    allowed = RANGES[name]
    company = {"prompt": "a"} | COMPANY.get(name, {})
    below, above = step(allowed, allowed.smallest, -1), step(allowed, allowed.largest, 1)
    inside = [allowed.smallest, allowed.largest]
    outside = [below, above]
    if allowed.is_open:
        inside[0], outside[0] = step(allowed, allowed.smallest, 1), allowed.smallest
    for value in inside:
        assert find_problems(Request(**company | {name: value}), CAPABILITIES) == []
    for value in [*outside, 10**400, -(10**400)]:
        problem, *_ = find_problems(Request(**company | {name: value}), CAPABILITIES)
        assert (problem.code, problem.field) == ("invalid-value", name)
        assert f"from {allowed.smallest} to" in problem.message or allowed.is_open


def test_the_fast_way_takes_the_requests_of_every_day():
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 5, "logprobs": 3}
    timed = {"arrival_time": 2, "deadline": 2.5, "priority": 5, "cache_salt": "é"}
    turn = {"session": "s", "think_time": 2}
    for fields in ({}, {"stop": ["a", "b"]}, {"stop_token": [1]}, sampled, timed, turn):
        assert quick_copy(Request(prompt="a", **fields), CAPABILITIES) is not None


def test_a_quick_copy_is_equal_and_has_lists_of_its_own():
    request = Request(prompt=[1, 2], temperature=1, stop_sequence=[[1], [2]])
    copy = quick_copy(request, CAPABILITIES)
    assert copy is not request
    assert all(getattr(copy, n) == getattr(request, n) for n in Request.__struct_fields__)
    assert copy.prompt is not request.prompt
    assert copy.stop_sequence[0] is not request.stop_sequence[0]


def test_a_request_of_a_type_with_other_fields_is_looked_at_closely():
    class Named(Request, frozen=True, kw_only=True):
        name: str = ""

    class Reordered(Request, frozen=True):
        id: str | None = None  # now the first field, since it is not by keyword alone

    for request in (Named(prompt="a", id="b"), Reordered(prompt="a", id="b")):
        assert quick_copy(request, CAPABILITIES) is None
        assert find_problems(request, CAPABILITIES) == []


def test_the_stops_are_measured_together():
    stops = {"stop_token": [1] * 200, "stop_sequence": [[2] * 600], "stop": "é" * 112}
    assert find_problems(Request(prompt="", **stops), ANY_TOKEN) == []
    (problem,) = find_problems(Request(prompt="", **stops | {"stop": "é" * 112 + "a"}), ANY_TOKEN)
    assert problem.field == "stop_sequence"
    assert "1025" in problem.message


def test_messages_name_the_field_and_what_is_allowed():
    (problem,) = find_problems(Request(prompt=[5, 600]), CAPABILITIES)
    assert problem.message == "`prompt[1]` must be a token id from 0 to 511, not 600"


@pytest.mark.parametrize(
    ("field", "value", "is_hinted"),
    [
        ("max_tokens", "12", True),
        ("max_tokens", "1.5", False),
        ("temperature", "0.5", True),
        ("top_p", "high", False),
        ("ignore_eos", "true", True),
        ("ignore_eos", "True", False),
        ("stop_token", "4", True),
    ],
)
def test_what_is_right_but_for_its_quotes_gets_a_hint(field, value, is_hinted):
    (problem,) = find_problems(Request(prompt="", **{field: value}), CAPABILITIES)
    assert problem.hint == ("remove the quotes" if is_hinted else None)


def test_no_message_grows_with_the_value():
    for value in ("x" * 10**6, 10**4000, [1] * 10**6, {"a": 1}):
        (problem,) = find_problems(Request(prompt="", priority=value), CAPABILITIES)
        assert len(problem.message) < 200


def test_lists_that_hold_themselves_end():
    endless = [1]
    endless.append(endless)
    assert find_problems(
        Request(prompt=endless, stop_sequence=[endless], stop=endless),
        ModelCapabilities(vocab_size=5),
    )


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 8),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from(["\ud800", 10**400, -(2**31), object(), int, np.zeros(2)]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=5,
)


@given(
    st.fixed_dictionaries(
        {"prompt": ANYTHING}, optional=dict.fromkeys(Request.__struct_fields__[1:], ANYTHING)
    )
)
def test_whatever_a_request_holds_problems_are_found_and_nothing_is_raised(fields):
    for problem in find_problems(Request(**fields), ModelCapabilities(vocab_size=6)):
        assert problem.code in ERROR_CODES
        assert problem.path[0] in fields
        assert problem.message


@pytest.mark.parametrize("name", Request.__struct_fields__)
def test_no_field_takes_what_json_has_not(name):
    for value in (np.zeros(2), np.array(["a"]), {1}, b"a", object(), 5j):
        fields = {"prompt": ""} | {name: value}
        problems = find_problems(Request(**fields), CAPABILITIES)
        assert [(p.code, p.field) for p in problems] == [("invalid-type", name)]


def test_every_code_in_the_sources_has_its_meaning_written_down():
    folders = [Path(package.__file__).parent for package in (batcher, cli)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    sources = "".join(path.read_text() for path in files if path.name != "errors.py")
    used = set(re.findall(r'(?:FieldProblem|JsonError|ErrorInfo|wrong)\(\s*"([a-z-]+)"', sources))
    assert len(used) > 5
    assert used <= ERROR_CODES.keys()
    assert {code for code in ERROR_CODES if f'"{code}"' not in sources} == set()


# States

THINKING = {
    "normal": [Transition("<think>", "reasoning")],
    "reasoning": [Transition("</think>", "normal")],
    "*": [Transition("<tool>", "tool")],
    "tool": [Transition([5, 6], None)],
}


def problems_of(states, **fields):
    return find_problems(Request(prompt="", states=states, **fields), CAPABILITIES)


def summary(states, **fields):
    return [(problem.code, problem.field) for problem in problems_of(states, **fields)]


GOOD_STATES = [
    THINKING,
    {"a": []},
    {"a": [Transition("x", "a"), Transition([1], "a"), Transition([1, 2], None)]},
    {"a": [Transition("x", "b")], "b": [Transition("x", "a")]},  # each has the marker once
    {"x" * MAX_NAME: []},
]


def test_without_a_state_it_is_said_what_is_one():
    (empty,) = problems_of({})
    assert (empty.message, empty.hint) == (
        "`states` declares no state",
        'add one, such as "text": []',
    )
    first, second = problems_of({"*": [Transition("x", "a")]})
    assert first.hint == '"*" is not a state: add one, such as "text": []'
    assert second.message == '`states.*[0].to` "a" is not declared; no state is'


@pytest.mark.parametrize("states", GOOD_STATES, ids=str)
def test_good_states_have_no_problems(states):
    assert summary(states) == []


@pytest.mark.parametrize(
    ("states", "code", "field"),
    [
        ([], "invalid-type", "states"),
        ({"*": []}, "invalid-value", "states"),
        ({"a": [], "": []}, "invalid-value", "states"),
        ({"a": [], 5: []}, "invalid-value", "states"),
        ({"x" * (MAX_NAME + 1): []}, "invalid-value", "states"),
        ({"a": None}, "invalid-type", "states.a"),
        ({"a": [Transition("x", None), 5]}, "invalid-type", "states.a[1]"),
        ({"a": [Transition("", None)]}, "invalid-value", "states.a[0].on"),
        ({"a": [Transition(5, None)]}, "invalid-type", "states.a[0].on"),
        ({"a": [Transition("\ud800", None)]}, "invalid-text", "states.a[0].on"),
        ({"a": [Transition([1, 512], None)]}, "unknown-token", "states.a[0].on[1]"),
        ({"a": [Transition("x", "b")]}, "invalid-value", "states.a[0].to"),
        ({"a": [Transition("x", "*")], "*": []}, "invalid-value", "states.a[0].to"),
        ({"a": [Transition("x", "a"), Transition("x", None)]}, "invalid-value", "states.a[1].on"),
        (
            {"a": [Transition("x", None)], "*": [Transition("x", "a")]},
            "invalid-value",
            "states.a[0].on",
        ),
        (
            {"a": [], "*": [Transition("x", "a"), Transition("x", None)]},
            "invalid-value",
            "states.*[1].on",
        ),
        ({"a": [], "b": [Transition("x", "b")]}, "invalid-value", "states.b"),
        ({"a": [Transition("x" * (MAX_STOP_LENGTH + 1), None)]}, "invalid-value", "states"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_states_have_their_problem(states, code, field):
    assert summary(states) == [(code, field)]


def test_no_message_grows_with_the_number_of_states():
    states = {str(number): [] for number in range(3000)} | {"a": [Transition("x", "y" * 10**6)]}
    problem = problems_of(states)[0]
    assert len(problem.message) < 200
    assert "and 2993 more" in problem.message


def test_the_first_state_is_the_initial_one_unless_another_is_named():
    assert initial_state_of(Request(prompt="", states={"*": [], "b": [], "a": []})) == "b"
    assert initial_state_of(Request(prompt="", states=THINKING, initial_state="tool")) == "tool"
    assert initial_state_of(Request(prompt="")) is None


def test_states_are_reached_from_the_initial_one():
    chain = {"a": [Transition("x", "b")], "b": [Transition("y", "c")], "c": []}
    assert summary(chain) == []
    problems = problems_of(chain, initial_state="b")
    assert [(problem.field, problem.is_key) for problem in problems] == [("states.a", True)]
    assert problems[0].message == 'state "a" can never be reached from "b"'


@pytest.mark.parametrize("name", ["z", "*", ""])
def test_the_initial_state_is_a_declared_one(name):
    states = {"a": [], "*": [Transition("x", None)]}
    assert summary(states, initial_state=name) == [("invalid-value", "initial_state")]
