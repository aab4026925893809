"""Norms, activations and rotary embeddings are what their papers say."""

import cmath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tiny import attention_by_definition

from batcher.transformer.config import LinearScaling, Llama3Scaling, RopeSettings
from batcher.transformer.graph import Graph
from batcher.transformer.layers import (
    KEYS,
    Attention,
    RotaryEmbedding,
    queries_of,
    rectangles_of,
    rms_norm,
    sigmoid,
    silu,
    soft_cap,
    softplus,
)


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x = np.array([[3, 4], [0, 0]], np.float32)
    weight = np.array([1, 2], np.float32)
    root = np.sqrt(12.5)
    assert_allclose(rms_norm(x[:1], weight, 0.0), [[3 / root, 8 / root]], rtol=1e-6)
    assert (rms_norm(x, weight, 1e-5)[1] == 0).all()


@pytest.mark.parametrize("x", [-200.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 200.0])
def test_nothing_that_goes_through_exp_overflows(x):
    given = np.array([x], np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = [silu(given), sigmoid(given), softplus(given)]
    power = np.exp(np.float64(-x))
    expected = [[x / (1 + power)], [1 / (1 + power)], [max(x, 0) + np.log1p(np.exp(-abs(x)))]]
    assert_allclose(found, expected, rtol=1e-5, atol=1e-30)
    assert all(part.dtype == np.float32 for part in found)


def test_scores_are_capped():
    graph = Graph()
    capped = graph.compiled(soft_cap(graph, "x", 30))
    assert_allclose(capped(None, x=np.float32([0.01, -0.01])), [0.01, -0.01], rtol=1e-5)
    assert_allclose(capped(None, x=np.float32([1e6, -1e6])), [30, -30])


def rotated(settings, x, position):
    """Return x [heads, head_dim] at a position."""
    graph, rotary = Graph(), RotaryEmbedding(settings, x.shape[1])
    program = graph.compiled(rotary.rotated(graph, "x", len(x), "cosines", "sines"))
    cosines, sines = rotary.angles(np.array([position]))
    return program(None, x=x.reshape(1, -1), cosines=cosines, sines=sines).reshape(x.shape)


@given(st.integers(0, 5000), st.sampled_from(["half-split", "interleaved"]))
def test_pairs_of_features_are_turned_by_the_position(position, style):
    x = np.random.default_rng(position).standard_normal((3, 8), np.float32)
    turned = rotated(RopeSettings(theta=100.0, style=style, scaling=None), x, position)
    for pair in range(4):
        first, second = (pair, pair + 4) if style == "half-split" else (2 * pair, 2 * pair + 1)
        turn = cmath.exp(1j * position * 100.0 ** (-2 * pair / 8))
        for head in range(3):
            expected = complex(x[head, first], x[head, second]) * turn
            assert abs(complex(turned[head, first], turned[head, second]) - expected) < 1e-5


@given(st.integers(0, 500), st.sampled_from(["half-split", "interleaved"]))
def test_what_is_beyond_the_part_that_turns_stays_as_it_is(position, style):
    settings = RopeSettings(theta=100.0, style=style, partial_rotary_factor=0.5)
    x = np.random.default_rng(position).standard_normal((3, 16), np.float32)
    turned = rotated(settings, x, position)
    whole = rotated(RopeSettings(100.0, style), np.ascontiguousarray(x[:, :8]), position)
    assert_allclose(turned[:, :8], whole, rtol=1e-6, atol=1e-6)
    assert np.array_equal(turned[:, 8:], x[:, 8:])


def test_linear_and_llama_3_scaling_stretch_what_they_should():
    scaling = LinearScaling(factor=4.0)
    stretched = RotaryEmbedding(RopeSettings(theta=100.0, style="half-split", scaling=scaling), 8)
    plain = RotaryEmbedding(RopeSettings(theta=100.0, style="half-split", scaling=None), 8)
    assert_allclose(stretched.frequencies * 4, plain.frequencies)
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    scaled = RotaryEmbedding(RopeSettings(theta=5e5, style="half-split", scaling=scaling), 128)
    plain = RotaryEmbedding(RopeSettings(theta=5e5, style="half-split", scaling=None), 128)
    ratio = scaled.frequencies / plain.frequencies
    turns = 8192 * plain.frequencies / (2 * np.pi)
    assert_allclose(ratio[turns > 4], 1)
    assert_allclose(ratio[turns < 1], 1 / 8)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(ratio) <= 1e-12).all()


# Attention is its definition, and the same to the bit however its tokens are cut and mixed.


HEADS, KV_HEADS, HEAD = 6, 2, 8
SIZES = [(1, 1, 128), (1, 1, 64), (3, 3, 10), (8, 1, 256), (8, 1, 130), (2, 1, 80), (8, 1, 16)]
WINDOWS = st.none() | st.integers(1, 3 * KEYS)


