"""Which product is made of a weight, and who attends, for a process that holds all of a model."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from batcher.transformer.layers import FloatArray, IntArray
from batcher.transformer.linear import FastLinear, Int8Linear, Linear, TiledLinear
from batcher.transformer.settings import WeightKind

Embedding = Callable[[IntArray], FloatArray]
"""Return the rows [tokens, hidden_size] of a table for token ids [tokens]."""


class OwnHeads(NamedTuple):
    """The heads of keys and values that a process attends with.

    which: of all of them.  gather: returns what all heads come to [tokens, heads * width], of what
    these do [tokens, own heads, width].
    """

    which: slice
    gather: Callable[[FloatArray], FloatArray]


class Linears(Protocol):
    """Makes products of weights."""

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], and a bias [out] added to it."""

    def embedding(self, table: FloatArray) -> Embedding:
        """Return what looks up rows of a table [vocab, hidden_size]."""

    def tied(self, table: FloatArray) -> tuple[Embedding, Linear]:
        """Return both for one table, which is held once where that is possible."""

    def heads(self, num_kv_heads: int) -> OwnHeads:
        """Return which of the heads of keys and values are those of this process."""


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

    def heads(self, num_kv_heads: int) -> OwnHeads:
        """Return all heads."""
        return OwnHeads(
            slice(0, num_kv_heads), lambda attended: attended.reshape(len(attended), -1)
        )
