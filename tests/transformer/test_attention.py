"""Attention is its definition, and the same to the bit however its tokens are cut and mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tiny import attention_by_definition

from batcher.transformer.layers import KEYS, Attention, RowBlocks, padded_cells

HEADS, KV_HEADS, HEAD = 6, 2, 8
WINDOWS = st.none() | st.integers(1, 3 * KEYS)


class Filled:
    """Sequences whose keys and values lie scattered among cells full of NaN."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        draw = np.random.default_rng(seed)
        num_cells = 1 + 2 * sum(lengths)
        self.keys = np.full((num_cells, KV_HEADS, HEAD), np.nan, np.float32)
        self.values = self.keys.copy()
        self.keys[0] = self.values[0] = 0
        free = 1 + draw.permutation(num_cells - 1)
        self.cells = []
        self.query = [draw.standard_normal((n, HEADS, HEAD), np.float32) * 3 for n in lengths]
        for length in lengths:
            cells, free = free[:length], free[length:]
            self.keys[cells] = draw.standard_normal((length, KV_HEADS, HEAD), np.float32)
            self.values[cells] = draw.standard_normal((length, KV_HEADS, HEAD), np.float32)
            self.cells.append(cells)

    def whole(self, number: int, window: int | None) -> np.ndarray:
        cells = padded_cells(self.cells[number])
        query = self.query[number]
        return Attention(HEAD**-0.5, window).of_chunk(query, 0, cells, self.keys, self.values)


@pytest.mark.parametrize("length", [1, 2, KEYS - 1, KEYS, KEYS + 1, 3 * KEYS + 5])
@pytest.mark.parametrize("window", [None, 1, 10, KEYS, KEYS + 1])
def test_attention_is_its_definition(length: int, window: int | None) -> None:
    filled = Filled([length], seed=length)
    cells = filled.cells[0]
    expected = attention_by_definition(
        filled.query[0], filled.keys[cells], filled.values[cells], window
    )
    assert_allclose(filled.whole(0, window), expected, atol=2e-6, rtol=2e-5)


@given(
    st.lists(st.integers(1, 3 * KEYS), min_size=1, max_size=4),
    WINDOWS,
    st.integers(0, 9),
    st.data(),
)
def test_neither_chunks_nor_rows_beside_them_show_in_the_bits(
    lengths: list[int], window: int | None, seed: int, data: st.DataObject
) -> None:
    filled = Filled(lengths, seed)
    attention = Attention(HEAD**-0.5, window)
    whole = [filled.whole(number, window) for number in range(len(lengths))]
    for number, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        stop = data.draw(st.integers(start + 1, length))
        part = attention.of_chunk(
            filled.query[number][start:stop],
            start,
            padded_cells(filled.cells[number][:stop]),
            filled.keys,
            filled.values,
        )
        assert np.array_equal(part, whole[number][start:stop])
    positions = np.array([data.draw(st.integers(0, length - 1)) for length in lengths])
    tables = [
        padded_cells(own[: position + 1])
        for own, position in zip(filled.cells, positions, strict=True)
    ]
    blocks = RowBlocks(positions, tables, window)
    query = np.stack([filled.query[n][position] for n, position in enumerate(positions)])
    rows = attention.of_rows(query, blocks, filled.keys, filled.values)
    for number, position in enumerate(positions):
        assert np.array_equal(rows[number], whole[number][position])
