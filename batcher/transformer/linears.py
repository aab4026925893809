"""Which product is made of a weight, for a process that holds all of it."""

from collections.abc import Callable
from typing import Protocol

from batcher.transformer.layers import FloatArray, IntArray
from batcher.transformer.linear import FastLinear, Int8Linear, Linear, TiledLinear
from batcher.transformer.settings import WeightKind

Embedding = Callable[[IntArray], FloatArray]
"""Return the rows [tokens, hidden_size] of a table for token ids [tokens]."""


class Linears(Protocol):
    """Makes products of weights."""

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], and a bias [out] added to it."""

    def embedding(self, table: FloatArray) -> Embedding:
        """Return what looks up rows of a table [vocab, hidden_size]."""

    def tied(self, table: FloatArray) -> tuple[Embedding, Linear]:
        """Return both for one table, which is held once where that is possible."""


class WholeLinears:
    """Makes products of weights that one process holds.

    kind: how they are kept and multiplied.  is_fast: whether products of floats are left to BLAS.
    """

    def __init__(self, kind: WeightKind = "fp32", *, is_fast: bool = False) -> None:
        self._kind, self._is_fast = kind, is_fast

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], and a bias [out] added to it."""
        if self._kind != "fp32":
            return Int8Linear(weight, bias, per_channel=self._kind == "int8-channel")
        if self._is_fast:
            return FastLinear(weight, bias)
        return TiledLinear(weight, bias)

    def embedding(self, table: FloatArray) -> Embedding:
        """Return what looks up rows of a table [vocab, hidden_size]."""
        return table.__getitem__

    def tied(self, table: FloatArray) -> tuple[Embedding, Linear]:
        """Return both for one table."""
        return self.embedding(table), self.linear(table)
