"""Products whose columns, the output features, are cut among ranks (Shoeybi et al., "Megatron-LM").

A column is a whole sum, so nothing is added up across ranks: outputs are gathered, and are the bits
of one process.  Integers give them wherever a weight is cut.  Floats are added by BLAS in an order
that depends on where a column stands: so a weight is cut where its parts are found to give the bits
that one process, whose BLAS has as many threads as that of a rank, gets for the whole of it.
"""

import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from batcher.errors import InvariantError
from batcher.transformer.layers import FloatArray, IntArray
from batcher.transformer.linear import FastLinear, Int8Linear, Linear, TiledLinear
from batcher.transformer.linears import Embedding, OwnHeads
from batcher.transformer.rank_group import Boundaries, RankGroup
from batcher.transformer.settings import WeightKind

_GRIDS = (192, 48, 16, 1)  # columns: what kernels take at once divides the first
_NUM_ROWS, _NUM_DRAWN = 64, 61  # of the products that are compared


def column_parallel_linear(
    x: FloatArray, own: Linear, boundaries: Boundaries, group: RankGroup
) -> FloatArray:
    """Return x [rows, in], which every rank has, times a matrix: [out, rows], on every rank.

    own: the product with the columns of this rank, its bias included.
    """
    return group.all_gather(own.by_feature(x), boundaries)


