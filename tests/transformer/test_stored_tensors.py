"""Tensors as they lie in files, as float32."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quantize

from batcher.errors import BatchdecodeError
from batcher.transformer.stored import KINDS, StoredTensor, stored_size


def test_float32_is_not_copied():
    numbers = np.arange(6, dtype=np.float32)
    data = numbers.view(np.uint8)
    read = StoredTensor("F32", (2, 3), data).read()
    assert np.shares_memory(read, numbers)
    assert read.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_1", "Q3_K"])
def test_some_rows_are_what_they_are_among_all(kind):
    size = stored_size(kind, (5, 256))
    data = np.random.default_rng(0).integers(0, 60, size, np.uint8)
    tensor = StoredTensor(kind, (5, 256), data)
    rows = np.array([3, 0, 3])
    assert tensor.read_rows(rows).tobytes() == tensor.read()[rows].tobytes()


def test_numbers_that_are_not_aligned_are_copied():
    data = np.zeros(25, np.uint8)
    data[1:] = np.arange(6, dtype=np.float32).view(np.uint8)
    read = StoredTensor("F32", (2, 3), data[1:]).read()
    assert read.flags.aligned
    assert read.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("number", [0.0, -1.0, 1.5, 3.0e38, float("inf"), 1e-40])
def test_bfloat16_is_the_upper_half_of_float32(number):
    upper = np.array([number], np.float32).view("<u4") >> 16
    read = StoredTensor("BF16", (1,), upper.astype("<u2").view(np.uint8)).read()
    assert read.view("<u4") == upper << 16


def test_float16_is_widened():
    halves = np.array([[1.5, -2], [65504, 6e-8]], np.float16)
    read = StoredTensor("F16", (2, 2), halves.view(np.uint8).ravel()).read()
    assert read.dtype == np.float32
    assert np.array_equal(read, halves.astype(np.float32))


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_0", 0.15), ("Q4_1", 0.15)])
def test_what_is_quantised_comes_back_nearly(kind, error):
    weights = np.random.default_rng(0).normal(0, 1, (3, 64)).astype(np.float32)
    packed = quantize(weights, GGMLQuantizationType[kind]).ravel()
    read = StoredTensor(kind, (3, 64), packed).read()
    assert read.flags.c_contiguous
    assert read.dtype == np.float32
    assert np.abs(read - weights).max() < error * np.abs(weights).max()


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_those_of_gguf(kind):
    data = np.random.default_rng(0).integers(0, 60, stored_size(kind, (2, 3, 512)), np.uint8)
    read = StoredTensor(kind, (2, 3, 512), data).read()
    rows = data.reshape(6, -1)
    expected = dequantize(rows, GGMLQuantizationType[kind]).reshape(2, 3, 512)
    assert np.isfinite(expected).all()
    assert np.array_equal(read, expected)


ONE, TWO = [0, 0x3C], [0, 0x40]  # in half precision
BLOCKS = [
    # a scale, the fifth bits, the lower four: 0 stands for -16
    ("Q5_0", [*ONE, *[0] * 4, *[0] * 16], -16),
    ("Q5_0", [*ONE, *[255] * 4, *[0x11] * 16], 1),
    # a scale, the least, the fifth bits, the lower four
    ("Q5_1", [*ONE, *TWO, *[0] * 4, *[0x33] * 16], 5),
    # scales and minima of 4 bits for each 16, two bits a number, the scale of each
    ("Q2_K", [*[0x12] * 16, *[0x55] * 64, *ONE, *TWO], 0),
    # third bits, of which 0 stands for -4, lower two, scales of 6 bits minus 32, a scale
    ("Q3_K", [*[0] * 32, *[0x55] * 64, *[0] * 12, *ONE], 96),
    # a scale, that of the minima, 6 bits of each for each 32, fifth bits, the lower four
    ("Q5_K", [*ONE, *TWO, *[3] * 4, *[1] * 4, *[0x13] * 4, *[255] * 32, *[0x22] * 128], 52),
    # lower four and upper two bits, 0 stands for -32; a scale for each 16, a scale
    ("Q6_K", [*[0] * 192, *[1] * 16, *ONE], -32),
]


@pytest.mark.parametrize(("kind", "block", "number"), BLOCKS)
def test_a_block_is_what_its_definition_says(kind, block, number):
    data = np.array(block, np.uint8)
    size = KINDS[kind][0]
    assert StoredTensor(kind, (size,), data).read().tolist() == [number] * size


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("IQ2_XS", (256,), f"IQ2_XS is not supported, known: {', '.join(KINDS)}"),
        ("Q4_K", (128,), "rows of 128 are no blocks of 256, as in Q4_K"),
        ("F32", (4, 0), r"the shape \[4, 0\] has a size of zero"),
        ("F32", (), r"the shape \[\] has a size of zero"),
        ("F32", (2**40, 2**40), "bytes are needed for .* 24 are there: the file is cut off or dam"),
        ("F32", (7,), "28 bytes are needed"),
        ("F32", (5,), "20 bytes are needed"),
    ],
)
def test_bytes_are_those_of_the_shape(kind, shape, message):
    with pytest.raises(BatchdecodeError, match=message):
        StoredTensor(kind, shape, np.zeros(24, np.uint8))
