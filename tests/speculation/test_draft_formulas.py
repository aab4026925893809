"""What drafts gain, by hand and by playing it."""

from random import Random

import pytest

from batcher.speculation.formulas import expected_speedup, expected_tokens, simple_return


def test_by_hand() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.7, 0) == 1
    assert expected_speedup(0.5, 2, 0.0) == 1.75
    assert expected_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert simple_return(0.5, 4, 0.25) == pytest.approx(1.6)


def test_tokens_of_a_step_as_they_are_accepted() -> None:
    random, num_steps, total = Random(3), 20_000, 0
    for _ in range(num_steps):
        accepted = 0
        while accepted < 4 and random.random() < 0.8:
            accepted += 1
        total += accepted + 1
    assert total / num_steps == pytest.approx(expected_tokens(0.8, 4), rel=0.02)
