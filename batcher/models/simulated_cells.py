"""The cells of the simulated model in pages: a number for each token, where the token is.

Nothing is kept by slot but where its row stands, so that only the block tables say whose past a row
goes on from.
"""

from typing import NamedTuple

import numpy as np

from batcher.errors import InvariantError
from batcher.models.base import Batch, IntArray, Pages
from batcher.models.simulated_hash import Hashes

# Cells before those of block 0.
BEGIN = 0  # the hash that every row begins with
SCRATCH = 1
NUM_FIXED = 2


class Cells:
    """A number for every cell of every block, behind a few fixed ones.

    num_blocks: how many there are so far.
    view: of the same memory; Python reads and writes it several times as fast one by one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.values: Hashes = np.zeros(NUM_FIXED + num_blocks * block_size, np.uint64)
        self.view = self.values.data

    def prepare(self, pages: Pages) -> None:
        """Move what is to be moved, make room for new blocks, and copy those that are to be."""
        if pages.moves:
            sources, targets = np.array(pages.moves).T + NUM_FIXED
            self.values[targets] = self.values[sources]
        if pages.num_blocks > self.num_blocks:
            num_more = max(pages.num_blocks - self.num_blocks, self.num_blocks)
            more = np.zeros(num_more * pages.block_size, np.uint64)
            self.values = np.concatenate([self.values, more])
            self.view, self.num_blocks = self.values.data, self.num_blocks + num_more
        size = pages.block_size
        for source, target in pages.copies:
            first, last = NUM_FIXED + source * size, NUM_FIXED + target * size
            self.values[last : last + size] = self.values[first : first + size]


class Drafts(NamedTuple):
    """The drafts of a step, in the order of its chunks: [drafts] each, and the hash after it."""

    tokens: IntArray
    hashes: Hashes


def together(drafts: list[Drafts]) -> Drafts:
    """Return the drafts of one after the other."""
    if len(drafts) == 1:
        return drafts[0]
    tokens, hashes = zip(*drafts, strict=True)
    return Drafts(np.concatenate(tokens), np.concatenate(hashes))


def pages_of(batch: Batch) -> Pages:
    """Return where the tokens of a batch are; a model that was to keep pages is given some."""
    if batch.pages is None:
        raise InvariantError("a model that was to keep pages is given none")
    return batch.pages


def cell_of(pages: Pages, slot: int, position: int) -> int:
    """Return the cell of the token at `position` of the row in `slot`."""
    block, offset = divmod(position, pages.block_size)
    return NUM_FIXED + pages.tables[slot][block] * pages.block_size + offset


def cells_of(pages: Pages, slot: int, start: int, stop: int) -> IntArray:
    """Return [stop - start] the cells of the tokens from position `start` on."""
    size = pages.block_size
    first = start // size
    blocks = np.array(pages.tables[slot][first : -(-stop // size)], np.int64)
    cells = (blocks * size + NUM_FIXED)[:, None] + np.arange(size)
    return cells.reshape(-1)[start - first * size : stop - first * size]
