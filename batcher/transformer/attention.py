"""Scaled dot-product attention over keys and values in cells, block by block from position 0.

Each head of a query is multiplied by KEYS keys at a time, whatever is beside it, and what blocks
come to is added in the order of positions: so neither chunks nor block tables nor other rows show
in the bits.  The largest score is taken first, over all blocks (a maximum has no order), and what
hidden keys add is exactly nothing.
"""

from collections.abc import Sequence

import numpy as np

from batcher.transformer.layers import FloatArray, IntArray, soft_cap

KEYS = 32  # of a block
QUERIES = 64  # of one sequence, at once

NOWHERE = 0  # the cell of positions that are not there: its keys and values are zeros


def create_causal_mask(seq_length: int, batch_size: int) -> FloatArray:
    """Return what is added to scores [batch, queries, keys] of sequences so that none looks ahead.

    It is 0 where the key is not after the query, and -inf above the diagonal; to be read only.
    """
    mask = np.triu(np.full((seq_length, seq_length), -np.inf, np.float32), 1)
    return np.broadcast_to(mask, (batch_size, seq_length, seq_length))


# Of a block of keys, by the place that a query has in it: before it, in it or behind it.
_MASKS = np.pad(create_causal_mask(KEYS, 1)[0], ((1, 1), (0, 0)))
_MASKS[0] = -np.inf


def padded_cells(cells: IntArray) -> IntArray:
    """Return the cells [positions] of a sequence, filled up to whole blocks of keys."""
    num_missing = -len(cells) % KEYS
    return np.concatenate([cells, np.full(num_missing, NOWHERE)]) if num_missing else cells


class RowBlocks:
    """The blocks of keys that some queries see, each of another sequence: one after the other.

    cells: [blocks, KEYS].  rows: [blocks] the number of the query that sees each.
    starts: [rows] where the blocks of each begin.  counts: [rows] how many each has.
    mask: [blocks, 1, 1, KEYS] is added to scores: 0, or -inf for a key that is hidden.
    """

    def __init__(self, positions: IntArray, tables: Sequence[IntArray], window: int | None) -> None:
        firsts, lasts = first_blocks(positions, window), positions // KEYS
        self.counts = lasts - firsts + 1
        self.starts: IntArray = self.counts.cumsum() - self.counts
        self.rows: IntArray = np.arange(len(positions)).repeat(self.counts)
        boundaries = zip(
            tables, (firsts * KEYS).tolist(), ((lasts + 1) * KEYS).tolist(), strict=True
        )
        own = [table[first:stop] for table, first, stop in boundaries]
        self.cells: IntArray = np.concatenate(own).reshape(-1, KEYS)
        numbers = np.arange(len(self.rows)) + (firsts - self.starts)[self.rows]
        self.mask = _mask(positions[self.rows], numbers * KEYS, window)[:, None, None]

    @property
    def _is_single(self) -> bool:
        """Whether each query sees one block."""
        return len(self.rows) == len(self.counts)

    def spread(self, x: FloatArray) -> FloatArray:
        """Return x [rows, ...] for the row of each block: [blocks, ...]."""
        return x if self._is_single else x[self.rows]

    def largest(self, parts: FloatArray) -> FloatArray:
        """Return the maxima [rows, ...] of what each block comes to [blocks, ...]."""
        if self._is_single:
            return parts
        largest: FloatArray = np.maximum.reduceat(parts, self.starts)
        return largest

    def summed(self, parts: FloatArray) -> FloatArray:
        """Return the sums [rows, ...] of what each block comes to [blocks, ...], in their order."""
        if self._is_single:
            return parts
        total: FloatArray = parts[self.starts]
        for number in range(1, int(self.counts.max())):
            rows = (self.counts > number).nonzero()[0]
            total[rows] += parts[self.starts[rows] + number]
        return total


def first_blocks(positions: IntArray, window: int | None) -> IntArray:
    """Return the number of the first block of which queries at `positions` see anything."""
    if window is None:
        return np.zeros_like(positions)
    first: IntArray = np.maximum(positions - window + 1, 0) // KEYS
    return first


