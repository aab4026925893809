"""How many rows BLAS may multiply at once for each of them to come out the same to the bit.

BLAS chooses its kernel by the size of a product, and within it by where a number stands; kernels
add in different orders.  So it is asked, for each shape of weights, which rows of products of a few
sizes have equal bits: all rows that are ever computed are put in such places.
"""

from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np

from batcher.transformer.layers import FloatArray

SIZES = (272, 144, 80, 64, 48, 32, 16, 8, 4, 2, 1)  # rows of products that are tried
_LEAST, _START = 8, 4  # what a product costs, in rows: at least that many, and some to begin
_TALL = 4096  # outputs: weights of more are multiplied in pieces
_PIECE = 2048  # outputs, or fewer
_NUM_SAMPLES = 64  # at least so many sums are compared for each place of a product


class Tile(NamedTuple):
    """A product of `size` rows, of which `num_rows` from `first` on are good."""

    size: int
    first: int
    num_rows: int

    @property
    def cost(self) -> int:
        """How long it takes, in rows."""
        return max(self.size, _LEAST) + _START


class TilePart(NamedTuple):
    """Rows start..stop of many, which a tile computes."""

    tile: Tile
    start: int
    stop: int


class Tiles:
    """The tiles in which weights of a shape are multiplied, and the cheapest of them for any rows.

    Whichever are taken, the bits are the same.
    """

    def __init__(self, tiles: list[Tile]) -> None:
        self._widest = max(tiles, key=lambda tile: tile.num_rows / tile.cost)
        self._best: list[Tile] = []  # by how many rows are left
        costs = [0]
        for num_rows in range(1, self._widest.num_rows + 1):
            cost, best = min(
                (tile.cost + costs[max(num_rows - tile.num_rows, 0)], tile) for tile in tiles
            )
            costs.append(cost)
            self._best.append(best)

    def split(self, num_rows: int) -> list[TilePart]:
        """Return the tiles of so many rows."""
        parts, start = [], 0
        while start < num_rows:
            num_left = num_rows - start
            is_wide = num_left > len(self._best)
            tile = self._widest if is_wide else self._best[num_left - 1]
            stop = min(start + tile.num_rows, num_rows)
            parts.append(TilePart(tile, start, stop))
            start = stop
        return parts


def multiply(weight: FloatArray, x: FloatArray) -> FloatArray:
    """Return weight [out, in] @ x.T of x [rows, in]: [out, rows]."""
    if len(x) == 1:  # BLAS is faster the other way round
        single: FloatArray = (x @ weight.T).T
        return single
    product = np.empty((len(weight), len(x)), np.float32)
    for piece in pieces_of(len(weight)):
        np.matmul(weight[piece], x.T, product[piece])
    return product


def pieces_of(num_out: int) -> list[slice]:
    """Return the pieces, all of one size, in which weights with so many outputs are multiplied."""
    size = _piece(num_out)
    return [slice(min(start, num_out - size), start + size) for start in range(0, num_out, size)]


def _piece(num_out: int) -> int:
    """Return how many outputs are multiplied at once, of so many."""
    return max(num_out, 1) if num_out <= _TALL else -(-num_out // -(-num_out // _PIECE))


@cache
def tiles_of(num_out: int, num_in: int) -> Tiles:
    """Return the tiles in which this BLAS gives all rows times weights [out, in] equal bits.

    Rows may lie in memory one after the other or feature by feature.
    """
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((_piece(num_out), num_in), np.float32)
    rows = draw.standard_normal((-(-_NUM_SAMPLES // len(weight)), num_in), np.float32)
    found = {size: _bits(weight, rows, size) for size in SIZES}
    counts = Counter(bits for places in found.values() for bits in places if bits is not None)
    wanted = counts.most_common(1)[0][0]
    tiles = []
    for size, places in found.items():
        first, stop = _longest_run([bits == wanted for bits in places])
        if first < stop:
            tiles.append(Tile(size, first, stop - first))
    return Tiles(tiles)


def _bits(weight: FloatArray, rows: FloatArray, size: int) -> list[bytes | None]:
    """Return what rows come to in each place of a product of `size`; None if layouts differ."""
    products, is_equal = [], np.ones(size, np.bool_)
    for row in rows:
        company = np.tile(row, (size, 1))
        products.append(multiply(weight, company))
        is_equal &= (products[-1] == multiply(weight, np.asfortranarray(company))).all(0)
    places = zip(np.concatenate(products).T, is_equal, strict=True)
    return [place.tobytes() if is_same else None for place, is_same in places]


def _longest_run(wanted: list[bool]) -> tuple[int, int]:
    """Return from where to where the longest run of what is wanted goes."""
    best, start = (0, 0), 0
    for at, is_wanted in enumerate([*wanted, False]):
        if not is_wanted:
            best = max(best, (start, at), key=lambda run: run[1] - run[0])
            start = at + 1
    return best
