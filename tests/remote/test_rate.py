"""How many requests may be in flight, and when the next one may be sent."""

import pytest

from batcher.remote.engine import Rate


def test_a_refusal_halves_the_limit_and_those_sent_before_it_count_as_one():
    rate = Rate(16, None)
    for _ in range(16):
        rate.note_sent(1.0)
    for _ in range(5):
        rate.num_in_flight -= 1
        rate.refuse(sent=1.0, now=2.0)
    assert rate.limit == 8
    rate.refuse(sent=2.5, now=3.0)
    assert rate.limit == 4


def test_as_many_answers_as_the_limit_raise_it_by_one_up_to_the_slots():
    rate = Rate(4, None)
    rate.refuse(1.0, 1.0)
    rate.refuse(2.0, 2.0)
    assert rate.limit == 1
    raised = [rate.succeed() for _ in range(12)]
    assert raised[0]
    assert rate.limit == 4
    assert raised.count(True) == 3


def test_the_limit_is_never_less_than_one():
    rate = Rate(2, None)
    for now in range(1, 9):
        rate.refuse(float(now), float(now))
    assert rate.limit == 1
    assert rate.why_not(9.0) is None


def test_no_more_fly_than_the_limit():
    rate = Rate(2, None)
    rate.note_sent(0.0)
    assert rate.why_not(0.0) is None
    rate.note_sent(0.0)
    assert rate.why_not(0.0) == "concurrency"
    assert rate.start_of_next(0.0) is None
    rate.num_in_flight -= 1
    assert rate.why_not(0.0) is None


@pytest.mark.parametrize("start", [0.0, 5.0])
def test_the_rate_is_a_distance_and_idle_time_is_not_saved(start):
    rate = Rate(8, 10.0)
    rate.note_sent(start)
    assert rate.why_not(start + 0.05) == "rate"
    assert rate.start_of_next(start + 0.05) == pytest.approx(start + 0.1)
    rate.note_sent(start + 3.0)
    assert rate.why_not(start + 3.05) == "rate"
