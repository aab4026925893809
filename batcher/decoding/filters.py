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

from batcher.decoding.logprobs import Floats, log_softmax
from batcher.models.base import FloatArray, IntArray

LOWEST = np.finfo(np.float32).min
BLOCK = 1 << 14  # about so many numbers at a time stay in a processor's cache
CHUNKS_PER_CANDIDATE = 4  # more cost time in finding the bound, fewer let more through it
WIDE = 1 << 12  # of rows from so many numbers on only those near a cut are sorted
NUM_BUCKETS = 1 << 10
MAX_SPAN = 32.0  # the buckets are of keys as near as this; what is beyond hardly weighs anything
ROUNDING = 2.0**-50  # of a sum, for each of its numbers: more than all roundings in a comparison

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
    ids = np.arange(vocab_size)
    for first in range(0, num_rows, num_together):
        floats = logits[first : first + num_together].astype(np.float64)
        rows = np.arange(first, first + len(floats))
        yield Candidates(rows, np.broadcast_to(ids, floats.shape), floats)


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
    if logits.shape[-1] < WIDE:
        _keep_sorted_top_p(logits, top_p)
        return
    for row in logits:
        weights = np.exp(row - row.max())
        total = weights.sum()
        # all that are not in it have less together than is to be dropped
        (head,) = (weights >= (1 - top_p) * total / len(row)).nonzero()
        scores = row[head]
        slack = total * len(row) * ROUNDING
        found = _cut(-scores, weights[head], top_p * total, slack)
        if found is None:
            _keep_sorted_top_p(row[None], top_p)
            continue
        is_kept = scores > -found.key
        (equal,) = (scores == -found.key).nonzero()
        is_kept[equal[: found.num_equal]] = True
        (kept,) = is_kept.nonzero()
        row.fill(-np.inf)
        row[head[kept]] = scores[kept]


def _keep_sorted_top_p(logits: Floats, top_p: float) -> None:
    """Keep what keep_top_p does; the probability of what is dropped is added up from the least."""
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
    if logits.shape[-1] < WIDE:
        logprobs = log_softmax(logits)
        probabilities = np.exp(logprobs)
        terms = np.zeros_like(logprobs)
        np.multiply(probabilities, logprobs, out=terms, where=probabilities > 0)
        distances = np.abs(logprobs - terms.sum(axis=-1, keepdims=True))
        cut = _farthest(distances, probabilities, typical_p)
        np.copyto(logits, -np.inf, where=distances > cut)
        return
    for row in logits:
        (left,) = (row > -np.inf).nonzero()
        logprobs = row[left] - row.max()
        logprobs -= np.log(_sum_of_row(np.exp(logprobs), left, len(row)))
        probabilities = np.exp(logprobs)
        entropy = -_sum_of_row(probabilities * logprobs, left, len(row))
        distances = np.abs(logprobs + entropy)
        found = _cut(distances, probabilities, typical_p, len(row) * ROUNDING)
        if found is None:
            farthest = _farthest(distances[None], probabilities[None], typical_p).item()
        else:
            farthest = found.key
        (dropped,) = (distances > farthest).nonzero()
        row[left[dropped]] = -np.inf


def _sum_of_row(values: Floats, columns: IntArray, width: int) -> float:
    """Return the sum of a row that has `values` at `columns`, and 0 elsewhere.

    The places decide which numbers are added first, and so the last bit.
    """
    row = values
    if len(columns) < width:
        row = np.zeros(width)
        row[columns] = values
    total: float = row.sum()
    return total


def _farthest(distances: Floats, probabilities: Floats, mass: float) -> Floats:
    """Return [rows, 1] the distance at which the nearest have `mass` of the probability."""
    nearest = np.argsort(distances, axis=-1, kind="stable")
    sums = np.take_along_axis(probabilities, nearest, axis=-1).cumsum(axis=-1)
    last = np.count_nonzero(sums[:, :-1] < mass, axis=-1)[:, None]
    farthest: Floats = np.take_along_axis(
        distances, np.take_along_axis(nearest, last, axis=-1), axis=-1
    )
    return farthest


class Cut(NamedTuple):
    """The last key that is needed for a mass, and how many of those equal to it."""

    key: float
    num_equal: int


def _cut(keys: Floats, weights: Floats, mass: float, slack: float) -> Cut | None:
    """Return where `weights` added up in ascending order of `keys`, both [width], come to `mass`.

    Only the keys of the bucket in which they do are sorted.  None if a sum is as near to `mass` as
    `slack`: then it counts in which order numbers are added.
    """
    lowest = keys.min()
    span = max(min(keys.max() - lowest, MAX_SPAN), TINY)
    buckets = ((keys - lowest).clip(0, span) * (NUM_BUCKETS / span)).astype(np.intp)
    sums = np.bincount(buckets, weights).cumsum()
    bucket = min(int(sums.searchsorted(mass)), len(sums) - 1)
    (members,) = (buckets == bucket).nonzero()
    members = members[keys[members].argsort()]
    before = sums[bucket - 1] if bucket else 0.0
    sums = np.concatenate(([before], weights[members])).cumsum()
    if np.abs(sums - mass).min() <= slack:
        return None
    last = int(sums.searchsorted(mass)) - 1
    ascending = keys[members]
    return Cut(ascending[last], last + 1 - int(ascending.searchsorted(ascending[last])))


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
