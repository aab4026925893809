"""Draws as they are defined: all noise of all tokens, and filters that sort whole rows."""

import numpy as np

from batcher.decoding import filters
from batcher.decoding.filters import SamplingParams
from batcher.decoding.logprobs import log_softmax
from batcher.decoding.sampling import DrawStates


def slow_draw(
    logits: np.ndarray, states: DrawStates, params: SamplingParams
) -> tuple[list[int], np.ndarray]:
    """The tokens of the rows of `logits`, and the log-probabilities [rows, vocab] of the draws."""
    tokens, told = np.zeros(len(logits), np.int64), np.full(logits.shape, -np.inf)
    every_id = np.broadcast_to(np.arange(logits.shape[-1]), logits.shape)
    groups = [filters.Candidates(np.arange(len(logits)), every_id, logits.astype(np.float64))]
    for rows, token_ids, values in (
        filters.top_candidates(logits, params.top_k) if params.top_k else groups
    ):
        with np.errstate(over="ignore"):
            scores = (values - values.max(axis=-1, keepdims=True)) / params.temperature
        if params.top_p < 1:
            keep_top_p(scores, params.top_p)
        if params.min_p > 0:
            scores[scores < scores.max(axis=-1, keepdims=True) + np.log(params.min_p)] = -np.inf
        if params.typical_p < 1:
            keep_typical(scores, params.typical_p)
        columns = (scores + noise(states.keys[rows], states.positions[rows], token_ids)).argmax(-1)
        tokens[rows] = token_ids[np.arange(len(rows)), columns]
        for row, ids, logprobs in zip(rows, token_ids, log_softmax(scores), strict=True):
            told[row, ids[logprobs > -np.inf]] = logprobs[logprobs > -np.inf]
    return tokens.tolist(), told


def keep_top_p(logits: np.ndarray, top_p: float) -> None:
    for row in logits:
        order = np.lexsort((-np.arange(len(row)), row))  # of equals the higher ids go first
        ascending = row[order]
        mass = np.exp(ascending - ascending[-1]).cumsum()
        num_dropped = (mass[:-1] <= (1 - top_p) * mass[-1]).sum()
        row[order[:num_dropped]] = -np.inf


def keep_typical(logits: np.ndarray, typical_p: float) -> None:
    logprobs = log_softmax(logits)
    probabilities = np.exp(logprobs)
    terms = np.zeros_like(logprobs)
    np.multiply(probabilities, logprobs, out=terms, where=probabilities > 0)
    distances = np.abs(logprobs - terms.sum(axis=-1, keepdims=True))
    for row, own, weights in zip(logits, distances, probabilities, strict=True):
        nearest = own.argsort(kind="stable")
        last = (weights[nearest].cumsum()[:-1] < typical_p).sum()
        row[own > own[nearest[last]]] = -np.inf


def noise(keys: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """The noise of `token_ids` [rows, width] by SplitMix64; keys, positions: [rows]."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    starts = scramble(keys + (positions.astype(np.uint64) + 1) * gamma)
    bits = scramble(starts[:, None] + (token_ids.astype(np.uint64) + 1) * gamma)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def scramble(numbers: np.ndarray) -> np.ndarray:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
