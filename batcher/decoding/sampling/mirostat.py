"""Mirostat: a filter that steers the surprise of what is generated (Basu et al. 2021).

Every row has a bound mu in bits, 2 * tau at first, that moves after each token towards what would
have given a surprise of tau.  `logits` is [rows, width] after the temperature, mu is [rows].
"""

import numpy as np

from batcher.decoding.sampling.filters import keep_top_k
from batcher.decoding.sampling.logprobs import Floats, log_softmax
from batcher.models.base import IntArray

TINY = 1e-9
NUM_ESTIMATED = 100  # m of the paper: from so many tokens the shape of the tail is estimated


def surprises(logits: Floats) -> Floats:
    """Return -log2 of the probability [rows, width] of every token."""
    bits: Floats = -log_softmax(logits) / np.log(2)
    return bits


def keep_zipf(logits: Floats, mu: Floats) -> None:
    """Keep as many as have a surprise below mu if probabilities fall by Zipf's law; in place.

    Version 1, algorithm 1 of the paper.
    """
    sizes = zipf_sizes(-np.sort(surprises(logits), axis=-1) * np.log(2), mu)
    keep_top_k(logits, sizes[:, None])


def zipf_sizes(logprobs: Floats, mu: Floats) -> IntArray:
    """Return k [rows], at least 1; logprobs: [rows, width], descending.

    With the exponent s and e = s - 1, k = (e * 2^mu / (1 - width^-e))^(1/s), in logarithms, since
    a nearly even distribution has an s near 0.
    """
    width = logprobs.shape[-1]
    if width == 1:
        return np.ones(len(logprobs), np.int64)
    top = logprobs[:, :NUM_ESTIMATED]
    ranks = np.arange(1, top.shape[-1])
    steps = np.log((ranks + 1) / ranks)
    is_finite = np.isfinite(top[:, 1:])
    falls = np.subtract(top[:, :-1], top[:, 1:], where=is_finite, out=np.zeros_like(top[:, 1:]))
    squares = np.where(is_finite, steps * steps, 0).sum(axis=-1)
    exponent = (steps * falls).sum(axis=-1) / np.maximum(squares, TINY)
    excess = exponent - 1
    excess[np.abs(excess) < TINY] = TINY  # near the gap of the formula, where it has a limit
    with np.errstate(over="ignore"):
        scale = np.log(excess / -np.expm1(-excess * np.log(width)))
        log_size = (scale + mu * np.log(2)) / np.maximum(exponent, TINY)
    sizes: IntArray = np.rint(np.exp(np.clip(log_size, 0, np.log(width)))).astype(np.int64)
    return sizes


def keep_below(logits: Floats, mu: Floats) -> None:
    """Keep what has a surprise of at most mu, or the most likely if there is none; in place.

    Version 2, of the authors' code (github.com/basusourya/mirostat).
    """
    bits = surprises(logits)
    cut = np.maximum(mu[:, None], bits.min(axis=-1, keepdims=True))
    np.copyto(logits, -np.inf, where=bits > cut)


def move(mu: Floats, surprise: Floats, *, tau: float, eta: float, vocab_size: int) -> Floats:
    """Return mu [rows] after tokens of `surprise` [rows] in bits.

    Where tau is out of reach mu would wind away, and take as long to come back; at 0 it leaves one
    token, and at twice the bits of an even distribution all that matter.
    """
    moved: Floats = np.clip(mu - eta * (surprise - tau), 0, 2 * np.log2(max(vocab_size, 2)))
    return moved
