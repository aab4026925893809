"""The weights of a model as parts of a graph: products in float32 or in blocks, norms, biases."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count

import numpy as np

from batcher.errors import BatchdecodeError
from batcher.transformer.config import WeightKind
from batcher.transformer.graph import Graph, Value
from batcher.transformer.layers import FloatArray
from batcher.transformer.stored import BLOCK, Blocks, StoredTensor

Watch = Callable[[int, int], None]
"""Called before each tensor with how many are read, never all, and of how many there are."""

_INTEGERS = 4  # accuracy_level: rows are quantised by blocks too, and integers are multiplied


class Weights:
    """The weights of a model, read when the graph that uses them is compiled.

    tensors: by name. kind: the format of products.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        kind: WeightKind = "fp32",
        watch: Watch = lambda _number, _total: None,
    ) -> None:
        self.tensors = tensors
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
        if self._kind == "fp32":
            weight = graph.weight(lambda: np.concatenate([self.read(name) for name in names]))
            return graph.op("Gemm", x, weight, transB=1)
        bits, has_offsets = formats.pop()
        blocks = cache(lambda: self._blocks(names))
        product = graph.op(
            "MatMulNBits",
            x,
            graph.weight(lambda: blocks().packed),
            graph.weight(lambda: blocks().scales.reshape(-1)),
            K=tensors[0].shape[1],
            N=sum(tensor.shape[0] for tensor in tensors),
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

    def _blocks(self, names: Sequence[str]) -> Blocks:
        """Return the concatenated weights of all names in blocks."""
        parts = []
        for name in names:
            with np.errstate(all="ignore"):  # checked below
                parts.append(self._begin(name).blocks(self._kind))
            _check(name, parts[-1].scales)
            _check(name, parts[-1].offsets)
        return Blocks(*map(np.concatenate, zip(*parts, strict=True)))

    def _begin(self, name: str) -> StoredTensor:
        self._watch(min(next(self._numbers), len(self.tensors) - 1), len(self.tensors))
        return self.tensors[name]


def _check(name: str, numbers: FloatArray) -> None:
    if not np.isfinite(numbers).all():
        raise BatchdecodeError(f"{name} is damaged: some values are not numbers")
