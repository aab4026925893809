"""Scaled dot-product attention over keys and values in cells, block by block from position 0.

The products of one query are the same few rows by KEYS keys whatever is beside it, and their sums
go block by block in the order of positions: so neither chunks nor block tables nor other rows show
in the bits.  The largest score is taken first, over all blocks (a maximum has no order), and what
a block of hidden keys adds is exactly nothing.
"""

from collections.abc import Iterator

import numpy as np

from batcher.transformer.layers import FloatArray, IntArray, soft_cap

KEYS = 64  # of a block
QUERIES = 64  # of one sequence, at once

NOWHERE = 0  # the cell of positions that are not there: its keys and values are zeros


def padded_cells(cells: IntArray) -> IntArray:
    """Return the cells [positions] of a sequence, filled up to whole blocks of keys."""
    num_missing = -len(cells) % KEYS
    return np.concatenate([cells, np.full(num_missing, NOWHERE)]) if num_missing else cells


class Attention:
    """Attention with grouped heads (Ainslie et al., "GQA", 2023), perhaps within a window.

    scale: of the scores.  window: how many keys, its own included, a query sees; None for all
    before it.  softcap: between which bounds the scores are kept; None if they are not.
    """

    def __init__(self, scale: float, window: int | None, softcap: float | None = None) -> None:
        self._scale, self._window, self._softcap = np.float32(scale), window, softcap

    def of_chunk(
        self, query: FloatArray, first: int, cells: IntArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of tokens on end of one sequence.

        query: [tokens, heads, head_dim].  first: the position of the first of them.
        cells: [whole blocks of keys] of the sequence, see `padded_cells`.
        keys, values: [cells, kv_heads, head_dim].
        """
        outputs = np.empty_like(query)
        own_keys, own_values = keys[cells], values[cells]
        for start in range(0, len(query), QUERIES):
            tile = query[start : start + QUERIES]
            positions = np.arange(first + start, first + start + len(tile))
            last = int(positions[-1])
            blocks = list(self._blocks(first + start, last))
            outputs[start : start + QUERIES] = self._attend(
                tile,
                positions,
                blocks,
                [own_keys[None, at : at + KEYS] for at in blocks],
                [own_values[None, at : at + KEYS] for at in blocks],
            )
        return outputs

    def of_rows(
        self,
        query: FloatArray,
        positions: IntArray,
        cells: IntArray,
        keys: FloatArray,
        values: FloatArray,
    ) -> FloatArray:
        """Return the output [rows, heads, head_dim] of one token of each of several sequences.

        query: [rows, heads, head_dim].  positions: [rows].
        cells: [rows, whole blocks of keys] of the sequences.  keys, values: as above.
        """
        blocks = list(self._blocks(int(positions.min()), int(positions.max())))
        return self._attend(
            query,
            positions,
            blocks,
            [keys[cells[:, at : at + KEYS]] for at in blocks],
            [values[cells[:, at : at + KEYS]] for at in blocks],
        )

    def _blocks(self, lowest: int, highest: int) -> Iterator[int]:
        """Yield where the blocks begin of which queries at these positions see anything."""
        first = 0 if self._window is None else max(lowest - self._window + 1, 0) // KEYS * KEYS
        yield from range(first, highest + 1, KEYS)

    def _attend(
        self,
        query: FloatArray,
        positions: IntArray,
        starts: list[int],
        keys: list[FloatArray],
        values: list[FloatArray],
    ) -> FloatArray:
        """Return the output [rows, heads, head_dim].

        starts: where each block of keys begins.  keys, values: of each block, [rows or 1, KEYS,
        kv_heads, head_dim].
        """
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = keys[0].shape[2]
        grouped = (query * self._scale).reshape(num_rows, num_kv_heads, -1, head_dim)
        scores = np.empty((len(starts), *grouped.shape[:3], KEYS), np.float32)
        for number, start in enumerate(starts):
            np.matmul(grouped, keys[number].transpose(0, 2, 3, 1), scores[number])
            if self._softcap is not None:
                scores[number] = soft_cap(scores[number], self._softcap)
            hidden = self._hidden(positions, start)
            if hidden is not None:
                scores[number][
                    np.broadcast_to(hidden[:, None, None], scores[number].shape)
                ] = -np.inf
        scores -= scores.max((0, 4), keepdims=True)
        np.exp(scores, out=scores)
        total = np.zeros(grouped.shape[:3], np.float32)
        output = np.zeros(grouped.shape, np.float32)
        for number in range(len(starts)):
            total += scores[number].sum(-1)
            output += scores[number] @ values[number].transpose(0, 2, 1, 3)
        output /= total[..., None]
        return output.reshape(num_rows, num_heads, head_dim)

    def _hidden(self, positions: IntArray, start: int) -> np.ndarray | None:
        """Return which keys [rows, KEYS] of a block each row does not see; None: it sees all."""
        at = np.arange(start, start + KEYS)
        own = positions[:, None]
        hidden = at > own
        if self._window is not None:
            hidden |= at <= own - self._window
        return hidden if hidden.any() else None
