"""The layers of a transformer: norms, activations, RoPE, attention, and matrix products.

Each works on the last axis alone, so that no row depends on other rows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.config import FrequencyFactors, LinearScaling, RopeSettings, WeightKind

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
    """Return 1 / (1 + exp(-x)) of each element; an infinite power gives 0."""
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
    """Return GELU of each element in its tanh form (Hendrycks and Gimpel, 2016)."""
    inner = np.float32(sqrt(2 / pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: FloatArray = np.float32(0.5) * x * np.add(np.tanh(inner), 1, dtype=np.float32)
    return activated


def soft_cap(x: FloatArray, cap: float) -> FloatArray:
    """Return cap * tanh(x / cap), between -cap and cap (Gemma 2)."""
    capped: FloatArray = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


class RotaryEmbedding:
    """Rotates pairs of features by angles that grow with the position (Su et al., 2021).

    frequencies: [pairs] angle from one position to the next.
    """

    def __init__(self, settings: RopeSettings, head_dim: int) -> None:
        rotary_dim = settings.rotary_dim(head_dim)
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        self.frequencies: NDArray[np.float64] = np.power(settings.theta, -exponents)
        scaling = settings.scaling  # of a model trained further on a longer context
        if isinstance(scaling, LinearScaling):
            self.frequencies /= scaling.factor
        elif isinstance(scaling, FrequencyFactors):
            self.frequencies /= np.array(scaling.factors)
        elif scaling is not None:
            # Llama 3.1: high frequencies stay, low ones are divided, those between are
            # interpolated.
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
        """Return x [rows, heads, head_dim], rotated.

        Half-split, feature i is paired with i + pairs; interleaved, 2i with 2i + 1. Features
        outside pairs are unchanged.
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
# Each query head is multiplied by KEYS keys at a time, and the results of blocks are added in order
# of position. So no bit depends on chunks, block tables or other rows. The largest score of all
# blocks is taken first (a maximum has no order), and hidden keys add exactly 0.

KEYS = 32  # of a block
QUERIES = 64  # of one sequence, at once

NOWHERE = 0  # the cell of missing positions: its keys and values are zeros


def create_causal_mask(seq_length: int, batch_size: int) -> FloatArray:
    """Return a mask to add to scores [batch, queries, keys]: -inf for keys after the query.

    It is read-only.
    """
    mask = np.triu(np.full((seq_length, seq_length), -np.inf, np.float32), 1)
    return np.broadcast_to(mask, (batch_size, seq_length, seq_length))


# By the position of a query relative to a block of keys: before, in or behind it.
_MASKS = np.pad(create_causal_mask(KEYS, 1)[0], ((1, 1), (0, 0)))
_MASKS[0] = -np.inf


def padded_cells(cells: IntArray) -> IntArray:
    """Return the cells [positions] of a sequence, padded to whole blocks of keys."""
    num_missing = -len(cells) % KEYS
    return np.concatenate([cells, np.full(num_missing, NOWHERE)]) if num_missing else cells


class RowBlocks:
    """The blocks of keys seen by queries of different sequences, concatenated.

    cells: [blocks, KEYS]. rows: [blocks] the query of each.
    starts: [rows] first block of each query. counts: [rows] number of its blocks.
    mask: [blocks, 1, 1, KEYS] added to scores: 0, or -inf for hidden keys.
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
        """Return x [rows, ...] repeated for each block: [blocks, ...]."""
        return x if self._is_single else x[self.rows]

    def largest(self, parts: FloatArray) -> FloatArray:
        """Return the maxima [rows, ...] of the blocks' results [blocks, ...]."""
        if self._is_single:
            return parts
        largest: FloatArray = np.maximum.reduceat(parts, self.starts)
        return largest

    def summed(self, parts: FloatArray) -> FloatArray:
        """Return the sums [rows, ...] of the blocks' results [blocks, ...], in order."""
        if self._is_single:
            return parts
        total: FloatArray = parts[self.starts]
        for number in range(1, int(self.counts.max())):
            rows = (self.counts > number).nonzero()[0]
            total[rows] += parts[self.starts[rows] + number]
        return total


def first_blocks(positions: IntArray, window: int | None) -> IntArray:
    """Return the number of the first block that queries at `positions` see."""
    if window is None:
        return np.zeros_like(positions)
    first: IntArray = np.maximum(positions - window + 1, 0) // KEYS
    return first


