"""Mirostat: the surprise it aims at is the surprise observed, and mu stays where it can act."""

import math

import numpy as np
import pytest
from examples import mostly_heavy
from sampling_rows import Letters, drawn_from, language_like

from batcher.decoding import filters
from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import Sampler, SamplingRow, row_key

VOCAB_SIZE = 512
NUM_STEPS = 1000


def run(version: int, tau: float, logits: np.ndarray, eta: float = 0.1) -> tuple[float, float]:
    """The mean surprise in bits of 1,000 tokens, and the mu they end with."""
    params = SamplingParams(
        temperature=1.0, mirostat=version, mirostat_tau=tau, mirostat_eta=eta, needs_cumulative=True
    )
    sampler = Sampler(1, VOCAB_SIZE, Letters(VOCAB_SIZE))
    sampler.open(0, SamplingRow(params, row_key(1, "mirostat", 0), []))
    for row in logits:
        sampler.sample(row[None])
    return -sampler._cumulative.item(0) / math.log(2) / len(logits), float(sampler._mu[0])


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return language_like(np.random.default_rng(0), NUM_STEPS, VOCAB_SIZE)


@pytest.mark.parametrize("version", [1, 2])
# The likeliest alone have 2.1.
@pytest.mark.parametrize("tau", mostly_heavy([2.5, 3.0, 4.0, 5.0], 3.0))
def test_the_mean_surprise_is_tau(version: int, tau: float, logits: np.ndarray) -> None:
    mean, _ = run(version, tau, logits)
    assert mean == pytest.approx(tau, abs=0.05)


@pytest.mark.heavy
@pytest.mark.parametrize("version", [1, 2])
def test_mu_does_not_wind_away_where_tau_is_out_of_reach(version: int) -> None:
    flat = np.zeros((1500, VOCAB_SIZE), np.float32)  # every token has 9 bits
    assert run(version, 0.5, flat) == (pytest.approx(9), 0)
    assert run(version, 15.0, flat) == (pytest.approx(9), 18)
    sharp = np.zeros((1500, VOCAB_SIZE), np.float32)
    sharp[:, 3] = 60  # one token has all
    assert run(version, 4.0, sharp) == (pytest.approx(0), 18)


def test_mu_begins_at_twice_tau_and_moves_by_the_surprise_before_the_cut() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    params = SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=0.75, mirostat_eta=0.5)
    np.testing.assert_allclose(np.exp(drawn_from(logits, params)), [1, 0, 0, 0])  # mu is 1.5 bits
    sampler = Sampler(1, 4, Letters(4))
    sampler.open(0, SamplingRow(params, 0, []))
    sampler.sample(logits[None])
    assert sampler._mu[0] == pytest.approx(1.5 - 0.5 * (1 - 0.75))  # though it was certain


def test_version_1_keeps_as_many_as_zipf_says() -> None:
    ranks = np.arange(1, 1001)
    for exponent in (0.8, 1.0, 1.3):
        logprobs = -exponent * np.log(ranks)
        logprobs -= np.log(np.exp(logprobs).sum())
        mu = 4.0
        [size] = filters.zipf_sizes(logprobs[None], np.array([mu]))
        excess = exponent - 1 or 1e-9
        scale = excess * 2**mu / (1 - len(ranks) ** -excess)
        assert size == round(scale ** (1 / exponent))


@pytest.mark.parametrize(
    "logprobs",
    [[0.0], [0, -math.inf], [-math.log(3)] * 3, [0.0, -800, -math.inf], [-0.7, -0.7, -1e9]],
)
def test_version_1_keeps_at_least_one_and_at_most_all_of_odd_rows(logprobs: list[float]) -> None:
    for mu in (0.0, 1.0, 30.0):
        [size] = filters.zipf_sizes(np.array([logprobs]), np.array([mu]))
        assert 1 <= size <= len(logprobs)
