"""The tokens that one forward computes: whose they are, where they stand, what they attend to."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from batcher.transformer.attention import (
    KEYS,
    Attention,
    RowBlocks,
    first_blocks,
    padded_cells,
)
from batcher.transformer.config import RopeSettings
from batcher.transformer.kv_store import KVStore
from batcher.transformer.layers import FloatArray, IntArray, RotaryEmbedding
from batcher.transformer.recurrent_states import RecurrentStates
from batcher.transformer.span import Span
from batcher.transformer.waves import waves_of

_NUM_BLOCKS = 128  # of keys of several rows, at once: so that they stay in the cache


class Mixed(Protocol):
    """Which tokens of a step attend to what."""

    def attend(
        self, attention: Attention, query: FloatArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of all queries."""


class Step:
    """Spans of several sequences, one after the other, and where what is kept of them is.

    num_tokens: how many tokens they have; behind them may be padding.
    token_ids, positions: [tokens].  For each group of layers with attention, own_cells: [tokens]
    where their keys and values are written, and mixed: which of them attend to what.
    waves: which of them recurrent layers compute together, if there are states of such layers.
    """

    def __init__(
        self, spans: Sequence[Span], store: KVStore, states: RecurrentStates | None
    ) -> None:
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
        self.num_tokens = len(self.token_ids)
        groups = [*zip(*(span.cells for span in spans), strict=True)]
        self.own_cells: list[IntArray] = [
            np.concatenate([own[span.start :] for own, span in zip(cells, spans, strict=True)])
            for cells in groups
        ]
        self.mixed: list[Mixed] = [_Mixed(spans, sizes, cells, self.positions) for cells in groups]
        self.store, self.states = store, states
        self.waves = (
            []
            if states is None
            else [*waves_of(spans, states.kernel_size, states.num_computed_together)]
        )
        self._angles: dict[RopeSettings, tuple[FloatArray, FloatArray]] = {}

    def angles(self, rotary: RotaryEmbedding) -> tuple[FloatArray, FloatArray]:
        """Return the cosines and sines of all tokens, which layers of one RoPE share."""
        if rotary.settings not in self._angles:
            self._angles[rotary.settings] = rotary.angles(self.positions)
        return self._angles[rotary.settings]


class _Mixed:
    """Which tokens of a step attend to what: single ones together, those on end by sequences."""

    def __init__(
        self,
        spans: Sequence[Span],
        sizes: list[int],
        cells: Sequence[IntArray],
        positions: IntArray,
    ) -> None:
        ends = np.cumsum(sizes).tolist()
        parts = [*zip(spans, sizes, cells, ends, strict=True)]
        self._chunks = [
            (slice(end - size, end), span.start, padded_cells(own))
            for span, size, own, end in parts
            if size > 1
        ]
        self._tables = [padded_cells(own) for _, size, own, _ in parts if size == 1]
        self._rows = np.array([end - 1 for _, size, _, end in parts if size == 1], np.int64)
        self._positions = positions[self._rows]
        self._blocks: dict[int | None, list[tuple[IntArray, RowBlocks]]] = {}

    def attend(
        self, attention: Attention, query: FloatArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of all queries."""
        output = np.empty_like(query)
        for part, start, cells in self._chunks:
            output[part] = attention.of_chunk(query[part], start, cells, keys, values)
        for rows, blocks in self._row_blocks(attention.window) if self._rows.size else ():
            output[rows] = attention.of_rows(query[rows], blocks, keys, values)
        return output

    def _row_blocks(self, window: int | None) -> list[tuple[IntArray, RowBlocks]]:
        """Return which single tokens see which blocks of keys, which layers of a window share."""
        if window not in self._blocks:
            counts = self._positions // KEYS - first_blocks(self._positions, window) + 1
            groups = (counts.cumsum() - 1) // _NUM_BLOCKS
            boundaries = [0, *(np.diff(groups).nonzero()[0] + 1).tolist(), len(groups)]
            self._blocks[window] = [
                (
                    self._rows[start:stop],
                    RowBlocks(self._positions[start:stop], self._tables[start:stop], window),
                )
                for start, stop in pairwise(boundaries)
            ]
        return self._blocks[window]
