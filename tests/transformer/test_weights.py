"""A row times the weights of a checkpoint is right, and the same to the bit in any company."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from batcher.transformer.graph import Graph
from batcher.transformer.layers import quantize_weights_int8
from batcher.transformer.stored import BLOCK, StoredTensor, stored_size
from batcher.transformer.weights import Weights

SHAPES = [(960, 576), (40, 2112), (7, 32), (1, 64)]
KINDS = {"fp32": "F32", "q8": "Q8_0", "q4": "Q4_1", "q4 without offsets": "Q4_0", "made": "F32"}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stored(kind, shape, seed=0):
    """Return a tensor of random numbers in the format of a file."""
    if kind == "F32":
        return StoredTensor(kind, shape, drawn(*shape, seed=seed).ravel().view(np.uint8))
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, stored_size(kind, shape), np.uint8)
    num_scales = 2 if kind == "Q4_1" else 1
    scales = draw.standard_normal((data.size // (stored_size(kind, (1, BLOCK))), num_scales))
    blocks = data.reshape(len(scales), -1)
    blocks[:, : 2 * num_scales] = scales.astype("<f2").view(np.uint8)
    return StoredTensor(kind, shape, data)


def product_of(name, *tensors):
    tensors = {str(number): tensor for number, tensor in enumerate(tensors)}
    graph, weights = Graph(), "q8" if name == "made" else name.split()[0]
    output = Weights(tensors, weights).product(graph, "x", *tensors)
    return graph.compiled(output)


def quantised_rows(x):
    """Return rows rounded to int8 by blocks of 32, as integers are multiplied."""
    blocks = x.reshape(len(x), -1, BLOCK).astype(np.float64)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    scales[scales == 0] = 1
    return (np.rint(blocks / scales) * scales).reshape(x.shape)


PRODUCTS = [
    (shape, product_of(name, stored(kind, shape)))
    for shape in SHAPES
    for name, kind in KINDS.items()
]


@given(
    st.sampled_from(PRODUCTS),
    st.integers(1, 70) | st.integers(1, 300),
    st.integers(0, 299),
    st.integers(0, 9),
)
def test_a_row_is_the_same_in_any_company(case, num_rows, at, seed):
    (_, num_in), product = case
    row = drawn(num_in, seed=99)
    x = drawn(num_rows, num_in, seed=seed) * np.float32(10**seed / 1000)
    x[at % num_rows] = row
    assert np.array_equal(product(None, x=x)[at % num_rows], product(None, x=row[None])[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_rows", [1, 17])
def test_the_product_is_that_of_the_stored_numbers(shape, name, num_rows):
    tensor, x = stored(KINDS[name], shape), drawn(num_rows, shape[1], seed=2)
    found = product_of(name, tensor)(None, x=x)
    weight = tensor.read().astype(np.float64)
    assert np.abs(weight).max() > 0.1
    if name == "fp32":
        assert_allclose(found, x @ weight.T, atol=1e-4, rtol=1e-5)
        return
    scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1)
    assert (np.abs(found - x @ weight.T) / scale).max() < 0.01  # rows are rounded
    if name != "made":  # whose weights are rounded, too
        assert (np.abs(found - quantised_rows(x) @ weight.T) / scale).max() < 0.003


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_file_are_kept_as_they_are(kind):
    tensor = stored(kind, (6, 96))
    blocks = tensor.blocks("q8" if kind == "Q8_0" else "q4")
    packed = blocks.packed.astype(np.int64)
    if kind == "Q8_0":
        numbers = packed - 128.0
    else:
        numbers = np.stack([packed & 15, packed >> 4], -1).reshape(6, 3, BLOCK) - 8.0
    found = numbers * blocks.scales[..., None].astype(np.float64)
    if blocks.offsets.size:
        found += blocks.offsets[..., None]
    expected = dequantize(tensor.data.reshape(6, -1), GGMLQuantizationType[kind])
    assert_allclose(found.reshape(6, 96), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_of_4_bits_widen_to_the_nearest_of_8(kind):
    tensor = stored(kind, (6, 96))
    blocks, expected = tensor.blocks("q8"), tensor.read().reshape(6, 3, BLOCK)
    assert_allclose(blocks.scales, np.abs(expected).max(-1) / 127, rtol=1e-5)
    found = (blocks.packed - 128.0) * blocks.scales[..., None]
    assert (np.abs(found - expected) <= blocks.scales[..., None] * 0.501).all()


def test_weights_of_several_formats_are_multiplied_together():
    tensors = [stored("Q4_1", (5, 64)), stored("F32", (3, 64)), stored("Q4_0", (4, 64), seed=1)]
    x = drawn(9, 64, seed=3)
    found = product_of("q4", *tensors)(None, x=x)
    parts = [product_of("q4", tensor)(None, x=x) for tensor in tensors]
    assert np.array_equal(found, np.concatenate(parts, 1))


def test_int8_is_symmetric():
    quantized = quantize_weights_int8(np.float32([[-2, 1.5], [3, -1]]))
    assert quantized.scales == pytest.approx([3 / 127])
    assert quantized.integers.tolist() == [[-85, 64], [127, -42]]
    each = quantize_weights_int8(np.float32([[-2, 1.5], [0, 0]]), per_channel=True)
    assert each.scales == pytest.approx([2 / 127, 1])
    assert each.integers.tolist() == [[-127, 95], [0, 0]]
