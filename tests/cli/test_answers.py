import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.events import FinishEvent
from batcher.request import Request
from batcher.requests.lines import BadLine
from batcher.requests.problems import Problem
from batcher.requests.results import decode_result_line
from batcher.result import ErrorInfo, Result, StepTimes, Usage
from cli.run.results import Answers, InputOrder, can_be_replayed


def result(request_id, index=0, *, failed=False):
    return Result(
        id=request_id,
        index=index,
        text="x",
        tokens=[1],
        finish_reason="error" if failed else "length",
        stop_reason=None,
        usage=Usage(1, 1),
        slot=0,
        steps=StepTimes(0, 0, 0, 0),
        error=ErrorInfo("model-error", "no") if failed else None,
    )


def finish(request_id, index=0, reason="length", role="sample"):
    return FinishEvent(0, 0.0, request_id, index, 0, reason, None, 1, role)


def request(request_id, **fields):
    return Request(id=request_id, prompt="x", **fields)


def answers_of(earlier=None, order=None, **options):
    return Answers("m", lambda _token: b"x", earlier, order, **options)


def opened(answers, request_id, input_index=0, form="result", **fields):
    return sorted(answers.open(request(request_id, **fields), form, input_index))


class Earlier:
    """An earlier run that has given results {id: indexes} and those of some bad lines."""

    def __init__(self, given, rejected=()):
        self.given, self.rejected = given, rejected

    def results_of(self, request):
        return {index: result(request.id, index) for index in self.given.get(request.id, ())}

    def has_rejected(self, line_number):
        return line_number in self.rejected


def shown(lines):
    found = []
    for line in b"".join(lines).splitlines(keepends=True):
        results = decode_result_line(line)
        found.append((results[0].id, [each.index for each in results]))
    return found


def test_samples_come_as_they_do_and_openai_rows_with_all_choices():
    answers = answers_of()
    opened(answers, "a", n=3)
    opened(answers, "b")
    lines = answers.take([result("a", 2), result("b")])
    assert shown(lines) == [("a", [2]), ("b", [0])]
    assert shown(answers.take([result("a", 0), result("a", 1)])) == [("a", [0]), ("a", [1])]
    assert not answers._open
    opened(answers, "a")  # the request has ended, so its id is free
    assert shown(answers.take([result("a")])) == [("a", [0])]
    answers = answers_of()
    opened(answers, "a", form="completion", n=3)
    assert answers.take([result("a", 2)]) == []
    lines = answers.take([result("b"), result("a", 1), result("a", 0)])
    assert shown(lines) == [("b", [0]), ("a", [0, 1, 2])]
    assert msgspec.json.decode(lines[1])["response"]["body"]["object"] == "text_completion"


@pytest.mark.parametrize("has_order", [False, True])
def test_the_best_samples_stay_in_the_order_they_are_handed_out_in(has_order):
    answers = answers_of(order=InputOrder() if has_order else None)
    opened(answers, "a", 0, n=2, best_of=5)
    opened(answers, "b", 1, n=2)
    opened(answers, "row", 2, form="completion", n=2, best_of=5)
    outcome = [result("a", 4), result("a", 1), result("b", 1), result("b", 0)]
    lines = answers.take([*outcome, result("row", 3), result("row", 2)])
    samples_of_b = [("b", [0]), ("b", [1])] if has_order else [("b", [1]), ("b", [0])]
    assert shown(lines) == [("a", [4]), ("a", [1]), *samples_of_b, ("row", [3, 2])]


def test_there_are_no_more_results_than_asked_for_where_failures_have_made_others_the_best():
    answers = answers_of(Earlier({"a": [4], "b": [3]}))
    opened(answers, "a", n=1, best_of=5)
    opened(answers, "b", n=2, best_of=5)
    assert answers.take([result("a", 2)]) == []
    assert shown(answers.take([result("b", 1), result("b", 0)])) == [("b", [1])]


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 3},
        {"num_beams": 3},
        {"json_schema": False},
        {"regex": "x"},
        {"choice": ["x"]},
        {"lark": "start: x"},
        {"gbnf": "root ::= x"},
        {"heal": True},
    ],
)
def test_what_cannot_be_replayed_is_decoded_again_and_not_answered_twice(fields):
    assert not can_be_replayed(request("a", n=2, **fields))
    answers = answers_of(Earlier({"a": [1]}))
    assert opened(answers, "a", n=2, **fields) == []
    assert not answers.note_replayed(finish("a", 1))
    assert shown(answers.take([result("a", 1), result("a", 0)])) == [("a", [0])]


def test_a_bad_line_is_answered_unless_it_was():
    problem = Problem("invalid-json", "no", 3, 1, 1, None, None, "{", 1)
    bad = BadLine("a", form="completion", problems=[problem])
    answers = answers_of(Earlier({"a": [0]}, [4]))
    (line,) = answers.reject(bad, 2)
    assert decode_result_line(line)[0].error.line == 3
    assert answers_of(Earlier({}, [3])).reject(bad, 2) == []


@given(st.permutations(range(25)), st.integers(0, 25), st.sampled_from([0, 12, 50, 10**6]))
def test_lines_come_out_in_order_however_little_is_held_in_memory(order, num_put, max_held_bytes):
    lines = {index: b"%d" % index * (index % 4 + 1) + b"\n" for index in order}
    put = order[:num_put]
    held = InputOrder(max_held_bytes)
    out = [line for index in put for line in held.put(index, lines[index])]
    first_missing = min(set(range(26)) - set(put))
    assert out == [lines[index] for index in range(first_missing)]
    out += held.rest()
    held.close()
    assert out == [lines[index] for index in sorted(put)]


def test_results_that_are_held_back_at_the_end_come_in_order():
    answers = answers_of(order=InputOrder())
    for index, num_samples in enumerate((2, 1, 3, 1, 1)):
        opened(answers, str(index), index, n=num_samples)
    results = [result("4"), result("0", 1), result("2", 1), result("3"), result("2", 0)]
    assert answers.take(results) == []
    lines = [*answers.rest()]
    assert shown(lines) == [("0", [1]), ("2", [0]), ("2", [1]), ("3", [0]), ("4", [0])]
    answers.close()