class Filled:
    """Sequences whose keys and values lie scattered among cells full of NaN."""

    def __init__(self, lengths, seed, sizes=(HEADS, KV_HEADS, HEAD), scale=HEAD**-0.5):
        heads, kv_heads, head_dim = sizes
        self.scale = scale
        draw = np.random.default_rng(seed)
        num_cells = 1 + 2 * sum(lengths)
        self.keys = np.full((num_cells, kv_heads, head_dim), np.nan, np.float32)
        self.values = self.keys.copy()
        self.keys[0] = self.values[0] = 0
        free = 1 + draw.permutation(num_cells - 1)
        self.cells = []
        self.query = [draw.standard_normal((n, heads, head_dim), np.float32) * 3 for n in lengths]
        for length in lengths:
            cells, free = free[:length], free[length:]
            self.keys[cells] = draw.standard_normal((length, kv_heads, head_dim), np.float32)
            self.values[cells] = draw.standard_normal((length, kv_heads, head_dim), np.float32)
            self.cells.append(cells)

    def attended(self, spans, window, **how):
        """Return the output of spans (number, start, stop) of sequences in one step."""
        queries, token = [], 0
        for number, start, stop in spans:
            queries += queries_of(token, start, stop, self.cells[number][:stop], window, **how)
            token += stop - start
        query = np.concatenate([self.query[number][start:stop] for number, start, stop in spans])
        rectangles = rectangles_of(queries, window, is_alone=bool(how))
        return Attention(self.scale, window)(query, rectangles, self.keys, self.values)

    def whole(self, number, window=None):
        return self.attended([(number, 0, len(self.cells[number]))], window)


@pytest.mark.parametrize("length", [1, 2, KEYS - 1, KEYS, KEYS + 1, 3 * KEYS + 5, 200])
@pytest.mark.parametrize("window", [None, 1, 10, KEYS, KEYS + 1])
def test_attention_is_its_definition(length, window):
    filled = Filled([length], seed=length)
    cells = filled.cells[0]
    expected = attention_by_definition(
        filled.query[0], filled.keys[cells], filled.values[cells], window
    )
    assert_allclose(filled.whole(0, window), expected, atol=2e-6, rtol=2e-5)


@given(
    st.lists(st.integers(1, 6 * KEYS), min_size=1, max_size=5),
    WINDOWS,
    st.integers(0, 9),
    st.data(),
)
def test_neither_chunks_nor_rows_beside_them_show_in_the_bits(lengths, window, seed, data):
    filled = Filled(lengths, seed)
    whole = [filled.whole(number, window) for number in range(len(lengths))]
    spans = []
    for number, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        stop = data.draw(st.sampled_from([start + 1, length]) | st.integers(start + 1, length))
        spans.append((number, start, stop))
    parts = [whole[number][start:stop] for number, start, stop in spans]
    assert np.array_equal(filled.attended(spans, window), np.concatenate(parts))
    assert np.array_equal(filled.attended(spans, window, most=1), np.concatenate(parts))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_no_size_of_heads_lets_neighbours_show_in_the_bits(sizes, scale):
    lengths = [40, 130, 300, 700, 1300]
    filled = Filled(lengths, 1, sizes, scale)
    whole = [filled.whole(number) for number in range(len(lengths))]
    draw = np.random.default_rng(2)
    for num_queries in (1, 1, 2, 5, 30):
        spans = [(number, n - num_queries, n) for number, n in enumerate(lengths)]
        alone = [whole[number][start:stop] for number, start, stop in spans]
        for span, expected in zip(spans, alone, strict=True):
            assert np.array_equal(filled.attended([span], None), expected), span
        several = draw.permutation(len(spans))[: draw.integers(2, 6)]
        found = filled.attended([spans[number] for number in several], None)
        assert np.array_equal(found, np.concatenate([alone[number] for number in several]))


def test_the_scores_of_long_prompts_are_computed_in_small_parts():
    length = 3000
    for rows in (1, 9):
        queries = [*queries_of(0, 0, length, np.arange(1, 1 + length), None)] * rows
        rectangles = rectangles_of(queries, None)
        assert max(rectangle.mask.size for rectangle in rectangles) <= 2**18
        assert sum(rectangle.mask.size for rectangle in rectangles) < 0.7 * rows * length**2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_long_sums_are_complete(sizes):
    filled = Filled([600], 3, sizes, sizes[2] ** -0.5)
    cells = filled.cells[0]
    expected = attention_by_definition(filled.query[0], filled.keys[cells], filled.values[cells])
    assert_allclose(filled.whole(0), expected, atol=1e-5, rtol=1e-4)
    assert_allclose(filled.attended([(0, 599, 600)], None), expected[-1:], atol=1e-5, rtol=1e-4)
