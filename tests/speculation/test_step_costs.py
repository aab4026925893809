"""What steps cost, learned from those that were."""

from statistics import median

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.speculation.step_costs import StepCosts


def costs_of(steps: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_tokens, seconds in steps.items():
        costs.learn(num_tokens, seconds)
    return costs


@pytest.mark.parametrize(
    ("steps", "num_tokens", "seconds"),
    [
        ({}, 5, 0.0),
        ({4: 2.0}, 2, 1.0),  # in proportion
        ({4: 2.0}, 6, 3.0),
        ({4: 2.0, 8: 4.0}, 4, 2.0),
        ({4: 2.0, 8: 4.0}, 8, 4.0),
        ({4: 2.0, 8: 4.0}, 6, 2.5),  # half the way, a quarter of the time
        ({4: 2.0, 8: 4.0}, 2, 1.0),
        ({4: 2.0, 8: 3.0}, 16, 5.0),  # as far again twice
        ({4: 2.0, 8: 3.0}, 32, 10.0),  # and in proportion beyond
        ({4: 2.0, 8: 1.0}, 9, 1.0),  # less time for more is noise
    ],
)
def test_by_hand(steps: dict[int, float], num_tokens: int, seconds: float) -> None:
    assert costs_of(steps).estimate(1, num_tokens) == pytest.approx(seconds)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 9)), min_size=1))
@examples(100)
def test_what_was_seen_is_the_median_of_its_latest_steps(steps: list[tuple[int, float]]) -> None:
    costs = StepCosts()
    for num_tokens, seconds in steps:
        costs.learn(num_tokens, seconds)
    for number in {num_tokens for num_tokens, _ in steps}:
        own = [seconds for num_tokens, seconds in steps if num_tokens == number][-15:]
        assert costs.estimate(1, number) == pytest.approx(median(own))


def test_odd_steps_are_lost() -> None:
    costs = costs_of({8: 1.0})
    for number in range(40):
        costs.learn(4, 50.0 if number % 5 == 4 else 0.5)
    assert costs.estimate(4, 4) == 0.5


def test_numbers_that_are_alike_are_one_but_none_is_one_with_an_exact_one() -> None:
    costs = costs_of({64: 1.0, 65: 9.0})
    assert costs.estimate(1, 64) == 1.0
    assert costs.estimate(1, 65) == 9.0
    costs.learn(66, 9.0)
    assert len(costs._points) == 2


def test_it_follows_what_has_changed() -> None:
    costs = StepCosts()
    for seconds in [1.0] * 100 + [2.0] * 8:
        costs.learn(4, seconds)
    assert costs.estimate(4, 4) == 2.0


@given(st.lists(st.integers(1, 2**24), min_size=1), st.integers(1, 2**24))
@examples(60)
def test_numbers_stay_in_order(numbers: list[int], asked: int) -> None:
    costs = StepCosts()
    for number in numbers:
        costs.learn(number, 0.001 * number)
    assert len(costs._points) <= len(set(numbers))
    tokens = [point.num_tokens for point in costs._points]
    assert tokens == sorted(set(tokens))
    assert costs.estimate(1, asked) <= 0.0011 * asked, "all of these steps are in proportion"


def test_what_is_kept_is_little() -> None:
    costs = StepCosts()
    for number in range(1, 2**13):
        costs.learn(number, 1.0)
    assert len(costs._points) == 64 + 7 * 8
