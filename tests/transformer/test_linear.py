"""A row times a matrix is the same to the bit in any company, and right."""

import tracemalloc

import numpy as np
import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tiny_checkpoints import config_json, random_tensors, write_gguf

from batcher import BatchdecodeError, Request, decode
from batcher.models.checkpoints import load_transformer
from batcher.transformer.config import TransformerSettings
from batcher.transformer.layers import (
    LARGEST,
    SIZES,
    FastLinear,
    Int8Linear,
    Tile,
    TiledLinear,
    Tiles,
    WholeLinears,
    quantize_weights_int8,
    slices_of,
    tiles_of,
)

SHAPES = [(960, 576), (40, 2100), (7, 3), (1, 1), (4100, 24)]


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linears(shape):
    weight, bias = drawn(*shape), drawn(shape[0], seed=1)
    return {
        "tiled": TiledLinear(weight, bias),
        "int8": Int8Linear(weight, bias, per_channel=False),
        "int8-channel": Int8Linear(weight, bias, per_channel=True),
    }


LINEARS = [(shape, name, linear) for shape in SHAPES for name, linear in linears(shape).items()]


@given(
    st.sampled_from(LINEARS),
    st.integers(1, 70) | st.integers(1, 300),
    st.integers(0, 299),
    st.integers(0, 9),
    st.sampled_from("CF"),
)
def test_a_row_is_the_same_in_any_company(case, num_rows, at, seed, order):
    (_, num_in), _, linear = case
    row = drawn(num_in, seed=99)
    x = drawn(num_rows, num_in, seed=seed) * np.float32(10**seed / 1000)
    x[at % num_rows] = row
    product = linear(x.copy(order))
    assert np.array_equal(product[at % num_rows], linear(row[None])[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 40])
def test_the_product_is_right(shape, num_rows):
    weight, bias = drawn(*shape), drawn(shape[0], seed=1)
    x = drawn(num_rows, shape[1], seed=2)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    for linear in (linears(shape)["tiled"], FastLinear(weight, bias)):
        assert_allclose(linear(x), expected, atol=1e-4, rtol=1e-5)
    assert_allclose(FastLinear(weight)(x) + bias, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["int8", "int8-channel"])
def test_integers_are_multiplied_exactly(shape, name):
    weight, bias = drawn(*shape), drawn(shape[0], seed=1)
    x = drawn(9, shape[1], seed=2)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(LARGEST)
    quantized = quantize_weights_int8(weight, per_channel=name == "int8-channel")
    whole = np.rint(x / scale).astype(np.int64) @ quantized.integers.T.astype(np.int64)
    expected = whole.astype(np.float32) * scale * quantized.scales + bias
    assert_allclose(linears(shape)[name](x), expected, rtol=1e-6, atol=1e-5)


def test_int8_is_symmetric_and_sums_are_cut_where_float32_ends():
    quantized = quantize_weights_int8(np.float32([[-2, 1.5], [3, -1]]))
    assert quantized.scales == pytest.approx([3 / 127])
    assert quantized.integers.tolist() == [[-85, 64], [127, -42]]
    each = quantize_weights_int8(np.float32([[-2, 1.5], [0, 0]]), per_channel=True)
    assert each.scales == pytest.approx([2 / 127, 1])
    assert each.integers.tolist() == [[-127, 95], [0, 0]]
    with np.errstate(all="raise"):
        assert (Int8Linear(drawn(3, 4), per_channel=True)(np.zeros((2, 4), np.float32)) == 0).all()
    linear = Int8Linear(np.ones((1, 5000), np.float32), per_channel=False)
    x = drawn(3, 5000)
    integers = np.rint(x / (np.abs(x).max(1, keepdims=True) / np.float32(LARGEST)))
    x[1], integers[1] = 1, LARGEST
    largest = np.array([[np.abs(row).max() / np.float32(LARGEST)] for row in x], np.float32)
    sums = integers.astype(np.int64).sum(1, keepdims=True) * LARGEST
    expected = sums.astype(np.float64) * largest / LARGEST
    assert_allclose(linear(x), expected, rtol=1e-6)
    assert [part.stop - part.start for part in slices_of(np.full((2, 5000), 127, np.int8))] == [
        1000
    ] * 5
    assert slices_of(np.full((2, 5000), 26, np.int8)) == [slice(0, 5000)]


# Rows are put only where a product of some size gives them the same bits as everywhere else.


KERNELS = {
    "one": lambda _place, _size: 0,
    "of single rows": lambda _place, size: int(size == 1),
    "of few rows": lambda _place, size: int(size < 7),
    "of edges": lambda place, size: int(size > 15 and not 8 <= place < size - 8),
    "of groups": lambda place, _size: place % 12 // 6,
    "of each size": lambda _place, size: size,
}


