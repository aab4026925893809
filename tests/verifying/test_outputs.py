"""Where two outputs differ, and which differences count."""

import pytest
from msgspec.structs import replace

from batcher.result import (
    ErrorInfo,
    Result,
    Segment,
    StepTimes,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from batcher.verifying import first_difference


def logprob(value, *tops):
    return TokenLogprob(7, value, [TopLogprob(token, number) for token, number in tops])


RESULT = Result(
    id="a",
    index=0,
    text="abc",
    tokens=[1, 2, 3],
    finish_reason="length",
    stop_reason=None,
    usage=Usage(1, 3),
    slot=0,
    steps=StepTimes(0, 0, 0, 2),
    cumulative_logprob=-1.5,
    logprobs=[logprob(-0.5, (7, -0.5), (8, -0.7)), logprob(-0.5), logprob(-0.5)],
    score=-0.5,
)


def difference(**changes):
    return first_difference(["a"], {("a", 0): RESULT}, {("a", 0): replace(RESULT, **changes)})


def test_slots_steps_and_usage_do_not_count():
    assert difference(slot=3, steps=StepTimes(5, 6, 7, 9)) is None


@pytest.mark.parametrize(
    ("changes", "field", "position"),
    [
        ({"tokens": [1, 5, 3]}, "tokens", 1),
        ({"tokens": [1, 2]}, "tokens", 2),
        ({"tokens": [1, 2, 3, 4]}, "tokens", 3),
        ({"text": "abd"}, "text", None),
        ({"finish_reason": "stop"}, "finish_reason", None),
        ({"stop_reason": 3}, "stop_reason", None),
        ({"segments": [Segment("a", "b", [1])]}, "segments", None),
        ({"constraint": "complete"}, "constraint", None),
        ({"constraint_check": "none"}, "constraint_check", None),
        ({"constraint_verified": ("not",)}, "constraint_verified", None),
        ({"error": ErrorInfo("model-error", "no")}, "error", None),
        ({"logprobs": [RESULT.logprobs[0], logprob(-0.5)]}, "logprobs", 2),
        ({"logprobs": [RESULT.logprobs[0], logprob(-0.5), logprob(-0.500003)]}, "logprobs", 2),
        (
            {"logprobs": [logprob(-0.5, (7, -0.5), (9, -0.7)), *RESULT.logprobs[1:]]},
            "logprobs",
            0,
        ),
        ({"logprobs": [logprob(-0.5, (7, -0.5)), *RESULT.logprobs[1:]]}, "logprobs", 0),
        ({"logprobs": None}, "logprobs", 0),
        ({"cumulative_logprob": -1.50001}, "cumulative_logprob", None),
        ({"score": None}, "score", None),
    ],
)
def test_what_a_request_is_given_does(changes, field, position):
    found = difference(**changes)
    assert (found.field, found.position) == (field, position)


def test_the_last_digit_that_is_told_may_be_rounded_either_way():
    told = [RESULT.logprobs[0], logprob(-0.500001), logprob(-0.499999)]
    assert difference(logprobs=told, cumulative_logprob=-1.500002, score=-0.500001) is None


def test_the_first_difference_is_that_of_the_first_request_and_output():
    wrong = replace(RESULT, tokens=[9])
    keys = [("b", 0), ("a", 1), ("a", 0), ("c", 0)]
    alone = dict.fromkeys(keys, RESULT)
    here = alone | {("c", 0): wrong, ("a", 1): wrong, ("b", 0): RESULT}
    found = first_difference(["c", "b", "a"], alone, here)
    assert (found.id, found.index) == ("c", 0)
    found = first_difference(["b", "a", "c"], alone, here)
    assert (found.id, found.index) == ("a", 1)


def test_a_result_that_is_missing_or_one_too_many_is_a_difference():
    both = {("a", 0): RESULT, ("a", 1): RESULT}
    for alone, here in ((both, {("a", 0): RESULT}), ({("a", 0): RESULT}, both)):
        found = first_difference(["a"], alone, here)
        assert (found.id, found.index, found.field) == ("a", 1, "result")