class Attention:
    """Attention with grouped heads (Ainslie et al., "GQA", 2023), perhaps within a window.

    scale: of the scores. window: keys that a query sees, its own included; None for all before it.
    softcap: limit of the scores, or None.
    """

    def __init__(self, scale: float, window: int | None, softcap: float | None = None) -> None:
        self.window = window
        self._scale, self._softcap = np.float32(scale), softcap

    def of_chunk(
        self, query: FloatArray, first: int, cells: IntArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of consecutive tokens of one sequence.

        query: [tokens, heads, head_dim]. first: the position of the first token.
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
        """Write the scores [..., KEYS] of queries [..., head_dim] with blocks of keys."""
        np.matvec(keys, grouped, out=scores)
        if self._softcap is not None:
            scores[:] = soft_cap(scores, self._softcap)


def _mask(positions: IntArray, starts: IntArray, window: int | None) -> FloatArray:
    """Return 0, or -inf for keys hidden from a query: [rows, KEYS]."""
    places = np.clip(positions - starts, -1, KEYS) + 1
    mask: FloatArray = _MASKS[places]
    if window is not None:
        behind = np.clip(positions - starts - window, -1, KEYS) + 1
        mask[_MASKS[behind] == 0] = -np.inf
    return mask


def _by_head(store: FloatArray, cells: IntArray) -> FloatArray:
    """Return the contents of `cells` [blocks, KEYS]: [blocks, kv_heads, 1, KEYS, head_dim].

    The keys of a head are contiguous, however many heads there are: kernels depend on that.
    """
    num_heads, head_dim = store.shape[1:]
    rows = cells[:, None] * num_heads + np.arange(num_heads)[:, None]
    found: FloatArray = store.reshape(-1, head_dim).take(rows, 0)
    return found[:, :, None]


# Products whose rows are bit-equal in any company.
#
# Sums of floats depend on their order. So rows are multiplied in tiles (see tiles_of) in which BLAS
# adds in one order. See He et al., "Defeating Nondeterminism in LLM Inference" (2025).
#
# BLAS is fastest at weight @ x.T, whose result lies feature by feature and is transposed.

# BLAS chooses its kernel by the size of a product, and by the place of a number in it; kernels add
# in different orders. So tiles_of finds, for each shape of weights, which rows of products of a few
# sizes have equal bits. Rows are only computed in such places.

SIZES = (272, 144, 80, 64, 48, 32, 16, 8, 4, 2, 1)  # rows of products to try
_LEAST, _START = 8, 4  # cost of a product, in rows: at least _LEAST, plus _START
_TALL = 4096  # outputs: larger weights are multiplied in pieces
_PIECE = 2048  # outputs of a piece at most
_NUM_SAMPLES = 64  # sums compared for each place of a product


class Tile(NamedTuple):
    """A product of `size` rows, of which `num_rows` from `first` on have the right bits."""

    size: int
    first: int
    num_rows: int

    @property
    def cost(self) -> int:
        return max(self.size, _LEAST) + _START


class TilePart(NamedTuple):
    """Rows start..stop, computed by a tile."""

    tile: Tile
    start: int
    stop: int


class Tiles:
    """The tiles in which weights of a shape are multiplied; all give equal bits."""

    def __init__(self, tiles: list[Tile]) -> None:
        self._widest = max(tiles, key=lambda tile: tile.num_rows / tile.cost)
        self._best: list[Tile] = []  # by the number of remaining rows
        costs = [0]
        for num_rows in range(1, self._widest.num_rows + 1):
            cost, best = min(
                (tile.cost + costs[max(num_rows - tile.num_rows, 0)], tile) for tile in tiles
            )
            costs.append(cost)
            self._best.append(best)

    def split(self, num_rows: int) -> list[TilePart]:
        parts, start = [], 0
        while start < num_rows:
            num_left = num_rows - start
            is_wide = num_left > len(self._best)
            tile = self._widest if is_wide else self._best[num_left - 1]
            stop = min(start + tile.num_rows, num_rows)
            parts.append(TilePart(tile, start, stop))
            start = stop
        return parts


def multiply(weight: FloatArray, x: FloatArray) -> FloatArray:
    """Return weight [out, in] @ x.T of x [rows, in]: [out, rows]."""
    if len(x) == 1:  # BLAS is faster with the operands swapped
        single: FloatArray = (x @ weight.T).T
        return single
    product = np.empty((len(weight), len(x)), np.float32)
    for piece in pieces_of(len(weight)):
        np.matmul(weight[piece], x.T, product[piece])
    return product


def pieces_of(num_out: int) -> list[slice]:
    """Return the equal pieces in which weights with `num_out` outputs are multiplied."""
    size = _piece(num_out)
    return [slice(min(start, num_out - size), start + size) for start in range(0, num_out, size)]


def _piece(num_out: int) -> int:
    return max(num_out, 1) if num_out <= _TALL else -(-num_out // -(-num_out // _PIECE))


@cache
def tiles_of(num_out: int, num_in: int) -> Tiles:
    """Return the tiles in which this BLAS gives equal bits for weights [out, in].

    Rows may be contiguous by row or by feature.
    """
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((_piece(num_out), num_in), np.float32)
    rows = draw.standard_normal((-(-_NUM_SAMPLES // len(weight)), num_in), np.float32)
    found: dict[int, list[bytes | None]] = {}  # by size, the bits of each place, None if they vary
    for size in SIZES:
        products, is_equal = [], np.ones(size, np.bool_)
        for row in rows:
            company = np.tile(row, (size, 1))
            products.append(multiply(weight, company))
            is_equal &= (products[-1] == multiply(weight, np.asfortranarray(company))).all(0)
        places_of = zip(np.concatenate(products).T, is_equal, strict=True)
        found[size] = [place.tobytes() if is_same else None for place, is_same in places_of]
    counts = Counter(bits for places in found.values() for bits in places if bits is not None)
    wanted = counts.most_common(1)[0][0]
    tiles = []
    for size, places in found.items():
        best, start = (0, 0), 0
        for at, is_wanted in enumerate([*[bits == wanted for bits in places], False]):
            if not is_wanted:
                best = max(best, (start, at), key=lambda run: run[1] - run[0])
                start = at + 1
        first, stop = best
        if first < stop:
            tiles.append(Tile(size, first, stop - first))
    return Tiles(tiles)


# Weights as symmetric int8, with one scale for a matrix or for each of its rows.

LARGEST = 127  # without -128, so that zero is in the middle


class Quantized(NamedTuple):
    """Integers times a scale.

    integers: [out, in] from -127 to 127. scales: [out], or [1] for all.
    """

    integers: NDArray[np.int8]
    scales: FloatArray


def quantize_weights_int8(weights: FloatArray, *, per_channel: bool = False) -> Quantized:
    """Return weights [out, in] as int8: divided by max|w| / 127, rounded to the nearest."""
    axes = 1 if per_channel else None
    scales = np.atleast_1d(np.abs(weights).max(axes) / np.float32(LARGEST)).astype(np.float32)
    scales[scales == 0] = 1
    integers = np.rint(weights / scales[:, None]).clip(-LARGEST, LARGEST)
    return Quantized(integers.astype(np.int8), scales)


ALL = slice(None)
EXACT = 2**24  # up to here, float32 represents all integers
UNPACKED = 2**18  # numbers unpacked at once: 1 MiB, which fits into the cache
_TURNED = 2048  # features transposed at once


class Linear:
    """A product with a matrix, plus a bias [out]."""

    _bias: FloatArray | None = None  # [out, 1]

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out], contiguous by row."""
        features = self.by_feature(x)
        if features.T.flags.c_contiguous:
            return features.T
        product = np.empty(features.shape[::-1], np.float32)
        for start in range(0, len(features), _TURNED):
            product[:, start : start + _TURNED] = features[start : start + _TURNED].T
        return product

    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the same as [out, rows], contiguous by feature."""
        product = self._product(x)
        if self._bias is not None:
            product += self._bias
        return product

    def _product(self, x: FloatArray) -> FloatArray:
        raise NotImplementedError


class FastLinear(Linear):
    """x @ weight.T as BLAS computes it; the last bits depend on the number of rows.

    weight: [out, in]. bias: [out].
    """

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias[:, None]

    def _product(self, x: FloatArray) -> FloatArray:
        return multiply(self._weight, x)


class TiledLinear(FastLinear):
    """x @ weight.T in tiles of rows, so that no row depends on the others."""

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        super().__init__(weight, bias)
        self._tiles = tiles_of(*weight.shape)

    def _product(self, x: FloatArray) -> FloatArray:
        parts, filled = self._tiles.split(len(x)), []
        for (size, first, _), start, stop in parts:
            rows = x[start:stop]
            if len(rows) < size:  # zeros outside the good places
                rows = np.zeros(
                    (size, x.shape[1]), np.float32, "C" if x.flags.c_contiguous else "F"
                )
                rows[first : first + stop - start] = x[start:stop]
            filled.append(rows)
        if len(parts) == 1:
            first = parts[0].tile.first
            return multiply(self._weight, filled[0])[:, first : first + len(x)]
        product = np.empty((len(self._weight), parts[-1].stop), np.float32)
        for piece in pieces_of(len(self._weight)):
            for (tile, start, stop), rows in zip(parts, filled, strict=True):
                good = slice(tile.first, tile.first + stop - start)
                product[piece, start:stop] = multiply(self._weight[piece], rows)[:, good]
        return product


class Int8Linear(Linear):
    """x @ weight.T in integers, whose sums have no order.

    The activations of each row are rounded to int8 with a scale of their own. Integers are
    multiplied as float32, in which BLAS is fastest. Sums up to EXACT are exact, so weights are
    multiplied in slices whose sums stay below.

    weight: [out, in]. per_channel: a scale for each output. bias: [out].
    outputs: a part of the outputs, with their scales among all.
    is_packed: keep weights as int8, a quarter of the memory, and unpack a few outputs at a time.
    """

    def __init__(
        self,
        weight: FloatArray,
        bias: FloatArray | None = None,
        *,
        per_channel: bool,
        outputs: slice = ALL,
        is_packed: bool = False,
    ) -> None:
        integers, scales = quantize_weights_int8(weight, per_channel=per_channel)
        self._scales = (scales[outputs] if per_channel else scales)[:, None]
        self._bias = None if bias is None else bias[outputs, None]
        self._slices = slices_of(integers[outputs])
        self._integers = integers[outputs].astype(np.int8 if is_packed else np.float32, "C")
        self._num_at_once = max(len(self._integers), 1)
        if is_packed:
            self._num_at_once = max(UNPACKED // weight.shape[1], 1)

    def _product(self, x: FloatArray) -> FloatArray:
        integers = np.abs(x)
        scales = integers.max(1, keepdims=True) / np.float32(LARGEST)
        scales[scales == 0] = 1
        np.divide(x, scales, out=integers)
        np.rint(integers, out=integers)
        product = np.empty((len(self._integers), len(x)), np.float32)
        for start in range(0, len(product), self._num_at_once):
            piece = slice(start, start + self._num_at_once)
            weight = self._integers[piece].astype(np.float32, copy=False)
            first, *others = self._slices
            product[piece] = multiply(weight[:, first], integers[:, first])
            for part in others:
                product[piece] += multiply(weight[:, part], integers[:, part])
        product *= scales.T
        product *= self._scales
        return product


def slices_of(integers: NDArray[np.int8]) -> list[slice]:
    """Return the fewest slices of weights [out, in] whose sums with any int8 are exact."""
    num_in = integers.shape[1]
    for num_slices in range(1, num_in + 1):
        starts = [num_in * number // num_slices for number in range(num_slices + 1)]
        largest = np.add.reduceat(np.abs(integers), starts[:-1], 1, np.int64).max(initial=0)
        if largest * LARGEST <= EXACT:
            break
    return [slice(start, stop) for start, stop in pairwise(starts)]


Embedding = Callable[[IntArray], FloatArray]
"""Return the rows [tokens, hidden_size] of a table for token ids [tokens]."""


class OwnHeads(NamedTuple):
    """The heads of keys and values of this process.

    which: of all heads. gather: returns the output of all heads [tokens, heads * width], from that
    of these [tokens, own heads, width].
    """

    which: slice
    gather: Callable[[FloatArray], FloatArray]


class WholeLinears:
    """Makes products of whole weights.

    kind: their format. is_fast: leave float products to BLAS.
    table: reads rows of the embedding from its file, if integers stay packed.
    """

    def __init__(
        self, kind: WeightKind = "fp32", *, is_fast: bool = False, table: Embedding | None = None
    ) -> None:
        self._kind, self._is_fast, self._table = kind, is_fast, table

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in] and a bias [out]."""
        if self._kind != "fp32":
            is_packed, per_channel = self._table is not None, self._kind == "int8-channel"
            return Int8Linear(weight, bias, per_channel=per_channel, is_packed=is_packed)
        return FastLinear(weight, bias) if self._is_fast else TiledLinear(weight, bias)

    def embedding(self, table: FloatArray) -> Embedding:
        return self._table or table.__getitem__

    def tied(self, table: FloatArray) -> tuple[Embedding, Linear]:
        return self.embedding(table), self.linear(table)

    def heads(self, num_kv_heads: int) -> OwnHeads:
        return OwnHeads(
            slice(0, num_kv_heads), lambda attended: attended.reshape(len(attended), -1)
        )
