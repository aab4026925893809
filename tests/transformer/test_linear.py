"""A row times a matrix is the same to the bit in any company, and right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from batcher.transformer.linear import (
    LARGEST,
    FastLinear,
    Int8Linear,
    Linear,
    TiledLinear,
    quantize_weights_int8,
    slices_of,
)

SHAPES = [(960, 576), (40, 2100), (7, 3), (1, 1), (4100, 24)]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linears(shape: tuple[int, int]) -> dict[str, Linear]:
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
def test_a_row_is_the_same_in_any_company(
    case: tuple, num_rows: int, at: int, seed: int, order: str
) -> None:
    (_, num_in), _, linear = case
    row = drawn(num_in, seed=99)
    x = drawn(num_rows, num_in, seed=seed) * np.float32(10**seed / 1000)
    x[at % num_rows] = row
    product = linear(x.copy(order))
    assert np.array_equal(product[at % num_rows], linear(row[None])[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 40])
def test_the_product_is_right(shape: tuple[int, int], num_rows: int) -> None:
    weight, bias = drawn(*shape), drawn(shape[0], seed=1)
    x = drawn(num_rows, shape[1], seed=2)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    for linear in (linears(shape)["tiled"], FastLinear(weight, bias)):
        assert_allclose(linear(x), expected, atol=1e-4, rtol=1e-5)
    assert_allclose(FastLinear(weight)(x) + bias, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["int8", "int8-channel"])
def test_integers_are_multiplied_exactly(shape: tuple[int, int], name: str) -> None:
    weight, bias = drawn(*shape), drawn(shape[0], seed=1)
    x = drawn(9, shape[1], seed=2)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(LARGEST)
    quantized = quantize_weights_int8(weight, per_channel=name == "int8-channel")
    whole = np.rint(x / scale).astype(np.int64) @ quantized.integers.T.astype(np.int64)
    expected = whole.astype(np.float32) * scale * quantized.scales + bias
    assert_allclose(linears(shape)[name](x), expected, rtol=1e-6, atol=1e-5)


def test_sums_that_float32_might_not_hold_are_cut_into_slices() -> None:
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


def test_a_row_of_zeros_is_no_division_by_zero() -> None:
    with np.errstate(all="raise"):
        assert (Int8Linear(drawn(3, 4), per_channel=True)(np.zeros((2, 4), np.float32)) == 0).all()


def test_int8_is_symmetric() -> None:
    quantized = quantize_weights_int8(np.float32([[-2, 1.5], [3, -1]]))
    assert quantized.scales == pytest.approx([3 / 127])
    assert quantized.integers.tolist() == [[-85, 64], [127, -42]]
    each = quantize_weights_int8(np.float32([[-2, 1.5], [0, 0]]), per_channel=True)
    assert each.scales == pytest.approx([2 / 127, 1])
    assert each.integers.tolist() == [[-127, 95], [0, 0]]
