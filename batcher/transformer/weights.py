"""The weights of a model as parts of a graph: products in float32 or in blocks, norms, biases."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from batcher.errors import BatchdecodeError
from batcher.transformer.config import WeightKind
from batcher.transformer.graph import Graph, Value
from batcher.transformer.layers import FloatArray
from batcher.transformer.stored import BLOCK, Blocks, StoredTensor

if TYPE_CHECKING:
    from batcher.transformer.ranks import RankGroup

Watch = Callable[[int, int], None]
"""Called before each tensor with how many are read, never all, and of how many there are."""

_GRID = 16  # columns: kernels compute groups of them, and each of the rest in another order
_INTEGERS = 4  # accuracy_level: rows are quantised by blocks too, and integers are multiplied


class Weights:
    """The weights of a model, read when the graph that uses them is compiled.

    tensors: by name. kind: the format of products. group: the ranks that split their columns.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        kind: WeightKind = "fp32",
        group: "RankGroup | None" = None,
        watch: Watch = lambda _number, _total: None,
    ) -> None:
        self.tensors, self.group = tensors, group
        self._kind, self._watch, self._numbers = kind, watch, count()

    def read(self, name: str) -> FloatArray:
        """Return a tensor as float32.

        Raises:
            BatchdecodeError: some of its values are not numbers.
        """
        with np.errstate(all="ignore"):  # checked below
            numbers = self._begin(name).read()
        _check(name, numbers)
        return numbers

    def product(self, graph: Graph, x: Value, *names: str) -> Value:
        """Record x [rows, in] times the concatenated weights of all names: [rows, out]."""
        tensors = [self.tensors[name] for name in names]
        formats = {tensor.block_format(self._kind) for tensor in tensors}
        if self._kind != "fp32" and len(formats) > 1:
            parts = [self.product(graph, x, name) for name in names]
            return graph.op("Concat", *parts, axis=1)
        num_out = sum(tensor.shape[0] for tensor in tensors)
        if not self.group:
            return self._columns(graph, x, names, slice(0, num_out))
        group, boundaries = self.group, self.group.boundaries(num_out, _GRID)
        own = group.own_part(boundaries)
        num_own = own.stop - own.start
        part = self._columns(graph, x, names, own) if num_own else x
        return graph.call(
            lambda _step, part: group.all_gather(part.T[:num_own], boundaries).T, part
        )

    def own_heads(self, num_kv_heads: int) -> slice:
        """Return the heads of keys and values of this process."""
        if self.group is None:
            return slice(0, num_kv_heads)
        return self.group.own_part(self.group.boundaries(num_kv_heads))

    def _columns(self, graph: Graph, x: Value, names: Sequence[str], columns: slice) -> Value:
        """Record the product with some of the outputs."""
        first = self.tensors[names[0]]
        if self._kind == "fp32":
            weight = graph.weight(
                lambda: np.concatenate([self.read(name) for name in names])[columns]
            )
            return graph.op("Gemm", x, weight, transB=1)
        bits, has_offsets = first.block_format(self._kind)
        blocks = cache(lambda: self._blocks(names, columns))
        product = graph.op(
            "MatMulNBits",
            x,
            graph.weight(lambda: blocks().packed),
            graph.weight(lambda: blocks().scales.reshape(-1)),
            K=first.shape[1],
            N=columns.stop - columns.start,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_INTEGERS,
        )
        if not has_offsets:
            return product
        in_blocks = graph.op("Reshape", x, graph.constant(np.array([0, -1, BLOCK])))
        sums = graph.op("ReduceSum", in_blocks, graph.constant(np.array([2])), keepdims=0)
        offsets = graph.weight(lambda: blocks().offsets)
        return graph.op("Add", product, graph.op("Gemm", sums, offsets, transB=1))

    def _blocks(self, names: Sequence[str], columns: slice) -> Blocks:
        """Return the concatenated weights of all names in blocks, some of their outputs."""
        parts = []
        for name in names:
            with np.errstate(all="ignore"):  # checked below
                parts.append(self._begin(name).blocks(self._kind))
            _check(name, parts[-1].scales)
            _check(name, parts[-1].offsets)
        arrays = [np.concatenate(part)[columns] for part in zip(*parts, strict=True)]
        return Blocks(*arrays)

    def _begin(self, name: str) -> StoredTensor:
        self._watch(min(next(self._numbers), len(self.tensors) - 1), len(self.tensors))
        return self.tensors[name]


def _check(name: str, numbers: FloatArray) -> None:
    if not np.isfinite(numbers).all():
        raise BatchdecodeError(f"{name} is damaged: some values are not numbers")
