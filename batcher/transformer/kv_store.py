"""The keys and values of tokens, in cells: whose they are is the block tables' business."""

from collections.abc import Sequence

import numpy as np

from batcher.transformer.attention import NOWHERE
from batcher.transformer.layers import FloatArray, IntArray

PADDING = NOWHERE + 1  # the cell of what padding has; nobody reads it
NUM_FIXED = PADDING + 1  # cells before those of block 0


class KVStore:
    """Keys and values of every layer for a number of cells, which may grow.

    keys, values: for each layer [cells, kv_heads, head_dim]; the cell NOWHERE holds zeros.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self._shape = (num_kv_heads, head_dim)
        self._num_cells = NUM_FIXED
        self.keys = [self._zeros(NUM_FIXED) for _ in range(num_layers)]
        self.values = [self._zeros(NUM_FIXED) for _ in range(num_layers)]

    def _zeros(self, num_cells: int) -> FloatArray:
        return np.zeros((num_cells, *self._shape), np.float32)

    def make_room(self, num_cells: int) -> None:
        """Have at least so many cells beside those that are fixed; memory is used as they are."""
        num_old = self._num_cells
        num_missing = NUM_FIXED + num_cells - num_old
        if num_missing <= 0:
            return
        self._num_cells = num_new = num_old + max(num_missing, num_old)
        for store in (self.keys, self.values):
            store[:] = [self._grown(old, num_new) for old in store]

    def _grown(self, old: FloatArray, num_cells: int) -> FloatArray:
        """Return so many cells, of which the first hold what `old` does."""
        new = self._zeros(num_cells)
        new[: len(old)] = old
        return new

    def cells(self, table: list[int], block_size: int, num_tokens: int) -> IntArray:
        """Return the cells [num_tokens] of the first tokens of a sequence with this block table.

        NOWHERE for those whose block is freed, which has a negative number.
        """
        positions = np.arange(num_tokens)
        blocks = np.array(table, np.int64)[positions // block_size]
        cells = NUM_FIXED + blocks * block_size + positions % block_size
        cells[blocks < 0] = NOWHERE
        return cells

    def update(
        self, layer: int, cells: IntArray, new_keys: FloatArray, new_values: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Write what a layer has made of new tokens; return its keys and values of all cells.

        cells: [tokens] where each is written.  new_keys, new_values: [tokens, kv_heads, head_dim].
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[cells] = new_keys
        values[cells] = new_values
        return keys, values

    def copy(self, source: int, target: int, block_size: int) -> None:
        """Let a block hold what another does."""
        first, second = NUM_FIXED + source * block_size, NUM_FIXED + target * block_size
        for store in (*self.keys, *self.values):
            store[second : second + block_size] = store[first : first + block_size]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Let cells hold what others do, all at once: pairs (source, target), from block 0 on."""
        sources, targets = np.array(moves).T + NUM_FIXED
        for store in (*self.keys, *self.values):
            store[targets] = store[sources]
