"""The keys and values of tokens, in cells: whose they are is the block tables' business."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batcher.transformer.config import DeltaNetSettings, TransformerConfig
from batcher.transformer.layers import NOWHERE, FloatArray, IntArray

# The states of recurrent layers, in cells: one holds what a layer keeps of all tokens so far.

_MAX_BYTES = 4 * 2**20  # of states at once; with more, each took twice the time


class RecurrentStates:
    """What each gated delta net keeps, for a number of cells, which may grow.

    Whose state is in which cell is up to the spans of a step; NOWHERE holds that of no tokens.

    convolution: for each layer [cells, kernel_size - 1, channels], the last inputs.
    delta: for each layer [cells, value heads, key_head_dim, value_head_dim], what keys lead to.
    num_computed_together: as many as do not push each other out of the processor's caches.
    """

    def __init__(self, settings: DeltaNetSettings) -> None:
        self.kernel_size = settings.kernel_size
        convolution = (NOWHERE + 1, settings.kernel_size - 1, settings.num_channels)
        heads = (settings.num_value_heads, settings.key_head_dim, settings.value_head_dim)
        self.convolution = [np.zeros(convolution, np.float32) for _ in settings.layers]
        self.delta = [np.zeros((NOWHERE + 1, *heads), np.float32) for _ in settings.layers]
        self.num_computed_together = max(1, _MAX_BYTES // self.delta[0].nbytes)

    @property
    def num_cells(self) -> int:
        return len(self.delta[0])

    def make_room(self, num_cells: int) -> None:
        num_old = self.num_cells
        if num_cells < num_old:
            return
        num_new = max(num_cells + 1, 2 * num_old)
        for store in (self.convolution, self.delta):
            store[:] = [_grown(old, num_new) for old in store]

    def copy(self, source: int, target: int) -> None:
        for states in (*self.convolution, *self.delta):
            states[target] = states[source]


def _grown(old: FloatArray, num_cells: int) -> FloatArray:
    new = np.zeros((num_cells, *old.shape[1:]), np.float32)
    new[: len(old)] = old
    return new


# Which layers share a block table: those that read the same of a sequence.
#
# Layers with attention are in groups of one size, the fewest that read the same, so that a block
# has room for any of them (vLLM's hybrid allocator does the same).


class CacheGroup(NamedTuple):
    """Layers with a block table of their own.

    window: how many tokens one reads there, its own included; None for all before it, and 2 for
    recurrent layers, which read what the token before has left.
    """

    layers: tuple[int, ...]
    window: int | None = None
    is_recurrent: bool = False


def cache_groups(config: TransformerConfig) -> tuple[CacheGroup, ...]:
    windows = {layer: config.window_of(layer) for layer in config.attention_layers}
    groups = attention_groups(windows, config.max_position_embeddings)
    if config.delta_net is None:
        return groups
    return (*groups, CacheGroup(config.delta_net.layers, 2, is_recurrent=True))


def attention_groups(
    windows: Mapping[int, int | None], max_position_embeddings: int
) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with attention: those that read all, those with a window.

    windows: of each layer; one as long as the context is none.
    """
    by_window: dict[int | None, list[int]] = {None: []}
    for layer, window in windows.items():
        is_full = window is None or window >= max_position_embeddings
        by_window.setdefault(None if is_full else window, []).append(layer)
    size = min(filter(None, map(len, by_window.values())), default=1)
    return tuple(
        CacheGroup(tuple(layers[start : start + size]), window)
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    )


def num_kv_layers(groups: Sequence[CacheGroup]) -> int:
    """Return for how many layers a block has room for keys and values: those of the first group."""
    first = groups[0]
    return 0 if first.is_recurrent else len(first.layers)


PADDING = NOWHERE + 1  # the cell of what padding has; nobody reads it
NUM_FIXED = PADDING + 1  # cells before those of block 0


