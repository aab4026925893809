"""Products with weight matrices whose rows are the same, to the bit, whatever rows are beside them.

Sums of floats depend on their order: so rows are multiplied in tiles (see tiles.py), which BLAS is
known to add up in one order.  See He et al., "Defeating Nondeterminism in LLM Inference" (2025).

BLAS is fastest at weight @ x.T, so what comes of it lies feature by feature, and is turned around.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.layers import FloatArray
from batcher.transformer.quantization import LARGEST, quantize_weights_int8
from batcher.transformer.tiles import Tile, TilePart, multiply, pieces_of, tiles_of

ALL = slice(None)
EXACT = 2**24  # up to here, float32 has all whole numbers
_TURNED = 2048  # features that are turned around at once: so that they stay in the cache


class Linear(ABC):
    """A product with a matrix."""

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out], row by row in memory."""
        features = self.by_feature(x)
        if features.T.flags.c_contiguous:
            return features.T
        product = np.empty(features.shape[::-1], np.float32)
        for start in range(0, len(features), _TURNED):
            product[:, start : start + _TURNED] = features[start : start + _TURNED].T
        return product

    @abstractmethod
    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the same as [out, rows], feature by feature; x may lie in memory either way."""


class FastLinear(Linear):
    """x @ weight.T as BLAS computes it; the last bits of a row depend on how many rows there are.

    weight: [out, in].  bias: [out].
    """

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias[:, None]

    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows]."""
        product = multiply(self._weight, x)
        if self._bias is not None:
            product += self._bias
        return product


class TiledLinear(Linear):
    """x @ weight.T in tiles of rows, so that each row is the same in any company.

    weight: [out, in].  bias: [out].
    """

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias[:, None]
        self._tiles = tiles_of(*weight.shape)

    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows]."""
        parts = self._tiles.split(len(x))
        filled = [_filled(x[part.start : part.stop], part.tile) for part in parts]
        if len(parts) == 1:
            first = parts[0].tile.first
            product = multiply(self._weight, filled[0])[:, first : first + len(x)]
        else:
            product = self._of_parts(parts, filled)
        if self._bias is not None:
            product += self._bias
        return product

    def _of_parts(self, parts: list[TilePart], filled: list[FloatArray]) -> FloatArray:
        """Return the product of several tiles, each piece of the weights with all of them."""
        product = np.empty((len(self._weight), parts[-1].stop), np.float32)
        for piece in pieces_of(len(self._weight)):
            for (tile, start, stop), rows in zip(parts, filled, strict=True):
                good = slice(tile.first, tile.first + stop - start)
                product[piece, start:stop] = multiply(self._weight[piece], rows)[:, good]
        return product


class Integers(Protocol):
    """Weights [out, in] of int8, however they are held."""

    def multiply(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows] with x [rows, in], which is int8 as float32: exactly."""


KeepIntegers = Callable[[NDArray[np.int8]], Integers]


class UnpackedIntegers:
    """Weights of int8 that are held as float32, in which BLAS is fastest.

    It adds whole numbers exactly as long as no sum can be above EXACT, so where one could, weights
    are multiplied in slices.
    """

    def __init__(self, integers: NDArray[np.int8]) -> None:
        self._slices = slices_of(integers)
        self._weights = [integers[:, part].astype(np.float32, "C") for part in self._slices]

    def multiply(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows]."""
        product = multiply(self._weights[0], x[:, self._slices[0]])
        for part, weight in zip(self._slices[1:], self._weights[1:], strict=True):
            product += multiply(weight, x[:, part])
        return product


class Int8Linear(Linear):
    """x @ weight.T in integers, which have no order: rows are the same in any company, untiled.

    The activations of each row are rounded to int8, too, with a scale of their own.

    weight: [out, in].  per_channel: whether each output has a scale of its own.  bias: [out].
    outputs: which of the outputs there are, with the scales that they have among all.
    keep: makes what holds the integers.
    """

    def __init__(
        self,
        weight: FloatArray,
        bias: FloatArray | None = None,
        *,
        per_channel: bool,
        outputs: slice = ALL,
        keep: KeepIntegers = UnpackedIntegers,
    ) -> None:
        integers, scales = quantize_weights_int8(weight, per_channel=per_channel)
        self._scales = (scales[outputs] if per_channel else scales)[:, None]
        self._bias = None if bias is None else bias[outputs, None]
        self._integers = keep(integers[outputs])

    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows]."""
        integers = np.abs(x)
        scales = integers.max(1, keepdims=True) / np.float32(LARGEST)
        scales[scales == 0] = 1
        np.divide(x, scales, out=integers)
        np.rint(integers, out=integers)
        product = self._integers.multiply(integers)
        product *= scales.T
        product *= self._scales
        if self._bias is not None:
            product += self._bias
        return product


def _filled(x: FloatArray, tile: Tile) -> FloatArray:
    """Return the rows [size, in] of a tile: x where they are good, and else zeros."""
    if len(x) == tile.size:
        return x
    filled = np.zeros((tile.size, x.shape[1]), np.float32, "C" if x.flags.c_contiguous else "F")
    filled[tile.first : tile.first + len(x)] = x
    return filled


def slices_of(integers: NDArray[np.int8]) -> list[slice]:
    """Return the fewest slices of weights [out, in] whose sums with any int8 stay exact."""
    num_in = integers.shape[1]
    for num_slices in range(1, num_in + 1):
        starts = [num_in * number // num_slices for number in range(num_slices + 1)]
        largest = np.add.reduceat(np.abs(integers), starts[:-1], 1, np.int64).max(initial=0)
        if largest * LARGEST <= EXACT:
            break
    return [slice(start, stop) for start, stop in pairwise(starts)]
