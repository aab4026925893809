"""What a request may hold, checked on requests built by hand."""

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
from batcher.request import MAX_INT, Request
from batcher.validation import MAX_STOP_LENGTH, find_problems

VOCAB_SIZE = 512

GOOD = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": "漢字 \U0001f600"},
    {"prompt": [0, 511]},
    {"prompt": "a", "id": "b"},
    {"prompt": "a", "max_tokens": 0},
    {"prompt": "a", "max_tokens": MAX_INT, "priority": -MAX_INT},
    {"prompt": "a", "stop_token": 0},
    {"prompt": "a", "stop_token": [511, 0]},
    {"prompt": "a", "stop_sequence": [1, 2]},
    {"prompt": "a", "stop_sequence": [[1, 2], [3]]},
    {"prompt": "a", "stop_sequence": "x"},
    {"prompt": "a", "stop_sequence": ["x", "y"]},
    {"prompt": "a", "stop": "x", "stop_token": 1, "stop_sequence": [2]},
    {"prompt": "a", "stop": ["x" * 512, "y" * 512]},
    {"prompt": "a", "stop_sequence": [1] * MAX_STOP_LENGTH},
    {"prompt": "a", "arrival_time": 5},
    {"prompt": "a", "arrival_time": 1e15, "ignore_eos": True},
]

# (the request, the code and the field of its only problem)
BAD = [
    ({"prompt": 5}, "invalid-type", "prompt"),
    ({"prompt": None}, "invalid-type", "prompt"),
    ({"prompt": (1, 2)}, "invalid-type", "prompt"),
    ({"prompt": b"abc"}, "invalid-type", "prompt"),
    ({"prompt": np.array([1, 2])}, "invalid-type", "prompt"),
    ({"prompt": [1, np.int64(2)]}, "invalid-type", "prompt[1]"),
    ({"prompt": [1, True]}, "invalid-type", "prompt[1]"),
    ({"prompt": [1.0]}, "invalid-type", "prompt[0]"),
    ({"prompt": [1, "a"]}, "invalid-type", "prompt[1]"),
    ({"prompt": [3, -1]}, "unknown-token", "prompt[1]"),
    ({"prompt": [3, 512, 513]}, "unknown-token", "prompt[1]"),
    ({"prompt": [10**400]}, "unknown-token", "prompt[0]"),
    ({"prompt": "a\ud800"}, "invalid-text", "prompt"),
    ({"prompt": ["\ud800"]}, "invalid-type", "prompt[0]"),
    ({"prompt": "", "id": 7}, "invalid-type", "id"),
    ({"prompt": "", "id": "\udfff"}, "invalid-text", "id"),
    ({"prompt": "", "max_tokens": -1}, "invalid-value", "max_tokens"),
    ({"prompt": "", "arrival_time": 1.7e18}, "invalid-value", "arrival_time"),
    ({"prompt": "", "max_tokens": MAX_INT + 1}, "invalid-value", "max_tokens"),
    ({"prompt": "", "max_tokens": 1.0}, "invalid-type", "max_tokens"),
    ({"prompt": "", "max_tokens": True}, "invalid-type", "max_tokens"),
    ({"prompt": "", "max_tokens": None}, "invalid-type", "max_tokens"),
    ({"prompt": "", "stop_token": 512}, "unknown-token", "stop_token"),
    ({"prompt": "", "stop_token": True}, "invalid-type", "stop_token"),
    ({"prompt": "", "stop_token": "a"}, "invalid-type", "stop_token"),
    ({"prompt": "", "stop_token": {1}}, "invalid-type", "stop_token"),
    ({"prompt": "", "stop_token": []}, "invalid-value", "stop_token"),
    ({"prompt": "", "stop_token": [1, -1]}, "unknown-token", "stop_token[1]"),
    ({"prompt": "", "stop_token": [1] * 1025}, "invalid-value", "stop_token"),
    ({"prompt": "", "stop_sequence": []}, "invalid-value", "stop_sequence"),
    ({"prompt": "", "stop_sequence": ""}, "invalid-value", "stop_sequence"),
    ({"prompt": "", "stop_sequence": [[1], []]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": ["a", ""]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": [1, "a"]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": [[1], 2]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": ["a", [1]]}, "invalid-value", "stop_sequence[1]"),
    ({"prompt": "", "stop_sequence": [1.5]}, "invalid-type", "stop_sequence[0]"),
    ({"prompt": "", "stop_sequence": [(1, 2)]}, "invalid-type", "stop_sequence[0]"),
    ({"prompt": "", "stop_sequence": [[1, 512]]}, "unknown-token", "stop_sequence[0][1]"),
    ({"prompt": "", "stop_sequence": 5}, "invalid-type", "stop_sequence"),
    ({"prompt": "", "stop_sequence": np.array(["", "a"])}, "invalid-type", "stop_sequence"),
    ({"prompt": "", "stop": ""}, "invalid-value", "stop"),
    ({"prompt": "", "stop": []}, "invalid-value", "stop"),
    ({"prompt": "", "stop": ["a", ""]}, "invalid-value", "stop[1]"),
    ({"prompt": "", "stop": ["a", 1]}, "invalid-type", "stop[1]"),
    ({"prompt": "", "stop": "\ud800"}, "invalid-text", "stop"),
    ({"prompt": "", "stop": ["é" * 2049]}, "invalid-value", "stop"),
    ({"prompt": "", "ignore_eos": 1}, "invalid-type", "ignore_eos"),
    ({"prompt": "", "arrival_time": math.nan}, "invalid-value", "arrival_time"),
    ({"prompt": "", "arrival_time": math.inf}, "invalid-value", "arrival_time"),
    ({"prompt": "", "arrival_time": 10**500}, "invalid-value", "arrival_time"),
    ({"prompt": "", "arrival_time": -0.5}, "invalid-value", "arrival_time"),
    ({"prompt": "", "arrival_time": "1"}, "invalid-type", "arrival_time"),
    ({"prompt": "", "arrival_time": False}, "invalid-type", "arrival_time"),
    ({"prompt": "", "priority": 2**31}, "invalid-value", "priority"),
    ({"prompt": "", "priority": 0.5}, "invalid-type", "priority"),
]


