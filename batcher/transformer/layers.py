"""The layers of a transformer: norms, activations, RoPE and attention.

Each works on the last axis alone, so that no row depends on other rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial, reduce
from math import pi
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.config import FrequencyFactors, LinearScaling, RopeSettings
from batcher.transformer.graph import Graph, Program, Value

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
        self._size, self._is_interleaved = rotary_dim, settings.style == "interleaved"

    def angles(self, positions: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the cosines and sines [rows, pairs] at `positions` [rows]."""
        angles = positions[:, None] * self.frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotated(
        self, graph: Graph, x: Value, num_heads: int, cosines: Value, sines: Value
    ) -> Value:
        """Return x [rows, heads * head_dim], rotated.

        Half-split, feature i is paired with i + pairs; interleaved, 2i with 2i + 1. Features
        outside pairs are unchanged.
        """
        line = graph.op("Unsqueeze", x, graph.constant([0]))  # rows are one sequence here
        turned = graph.op(
            "RotaryEmbedding",
            line,
            graph.constant([0]),  # the row of `cosines` for the first row
            cosines,
            sines,
            num_heads=num_heads,
            rotary_embedding_dim=self._size,
            interleaved=int(self._is_interleaved),
        )
        return graph.op("Squeeze", turned, graph.constant([0]))


# Scaled dot-product attention over keys and values in cells.
#
# Queries of different sequences are padded to rectangles. A masked key adds exactly 0, so padding
# changes no bit. The keys of a query begin where those of its block of QUERIES do, wherever a chunk
# begins; so its terms are added in one order.
#
# The runtime adds a long sum in parts of at least _TERMS. Their size depends on the shape of the
# product, and on how many threads share its columns. So sums that may differ are divided here.

KEYS = 32  # rectangles are padded to multiples of it
QUERIES = 64  # of one sequence at most, consecutive and aligned
_SMALL = 4096  # queries times keys: padding up to here is cheaper than another call
_PADDING = 1.25  # limit of a larger rectangle, in parts of what it holds
_MAX_KEYS, _MAX_SCORES = 2**16, 2**18  # of several rows at once, to bound memory
_TERMS = 128
_FACTOR = 2.0  # of products: without one, a single row is added in another order

NOWHERE = 0  # the cell of missing positions: its keys and values are zeros


def create_causal_mask(seq_length: int, batch_size: int) -> FloatArray:
    """Return a mask to add to scores [batch, queries, keys]: -inf for keys after the query.

    It is read-only.
    """
    mask = np.triu(np.full((seq_length, seq_length), -np.inf, np.float32), 1)
    return np.broadcast_to(mask, (batch_size, seq_length, seq_length))


