"""Draws: the same tokens and log-probabilities, to the last bit, as the definition in slow_draw."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sampling_rows import language_like
from slow_draw import slow_draw

from batcher.decoding import filters
from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import DrawStates, draw, probabilities

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


def some_logits(kind: str, seed: int, num_rows: int, vocab_size: int) -> np.ndarray:
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


def check(logits: np.ndarray, params: SamplingParams, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    num_rows, vocab_size = logits.shape
    keys = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    states = DrawStates(keys, rng.integers(0, 99, num_rows), np.zeros(num_rows))

    def tell(logprobs: np.ndarray, token_ids: np.ndarray, *_: int) -> np.ndarray:
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
def test_a_draw_is_that_of_the_definition(
    params: SamplingParams, kind: str, vocab_size: int, seed: int, wide: int
) -> None:
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
def test_a_draw_of_a_large_vocabulary_is_that_of_the_definition(
    fields: dict[str, float], temperature: float, kind: str
) -> None:
    params = SamplingParams(temperature=temperature, **fields)
    check(some_logits(kind, 0, 1, 49_152), params)