class KVStore:
    """Keys and values of every layer for a number of cells, which may grow.

    keys, values: for each layer [cells, kv_heads, head_dim]; the cell NOWHERE holds zeros.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self._num_cells = NUM_FIXED
        shape = (NUM_FIXED, num_kv_heads, head_dim)
        self.keys = [np.zeros(shape, np.float32) for _ in range(num_layers)]
        self.values = [np.zeros(shape, np.float32) for _ in range(num_layers)]

    def make_room(self, num_cells: int) -> None:
        num_old = self._num_cells
        num_missing = NUM_FIXED + num_cells - num_old
        if num_missing <= 0:
            return
        self._num_cells = num_new = num_old + max(num_missing, num_old)
        for store in (self.keys, self.values):
            store[:] = [self._grown(old, num_new) for old in store]

    def _grown(self, old: FloatArray, num_cells: int) -> FloatArray:
        return _grown(old, num_cells)

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
        first, second = NUM_FIXED + source * block_size, NUM_FIXED + target * block_size
        for store in (*self.keys, *self.values):
            store[second : second + block_size] = store[first : first + block_size]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Let cells hold what others do, all at once: pairs (source, target), from block 0 on."""
        sources, targets = np.array(moves).T + NUM_FIXED
        for store in (*self.keys, *self.values):
            store[targets] = store[sources]


# How much memory the cache of a transformer takes, which its config tells without its weights.

_FLOAT_SIZE = 4  # bytes


class CacheSize(NamedTuple):
    """What a cache takes, in bytes.

    per_token: the keys and values of a token, in all groups of layers.
    cell: those of one group, which a block has room for.
    state: the recurrent states that a block has room for beside them.
    """

    per_token: int
    cell: int
    state: int

    def of_block(self, block_size: int) -> int:
        return block_size * self.cell + self.state


def cache_size(config: TransformerConfig) -> CacheSize:
    groups, delta_net = cache_groups(config), config.delta_net
    cell = 2 * num_kv_layers(groups) * config.num_kv_heads * config.head_dim * _FLOAT_SIZE
    num_tables = sum(not group.is_recurrent for group in groups)
    state_size = 0 if delta_net is None else len(delta_net.layers) * delta_net.state_size
    return CacheSize(num_tables * cell, cell, state_size * _FLOAT_SIZE)


# Block tables of slots whose rows share nothing: blocks come as rows grow, and go with them.

OWN_BLOCK_SIZE = 64  # tokens
NO_BLOCK = -1


class OwnTables:
    """A table of each slot for each group of layers, over blocks of which there are ever more."""

    def __init__(self, num_slots: int, groups: Sequence[CacheGroup]) -> None:
        self.num_blocks = 0
        self._groups = groups
        self._free: list[int] = []
        self._tables: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_slots)]

    def grow(self, slot: int, start: int, stop: int) -> list[list[int]]:
        """Return the tables of a slot, by groups, with blocks to compute the tokens start..stop.

        What no token from `start` on reads is given back, and its place is NO_BLOCK.  So are those
        of states after tokens in the middle: nobody goes on from there.
        """
        tables, num_blocks = self._tables[slot], -(-stop // OWN_BLOCK_SIZE)
        for group, table in zip(self._groups, tables, strict=True):
            if group.window is not None:
                passed = max(start - group.window + 1, 0) // OWN_BLOCK_SIZE - 1
                while passed >= 0 and table[passed] != NO_BLOCK:
                    self._free.append(table[passed])
                    table[passed] = NO_BLOCK
                    passed -= 1
            if group.is_recurrent:
                table.extend([NO_BLOCK] * (num_blocks - 1 - len(table)))
            table.extend([self._take() for _ in range(num_blocks - len(table))])
        return tables

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self.num_blocks += 1
        return self.num_blocks - 1

    def fork(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """Give `target` as many blocks as `source` has; yield which are to be copied to which."""
        self.release(target)
        for table, copied in zip(self._tables[source], self._tables[target], strict=True):
            for block in table:
                copied.append(NO_BLOCK if block == NO_BLOCK else self._take())
                if block != NO_BLOCK:
                    yield block, copied[-1]

    def release(self, slot: int) -> None:
        for table in self._tables[slot]:
            self._free += [block for block in table if block != NO_BLOCK]
            table.clear()