@pytest.mark.parametrize("fields", GOOD, ids=repr)
def test_good_requests_have_no_problems(fields):
    assert find_problems(Request(**fields), VOCAB_SIZE) == []


@pytest.mark.parametrize(("fields", "code", "field"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_request_has_its_problem(fields, code, field):
    problems = find_problems(Request(**fields), VOCAB_SIZE)
    assert [(problem.code, problem.field) for problem in problems] == [(code, field)]


def test_all_problems_are_found():
    request = Request(prompt=[600], max_tokens=-1, stop="", stop_token=[], ignore_eos=None)
    fields = [problem.field for problem in find_problems(request, VOCAB_SIZE)]
    assert fields == ["prompt[0]", "max_tokens", "stop_token", "stop", "ignore_eos"]


def test_the_stops_are_measured_together():
    stops = {"stop_token": [1] * 200, "stop_sequence": [[2] * 600], "stop": "é" * 112}
    assert find_problems(Request(prompt="", **stops), None) == []
    (problem,) = find_problems(Request(prompt="", **stops | {"stop": "é" * 112 + "a"}), None)
    assert problem.field == "stop_sequence"
    assert "1025" in problem.message


def test_without_a_vocabulary_any_31_bit_id_will_do():
    assert find_problems(Request(prompt=[MAX_INT], stop_token=MAX_INT), None) == []
    assert find_problems(Request(prompt=[MAX_INT + 1]), None) != []


def test_messages_name_the_field_and_what_is_allowed():
    (problem,) = find_problems(Request(prompt=[5, 600]), VOCAB_SIZE)
    assert problem.message == "`prompt[1]` must be a token id from 0 to 511, not 600"


def test_a_number_in_quotes_gets_a_hint():
    (problem,) = find_problems(Request(prompt="", max_tokens="12"), VOCAB_SIZE)
    assert problem.hint == "remove the quotes"


def test_no_message_grows_with_the_value():
    for value in ("x" * 10**6, 10**4000, [1] * 10**6, {"a": 1}):
        (problem,) = find_problems(Request(prompt="", priority=value), VOCAB_SIZE)
        assert len(problem.message) < 200


def test_lists_that_hold_themselves_end():
    endless = [1]
    endless.append(endless)
    assert find_problems(Request(prompt=endless, stop_sequence=[endless], stop=endless), 5)


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
    for problem in find_problems(Request(**fields), 6):
        assert problem.code in ERROR_CODES
        assert problem.path[0] in fields
        assert problem.message


def test_every_code_in_the_sources_has_its_meaning_written_down():
    folders = [Path(package.__file__).parent for package in (batcher, cli)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    sources = "".join(path.read_text() for path in files if path.name != "errors.py")
    used = set(re.findall(r'(?:FieldProblem|JsonError|ErrorInfo|_wrong)\(\s*"([a-z-]+)"', sources))
    assert len(used) > 5
    assert used <= ERROR_CODES.keys()
    assert {code for code in ERROR_CODES if f'"{code}"' not in sources} == set()
