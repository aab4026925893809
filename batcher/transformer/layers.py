"""The layers of a transformer that have no weights to multiply by, or only one for each feature.

Each works on the last axis alone, so that what a row comes to never depends on the rows beside it.
"""

from collections.abc import Sequence
from math import pi, sqrt

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.config import (
    FrequencyFactors,
    LinearScaling,
    RopeSettings,
)

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


def rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """Return x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    x: [..., features].  weight: [features].
    """
    mean: FloatArray = np.vecdot(x, x)[..., None]
    mean /= np.float32(x.shape[-1])
    mean += np.float32(eps)
    np.sqrt(mean, out=mean)
    normed: FloatArray = x / mean
    normed *= weight
    return normed


def sigmoid(x: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)) of each element.

    Where the power is above all floats, it is infinite, and what comes of it is 0, as it should be.
    """
    activated = _one_and_power(x)
    return np.divide(np.float32(1), activated, out=activated)


def silu(x: FloatArray) -> FloatArray:
    """Return x * sigmoid(x) of each element."""
    activated = _one_and_power(x)
    return np.divide(x, activated, out=activated)


def _one_and_power(x: FloatArray) -> FloatArray:
    """Return 1 + exp(-x) of each element; it may be infinite."""
    power: FloatArray = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(power, out=power)
    power += np.float32(1)
    return power


def softplus(x: FloatArray) -> FloatArray:
    """Return log(1 + exp(x)) of each element; nothing overflows."""
    positive: FloatArray = np.maximum(x, 0)
    return positive + np.log1p(np.exp(-np.abs(x)))


def gelu_tanh(x: FloatArray) -> FloatArray:
    """Return x * P(X <= x) of a normal X, by way of tanh (Hendrycks and Gimpel, 2016)."""
    inner = np.float32(sqrt(2 / pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: FloatArray = np.float32(0.5) * x * np.add(np.tanh(inner), 1, dtype=np.float32)
    return activated


def soft_cap(x: FloatArray, cap: float) -> FloatArray:
    """Return cap * tanh(x / cap), which lies between -cap and cap (Gemma 2)."""
    capped: FloatArray = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


class RotaryEmbedding:
    """Turns pairs of features by angles that grow with the position (Su et al., "RoFormer", 2021).

    frequencies: [pairs] by how much each pair is turned from one position to the next.
    """

    def __init__(self, settings: RopeSettings, head_dim: int) -> None:
        rotary_dim = settings.rotary_dim(head_dim)
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        self.frequencies: NDArray[np.float64] = np.power(settings.theta, -exponents)
        scaling = settings.scaling  # of a model that was trained further on a longer context
        if isinstance(scaling, LinearScaling):
            self.frequencies /= scaling.factor
        elif isinstance(scaling, FrequencyFactors):
            self.frequencies /= np.array(scaling.factors)
        elif scaling is not None:
            # Llama 3.1: high frequencies stay, low ones are divided, those between are mixed.
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            num_turns = scaling.original_max_position_embeddings * self.frequencies / (2 * pi)
            share = np.clip((num_turns - low) / (high - low), 0, 1)
            self.frequencies *= share + (1 - share) / scaling.factor
        self.settings = settings
        self._is_interleaved = settings.style == "interleaved"

    def angles(self, positions: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the cosines and sines [rows, 1, pairs] at `positions` [rows]."""
        angles = positions[:, None, None] * self.frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotate(self, x: FloatArray, cosines: FloatArray, sines: FloatArray) -> FloatArray:
        """Return x [rows, heads, head_dim], turned.

        Half-split, feature i is paired with i + pairs; interleaved, 2i with 2i + 1.  What is not in
        a pair stays as it is.
        """
        half = len(self.frequencies)
        end = 2 * half
        is_interleaved = self._is_interleaved
        firsts = (..., slice(0, end, 2)) if is_interleaved else (..., slice(None, half))
        seconds = (..., slice(1, end, 2)) if is_interleaved else (..., slice(half, end))
        turned = np.empty_like(x)
        turned[..., end:] = x[..., end:]
        first = np.multiply(x[firsts], cosines, out=turned[firsts])
        first -= x[seconds] * sines
        second = np.multiply(x[seconds], cosines, out=turned[seconds])
        second += x[firsts] * sines
        return turned


