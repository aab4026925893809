"""The tokens of one forward, and the cells of their cache."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from batcher.errors import InvariantError, ModelError
from batcher.events import Layout
from batcher.transformer.config import DeltaNetSettings, TransformerConfig
from batcher.transformer.layers import (
    NOWHERE,
    QUERIES,
    FloatArray,
    IntArray,
    Queries,
    Rectangle,
    queries_of,
    rectangles_of,
)

# The states of recurrent layers, in cells, one for each sequence prefix.

_MAX_BYTES = 4 * 2**20  # of states at once; more take twice the time each


class RecurrentStates:
    """The states of each gated delta net, in a growing number of cells.

    Spans assign cells; NOWHERE holds the state before any token.

    convolution: for each layer [cells, kernel_size - 1, channels], the last inputs.
    delta: for each layer [cells, value heads, key_head_dim, value_head_dim], the memory.
    num_computed_together: spans that fit into the processor's caches.
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


# Layers that share a block table read the same of a sequence.
#
# Groups of attention layers have equal sizes, that of the smallest set with equal windows, so that
# a block has room for any group (as in vLLM's hybrid allocator).


class CacheGroup(NamedTuple):
    """Layers with a block table of their own.

    window: tokens that a token reads there, its own included; None for all before it, and 2 for
    recurrent layers, which read the state after the previous token.
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
    """Return the groups of layers with attention, by window."""
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
    """Return the number of layers for which a block holds keys and values."""
    first = groups[0]
    return 0 if first.is_recurrent else len(first.layers)


PADDING = NOWHERE + 1  # the cell written by padding, never read
NUM_FIXED = PADDING + 1  # cells before those of block 0


class KVStore:
    """Keys and values of every layer, in a growing number of cells.

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
            store[:] = [_grown(old, num_new) for old in store]

    def cells(self, table: list[int], block_size: int, num_tokens: int) -> IntArray:
        """Return the cells [num_tokens] of the first tokens of a sequence with this block table.

        NOWHERE if their block is freed, which has a negative number.
        """
        positions = np.arange(num_tokens)
        blocks = np.array(table, np.int64)[positions // block_size]
        cells = NUM_FIXED + blocks * block_size + positions % block_size
        cells[blocks < 0] = NOWHERE
        return cells

    def update(
        self, layer: int, cells: IntArray, new_keys: FloatArray, new_values: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Write a layer's keys and values of new tokens; return those of all cells.

        cells: [tokens]. new_keys, new_values: [tokens, kv_heads, head_dim].
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
        """Copy cells to others, all at once: pairs (source, target), counted from block 0."""
        sources, targets = np.array(moves).T + NUM_FIXED
        for store in (*self.keys, *self.values):
            store[targets] = store[sources]


# The memory of a cache, from the config alone.

_FLOAT_SIZE = 4  # bytes


class CacheSize(NamedTuple):
    """The bytes of a cache.

    per_token: keys and values of a token, in all groups of layers.
    cell: those of one group, for which a block has room.
    state: recurrent states of a block.
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


# Block tables of slots that share nothing: blocks are allocated as rows grow.

OWN_BLOCK_SIZE = 64  # tokens
NO_BLOCK = -1


class OwnTables:
    """Block tables of each slot for each group of layers, over a growing number of blocks.

    max_blocks: the most there can be, or None.
    """

    def __init__(self, num_slots: int, groups: Sequence[CacheGroup]) -> None:
        self.num_blocks = 0
        self.max_blocks: int | None = None
        self._groups = groups
        self._free: list[int] = []
        self._tables: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_slots)]

    def grow(self, slot: int, start: int, stop: int) -> list[list[int]]:
        """Return the tables of a slot, by group, with blocks for the tokens start..stop.

        Blocks that no token from `start` on reads are freed and become NO_BLOCK, as are states
        after tokens in the middle.
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
            while len(table) < num_blocks:
                table.append(self._take())
        return tables

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self.num_blocks == self.max_blocks:
            raise ModelError(
                f"all {self.num_blocks:,} KV blocks that fit are in use: "
                "set --kv-memory auto, or a smaller --batch"
            )
        self.num_blocks += 1
        return self.num_blocks - 1

    def fork(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """Allocate blocks for a copy of `source` in `target`; yield the blocks to copy."""
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


# A span: consecutive tokens of one sequence, and the cells of that sequence.


class Snapshot(NamedTuple):
    """The cell for the states after the first `num_tokens` of a span."""

    num_tokens: int
    cell: int


class Span(NamedTuple):
    """Consecutive tokens of one sequence.

    start: the position of the first. cells: for each group of layers with attention, those of all
    positions up to the last token; NOWHERE for positions that are not read. Recurrent layers need:
    source: the cell of the states before the first token; NOWHERE at the start of a sequence.
    snapshots: the states to keep, ascending; the last are those before the drafts. A later span in
    the step may start from them.
    num_drafts: how many of the last tokens are drafts.
    """

    token_ids: Sequence[int]
    start: int
    cells: Sequence[IntArray]
    source: int = NOWHERE
    snapshots: Sequence[Snapshot] = ()
    num_drafts: int = 0


def spans_of_tree(span: Span, paths: Sequence[Sequence[int]]) -> list[Span]:
    """Return the spans of tokens that end in a tree of drafts."""
    num_known = len(span.token_ids) - len(paths)
    known = span.start + num_known
    past = [cells[:known] for cells in span.cells]
    drafts = [
        Span(
            [span.token_ids[path[-1]]],
            known + len(path) - 1,
            [
                np.concatenate([own, cells[span.start + np.array(path)]])
                for own, cells in zip(past, span.cells, strict=True)
            ],
        )
        for path in paths
    ]
    first = Span(span.token_ids[:num_known], span.start, past)
    return [first, *drafts]


class Step:
    """Spans of several sequences, concatenated, and their cells.

    Padded, all spans are as long as the longest. The padding follows the tokens of all spans: it
    attends to its sequence, writes into an unused cell, changes no states and no bit of other
    tokens, and is dropped.

    num_tokens: without padding.
    token_ids, positions: [tokens]. own_cells: for each group of layers with attention [tokens], the
    cells of their keys and values.
    is_alone: compute the attention of each query alone.
    waves: the spans that recurrent layers compute together, if there are such layers.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        store: KVStore,
        states: RecurrentStates | None,
        layout: Layout = "ragged",
        *,
        is_alone: bool = False,
    ) -> None:
        self.store, self.states = store, states
        self.num_tokens = sum(len(span.token_ids) for span in spans)
        self.waves = (
            []
            if states is None
            else [*waves_of(spans, states.kernel_size, states.num_computed_together)]
        )
        longest = max(len(span.token_ids) for span in spans)
        for span in [*spans] if layout == "padded" else ():
            num_missing = longest - len(span.token_ids)
            if num_missing:
                cells = [np.concatenate([own, np.full(num_missing, NOWHERE)]) for own in span.cells]
                behind = Span([0] * num_missing, span.start + len(span.token_ids), cells)
                spans = [*spans, behind]
        sizes = [len(span.token_ids) for span in spans]
        self.positions: IntArray = np.concatenate(
            [
                np.arange(span.start, span.start + size)
                for span, size in zip(spans, sizes, strict=True)
            ]
        )
        self.token_ids: IntArray = np.concatenate(
            [np.asarray(span.token_ids, np.int64) for span in spans]
        )
        groups = [*zip(*(span.cells for span in spans), strict=True)]
        self.own_cells: list[IntArray] = [
            np.concatenate([own[span.start :] for own, span in zip(every, spans, strict=True)])
            for every in groups
        ]
        for own_cells in self.own_cells:
            own_cells[self.num_tokens :] = PADDING
        self._spans, self._is_alone = spans, is_alone
        self._rectangles: dict[tuple[int, int | None], list[Rectangle]] = {}

    def rectangles(self, group: int, window: int | None) -> list[Rectangle]:
        """Return the queries of layers in a group with this window."""
        if (group, window) not in self._rectangles:
            queries, token = list[Queries](), 0
            most = 1 if self._is_alone else QUERIES
            for span in self._spans:
                stop = span.start + len(span.token_ids)
                queries += queries_of(token, span.start, stop, span.cells[group], window, most)
                token += len(span.token_ids)
            self._rectangles[group, window] = rectangles_of(
                queries, window, is_alone=self._is_alone
            )
        return self._rectangles[group, window]


# Spans in the order of time, for recurrent layers.
#
# Spans without dependencies form a wave, and are computed together. A span that starts from the
# states of another one follows in a later wave.


class Kept(NamedTuple):
    """States to keep at some time: spans [snapshots] and cells [snapshots]."""

    spans: IntArray
    cells: IntArray


class Wave:
    """Independent spans, the longest first: at any time the first few of them have a token.

    sources: [spans] the cells of their initial states.
    rows: [tokens] indices of their tokens in the step, by time, then by span.
    bounds: [times + 1] where in `rows` the tokens of each time begin.
    kept: number of tokens -> states to keep then.
    inputs: [kernel_size, tokens] inputs of each token's convolution, oldest first: rows of the past
    of all spans, [kernel_size - 1, spans], followed by those of the tokens.
    kept_inputs: [snapshots, kernel_size - 1] the past to keep, in kept_cells.
    """

    def __init__(self, spans: Sequence[Span], firsts: Sequence[int], kernel_size: int) -> None:
        order = sorted(range(len(spans)), key=lambda number: -len(spans[number].token_ids))
        spans = [spans[number] for number in order]
        sizes = np.array([len(span.token_ids) for span in spans])
        self.sources: IntArray = np.array([span.source for span in spans])
        num_times = int(sizes[0])
        num_active = len(spans) - np.bincount(sizes, minlength=num_times + 1).cumsum()[:-1]
        bounds = np.concatenate([[0], num_active.cumsum()])
        self.bounds: list[int] = bounds.tolist()
        times = np.repeat(np.arange(num_times), num_active)
        numbers = np.arange(len(times)) - bounds[times]
        self.rows: IntArray = np.array([firsts[number] for number in order])[numbers] + times
        past = np.arange(kernel_size - 1)
        starts = np.concatenate([past * len(spans), (kernel_size - 1) * len(spans) + bounds])
        self.inputs: IntArray = starts[times + np.arange(kernel_size)[:, None]] + numbers
        snapshots = [
            (snapshot.num_tokens, number, snapshot.cell)
            for number, span in enumerate(spans)
            for snapshot in span.snapshots
        ]
        after, kept_spans, cells = np.array(snapshots, np.int64).reshape(-1, 3).T
        self.kept = {
            num_tokens: Kept(kept_spans[after == num_tokens], cells[after == num_tokens])
            for num_tokens in {*after.tolist()}
        }
        self.kept_inputs: IntArray = starts[after[:, None] + past] + kept_spans[:, None]
        self.kept_cells: IntArray = cells


def waves_of(spans: Sequence[Span], kernel_size: int, max_spans: int) -> Iterator[Wave]:
    """Yield the spans of a step in waves of at most `max_spans`, in order.

    Raises:
        InvariantError: a span keeps nothing before its drafts, or states NOWHERE or after drafts.
    """
    written: set[int] = set()
    begun: list[Span] = []
    firsts: list[int] = []
    first = 0
    for span in spans:
        cells = {snapshot.cell for snapshot in span.snapshots}
        kept = [snapshot.num_tokens for snapshot in span.snapshots]
        is_ascending = all(first < second for first, second in pairwise([0, *kept]))
        num_known = len(span.token_ids) - span.num_drafts
        if NOWHERE in cells or not is_ascending or kept[-1:] != [num_known]:
            raise InvariantError(f"a span of {num_known} tokens keeps {span.snapshots}")
        if written & {span.source, *cells} or len(begun) == max_spans:
            yield Wave(begun, firsts, kernel_size)
            written, begun, firsts = set(), [], []
        written |= cells
        begun.append(span)
        firsts.append(first)
        first += len(span.token_ids)
    yield Wave(begun, firsts, kernel_size)
