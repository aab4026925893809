"""Products with weight matrices whose rows are the same, to the bit, whatever rows are beside them.

BLAS chooses its kernel by the size of a product, and by where in it a number stands; kernels add in
different orders.  So rows are multiplied in tiles of one size, for which this BLAS is known to give
a row equal bits wherever it stands: it is asked when a model is loaded.  See He et al., "Defeating
Nondeterminism in LLM Inference" (2025).
"""

from typing import Protocol

import numpy as np

from batcher.transformer.layers import FloatArray
from batcher.transformer.quantization import LARGEST, quantize_weights_int8

TILES = (16, 8, 4, 1)  # rows; the first that will do is taken
ALL = slice(None)
EXACT = 2**24 // LARGEST**2  # products of two int8 whose sum is below 2^24: 1,040


class Linear(Protocol):
    """A product with a matrix."""

    def __call__(self, x: FloatArray, /) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out]."""


class FastLinear:
    """x @ weight.T as BLAS computes it; the last bits of a row depend on how many rows there are.

    weight: [out, in].  bias: [out].
    """

    def __init__(self, weight: FloatArray, bias: FloatArray | None = None) -> None:
        self._transposed, self._bias = weight.T, bias

    def __call__(self, x: FloatArray, /) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out]."""
        product: FloatArray = x @ self._transposed
        return product if self._bias is None else product + self._bias


class TiledLinear:
    """x @ weight.T in tiles of rows, so that each row is the same in any company.

    A tile that is not full is filled with zeros.

    weight: [out, in].  tile: how many rows.  bias: [out].
    """

    def __init__(self, weight: FloatArray, tile: int, bias: FloatArray | None = None) -> None:
        self._weight, self._tile, self._bias = weight, tile, bias

    def __call__(self, x: FloatArray, /) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out]."""
        product = np.empty((len(x), len(self._weight)), np.float32)
        for start in range(0, len(x), self._tile):
            product[start : start + self._tile] = self._of_tile(x[start : start + self._tile])
        if self._bias is not None:
            product += self._bias
        return product

    def _of_tile(self, x: FloatArray) -> FloatArray:
        num_rows = len(x)
        if num_rows < self._tile:
            filled = np.zeros((self._tile, x.shape[1]), np.float32)
            filled[:num_rows] = x
            x = filled
        product: FloatArray = (self._weight @ x.T)[:, :num_rows].T
        return product


class Int8Linear:
    """x @ weight.T in integers, which have no order: rows are the same in any company, untiled.

    The activations of each row are rounded to int8, too, with a scale of their own.  Integers are
    held as float32, in which BLAS is fastest: it adds whole numbers below 2^24 exactly, and the sum
    of EXACT products of two int8 is one.

    weight: [out, in].  per_channel: whether each output has a scale of its own.  bias: [out].
    outputs: which of the outputs there are, with the scales that they have among all.
    """

    def __init__(
        self,
        weight: FloatArray,
        bias: FloatArray | None = None,
        *,
        per_channel: bool,
        outputs: slice = ALL,
    ) -> None:
        quantized = quantize_weights_int8(weight, per_channel=per_channel)
        self._scales = quantized.scales[outputs] if per_channel else quantized.scales
        self._bias = None if bias is None else bias[outputs]
        num_in = weight.shape[1]
        self._slices = [slice(start, start + EXACT) for start in range(0, num_in, EXACT)]
        self._weights = [
            np.ascontiguousarray(quantized.integers[outputs, part], np.float32).T
            for part in self._slices
        ]

    def __call__(self, x: FloatArray, /) -> FloatArray:
        """Return x [rows, in] times the matrix: [rows, out]."""
        scales = np.abs(x).max(1, keepdims=True) / np.float32(LARGEST)
        scales[scales == 0] = 1
        integers = np.rint(x / scales)
        product: FloatArray = integers[:, self._slices[0]] @ self._weights[0]
        for part, weight in zip(self._slices[1:], self._weights[1:], strict=True):
            product += integers[:, part] @ weight
        product *= scales
        product *= self._scales
        return product if self._bias is None else product + self._bias


def tile_of(weight: FloatArray) -> int:
    """Return how many rows this BLAS multiplies by `weight` [out, in] with equal bits for each."""
    row = np.random.default_rng(0).standard_normal(weight.shape[1], np.float32)
    for tile in TILES:
        product = weight @ np.tile(row, (tile, 1)).T
        if (product == product[:, :1]).all():
            return tile
    return 1
