"""How the spans of a step are laid out for a transformer: ragged, or as a rectangle with padding.

Padding is computed in every product as tokens are, and thrown away: it costs what it costs, and
shows in no bit of the tokens beside it.
"""

from collections.abc import Sequence

import numpy as np

from batcher.events import Layout
from batcher.padding import PAD
from batcher.transformer.attention import NOWHERE, Attention, RowBlocks, padded_cells
from batcher.transformer.kv_store import PADDING, KVStore
from batcher.transformer.layers import FloatArray, IntArray
from batcher.transformer.recurrent_states import RecurrentStates
from batcher.transformer.span import Span
from batcher.transformer.step import Mixed, Step

_NUM_KEYS = 2**16  # of several rows, at once: so that memory is bounded


class PaddedStep(Step):
    """Spans that all are as long as the longest, with padding behind those that are not.

    The padding of all spans comes after their tokens.  It attends to the sequence that it stands
    behind, writes into a cell that nobody reads, and changes no states.  Spans of one token have no
    padding, but their keys and values are a rectangle.
    """

    def __init__(
        self, spans: Sequence[Span], store: KVStore, states: RecurrentStates | None
    ) -> None:
        super().__init__(spans, store, states)
        longest = max(len(span.token_ids) for span in spans)
        if longest == 1:
            self.mixed = [
                _PaddedKeys(cells) for cells in zip(*(span.cells for span in spans), strict=True)
            ]
        fillers = [_behind(span, longest) for span in spans if len(span.token_ids) < longest]
        if not fillers:
            return
        padding = Step(fillers, store, None)
        self.mixed = [
            _BothParts(mixed, self.num_tokens, behind)
            for mixed, behind in zip(self.mixed, padding.mixed, strict=True)
        ]
        self.token_ids = np.concatenate([self.token_ids, padding.token_ids])
        self.positions = np.concatenate([self.positions, padding.positions])
        nowhere_read = np.full(padding.num_tokens, PADDING)
        self.own_cells = [np.concatenate([cells, nowhere_read]) for cells in self.own_cells]


STEPS: dict[Layout, type[Step]] = {"ragged": Step, "padded": PaddedStep}


def _behind(span: Span, longest: int) -> Span:
    """Return the padding behind a span that is shorter than the longest."""
    num_missing = longest - len(span.token_ids)
    cells = [np.concatenate([own, np.full(num_missing, NOWHERE)]) for own in span.cells]
    return Span([PAD] * num_missing, span.start + len(span.token_ids), cells)


class _BothParts:
    """What tokens attend to, and then what padding does."""

    def __init__(self, tokens: Mixed, num_tokens: int, padding: Mixed) -> None:
        self._tokens, self._num_tokens, self._padding = tokens, num_tokens, padding

    def attend(
        self, attention: Attention, query: FloatArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [positions, heads, head_dim] of all queries."""
        of_tokens, of_padding = np.split(query, [self._num_tokens])
        return np.concatenate(
            [
                self._tokens.attend(attention, of_tokens, keys, values),
                self._padding.attend(attention, of_padding, keys, values),
            ]
        )


class _PaddedKeys:
    """What single tokens of several sequences attend to, all gathered as long as the longest."""

    def __init__(self, cells: Sequence[IntArray]) -> None:
        self._lengths: IntArray = np.array([*map(len, cells)])
        self._cells = np.full((len(cells), self._lengths.max()), NOWHERE)
        for line, own in zip(self._cells, cells, strict=True):
            line[: len(own)] = own

    def attend(
        self, attention: Attention, query: FloatArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [rows, heads, head_dim] of all queries."""
        output = np.empty_like(query)
        num_rows = max(_NUM_KEYS // self._cells.shape[1], 1)
        for start in range(0, len(query), num_rows):
            rows = slice(start, start + num_rows)
            cells, lengths = self._cells[rows], self._lengths[rows]
            attended = batched_attention_with_padding(
                query[rows, None], keys[cells], values[cells], lengths, attention
            )
            output[rows] = attended[:, 0]
        return output


def batched_attention_with_padding(
    query: FloatArray,
    key: FloatArray,
    value: FloatArray,
    seq_lengths: IntArray,
    attention: Attention | None = None,
) -> FloatArray:
    """Return softmax(QK^T / sqrt(d)) V of padded sequences, of the shape of `query`.

    query: [batch, queries, d], or [batch, queries, heads, d]; each sees all keys of its sequence.
    key, value: [batch, seq, d], or [batch, seq, kv_heads, d].
    seq_lengths: [batch] how many keys each sequence has, at least one; behind them may be anything.
    attention: how it is done; None for nothing but the formula.
    """
    (batch, num_queries), head_dim = query.shape[:2], query.shape[-1]
    num_keys = key.shape[1]
    if attention is None:
        attention = Attention(head_dim**-0.5, window=None)
    numbers = NOWHERE + 1 + np.arange(batch * num_keys).reshape(batch, num_keys)
    cells = np.where(np.arange(num_keys) < seq_lengths[:, None], numbers, NOWHERE)
    tables = [padded_cells(line) for line in cells.repeat(num_queries, 0)]
    blocks = RowBlocks((seq_lengths - 1).repeat(num_queries), tables, attention.window)
    output = attention.of_rows(
        query.reshape(batch * num_queries, -1, head_dim), blocks, _store_of(key), _store_of(value)
    )
    return output.reshape(query.shape)


def _store_of(padded: FloatArray) -> FloatArray:
    """Return keys or values [batch, seq, ..., d] as cells [1 + batch * seq, kv_heads, d]."""
    batch, num_keys, head_dim = *padded.shape[:2], padded.shape[-1]
    cells = padded.reshape(batch * num_keys, -1, head_dim)
    return np.concatenate([np.zeros_like(cells[:1]), cells])
