import pytest

from batcher.events import FinishEvent
from batcher.formats.diagnostics import Problem
from batcher.formats.requests import BadLine, ParsedLine
from batcher.request import Request
from batcher.result import (
    ErrorInfo,
    Result,
    StepTimes,
    Usage,
)
from cli.running.answers import Flights, can_be_replayed


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


def line(request_id, *, form="result", **fields):
    return ParsedLine(Request(id=request_id, prompt="x", **fields), form)


class Earlier:
    """An earlier run that has given results {id: indexes} and those of some bad lines."""

    def __init__(self, given, rejected=()):
        self.given, self.rejected = given, rejected

    def results_of(self, request):
        return {index: result(request.id, index) for index in self.given.get(request.id, ())}

    def check_replay(self, request, known):
        self.checked = request.id, sorted(known)

    def has_rejected(self, request_id, line_number):
        return (request_id, line_number) in self.rejected


def shown(answers):
    return [(a.place, [r.index for r in a.results], a.form, a.is_last) for a in answers]


def test_a_plain_request_is_answered_once():
    flights = Flights()
    assert flights.begin(line("a"), 7) == {}
    assert shown(flights.answer([result("a")])) == [(7, [0], "result", True)]


def test_samples_are_answered_as_they_come_and_the_last_one_says_so():
    flights = Flights()
    flights.begin(line("a", n=3), 4)
    flights.begin(line("b"), 5)
    assert shown(flights.answer([result("a", 2), result("b")])) == [
        (4, [2], "result", False),
        (5, [0], "result", True),
    ]
    assert shown(flights.answer([result("a", 0), result("a", 1)])) == [
        (4, [0], "result", False),
        (4, [1], "result", True),
    ]
    flights.begin(line("a"), 9)  # the request has ended, so its id is free
    assert shown(flights.answer([result("a")])) == [(9, [0], "result", True)]


def test_an_openai_row_waits_for_all_its_choices():
    flights = Flights()
    flights.begin(line("a", n=3, form="completion"), 4)
    assert flights.answer([result("a", 2)]) == []
    assert shown(flights.answer([result("a", 1), result("a", 0)])) == [
        (4, [0, 1, 2], "completion", True)
    ]


def test_the_best_samples_stay_in_the_order_they_are_handed_out_in():
    flights = Flights()
    flights.begin(line("a", n=2, best_of=5), 0)
    flights.begin(line("b", n=2), 1)
    flights.begin(line("row", n=2, best_of=5, form="completion"), 2)
    outcome = [result("a", 4), result("a", 1), result("b", 1), result("b", 0)]
    answers = flights.answer([*outcome, result("row", 3), result("row", 2)])
    ranked = sorted(answers, key=lambda answer: (answer.place, answer.rank))
    indices = [[choice.index for choice in answer.results] for answer in ranked]
    assert indices == [[4], [1], [0], [1], [3, 2]]


def test_a_row_of_the_best_samples_that_is_there_is_not_written_again():
    flights = Flights(Earlier({"row": [0, 1]}))
    flights.begin(line("row", n=2, best_of=5, form="completion"), 2)
    assert flights.answer([result("row", 1), result("row", 3)]) == []


def test_there_are_no_more_results_than_asked_for_where_failures_have_made_others_the_best():
    flights = Flights(Earlier({"a": [4], "b": [3]}))
    flights.begin(line("a", n=1, best_of=5), 0)
    flights.begin(line("b", n=2, best_of=5), 1)
    assert flights.answer([result("a", 2)]) == []
    answers = flights.answer([result("b", 1), result("b", 0)])
    assert [answer.results[0].index for answer in answers] == [1]


def test_a_request_fails_once_however_many_of_its_results_are_errors():
    flights = Flights()
    flights.begin(line("a", n=3), 0)
    flights.begin(line("b"), 1)
    assert flights.is_first_failure("a")
    assert not flights.is_first_failure("a")
    assert flights.is_first_failure("b")


def test_known_samples_are_replayed_and_the_others_decoded():
    earlier = Earlier({"a": [0, 2]})
    flights = Flights(earlier)
    assert sorted(flights.begin(line("a", n=3), 4)) == [0, 2]
    assert earlier.checked == ("a", [0, 2])
    assert flights.begin(line("b", n=2), 5) == {}
    assert not flights.note_replayed(finish("a", 0))
    assert not flights.note_replayed(finish("a", 1))
    assert shown(flights.answer([result("a", 1)])) == [(4, [1], "result", False)]
    assert not flights.note_replayed(finish("a", 2))
    assert "a" not in flights._flights


def test_a_replayed_request_fails_once():
    flights = Flights(Earlier({"a": [0, 1, 2]}))
    flights.begin(line("a", n=3), 4)
    assert flights.note_replayed(finish("a", 0, "error"))
    assert not flights.note_replayed(finish("a", 1, "error"))
    assert not flights.note_replayed(finish("a", 2, "error"))
    assert not flights.note_replayed(finish("a", 2, "unused", "negative"))


def test_the_row_beside_a_replayed_sample_does_not_count():
    flights = Flights(Earlier({"a": [0, 1]}))
    flights.begin(line("a", n=2, cfg_scale=2.0), 4)
    flights.note_replayed(finish("a", 0))
    flights.note_replayed(finish("a", 0, "unused", "negative"))
    assert flights.note_replayed(finish("a", 1, "error"))


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
    request = line("a", n=2, **fields)
    assert not can_be_replayed(request.request)
    flights = Flights(Earlier({"a": [1]}))
    assert flights.begin(request, 4) == {}
    assert not flights.note_replayed(finish("a", 1))
    assert shown(flights.answer([result("a", 1), result("a", 0)])) == [(4, [0], "result", True)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3, "temperature": 1.0}, {"cfg_scale": 2.0}, {"states": {}}, {"session": "ann"}],
)
def test_what_takes_a_step_for_each_token_can_be_replayed(fields):
    assert can_be_replayed(Request(prompt="x", **fields))


def test_nothing_is_replayed_where_a_schedule_has_limits():
    earlier = Earlier({"a": [1]})
    flights = Flights(earlier, is_plain=False)
    assert flights.begin(line("a", n=2), 4) == {}
    assert not hasattr(earlier, "checked")  # it may have taken any number of steps
    assert shown(flights.answer([result("a", 1), result("a", 0)])) == [(4, [0], "result", True)]


def test_an_openai_row_that_is_there_is_not_written_again():
    flights = Flights(Earlier({"a": [0, 1], "b": [0, 1]}))
    for request_id in "ab":
        flights.begin(line(request_id, n=2, form="completion", regex="x"), 4)
    assert flights.answer([result("a", 0), result("b", 0)]) == []
    assert flights.answer([result("a", 1), result("b", 1)]) == []


def test_a_bad_line_is_answered_unless_it_was():
    problem = Problem("invalid-json", "no", 3, 1, 1, None, None, "{", 1)
    bad = BadLine("a", form="completion", problems=[problem])
    answers = Flights(Earlier({"a": [0]}, [("a", 4), ("b", 3)])).reject(bad, 2)
    assert shown(answers) == [(2, [0], "completion", True)]
    assert answers[0].results[0].error.line == 3
    assert Flights(Earlier({}, [("a", 3)])).reject(bad, 2) == []
