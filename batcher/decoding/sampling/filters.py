"""Which tokens stay in the draw: temperature and the filters of the sampling literature.

`logits` is [rows, width] float64, of the vocabulary or of candidates in the order of their ids.  A
filter sets what it drops to -inf, in place, and never drops all of a row that has any.

Mirostat is a filter that steers the surprise of what is generated (Basu et al. 2021): every row has
a bound mu [rows] in bits, 2 * tau at first, that moves after each token towards what would have
given a surprise of tau.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from batcher.decoding.sampling.logprobs import Floats, log_softmax
from batcher.models.base import FloatArray, IntArray

LOWEST = np.finfo(np.float32).min
BLOCK = 1 << 14  # about so many numbers at a time stay in a processor's cache
CHUNKS_PER_CANDIDATE = 4  # more cost time in finding the bound, fewer let more through it


TINY = 1e-9
NUM_ESTIMATED = 100  # m of the paper: from so many tokens the shape of the tail is estimated


class Candidates(NamedTuple):
    """Some tokens of some rows.

    rows: [n] which rows.  token_ids: [n, width], ascending in each row.  logits: [n, width]
    float64, -inf where there is no candidate.
    """

    rows: IntArray
    token_ids: IntArray
    logits: Floats


def all_candidates(logits: FloatArray) -> Iterator[Candidates]:
    """Yield every token of every row, some rows at a time; the logits are copies."""
    num_rows, vocab_size = logits.shape
    num_together = max(1, BLOCK // vocab_size)
    for first in range(0, num_rows, num_together):
        rows = np.arange(first, min(first + num_together, num_rows))
        token_ids = np.broadcast_to(np.arange(vocab_size), (len(rows), vocab_size))
        yield Candidates(rows, token_ids, logits[rows].astype(np.float64))


def top_candidates(logits: FloatArray, top_k: int) -> Iterator[Candidates]:
    """Yield the tokens of each row that are among its `top_k` largest, ties at the end kept.

    What rounds later depends on the width, so that of a row depends on this row alone: top_k, or,
    if ties make it more, the next power of two.
    """
    num_rows, vocab_size = logits.shape
    top_k = min(top_k, vocab_size)
    (flat,) = (logits >= _lower_bound(logits, top_k)).reshape(-1).nonzero()
    rows = flat // vocab_size
    token_ids = flat - rows * vocab_size  # a third of what divmod takes
    values = logits.reshape(-1)[flat]
    (tops,) = (values >= _kth_largest(rows, values, num_rows, top_k)[rows]).nonzero()
    rows, token_ids, values = rows[tops], token_ids[tops], values[tops]
    counts = np.bincount(rows, minlength=num_rows)
    if (counts == top_k).all():  # nearly always
        shape = num_rows, top_k
        floats = values.astype(np.float64).reshape(shape)
        yield Candidates(np.arange(num_rows), token_ids.reshape(shape), floats)
        return
    widths = np.where(counts <= top_k, top_k, 2 ** np.ceil(np.log2(np.maximum(counts, 1))))
    for width in np.unique(widths).tolist():
        (chosen,) = (widths == width).nonzero()
        shape = len(chosen), int(width)
        packed = Candidates(chosen, np.zeros(shape, np.int64), np.full(shape, -np.inf))
        is_here = np.isin(rows, chosen)
        at = chosen.searchsorted(rows[is_here]), _columns(rows, counts)[is_here]
        packed.token_ids[at], packed.logits[at] = token_ids[is_here], values[is_here]
        yield packed


def _columns(rows: IntArray, counts: IntArray) -> IntArray:
    """Return [n] how many of the same row come before; rows: [n] ascending; counts: [num_rows]."""
    return np.arange(len(rows)) - (counts.cumsum() - counts)[rows]


def _lower_bound(logits: FloatArray, top_k: int) -> FloatArray:
    """Return [rows, 1]: at most the top_k-th largest of each row, near it, and finite.

    The top_k-th largest of the maxima of many chunks: far fewer numbers to select from.
    """
    num_rows, vocab_size = logits.shape
    size = vocab_size // (CHUNKS_PER_CANDIDATE * top_k)
    if size < 1:
        return np.full((num_rows, 1), LOWEST)
    num_chunks = vocab_size // size
    chunks = logits[:, : size * num_chunks].reshape(num_rows, size, num_chunks)
    place = num_chunks - top_k
    maxima = np.sort(chunks.max(axis=1), axis=-1)  # faster than np.partition for so few
    bound: FloatArray = np.maximum(maxima[:, place : place + 1], LOWEST)
    return bound


def _kth_largest(rows: IntArray, values: FloatArray, num_rows: int, k: int) -> FloatArray:
    """Return [num_rows] the k-th largest value of every row, -inf where it has fewer.

    rows: [n] ascending, the row of each of `values`.
    """
    counts = np.bincount(rows, minlength=num_rows)
    width = max(k, int(counts.max()))
    table = np.full((num_rows, width), -np.inf, np.float32)
    table[rows, _columns(rows, counts)] = values
    kth: FloatArray = np.sort(table, axis=-1)[:, width - k]
    return kth


def temper(logits: Floats, temperature: float) -> Floats:
    """Return (logits - the row's largest) / temperature.

    A softmax does not see the shift, and no temperature, however small, overflows.
    """
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        shifted /= temperature
    return shifted


def keep_min_p(logits: Floats, min_p: float) -> None:
    """Keep what is at least `min_p` times as likely as the most likely (Nguyen et al. 2024)."""
    if min_p > 0:
        cut = logits.max(axis=-1, keepdims=True) + np.log(min_p)
        np.copyto(logits, -np.inf, where=logits < cut)


def keep_top_k(logits: Floats, top_k: int | IntArray) -> None:
    """Keep the `top_k` most likely, an int >= 1 or [rows, 1], ties at the end kept.

    Fan et al. 2018, section 5.1.
    """
    width = logits.shape[-1]
    place = np.broadcast_to(width - np.minimum(top_k, width), (len(logits), 1))
    cut = np.take_along_axis(np.sort(logits, axis=-1), place, axis=-1)
    np.copyto(logits, -np.inf, where=logits < cut)


def keep_top_p(logits: Floats, top_p: float) -> None:
    """Keep the fewest of the most likely that have `top_p` of the probability, at least one.

    Holtzman et al. 2020, section 3.1.  Of equal ones at the end the lower ids stay.
    """
    if top_p >= 1:
        return
    ascending = np.sort(logits, axis=-1)
    mass = np.exp(ascending - ascending[:, -1:]).cumsum(axis=-1)
    num_dropped = (mass[:, :-1] <= (1 - top_p) * mass[:, -1:]).sum(axis=-1)
    rows = np.arange(len(logits))
    cut = ascending[rows, num_dropped]
    is_tied = (ascending[rows, num_dropped - 1] == cut) & (num_dropped > 0)
    for row in is_tied.nonzero()[0].tolist():
        (ties,) = (logits[row] == cut[row]).nonzero()
        num_below = int(ascending[row].searchsorted(cut[row]))
        logits[row, ties[num_below - num_dropped[row] :]] = -np.inf
    np.copyto(logits, -np.inf, where=logits < cut[:, None])


def keep_typical(logits: Floats, typical_p: float) -> None:
    """Keep what is nearest to the expected surprise until it has `typical_p` of the probability.

    Meister et al. 2022, section 5; what is as near as the last stays too.
    """
    if typical_p >= 1:
        return
    logprobs = log_softmax(logits)
    probabilities = np.exp(logprobs)
    terms = np.zeros_like(logprobs)
    np.multiply(probabilities, logprobs, out=terms, where=probabilities > 0)
    distances = np.abs(logprobs - terms.sum(axis=-1, keepdims=True))
    nearest = np.argsort(distances, axis=-1, kind="stable")
    mass = np.take_along_axis(probabilities, nearest, axis=-1).cumsum(axis=-1)
    last = np.count_nonzero(mass[:, :-1] < typical_p, axis=-1)[:, None]
    cut = np.take_along_axis(distances, np.take_along_axis(nearest, last, axis=-1), axis=-1)
    np.copyto(logits, -np.inf, where=distances > cut)


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


def move_mu(mu: Floats, surprise: Floats, *, tau: float, eta: float, vocab_size: int) -> Floats:
    """Return mu [rows] after tokens of `surprise` [rows] in bits.

    Where tau is out of reach mu would wind away, and take as long to come back; at 0 it leaves one
    token, and at twice the bits of an even distribution all that matter.
    """
    moved: Floats = np.clip(mu - eta * (surprise - tau), 0, 2 * np.log2(max(vocab_size, 2)))
    return moved
