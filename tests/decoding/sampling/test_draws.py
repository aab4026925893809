"""Draws: tokens, log-probabilities and noise as defined, drafts accepted, surprise steered."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sampling_rows import Letters, drawn_from, language_like
from slow_draw import slow_draw

from batcher.decoding import filters, sampling
from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import (
    DrawnDraft,
    DrawStates,
    Sampler,
    SamplingRow,
    draw,
    probabilities,
    row_key,
    verify,
)

SHARES = st.one_of(st.sampled_from([0.25, 0.5, 0.75, 0.9, 1.0]), st.floats(1e-9, 1))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-300, 0.01, 0.3, 0.8, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 0, 0, 1, 5, 40]),
    top_p=st.one_of(SHARES, st.just(0.0)),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    typical_p=SHARES,
)
KINDS = st.sampled_from(["language", "tied", "flat", "halves", "few", "masked", "apart", "peaked"])
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([511, 3000, 5000]))


def some_logits(kind, seed, num_rows, vocab_size):
    rng = np.random.default_rng(seed)
    logits = language_like(rng, num_rows, vocab_size)
    if kind == "tied":
        logits = logits.round(1)
    if kind == "flat":
        logits[:] = 3
    if kind == "halves":  # sums that are on the cut exactly
        logits[:] = np.log(2) * rng.integers(0, 3, logits.shape)
    if kind == "few":
        logits[:, 3:] = -math.inf
    if kind == "masked":
        logits[:, 1:][rng.random((num_rows, vocab_size - 1)) < 0.7] = -math.inf
    if kind == "apart":
        logits = (1e30 * rng.normal(size=logits.shape)).astype(np.float32)
    if kind == "peaked":
        logits[:, vocab_size // 2] = 40
    return logits


def check(logits, params, seed=0):
    rng = np.random.default_rng(seed)
    num_rows, vocab_size = logits.shape
    keys = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    states = DrawStates(keys, rng.integers(0, 99, num_rows), np.zeros(num_rows))

    def tell(logprobs, token_ids, *_):
        whole = np.full(vocab_size, -math.inf)
        whole[token_ids[logprobs > -math.inf]] = logprobs[logprobs > -math.inf]
        return whole

    with patch("batcher.decoding.sampling.token_logprob", tell):
        fields = {"num_logprobs": 1, "has_processed_logprobs": True}
        drawn = draw(logits, states, structs.replace(params, **fields))
    tokens, expected = slow_draw(logits, states, params)
    assert drawn.tokens.tolist() == tokens
    told = [drawn.logprobs[row] for row in range(num_rows)]
    np.testing.assert_array_equal(np.array(told), expected)
    found = probabilities(logits, states.mu, params)
    np.testing.assert_array_equal(found, np.exp(expected))


@examples(600)
@given(PARAMS, KINDS, WIDTHS, st.integers(0, 2**32), st.sampled_from([1, 100, filters.WIDE]))
def test_a_draw_is_that_of_the_definition(params, kind, vocab_size, seed, wide):
    with patch.object(filters, "WIDE", wide):
        check(some_logits(kind, seed, 3, vocab_size), params, seed)


LARGE = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.999, "min_p": 1e-4},
    {"typical_p": 0.9},
    {"top_p": 0.95, "min_p": 0.001, "typical_p": 0.5},
]


@pytest.mark.parametrize(
    "kind", mostly_heavy(["language", "tied", "flat", "masked"], "language", "masked")
)
@pytest.mark.parametrize("temperature", mostly_heavy([0.5, 1.3], 1.3))
@pytest.mark.parametrize("fields", LARGE, ids=str)
def test_a_draw_of_a_large_vocabulary_is_that_of_the_definition(fields, temperature, kind):
    params = SamplingParams(temperature=temperature, **fields)
    check(some_logits(kind, 0, 1, 49_152), params)


WANTED, DRAWN_FROM = np.array([0.5, 0.2, 0.3]), np.array([0.2, 0.5, 0.3])


def left(wanted, token, noise, token_ids=(0, 1, 2)):
    """Return the probabilities that a row with a draft is drawn from."""
    proposal = DrawnDraft(token, DRAWN_FROM.astype(np.float32))
    with np.errstate(divide="ignore"):
        scores = np.log(wanted)[None]
    verified = np.exp(verify(scores, np.array([token_ids]), [proposal], np.array([noise])))[0]
    return (verified / verified.sum()).round(6).tolist()


@pytest.mark.parametrize(
    ("token", "noise", "weights"),
    [
        (0, 0.999, [1, 0, 0]),  # what is likelier than it was drafted is always accepted
        (1, 0.399, [0, 1, 0]),  # p / q is 0.4
        (1, 0.401, [1, 0, 0]),
        (2, 0.999, [0, 0, 1]),
    ],
)
def test_a_draft_is_accepted_as_often_as_p_is_of_q(token, noise, weights):
    assert left(WANTED, token, noise) == weights


def test_a_draft_that_is_not_among_the_candidates_is_refused():
    assert left(np.array([0.4, 0.6]), 1, 1e-9, (0, 2)) == [0.4, 0.6]


def test_candidates_that_only_fill_up_are_not_drawn():
    assert left(np.array([0.6, 0.4, 0.0]), 0, 0.1, (0, 2, 0)) == [1, 0, 0]


def test_where_both_differ_by_rounding_alone_nothing_else_is_left():
    assert left(DRAWN_FROM * 0.5, 2, 1.0 + 1e-6) == DRAWN_FROM.tolist()


def opened(key, *, after):
    """A sampler with a row of two tokens; after: in the slot of one that was drafted for."""
    sampler = Sampler(1, 3, Letters(3))
    if after:
        sampler.open(0, SamplingRow(SamplingParams(temperature=1.0), 7, []))
        sampler.extend({0: [1]})
        with sampler.drafting(np.array([0])):
            for _ in range(3):
                sampler.sample(np.log(DRAWN_FROM)[None])
        sampler.close(0)
    sampler.open(0, SamplingRow(SamplingParams(temperature=1.0), key, []))
    sampler.extend({0: [1, 2]})
    return sampler


def test_the_drafts_of_a_row_that_is_gone_count_for_no_other():
    logits = np.log(WANTED)[None]
    for key in range(40):
        tokens = [opened(key, after=after).sample(logits).tokens.item(0) for after in (0, 1)]
        assert tokens[0] == tokens[1]


VOCAB_SIZE = 512
NUM_STEPS = 1000


def run(version, tau, logits, eta=0.1):
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
def logits():
    return language_like(np.random.default_rng(0), NUM_STEPS, VOCAB_SIZE)


@pytest.mark.parametrize("version", [1, 2])
# The likeliest alone have 2.1.
@pytest.mark.parametrize("tau", mostly_heavy([2.5, 3.0, 4.0, 5.0], 3.0))
def test_the_mean_surprise_is_tau(version, tau, logits):
    mean, _ = run(version, tau, logits)
    assert mean == pytest.approx(tau, abs=0.05)


@pytest.mark.heavy
@pytest.mark.parametrize("version", [1, 2])
def test_mu_does_not_wind_away_where_tau_is_out_of_reach(version):
    flat = np.zeros((1500, VOCAB_SIZE), np.float32)  # every token has 9 bits
    assert run(version, 0.5, flat) == (pytest.approx(9), 0)
    assert run(version, 15.0, flat) == (pytest.approx(9), 18)
    sharp = np.zeros((1500, VOCAB_SIZE), np.float32)
    sharp[:, 3] = 60  # one token has all
    assert run(version, 4.0, sharp) == (pytest.approx(0), 18)


def test_mu_begins_at_twice_tau_and_moves_by_the_surprise_before_the_cut():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    params = SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=0.75, mirostat_eta=0.5)
    np.testing.assert_allclose(np.exp(drawn_from(logits, params)), [1, 0, 0, 0])  # mu is 1.5 bits
    sampler = Sampler(1, 4, Letters(4))
    sampler.open(0, SamplingRow(params, 0, []))
    sampler.sample(logits[None])
    assert sampler._mu[0] == pytest.approx(1.5 - 0.5 * (1 - 0.75))  # though it was certain


def test_version_1_keeps_as_many_as_zipf_says():
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
def test_version_1_keeps_at_least_one_and_at_most_all_of_odd_rows(logprobs):
    for mu in (0.0, 1.0, 30.0):
        [size] = filters.zipf_sizes(np.array([logprobs]), np.array([mu]))
        assert 1 <= size <= len(logprobs)


def gumbel(keys, positions, token_ids):
    """[rows, tokens]"""
    ids = np.tile(token_ids, (len(keys), 1))
    hashes = sampling.token_hashes(np.array(keys, np.uint64), np.array(positions), ids)
    values = sampling.gumbel_noise(hashes)
    assert (sampling.highest_noise(hashes) > values).all()
    return values


def test_keys_differ_by_seed_request_and_sample_and_never_change():
    given = [(s, i, n) for s in (0, 1, -1, 2**63) for i in ("", "a", "b", "\udcff") for n in (0, 1)]
    keys = [sampling.row_key(*each) for each in given]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert sampling.row_key(0, "1", 0) == 24513270026664046


def test_every_position_and_token_has_noise_of_its_own():
    values = gumbel([5, 5, 6], [0, 1, 0], np.arange(100))
    assert len(np.unique(values)) == values.size
    assert (gumbel([6, 5], [0, 1], np.arange(50, 60)) == values[[2, 1], 50:60]).all()


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_at_both_ends_of_the_hash(bits):
    with patch.object(sampling, "mix_in_place", lambda numbers: np.full_like(numbers, bits)):
        assert np.isfinite(gumbel([1], [0], np.arange(3))).all()


def test_noise_is_spread_as_gumbel_says():
    values = gumbel(list(range(40)), [3] * 40, np.arange(1000))
    uniform = np.exp(-np.exp(-values)).reshape(-1)
    counts = np.histogram(uniform, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 50.8  # 19 degrees of freedom, p > 1e-4
    correlations = np.corrcoef(values)[np.triu_indices(40, 1)]
    assert abs(correlations).max() < 0.16  # five deviations


def test_drafts_and_their_acceptance_have_noise_of_their_own():
    keys, positions = np.arange(2000, dtype=np.uint64).repeat(3), np.tile([1, 2, 3], 2000)
    drafting = sampling.draft_keys(keys, positions)
    assert len({*keys.tolist(), *drafting.tolist()}) == 2000 + 6000  # one for each beginning
    first = np.zeros((6000, 1), np.int64)
    hashes = [sampling.token_hashes(each, positions, first)[:, 0] for each in (keys, drafting)]
    accepting = sampling.acceptance_noise(keys, positions)
    assert accepting.min() > 0
    assert accepting.max() < 1
    streams = [accepting, *map(sampling._uniform, (drafting, *hashes))]
    correlations = np.corrcoef(streams)[np.triu_indices(4, 1)]
    assert abs(correlations).max() < 0.065  # five deviations
    counts = np.histogram(accepting, bins=20, range=(0, 1))[0]
    assert ((counts - 300) ** 2 / 300).sum() < 50.8  # as above