# Scaled dot-product attention over keys and values in cells, block by block from position 0.
#
# Each head of a query is multiplied by KEYS keys at a time, whatever is beside it, and what blocks
# come to is added in the order of positions: so neither chunks nor block tables nor other rows show
# in the bits. The largest score is taken first, over all blocks (a maximum has no order), and what
# hidden keys add is exactly nothing.

KEYS = 32  # of a block
QUERIES = 64  # of one sequence, at once

NOWHERE = 0  # the cell of positions that are not there: its keys and values are zeros


def create_causal_mask(seq_length: int, batch_size: int) -> FloatArray:
    """Return what is added to scores [batch, queries, keys] of sequences so that none looks ahead.

    It is 0 where the key is not after the query, and -inf above the diagonal; to be read only.
    """
    mask = np.triu(np.full((seq_length, seq_length), -np.inf, np.float32), 1)
    return np.broadcast_to(mask, (batch_size, seq_length, seq_length))


# Of a block of keys, by the place that a query has in it: before it, in it or behind it.
_MASKS = np.pad(create_causal_mask(KEYS, 1)[0], ((1, 1), (0, 0)))
_MASKS[0] = -np.inf


def padded_cells(cells: IntArray) -> IntArray:
    """Return the cells [positions] of a sequence, filled up to whole blocks of keys."""
    num_missing = -len(cells) % KEYS
    return np.concatenate([cells, np.full(num_missing, NOWHERE)]) if num_missing else cells


class RowBlocks:
    """The blocks of keys that some queries see, each of another sequence: one after the other.

    cells: [blocks, KEYS].  rows: [blocks] the number of the query that sees each.
    starts: [rows] where the blocks of each begin.  counts: [rows] how many each has.
    mask: [blocks, 1, 1, KEYS] is added to scores: 0, or -inf for a key that is hidden.
    """

    def __init__(self, positions: IntArray, tables: Sequence[IntArray], window: int | None) -> None:
        firsts, lasts = first_blocks(positions, window), positions // KEYS
        self.counts = lasts - firsts + 1
        self.starts: IntArray = self.counts.cumsum() - self.counts
        self.rows: IntArray = np.arange(len(positions)).repeat(self.counts)
        boundaries = zip(
            tables, (firsts * KEYS).tolist(), ((lasts + 1) * KEYS).tolist(), strict=True
        )
        own = [table[first:stop] for table, first, stop in boundaries]
        self.cells: IntArray = np.concatenate(own).reshape(-1, KEYS)
        numbers = np.arange(len(self.rows)) + (firsts - self.starts)[self.rows]
        self.mask = _mask(positions[self.rows], numbers * KEYS, window)[:, None, None]

    @property
    def _is_single(self) -> bool:
        return len(self.rows) == len(self.counts)

    def spread(self, x: FloatArray) -> FloatArray:
        """Return x [rows, ...] for the row of each block: [blocks, ...]."""
        return x if self._is_single else x[self.rows]

    def largest(self, parts: FloatArray) -> FloatArray:
        """Return the maxima [rows, ...] of what each block comes to [blocks, ...]."""
        if self._is_single:
            return parts
        largest: FloatArray = np.maximum.reduceat(parts, self.starts)
        return largest

    def summed(self, parts: FloatArray) -> FloatArray:
        """Return the sums [rows, ...] of what each block comes to [blocks, ...], in their order."""
        if self._is_single:
            return parts
        total: FloatArray = parts[self.starts]
        for number in range(1, int(self.counts.max())):
            rows = (self.counts > number).nonzero()[0]
            total[rows] += parts[self.starts[rows] + number]
        return total


def first_blocks(positions: IntArray, window: int | None) -> IntArray:
    """Return the number of the first block of which queries at `positions` see anything."""
    if window is None:
        return np.zeros_like(positions)
    first: IntArray = np.maximum(positions - window + 1, 0) // KEYS
    return first


