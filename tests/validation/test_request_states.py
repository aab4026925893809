"""The states of a request, checked when it is read."""

import pytest

from batcher.request import Request, Transition
from batcher.requests.validation import (
    MAX_NAME,
    MAX_STOP_LENGTH,
    ModelCapabilities,
    find_problems,
    initial_state_of,
)

CAPABILITIES = ModelCapabilities(vocab_size=512)
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


GOOD = [
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


@pytest.mark.parametrize("states", GOOD, ids=str)
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
