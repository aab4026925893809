"""Rows are put only where a product of some size gives them the same bits as everywhere else."""

from collections.abc import Callable

import numpy as np
import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st

from batcher.transformer.linear import SIZES, Tile, Tiles, tiles_of

KERNELS: dict[str, Callable[[int, int], int]] = {
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

    def __init__(self, kernel: Callable[[int, int], int], *, turned: bool = False) -> None:
        self._kernel, self._turned = kernel, turned

    def multiply(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        kernels = np.array([self._kernel(place, len(x)) for place in range(len(x))])
        is_turned = self._turned and len(x) > 1 and not x.flags.c_contiguous
        sums = (np.ascontiguousarray(x)[:, None] * weight).sum(-1)
        return (sums + kernels[:, None] + 0.5 * is_turned).T


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_out", mostly_heavy([7, 70], 7))
def test_only_places_with_equal_bits_are_good(
    kernel: str, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batcher.transformer.linear.multiply", OddBlas(KERNELS[kernel]).multiply)
    tiles = tiles_of.__wrapped__(num_out, 5)
    good = {
        KERNELS[kernel](place, part.tile.size)
        for num_rows in range(1, 600, 37)
        for part in tiles.split(num_rows)
        for place in range(part.tile.first, part.tile.first + part.stop - part.start)
    }
    assert len(good) == 1


def test_a_blas_that_minds_the_layout_multiplies_single_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "batcher.transformer.linear.multiply", OddBlas(KERNELS["one"], turned=True).multiply
    )
    assert {part.tile.size for part in tiles_of.__wrapped__(7, 5).split(40)} == {1}


@given(
    st.sets(
        st.builds(Tile, st.integers(10, 200), st.integers(0, 5), st.integers(1, 10)), min_size=1
    ),
    st.integers(0, 500),
)
def test_tiles_hold_every_row_once(drawn: set[Tile], num_rows: int) -> None:
    parts = Tiles([*drawn]).split(num_rows)
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(num_rows)]
    assert all(0 < part.stop - part.start <= part.tile.num_rows for part in parts)


def test_rows_that_fill_a_tile_take_no_more_than_that() -> None:
    every = Tiles([Tile(size, 0, size) for size in SIZES])
    assert [every.split(size) for size in SIZES] == [
        [(Tile(size, 0, size), 0, size)] for size in SIZES
    ]
