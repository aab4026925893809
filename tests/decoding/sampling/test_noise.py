"""Noise: what it depends on, how it is spread, and that it draws what it should."""

from unittest.mock import patch

import numpy as np
import pytest
from sampling_rows import Letters, language_like

from batcher.decoding import sampling
from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import Sampler, SamplingRow


def gumbel(keys: list[int], positions: list[int], token_ids: np.ndarray) -> np.ndarray:
    """[rows, tokens]"""
    ids = np.tile(token_ids, (len(keys), 1))
    hashes = sampling.token_hashes(np.array(keys, np.uint64), np.array(positions), ids)
    values = sampling.gumbel_noise(hashes)
    assert (sampling.highest_noise(hashes) > values).all()
    return values


def test_keys_differ_by_seed_request_and_sample_and_never_change() -> None:
    given = [(s, i, n) for s in (0, 1, -1, 2**63) for i in ("", "a", "b", "\udcff") for n in (0, 1)]
    keys = [sampling.row_key(*each) for each in given]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert sampling.row_key(0, "1", 0) == 24513270026664046


def test_every_position_and_token_has_noise_of_its_own() -> None:
    values = gumbel([5, 5, 6], [0, 1, 0], np.arange(100))
    assert len(np.unique(values)) == values.size
    assert (gumbel([6, 5], [0, 1], np.arange(50, 60)) == values[[2, 1], 50:60]).all()


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_at_both_ends_of_the_hash(bits: int) -> None:
    with patch.object(sampling, "mix_in_place", lambda numbers: np.full_like(numbers, bits)):
        assert np.isfinite(gumbel([1], [0], np.arange(3))).all()


def test_noise_is_spread_as_gumbel_says() -> None:
    values = gumbel(list(range(40)), [3] * 40, np.arange(1000))
    uniform = np.exp(-np.exp(-values)).reshape(-1)
    counts = np.histogram(uniform, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 50.8  # 19 degrees of freedom, p > 1e-4
    correlations = np.corrcoef(values)[np.triu_indices(40, 1)]
    assert abs(correlations).max() < 0.16  # five deviations


def test_drafts_and_their_acceptance_have_noise_of_their_own() -> None:
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


def draws(logits: np.ndarray, params: SamplingParams, by: str) -> np.ndarray:
    """How often each token is chosen of 2,000: of one row at many positions, or of many rows."""
    num_rows, num_steps = (1, 2000) if by == "position" else (400, 5)
    sampler = Sampler(num_rows, len(logits), Letters(len(logits)))
    for row in range(num_rows):
        sampler.open(row, SamplingRow(params, sampling.row_key(3, f"request {row}", 0), []))
    counts = np.zeros(len(logits))
    for _ in range(num_steps):
        np.add.at(counts, sampler.sample(np.tile(logits, (num_rows, 1))).tokens, 1)
    return counts


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = language_like(np.random.default_rng(5), 1, 11)[0]
    expected = np.exp(logits - logits.max())
    expected *= 2000 / expected.sum()
    for by in ("position", "row"):
        counts = draws(logits, SamplingParams(temperature=1.0), by)
        assert ((counts - expected) ** 2 / expected).sum() < 35.6  # 10 degrees, p > 1e-4
    kept = np.sort(expected)[-3:]
    counts = draws(logits, SamplingParams(temperature=1.0, top_k=3), "row")
    observed = counts[np.argsort(expected)]
    assert not observed[:-3].any()
    expected = kept * 2000 / kept.sum()
    assert ((observed[-3:] - expected) ** 2 / expected).sum() < 18.4  # 2 degrees
