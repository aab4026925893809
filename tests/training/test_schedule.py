"""The learning rate: up in a line, down in half a cosine, and never nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.training.data import TrainingSettings, learning_rate

SETTINGS = TrainingSettings(steps=110, warmup_steps=10, learning_rate=0.01)


def test_warm_up_is_a_line_to_the_highest_rate():
    rates = [learning_rate(step, SETTINGS) for step in range(11)]
    assert rates == pytest.approx([0.01 * (step + 1) / 11 for step in range(11)])


def test_the_cosine_is_at_half_its_way_in_the_middle_and_ends_just_above_nothing():
    assert learning_rate(60, SETTINGS) == pytest.approx(0.005)
    assert 0 < learning_rate(109, SETTINGS) < 0.01 / 1000


@given(st.integers(1, 500), st.data())
def test_no_step_has_a_rate_of_nothing_and_none_more_than_was_asked_for(steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    settings = TrainingSettings(steps=steps, warmup_steps=warmup)
    rates = [learning_rate(step, settings) for step in range(steps)]
    assert min(rates) > 0
    assert max(rates) == rates[warmup] == settings.learning_rate
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
