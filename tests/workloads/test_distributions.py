"""Distributions: what names mean, what lengths are clipped to, what is said of a wrong one."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.planning.synthetic import (
    LENGTHS,
    TIMES,
    draw_lengths,
    draw_seconds,
    make_generator,
    parse_distribution,
)
from batcher.planning.workload_traces import MAX_LENGTH, WorkloadError

SPECS = [
    "7",
    "constant:7",
    "uniform:16,256",
    "normal:100,200",
    "lognormal:512,0.8",
    "exponential:40",
    "pareto:10,1.2",
    "zipf:1.1,500",
]


def lengths(text, count=20_000, maximum=MAX_LENGTH, seed=0):
    drawn = draw_lengths(
        parse_distribution(text, "--prompt-tokens", LENGTHS), make_generator(seed, 1), maximum
    )
    return np.array(list(islice(drawn, count)))


@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(1, 300))
def test_lengths_are_whole_and_within_their_bounds(text, seed, maximum):
    found = lengths(text, 1500, maximum, seed)
    assert found.dtype == np.int64
    assert found.min() >= 1
    assert found.max() <= maximum
    assert (found == lengths(text, 1500, maximum, seed)).all()


def test_uniform_lengths_have_both_ends_as_often_as_the_rest():
    values, counts = np.unique(lengths("uniform:3,12"), return_counts=True)
    assert values.tolist() == list(range(3, 13))
    assert counts.min() > 1850
    assert counts.max() < 2150


@pytest.mark.parametrize(
    ("text", "statistic", "expected"),
    [
        ("normal:1000,50", np.mean, 1000),
        ("normal:1000,50", np.std, 50),
        ("lognormal:512,0.8", np.median, 512),
        ("lognormal:512,0.8", np.mean, 512 * np.exp(0.32)),
        ("exponential:400", np.mean, 400),
        ("pareto:100,3", np.mean, 150),
        ("pareto:100,3", np.min, 100),
    ],
)
def test_parameters_mean_what_their_names_say(text, statistic, expected):
    assert statistic(lengths(text)) == pytest.approx(expected, rel=0.04)


def test_zipf_falls_as_a_power():
    found = lengths("zipf:1,100", 100_000)
    assert found.max() <= 100
    assert (found == 1).mean() / (found == 2).mean() == pytest.approx(2, rel=0.05)
    assert (found == 1).mean() / (found == 10).mean() == pytest.approx(10, rel=0.1)


def test_extreme_parameters_neither_overflow_nor_warn():
    for text in ("lognormal:1e9,10", "pareto:1e9,0.1", "normal:1e9,1e9", "exponential:1e9"):
        assert lengths(text).max() == MAX_LENGTH


def test_seconds_are_not_negative_and_need_not_be_whole():
    drawn = draw_seconds(
        parse_distribution("normal:1,2", "--think-time", TIMES), make_generator(0, 0)
    )
    found = list(islice(drawn, 2000))
    assert min(found) == 0.0
    assert any(second != int(second) for second in found)
    assert found == [round(second, 6) for second in found]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gauss:1,2", "unknown distribution 'gauss' (known: N; constant:N; uniform:LOW,HIGH; "),
        ("", "unknown distribution ''"),
        ("-3", "constant:N with N >= 0"),
        ("uniform:9,3", "uniform:LOW,HIGH with 0 <= LOW <= HIGH"),
        ("uniform:a,3", "'a' is not a number"),
        ("normal:inf,3", "'inf' is not a number up to 1e+09"),
        ("lognormal:512,11", "SIGMA from 0 to 10"),
        ("zipf:1,0", "MAX from 1 to 1,048,576"),
    ],
)
def test_a_wrong_distribution_is_named_with_what_is_allowed(text, said):
    with pytest.raises(WorkloadError) as caught:
        parse_distribution(text, "--prompt-tokens", LENGTHS)
    assert str(caught.value).startswith(f"--prompt-tokens {text}: ")
    assert said in str(caught.value)