class OddBlas:
    """Multiplies with a kernel that is chosen by the place in a product; each has bits of its own.

    turned: whether it has others for rows that lie in memory feature by feature.
    """

    def __init__(self, kernel, *, turned=False):
        self._kernel, self._turned = kernel, turned

    def multiply(self, weight, x):
        kernels = np.array([self._kernel(place, len(x)) for place in range(len(x))])
        is_turned = self._turned and len(x) > 1 and not x.flags.c_contiguous
        sums = (np.ascontiguousarray(x)[:, None] * weight).sum(-1)
        return (sums + kernels[:, None] + 0.5 * is_turned).T


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_out", mostly_heavy([7, 70], 7))
def test_only_places_with_equal_bits_are_good(kernel, num_out, monkeypatch):
    monkeypatch.setattr("batcher.transformer.layers.multiply", OddBlas(KERNELS[kernel]).multiply)
    tiles = tiles_of.__wrapped__(num_out, 5)
    good = {
        KERNELS[kernel](place, part.tile.size)
        for num_rows in range(1, 600, 37)
        for part in tiles.split(num_rows)
        for place in range(part.tile.first, part.tile.first + part.stop - part.start)
    }
    assert len(good) == 1


def test_a_blas_that_minds_the_layout_multiplies_single_rows(monkeypatch):
    monkeypatch.setattr(
        "batcher.transformer.layers.multiply", OddBlas(KERNELS["one"], turned=True).multiply
    )
    assert {part.tile.size for part in tiles_of.__wrapped__(7, 5).split(40)} == {1}


def test_rows_that_fill_a_tile_take_no_more_than_that():
    every = Tiles([Tile(size, 0, size) for size in SIZES])
    assert [every.split(size) for size in SIZES] == [
        [(Tile(size, 0, size), 0, size)] for size in SIZES
    ]


# Packed weights give what others give to the last bit, and take a quarter of the memory.


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("batcher.transformer.layers.UNPACKED", 2048)


@given(
    st.integers(1, 70),
    st.sampled_from([1, 16, 1039, 1041, 2300]),
    st.integers(1, 20),
    st.sampled_from(["int8", "int8-channel"]),
    st.booleans(),
    st.booleans(),
)
def test_products_are_the_same_to_the_last_bit(num_out, num_in, num_rows, kind, has_bias, is_large):
    draw = np.random.default_rng(num_out)
    weight = draw.standard_normal((num_out, num_in), np.float32)
    weight = np.sign(weight) if is_large else weight  # all as large as can be, so there are slices
    weight[0] *= 100
    bias = draw.standard_normal(num_out, np.float32) if has_bias else None
    x = draw.standard_normal((num_rows, num_in), np.float32)
    linears = WholeLinears(kind, table=weight.__getitem__)
    product = linears.linear(weight, bias)(x)
    assert product.tobytes() == WholeLinears(kind).linear(weight, bias)(x).tobytes()


PACKED_REQUESTS = [
    Request(prompt="the cat", max_tokens=8, logprobs=2, prompt_logprobs=1),
    Request(prompt=" the the", max_tokens=5, temperature=1.0, seed=1, logprobs=1),
    Request(prompt="x", num_beams=2, max_tokens=4),
]


@pytest.mark.parametrize("weights", ["int8", "int8-channel"])
@pytest.mark.parametrize("kind", mostly_heavy(["F32", "F16", "Q8_0"], "F32", "Q8_0"))
@pytest.mark.parametrize("ties", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_results_are_the_same_and_so_is_what_resumes_them(tmp_path, weights, kind, ties):
    path = str(write_gguf(tmp_path / "a.gguf", "qwen2", kind, tie_word_embeddings=ties))
    whole = load_transformer(path, TransformerSettings(weights=weights))
    low = load_transformer(path, TransformerSettings(weights=weights, low_memory=True))
    assert decode(PACKED_REQUESTS, model=low) == decode(PACKED_REQUESTS, model=whole)
    assert low.settings == whole.settings


def num_bytes(path, **settings):
    made = TransformerSettings(weights="int8-channel", **settings)
    load_transformer(path, made)  # which may import something
    tracemalloc.start()
    model = load_transformer(path, made)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert model.vocab_size
    return size


def test_weights_take_a_quarter_of_float32(tmp_path):
    fields = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    path = str(write_gguf(tmp_path / "a.gguf", kind="F16", tie_word_embeddings=True, **fields))
    tensors = random_tensors(config_json(tie_word_embeddings=True, **fields))
    all_as_float32 = sum(tensor.nbytes for tensor in tensors.values())
    assert num_bytes(path) > all_as_float32
    assert num_bytes(path, low_memory=True) <= 0.28 * all_as_float32  # the rest: Python objects


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "--low-memory needs integer weights: use --weights int8-channel"),
        (
            {"weights": "int8", "tensor_parallel": 2},
            "--low-memory cannot be used with --tensor-parallel",
        ),
    ],
)
def test_what_it_is_not_for_is_said(tmp_path, settings, why):
    path = str(write_gguf(tmp_path / "a.gguf"))
    with pytest.raises(BatchdecodeError, match=why):
        load_transformer(path, TransformerSettings(low_memory=True, **settings))
