"""Products with weight matrices whose rows are the same, to the bit, whatever rows are beside them.

Sums of floats depend on their order: so rows are multiplied in tiles (see tiles_of), which BLAS is
known to add up in one order.  See He et al., "Defeating Nondeterminism in LLM Inference" (2025).

BLAS is fastest at weight @ x.T, so what comes of it lies feature by feature, and is turned around.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.config import WeightKind
from batcher.transformer.layers import FloatArray, IntArray

# How many rows BLAS may multiply at once for each of them to come out the same to the bit.
#
# BLAS chooses its kernel by the size of a product, and within it by where a number stands; kernels
# add in different orders. So it is asked, for each shape of weights, which rows of products of a
# few sizes have equal bits: all rows that are ever computed are put in such places.

SIZES = (272, 144, 80, 64, 48, 32, 16, 8, 4, 2, 1)  # rows of products that are tried
_LEAST, _START = 8, 4  # what a product costs, in rows: at least that many, and some to begin
_TALL = 4096  # outputs: weights of more are multiplied in pieces
_PIECE = 2048  # outputs, or fewer
_NUM_SAMPLES = 64  # at least so many sums are compared for each place of a product


class Tile(NamedTuple):
    """A product of `size` rows, of which `num_rows` from `first` on are good."""

    size: int
    first: int
    num_rows: int

    @property
    def cost(self) -> int:
        return max(self.size, _LEAST) + _START


class TilePart(NamedTuple):
    """Rows start..stop of many, which a tile computes."""

    tile: Tile
    start: int
    stop: int


class Tiles:
    """The tiles in which weights of a shape are multiplied, and the cheapest of them for any rows.

    Whichever are taken, the bits are the same.
    """

    def __init__(self, tiles: list[Tile]) -> None:
        self._widest = max(tiles, key=lambda tile: tile.num_rows / tile.cost)
        self._best: list[Tile] = []  # by how many rows are left
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
    if len(x) == 1:  # BLAS is faster the other way round
        single: FloatArray = (x @ weight.T).T
        return single
    product = np.empty((len(weight), len(x)), np.float32)
    for piece in pieces_of(len(weight)):
        np.matmul(weight[piece], x.T, product[piece])
    return product


def pieces_of(num_out: int) -> list[slice]:
    """Return the pieces, all of one size, in which weights with so many outputs are multiplied."""
    size = _piece(num_out)
    return [slice(min(start, num_out - size), start + size) for start in range(0, num_out, size)]


def _piece(num_out: int) -> int:
    return max(num_out, 1) if num_out <= _TALL else -(-num_out // -(-num_out // _PIECE))


@cache
def tiles_of(num_out: int, num_in: int) -> Tiles:
    """Return the tiles in which this BLAS gives all rows times weights [out, in] equal bits.

    Rows may lie in memory one after the other or feature by feature.
    """
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((_piece(num_out), num_in), np.float32)
    rows = draw.standard_normal((-(-_NUM_SAMPLES // len(weight)), num_in), np.float32)
    found: dict[int, list[bytes | None]] = {}  # by size, the bits of each place that has but one
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


# Weights as integers of eight bits: symmetric, for a whole matrix or for each of its rows.

LARGEST = 127  # -128 is not used, so that zero is in the middle


class Quantized(NamedTuple):
    """Numbers as integers times a scale.

    integers: [out, in] from -127 to 127.  scales: [out], or [1] for all.
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
EXACT = 2**24  # up to here, float32 has all whole numbers
UNPACKED = 2**18  # numbers that are unpacked at once: 1 MiB, which stays in the cache
_TURNED = 2048  # features that are turned around at once, as above


class Linear:
    """A product with a matrix, and a bias [out] added to it."""

    _bias: FloatArray | None = None  # [out, 1]

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out], row by row in memory."""
        features = self.by_feature(x)
        if features.T.flags.c_contiguous:
            return features.T
        product = np.empty(features.shape[::-1], np.float32)
        for start in range(0, len(features), _TURNED):
            product[:, start : start + _TURNED] = features[start : start + _TURNED].T
        return product

    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the same as [out, rows], feature by feature; x may lie in memory either way."""
        product = self._product(x)
        if self._bias is not None:
            product += self._bias
        return product

    def _product(self, x: FloatArray) -> FloatArray:
        raise NotImplementedError


class FastLinear(Linear):
    """x @ weight.T as BLAS computes it; the last bits of a row depend on how many rows there are.

    weight: [out, in].  bias: [out].
    """

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias[:, None]

    def _product(self, x: FloatArray) -> FloatArray:
        return multiply(self._weight, x)


class TiledLinear(FastLinear):
    """x @ weight.T in tiles of rows, so that each row is the same in any company."""

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        super().__init__(weight, bias)
        self._tiles = tiles_of(*weight.shape)

    def _product(self, x: FloatArray) -> FloatArray:
        parts, filled = self._tiles.split(len(x)), []
        for (size, first, _), start, stop in parts:
            rows = x[start:stop]
            if len(rows) < size:  # x where the tile is good, and else zeros
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
    """x @ weight.T in integers, which have no order: rows are the same in any company, untiled.

    The activations of each row are rounded to int8, too, with a scale of their own.  Integers are
    multiplied as float32, in which BLAS is fastest.  It adds whole numbers exactly as long as no
    sum can be above EXACT, so where one could, weights are multiplied in slices.

    weight: [out, in].  per_channel: whether each output has a scale of its own.  bias: [out].
    outputs: which of the outputs there are, with the scales that they have among all.
    is_packed: whether weights are kept as int8, a quarter of the memory, and unpacked for each
    product, a few outputs at a time.
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
    """Return the fewest slices of weights [out, in] whose sums with any int8 stay exact."""
    num_in = integers.shape[1]
    for num_slices in range(1, num_in + 1):
        starts = [num_in * number // num_slices for number in range(num_slices + 1)]
        largest = np.add.reduceat(np.abs(integers), starts[:-1], 1, np.int64).max(initial=0)
        if largest * LARGEST <= EXACT:
            break
    return [slice(start, stop) for start, stop in pairwise(starts)]


# Which product is made of a weight, and who attends, for a process that holds all of a model.

Embedding = Callable[[IntArray], FloatArray]
"""Return the rows [tokens, hidden_size] of a table for token ids [tokens]."""


class OwnHeads(NamedTuple):
    """The heads of keys and values that a process attends with.

    which: of all of them.  gather: returns what all heads come to [tokens, heads * width], of what
    these do [tokens, own heads, width].
    """

    which: slice
    gather: Callable[[FloatArray], FloatArray]


class WholeLinears:
    """Makes products of weights that one process holds.

    kind: how they are kept and multiplied.  is_fast: whether products of floats are left to BLAS.
    table: looks up rows of the embedding where its file is, if integers stay packed.
    """

    def __init__(
        self, kind: WeightKind = "fp32", *, is_fast: bool = False, table: Embedding | None = None
    ) -> None:
        self._kind, self._is_fast, self._table = kind, is_fast, table

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], and a bias [out] added to it."""
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
