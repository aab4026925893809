"""Arrival patterns begin at 0, never go back, and keep the rate and the shape they promise."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.planning.synthetic import bursty, constant, gamma, make_generator, poisson

RATES = st.floats(1e-3, 1e3)
PATTERNS = st.one_of(
    st.builds(constant, RATES),
    st.builds(poisson, RATES),
    st.builds(gamma, RATES, st.floats(0.05, 50)),
    st.builds(bursty, RATES, st.floats(0.01, 100), st.floats(0, 100)),
)


def times(pattern, count, seed=0):
    return list(islice(pattern(make_generator(seed, 0)), count))


def gaps(pattern, count=20_000):
    return np.diff(times(pattern, count))


@given(PATTERNS, st.integers(0, 2**32))
def test_the_first_comes_at_0_and_none_before_the_last(pattern, seed):
    found = times(pattern, 1100, seed)
    assert found[0] == 0.0
    assert all(earlier <= later for earlier, later in pairwise(found))
    assert found == [round(time, 6) for time in found]
    assert found == times(pattern, 1100, seed)


def test_constant_arrivals_do_not_drift():
    assert times(constant(3.0), 30_001)[-1] == 10_000.0
    assert times(constant(4.0), 3) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    "pattern", [poisson(5.0), gamma(5.0, 0.25), gamma(5.0, 8.0), bursty(5.0, 2.0, 6.0)]
)
def test_the_mean_rate_is_the_one_asked_for(pattern):
    assert 1 / gaps(pattern).mean() == pytest.approx(5.0, rel=0.04)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_of_gamma_arrivals_vary_as_burstiness_says(burstiness):
    found = gaps(poisson(2.0) if burstiness == 1 else gamma(2.0, burstiness))
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_bursty_arrivals_come_only_while_it_is_on():
    found = np.array(times(bursty(5.0, 2.0, 6.0), 5000))
    assert (found % 8).max() <= 2.0
    assert len(set(found // 8)) > 100
