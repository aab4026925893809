"""Weights that stay integers of eight bits, and an embedding that stays in its file.

A quarter of the memory that float32 takes; each product unpacks them anew, a few outputs at a time.
Sums of integers have no order, so what comes of it is what it is without, to the last bit.
"""

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.layers import FloatArray
from batcher.transformer.linear import Int8Linear, Linear, slices_of
from batcher.transformer.linears import Embedding, WholeLinears
from batcher.transformer.settings import WeightKind

UNPACKED = 2**18  # numbers that are unpacked at once: 1 MiB, which stays in the cache


class PackedIntegers:
    """Weights of int8 that stay what they are."""

    def __init__(self, integers: NDArray[np.int8]) -> None:
        self._integers, self._slices = np.ascontiguousarray(integers), slices_of(integers)

    def multiply(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows]."""
        num_out, num_in = self._integers.shape
        size = max(UNPACKED // num_in, 1)
        product = np.empty((num_out, len(x)), np.float32)
        for start in range(0, num_out, size):
            weight = self._integers[start : start + size].astype(np.float32)
            own = product[start : start + size]
            np.matmul(weight[:, self._slices[0]], x[:, self._slices[0]].T, own)
            for part in self._slices[1:]:
                own += weight[:, part] @ x[:, part].T
        return product


class PackedLinears(WholeLinears):
    """Makes products with weights that stay int8.

    kind: how they are scaled, which is not fp32.  embedding: looks up rows where the file is.
    """

    def __init__(self, kind: WeightKind, embedding: Embedding) -> None:
        super().__init__(kind)
        self._per_channel, self._embedding = kind == "int8-channel", embedding

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], and a bias [out] added to it."""
        return Int8Linear(weight, bias, per_channel=self._per_channel, keep=PackedIntegers)

    def embedding(self, _table: FloatArray) -> Embedding:
        """Return what looks up rows of the table, which is not held."""
        return self._embedding