def even_boundaries(num_columns: int, world_size: int) -> tuple[int, ...]:
    """Return where each rank begins if all have as many columns, or some one more than others."""
    return tuple(-(-num_columns * rank // world_size) for rank in range(world_size + 1))


class ColumnParallelLinears:
    """Makes products of which this rank holds its columns.

    kind: how weights are kept and multiplied.  is_fast: whether products of floats are left to
    BLAS.
    """

    def __init__(self, kind: WeightKind, group: RankGroup, *, is_fast: bool) -> None:
        self._kind, self._group, self._is_fast = kind, group, is_fast
        self._cuts: dict[tuple[int, ...], Boundaries] = {}  # by the shape of a weight

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], and a bias [out] added to it."""
        return self._parallel(weight, self._own_rows(weight), bias)

    def embedding(self, table: FloatArray) -> Embedding:
        """Return what looks up rows of a table [vocab, hidden_size]."""
        return ParallelEmbedding(self._own_rows(table), self._cut(table), self._group)

    def tied(self, table: FloatArray) -> tuple[Embedding, Linear]:
        """Return both for one table."""
        own = self._own_rows(table)
        embedding = ParallelEmbedding(own, self._cut(table), self._group)
        return embedding, self._parallel(table, own, None)

    def heads(self, num_kv_heads: int) -> OwnHeads:
        """Return which of the heads of keys and values are those of this rank."""
        boundaries = even_boundaries(num_kv_heads, self._group.world_size)
        own = self._group.own_part(boundaries)

        def gather(attended: FloatArray) -> FloatArray:
            num_tokens, num_own, width = attended.shape
            by_feature = attended.reshape(num_tokens, num_own * width).T
            return self._group.all_gather(by_feature, [width * head for head in boundaries]).T

        return OwnHeads(own, gather)

    def _parallel(self, weight: FloatArray, own: FloatArray, bias: FloatArray | None) -> Linear:
        boundaries = self._cut(weight)
        rows = self._group.own_part(boundaries)
        own_bias = None if bias is None else bias[rows]
        linear: Linear
        if self._kind != "fp32":
            per_channel = self._kind == "int8-channel"
            linear = Int8Linear(weight, bias, per_channel=per_channel, outputs=rows)
        elif self._is_fast:
            linear = FastLinear(own, own_bias)
        else:
            linear = TiledLinear(own, own_bias)
        return ColumnParallelLinear(linear, boundaries, self._group)

    def _own_rows(self, weight: FloatArray) -> FloatArray:
        """Return the rows of this rank, and nothing that keeps the others in memory."""
        own = weight[self._group.own_part(self._cut(weight))]
        is_mapped = not weight.flags.writeable
        return own if is_mapped else own.copy()

    def _cut(self, weight: FloatArray) -> Boundaries:
        """Return where a weight is cut."""
        shape = (len(weight), weight.shape[1])
        if shape not in self._cuts:
            if self._kind == "fp32" and not self._is_fast:
                self._cuts[shape] = exact_boundaries(shape, reference_of(shape), self._group)
            else:
                self._cuts[shape] = even_boundaries(shape[0], self._group.world_size)
        return self._cuts[shape]


class ColumnParallelLinear(Linear):
    """A product of which every rank has its columns.

    own: that with the columns of this rank.  boundaries: where those of each begin.
    """

    def __init__(self, own: Linear, boundaries: Boundaries, group: RankGroup) -> None:
        self._own, self._boundaries, self._group = own, boundaries, group

    def by_feature(self, x: FloatArray) -> FloatArray:
        """Return the product [out, rows]."""
        return column_parallel_linear(x, self._own, self._boundaries, self._group)


class ParallelEmbedding:
    """A table of which each rank holds the rows of some tokens.

    own: the rows of this rank.  boundaries: the first token of each.
    """

    def __init__(self, own: FloatArray, boundaries: Boundaries, group: RankGroup) -> None:
        self._own, self._boundaries, self._group = own, boundaries, group

    def __call__(self, token_ids: IntArray) -> FloatArray:
        """Return the rows [tokens, hidden_size] of all tokens."""
        owners = np.searchsorted(self._boundaries, token_ids, "right") - 1
        counts = np.bincount(owners, minlength=self._group.world_size)
        rank = self._group.rank
        found = self._own[token_ids[owners == rank] - self._boundaries[rank]]
        gathered = self._group.all_gather(found, [0, *np.cumsum(counts).tolist()])
        rows = np.empty_like(gathered)
        rows[owners.argsort(kind="stable")] = gathered
        return rows


def reference_of(shape: tuple[int, int]) -> FloatArray:
    """Return what a process gets for a weight [out, in]: a product [rows, out] of drawn numbers."""
    weight = _drawn_weight(shape, slice(0, shape[0]))
    return TiledLinear(weight)(_drawn_rows(shape[1]))


def exact_boundaries(
    shape: tuple[int, int], reference: FloatArray, group: RankGroup
) -> tuple[int, ...]:
    """Return where a weight of this shape is cut so that the bits are those of the reference.

    All ranks find the same.  If need be, one of them has all columns.
    """
    tried = set()
    for boundaries in _promising(shape[0], group.world_size):
        if boundaries in tried:
            continue
        tried.add(boundaries)
        own = group.own_part(boundaries)
        product = TiledLinear(_drawn_weight(shape, own))(_drawn_rows(shape[1]))
        is_equal = np.array_equal(product, reference[:, own])
        vote = np.full((1, 1), is_equal, np.float32)
        votes = group.all_gather(vote, range(group.world_size + 1))
        if votes.all():
            return boundaries
    raise InvariantError(f"a rank has other bits for all of {list(shape)} than it had before")


def _promising(num_columns: int, world_size: int) -> Iterator[tuple[int, ...]]:
    """Yield where a weight may be cut, evenest first.

    Threads of BLAS take even parts of the columns, and kernels go through each in steps of a grid.
    """
    yield even_boundaries(num_columns, world_size)
    num_cpus = os.cpu_count() or 1
    threads = [1, *(2**power for power in range(1, num_cpus.bit_length())), num_cpus]
    for grid in _GRIDS:
        for num_threads in threads:
            starts = even_boundaries(num_columns, num_threads)
            steps = [np.arange(first, end, grid) for first, end in pairwise(starts)]
            allowed = np.concatenate([*steps, [num_columns]])
            wanted = even_boundaries(num_columns, world_size)[1:-1]
            nearest = [int(allowed[np.abs(allowed - column).argmin()]) for column in wanted]
            yield (0, *nearest, num_columns)
    yield (0, *[num_columns] * world_size)


def _drawn_weight(shape: tuple[int, int], rows: slice) -> FloatArray:
    """Return rows of a weight [out, in]; a few that are drawn, again and again."""
    drawn = np.random.default_rng(0).standard_normal((_NUM_DRAWN, shape[1]), np.float32)
    weight: FloatArray = drawn[np.arange(rows.start, rows.stop) % _NUM_DRAWN]
    return weight


def _drawn_rows(num_in: int) -> FloatArray:
    return np.random.default_rng(1).standard_normal((_NUM_ROWS, num_in), np.float32)