class Attention:
    """Attention with grouped heads (Ainslie et al., "GQA", 2023), perhaps within a window.

    scale: of the scores.  window: how many keys, its own included, a query sees; None for all
    before it.  softcap: between which bounds the scores are kept; None if they are not.
    """

    def __init__(self, scale: float, window: int | None, softcap: float | None = None) -> None:
        self.window = window
        self._scale, self._softcap = np.float32(scale), softcap

    def of_chunk(
        self, query: FloatArray, first: int, cells: IntArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of tokens on end of one sequence.

        query: [tokens, heads, head_dim].  first: the position of the first of them.
        cells: [whole blocks of keys] of the sequence, see `padded_cells`.
        keys, values: [cells, kv_heads, head_dim].
        """
        output = np.empty(query.shape, np.float32)
        blocks = cells.reshape(-1, KEYS)
        own_keys, own_values = _by_head(keys, blocks), _by_head(values, blocks)
        for start in range(0, len(query), QUERIES):
            part = slice(start, min(start + QUERIES, len(query)))
            positions = np.arange(first + start, first + part.stop)
            seen = range(
                int(first_blocks(positions[:1], self.window)[0]), int(positions[-1]) // KEYS + 1
            )
            grouped = self._grouped(query[part], keys.shape[1])
            scores = np.empty((len(seen), *grouped.shape[:3], KEYS), np.float32)
            for number, block in enumerate(seen):
                self._score(own_keys[block], grouped, scores[number])
                mask = _mask(positions, np.array([block * KEYS]), self.window)
                scores[number] += mask[:, None, None]
            scores -= scores.max((0, 4), keepdims=True)
            np.exp(scores, out=scores)
            totals = scores.sum(-1)
            total, summed = totals[0], np.vecmat(scores[0], own_values[seen.start])
            for number, block in enumerate(seen[1:], 1):
                total += totals[number]
                summed += np.vecmat(scores[number], own_values[block])
            summed /= total[..., None]
            output[part] = summed.reshape(output[part].shape)
        return output

    def of_rows(
        self, query: FloatArray, blocks: RowBlocks, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [rows, heads, head_dim] of one token of each of several sequences.

        query: [rows, heads, head_dim].  keys, values: as above.
        """
        grouped = blocks.spread(self._grouped(query, keys.shape[1]))
        scores = np.empty((*grouped.shape[:3], KEYS), np.float32)
        self._score(_by_head(keys, blocks.cells), grouped, scores)
        scores += blocks.mask
        scores -= blocks.spread(blocks.largest(scores.max(-1, keepdims=True)))
        np.exp(scores, out=scores)
        output: FloatArray = blocks.summed(np.vecmat(scores, _by_head(values, blocks.cells)))
        output /= blocks.summed(scores.sum(-1))[..., None]
        return output.reshape(query.shape)

    def _grouped(self, query: FloatArray, num_kv_heads: int) -> FloatArray:
        """Return queries [rows, kv_heads, heads of each, head_dim], scaled."""
        num_rows, _, head_dim = query.shape
        return (query * self._scale).reshape(num_rows, num_kv_heads, -1, head_dim)

    def _score(self, keys: FloatArray, grouped: FloatArray, scores: FloatArray) -> None:
        """Put the scores [..., KEYS] of queries [..., head_dim] with blocks of keys in place."""
        np.matvec(keys, grouped, out=scores)
        if self._softcap is not None:
            scores[:] = soft_cap(scores, self._softcap)


def _mask(positions: IntArray, starts: IntArray, window: int | None) -> FloatArray:
    """Return 0, or -inf for a key that is hidden from a query: [rows, KEYS].

    positions: [rows].  starts: [rows or 1] where blocks of keys begin.
    """
    places = np.clip(positions - starts, -1, KEYS) + 1
    mask: FloatArray = _MASKS[places]
    if window is not None:
        behind = np.clip(positions - starts - window, -1, KEYS) + 1
        mask[_MASKS[behind] == 0] = -np.inf
    return mask


def _by_head(store: FloatArray, cells: IntArray) -> FloatArray:
    """Return what is in `cells` [blocks, KEYS]: [blocks, kv_heads, 1, KEYS, head_dim].

    The keys of a head lie on end, however many heads there are: kernels are chosen by that.
    """
    num_heads, head_dim = store.shape[1:]
    rows = cells[:, None] * num_heads + np.arange(num_heads)[:, None]
    found: FloatArray = store.reshape(-1, head_dim).take(rows, 0)
    return found[:, :, None]