def first_key(position: int, window: int | None) -> int:
    """Return the position at which the keys of a query begin."""
    if window is None:
        return 0
    return max(position // QUERIES * QUERIES - window + 1, 0) // KEYS * KEYS


class Queries(NamedTuple):
    """Consecutive queries of one sequence, at most QUERIES, in one block.

    token: the index of the first in the step. position: of the first. cells: of their keys, which
    begin at `first_key`; the last one is the last query's own.
    """

    token: int
    position: int
    num_queries: int
    cells: IntArray


def queries_of(
    token: int, start: int, stop: int, cells: IntArray, window: int | None, most: int = QUERIES
) -> Iterator[Queries]:
    """Yield the queries of a span of positions in blocks; `cells`: [stop] of all positions."""
    position = start
    while position < stop:
        end = min((position // most + 1) * most, stop)
        own = cells[first_key(position, window) : end]
        yield Queries(token + position - start, position, end - position, own)
        position = end


class Rectangle:
    """Queries of several sequences, padded to equal numbers of queries and keys.

    tokens: [rows, queries] the index of each query in the step, -1 for padding.
    cells: [rows, keys]. mask: [rows, 1, queries, keys], -inf for hidden keys.
    """

    def __init__(self, rows: Sequence[Queries], window: int | None) -> None:
        num_queries = max(row.num_queries for row in rows)
        num_keys = -(-max(len(row.cells) for row in rows) // KEYS) * KEYS
        steps, keys = np.arange(num_queries), np.arange(num_keys)
        sizes = np.array([row.num_queries for row in rows])
        self.tokens: IntArray = np.array([row.token for row in rows])[:, None] + steps
        self.tokens[steps >= sizes[:, None]] = -1
        self.cells: IntArray = np.full((len(rows), num_keys), NOWHERE)
        for line, row in zip(self.cells, rows, strict=True):
            line[: len(row.cells)] = row.cells
        lengths = np.array([len(row.cells) for row in rows])
        own = (lengths - sizes)[:, None] + np.minimum(steps, (sizes - 1)[:, None])
        is_hidden = keys > own[..., None]
        if window is not None:
            is_hidden |= keys <= own[..., None] - window
        self.mask: FloatArray = np.where(is_hidden, np.float32(-np.inf), np.float32(0))[:, None]
        self._index: tuple[int, IntArray] = 0, self.cells

    def index(self, num_kv_heads: int) -> IntArray:
        """Return where the keys [rows, kv_heads, keys] are among those of all heads."""
        if self._index[0] != num_kv_heads:
            heads = np.arange(num_kv_heads)[:, None]
            self._index = num_kv_heads, self.cells[:, None] * num_kv_heads + heads
        return self._index[1]


def rectangles_of(
    queries: Iterable[Queries], window: int | None, *, is_alone: bool = False
) -> list[Rectangle]:
    """Return queries in few rectangles with little padding; each `is_alone` for exactness."""
    rows = sorted(queries, key=lambda row: (row.num_queries, len(row.cells)))
    parts: list[list[Queries]] = []
    own = num_keys = 0
    for row in rows:
        own, num_keys = own + row.num_queries * len(row.cells), max(num_keys, len(row.cells))
        num_rows = len(parts[-1]) + 1 if parts else 0
        size = num_rows * num_keys * row.num_queries
        is_small = size <= max(_SMALL, own * _PADDING) and size <= _MAX_SCORES
        if parts and is_small and num_rows * num_keys <= _MAX_KEYS and not is_alone:
            parts[-1].append(row)
        else:
            parts.append([row])
            own, num_keys = row.num_queries * len(row.cells), len(row.cells)
    return [Rectangle(part, window) for part in parts]


class Attention:
    """Attention with grouped heads (Ainslie et al., "GQA", 2023), perhaps within a window.

    scale: of the scores. window: keys that a query sees, its own included; None for all before it.
    softcap: limit of the scores, or None.
    """

    def __init__(self, scale: float, window: int | None, softcap: float | None = None) -> None:
        self.window, self._scale, self._softcap = window, scale, softcap

    def __call__(
        self,
        query: FloatArray,
        rectangles: Sequence[Rectangle],
        keys: FloatArray,
        values: FloatArray,
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of queries of that shape.

        keys, values: [cells, kv_heads, head_dim].
        """
        output = np.empty((len(query) + 1, *query.shape[1:]), np.float32)  # the last: of padding
        num_kv_heads, head_dim = keys.shape[1:]
        group = query.shape[1] // num_kv_heads
        part_size = _part_size(head_dim)
        lines = {"keys": keys.reshape(-1, head_dim), "values": values.reshape(-1, head_dim)}
        for rectangle in rectangles:
            num_rows, num_queries = rectangle.tokens.shape
            by_head = query[rectangle.tokens].reshape(num_rows, num_queries, num_kv_heads, -1)
            num_whole = (rectangle.cells.shape[1] - 1) // part_size * part_size
            if num_queries * group >= head_dim:  # threads share queries, not columns
                num_whole = 0
            program = _attention(self._scale, self._softcap, head_dim, has_parts=num_whole > 0)
            whole = {"whole": np.array([num_whole])} if num_whole else {}
            attended = program(
                None,
                **lines,
                **whole,
                query=by_head.swapaxes(1, 2).reshape(num_rows, num_kv_heads, -1, head_dim),
                cells=rectangle.index(num_kv_heads),
                mask=rectangle.mask if num_queries == 1 else rectangle.mask.repeat(group, 2),
            )
            if num_whole:
                attended = reduce(np.add, attended.swapaxes(0, 2)).swapaxes(0, 1)
            attended /= np.float32(_FACTOR)
            attended = attended.reshape(num_rows, num_kv_heads, num_queries, -1).swapaxes(1, 2)
            output[rectangle.tokens] = attended.reshape(num_rows, num_queries, -1, head_dim)
        return output[:-1]


def _part_size(head_dim: int) -> int:
    """Return how many keys the runtime adds in one part if no threads share the columns."""
    num_columns = min(max(1 << (head_dim - 1).bit_length(), 16), _TERMS)
    return _TERMS * _TERMS // num_columns


@cache
def _attention(scale: float, softcap: float | None, head_dim: int, *, has_parts: bool) -> Program:
    """Return the program of _FACTOR times the output [rows, kv_heads, queries, head_dim].

    has_parts: give the sums of parts of the first `whole` keys, and of the rest, [rows, kv_heads,
    parts, queries, head_dim].
    """
    graph, query, rest = Graph(), "query", "cells"
    first, end, axis = (graph.constant([number]) for number in (0, np.iinfo(np.int64).max, -1))
    part_size = _part_size(head_dim)
    if scale == 1:
        query, scale = graph.op("Div", query, graph.constant(np.float32(_FACTOR))), _FACTOR
    keys = graph.op("Gather", "keys", "cells")
    if has_parts:
        rest = graph.op("Slice", "cells", "whole", end, axis)
        whole = graph.op("Slice", "cells", first, "whole", axis)
        whole = graph.op("Reshape", whole, graph.constant([0, 0, -1, part_size]))
        whole = graph.op("Gather", "values", whole)
    values = graph.op("Gather", "values", rest)  # late, it would take a fifth longer
    num_parts = -(-head_dim // _TERMS)
    pairs: Iterable[Sequence[Value]] = [(query, keys)]
    if num_parts > 1:
        split = (
            graph.ops("Split", num_parts, x, axis=-1, num_outputs=num_parts) for x in (query, keys)
        )
        pairs = zip(*split, strict=True)
    products = [graph.op("FusedMatMul", *pair, transB=1, alpha=scale) for pair in pairs]
    scores = reduce(partial(graph.op, "Add"), products)
    if softcap is not None:
        scores = soft_cap(graph, scores, softcap)
    shares = graph.op("Softmax", graph.op("Add", scores, "mask"))
    if not has_parts:
        output = graph.op("FusedMatMul", shares, values, alpha=_FACTOR)
        return graph.compiled(output, integers=("cells",))
    by_part = graph.op("Slice", shares, first, "whole", axis)
    by_part = graph.op("Reshape", by_part, graph.constant([0, 0, 0, -1, part_size]))
    by_part = graph.op("Transpose", by_part, perm=[0, 1, 3, 2, 4])
    shares = graph.op("Slice", shares, "whole", end, axis)
    last = graph.op("FusedMatMul", shares, values, alpha=_FACTOR)
    output = graph.op(
        "Concat",
        graph.op("FusedMatMul", by_part, whole, alpha=_FACTOR),
        graph.op("Unsqueeze", last, graph.constant([2])),
        axis=2,
    )
    return graph.compiled(output, integers=("cells", "whole"))


def soft_cap(graph: Graph, x: Value, cap: float) -> Value:
    """Return cap * tanh(x / cap), between -cap and cap (Gemma 2)."""
    limit = graph.constant(np.float32(cap))
    return graph.op("Mul", graph.op("Tanh", graph.op("Div", x, limit)), limit)


def batched_attention_with_padding(
    query: FloatArray, key: FloatArray, value: FloatArray, seq_lengths: IntArray
) -> FloatArray:
    """Return softmax(QK^T / sqrt(d)) V of padded sequences, of the shape of `query`.

    query: [batch, queries, d], or [batch, queries, heads, d]; each sees all keys of its sequence.
    key, value: [batch, seq, d], or [batch, seq, kv_heads, d].
    seq_lengths: [batch] keys of each sequence, at least one; the rest is ignored.
    """
    (batch, num_queries), head_dim, num_keys = query.shape[:2], query.shape[-1], key.shape[1]
    cells = NOWHERE + 1 + np.arange(batch * num_keys).reshape(batch, num_keys)
    rows = [
        Queries(row * num_queries + number, length - 1, 1, own[:length])
        for row, (own, length) in enumerate(zip(cells, seq_lengths.tolist(), strict=True))
        for number in range(num_queries)
    ]
    output = Attention(head_dim**-0.5, window=None)(
        query.reshape(batch * num_queries, -1, head_dim),
        rectangles_of(rows, None),
        _cells_of(key),
        _cells_of(value),
    )
    return output.reshape(query.shape)


def _cells_of(padded: FloatArray) -> FloatArray:
    """Return keys or values [batch, seq, ..., d] as cells [1 + batch * seq, kv_heads, d]."""
    batch, num_keys, head_dim = *padded.shape[:2], padded.shape[-1]
    cells = padded.reshape(batch * num_keys, -1, head_dim)
    return np.concatenate([np.zeros_like(cells[:1]), cells])


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