class Attention:
    """Attention with grouped heads (Ainslie et al., "GQA", 2023), perhaps within a window.

    scale: of the scores.  window: how many keys, its own included, a query sees; None for all
    before it.  softcap: between which bounds the scores are kept; None if they are not.
    """

    def __init__(self, scale: float, window: int | None, softcap: float | None = None) -> None:
        self.window = window
        self._scale, self._softcap = np.float32(scale), softcap

    def of_chunk(
        self, query: FloatArray, first: int, cells: IntArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of tokens on end of one sequence.

        query: [tokens, heads, head_dim].  first: the position of the first of them.
        cells: [whole blocks of keys] of the sequence, see `padded_cells`.
        keys, values: [cells, kv_heads, head_dim].
        """
        output = np.empty(query.shape, np.float32)
        blocks = cells.reshape(-1, KEYS)
        own_keys, own_values = _by_head(keys, blocks), _by_head(values, blocks)
        for start in range(0, len(query), QUERIES):
            part = slice(start, min(start + QUERIES, len(query)))
            positions = np.arange(first + start, first + part.stop)
            at = slice(
                int(first_blocks(positions[:1], self.window)[0]), int(positions[-1]) // KEYS + 1
            )
            output[part] = self._of_tile(query[part], positions, at, own_keys, own_values)
        return output

    def _of_tile(
        self,
        query: FloatArray,
        positions: IntArray,
        blocks: slice,
        keys: FloatArray,
        values: FloatArray,
    ) -> FloatArray:
        """Return the output of some queries at `positions` of one sequence.

        keys, values: [all blocks, kv_heads, 1, KEYS, head_dim]; `blocks` are those that are seen.
        """
        keys, values = keys[blocks], values[blocks]
        grouped = self._grouped(query, keys.shape[1])
        scores = np.empty((len(keys), *grouped.shape[:3], KEYS), np.float32)
        for number, block in enumerate(range(blocks.start, blocks.stop)):
            self._score(keys[number], grouped, scores[number])
            mask = _mask(positions, np.array([block * KEYS]), self.window)
            scores[number] += mask[:, None, None]
        scores -= scores.max((0, 4), keepdims=True)
        np.exp(scores, out=scores)
        totals = scores.sum(-1)
        total: FloatArray = totals[0]
        output: FloatArray = np.vecmat(scores[0], values[0])
        for number in range(1, len(keys)):
            total += totals[number]
            output += np.vecmat(scores[number], values[number])
        output /= total[..., None]
        return output.reshape(query.shape)

    def of_rows(
        self, query: FloatArray, blocks: RowBlocks, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [rows, heads, head_dim] of one token of each of several sequences.

        query: [rows, heads, head_dim].  keys, values: as above.
        """
        grouped = blocks.spread(self._grouped(query, keys.shape[1]))
        scores = np.empty((*grouped.shape[:3], KEYS), np.float32)
        self._score(_by_head(keys, blocks.cells), grouped, scores)
        scores += blocks.mask
        scores -= blocks.spread(blocks.largest(scores.max(-1, keepdims=True)))
        np.exp(scores, out=scores)
        output: FloatArray = blocks.summed(np.vecmat(scores, _by_head(values, blocks.cells)))
        output /= blocks.summed(scores.sum(-1))[..., None]
        return output.reshape(query.shape)

    def _grouped(self, query: FloatArray, num_kv_heads: int) -> FloatArray:
        """Return queries [rows, kv_heads, heads of each, head_dim], scaled."""
        num_rows, _, head_dim = query.shape
        return (query * self._scale).reshape(num_rows, num_kv_heads, -1, head_dim)

    def _score(self, keys: FloatArray, grouped: FloatArray, scores: FloatArray) -> None:
        """Put the scores [..., KEYS] of queries [..., head_dim] with blocks of keys in place."""
        np.matvec(keys, grouped, out=scores)
        if self._softcap is not None:
            scores[:] = soft_cap(scores, self._softcap)


def _mask(positions: IntArray, starts: IntArray, window: int | None) -> FloatArray:
    """Return 0, or -inf for a key that is hidden from a query: [rows, KEYS].

    positions: [rows].  starts: [rows or 1] where blocks of keys begin.
    """
    places = np.clip(positions - starts, -1, KEYS) + 1
    mask: FloatArray = _MASKS[places]
    if window is not None:
        behind = np.clip(positions - starts - window, -1, KEYS) + 1
        mask[_MASKS[behind] == 0] = -np.inf
    return mask


def _by_head(store: FloatArray, cells: IntArray) -> FloatArray:
    """Return what is in `cells` [blocks, KEYS]: [blocks, kv_heads, 1, KEYS, head_dim].

    The keys of a head lie on end, however many heads there are: kernels are chosen by that.
    """
    num_heads, head_dim = store.shape[1:]
    rows = cells[:, None] * num_heads + np.arange(num_heads)[:, None]
    found: FloatArray = store.reshape(-1, head_dim).take(rows, 0)
    return found[:, :, None]
