"""Filters: each against its definition in plain Python, and at its limits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_rows import drawn_from, language_like

from batcher.decoding import filters
from batcher.decoding.filters import SamplingParams

EIGHTHS = st.integers(-40, 40).map(lambda number: number / 8)  # so that ties are common, and exact
LOGITS = st.lists(st.one_of(EIGHTHS, st.just(-math.inf)), min_size=1, max_size=40).filter(
    lambda logits: max(logits) > -math.inf
)
HALVES = st.sampled_from([0.5, 0.25, 0.125])


def kept(logits, **fields):
    """The ids that can be drawn with these settings."""
    params = SamplingParams(**{"temperature": 1.0, **fields})
    return set(np.isfinite(drawn_from(np.array(logits, np.float32), params)).nonzero()[0].tolist())


def probabilities(logits):
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def finite(logits):
    return {token for token, logit in enumerate(logits) if logit > -math.inf}


@given(LOGITS, st.integers(1, 60))
def test_top_k_keeps_what_fewer_than_k_are_above(logits, k):
    above = [sum(other > logit for other in logits) for logit in logits]
    assert kept(logits, top_k=k) == {t for t in finite(logits) if above[t] < k}


LIMITS = [
    # logits, settings, what is kept
    ([1, 3, 2], {"top_k": 1}, {1}),
    ([1, 3, 3], {"top_k": 1}, {1, 2}),  # a tie at the end
    ([1, 3, 2], {"top_p": 1.0}, {0, 1, 2}),
    ([1, 3, 2], {"top_p": 0.0}, {1}),
    ([3, 3, 3], {"top_p": 0.0}, {0}),  # as greedy
    ([0, 0, 0, 0, 0], {"top_p": 0.5}, {0, 1, 2}),
    ([0, 0, 0, 0], {"top_p": 0.75}, {0, 1, 2}),  # exactly
    ([0, -1e4], {"top_p": 1.0}, {0, 1}),  # even what has a probability of 0 in float64
    ([0, -1e4], {"typical_p": 1.0}, {0, 1}),
    ([1, 3, 3], {"min_p": 1.0}, {1, 2}),
    ([0, 0, 0, 0], {"typical_p": 0.01}, {0, 1, 2, 3}),
    ([5], {"top_k": 3, "top_p": 0.5, "typical_p": 0.5, "min_p": 0.5}, {0}),
    # of .4 .3 .15 .1 .05: top_p looks at all of them, whatever min_p will leave
    ([math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)], {"top_p": 0.8, "min_p": 0.3}, {0, 1, 2}),
    ([-math.inf, 0, -math.inf], {"top_k": 2, "top_p": 0.9, "typical_p": 0.9}, {1}),
    ([1e30, -1e30, 0], {"temperature": 1e-300, "top_p": 0.9}, {0}),
    ([3.4e38, -3.4e38], {"temperature": 2.0, "typical_p": 0.5}, {0}),
]


@pytest.mark.parametrize(("logits", "fields", "expected"), LIMITS, ids=str)
def test_a_limit(logits, fields, expected):
    assert kept(logits, **fields) == expected


@given(LOGITS, st.integers(1, 50))
def test_finding_candidates_agrees_with_filtering_the_whole_row(logits, k):
    whole = np.array([logits])
    filters.keep_top_k(whole, k)
    found = {
        (int(token), value)
        for candidates in filters.top_candidates(np.array([logits], np.float32), k)
        for token, value in zip(candidates.token_ids[0], candidates.logits[0], strict=True)
        if value > -math.inf
    }
    assert found == {(t, whole[0, t]) for t in np.isfinite(whole[0]).nonzero()[0].tolist()}


@pytest.mark.parametrize("spread", ["apart", "in one chunk", "tied", "few"])
def test_candidates_of_a_large_vocabulary_are_those_of_a_sort(spread):
    rng = np.random.default_rng(1)
    logits = language_like(rng, 7, 5000)
    if spread == "in one chunk":
        logits = np.sort(logits, axis=-1)
    if spread == "tied":
        logits[::2] = logits[::2].round()
    if spread == "few":
        logits[:, 9:] = -np.inf
    cut = np.sort(logits, axis=-1)[:, [-20]]
    expected = {(r, t) for r, t in np.argwhere((logits >= cut) & np.isfinite(logits)).tolist()}
    found = set()
    for rows, token_ids, values in filters.top_candidates(logits, 20):
        for row, own, floats in zip(rows.tolist(), token_ids, values, strict=True):
            np.testing.assert_array_equal(
                logits[row, own][floats > -np.inf], floats[floats > -np.inf]
            )
            found |= {(row, token) for token in own[floats > -np.inf].tolist()}
    assert found == expected


def test_the_width_of_a_row_of_candidates_depends_on_the_row_alone():
    rng = np.random.default_rng(2)
    logits = language_like(rng, 6, 3000)
    logits[1, :90] = 50  # 90 ties
    logits[2, :90] = 50
    logits[4] = -np.inf
    logits[4, 7] = 1

    def widths(rows):
        found = filters.top_candidates(logits[rows], 30)
        return {rows[row]: c.logits.shape[1] for c in found for row in c.rows.tolist()}

    together = widths([0, 1, 2, 3, 4, 5])
    assert together == {0: 30, 1: 128, 2: 128, 3: 30, 4: 30, 5: 30}
    for row, width in together.items():
        assert widths([row]) == {row: width}
