"""What the simulated model keeps in pages: a number for each token, in the cell where the token is.

Nothing is kept by slot but where its row stands, so that only the block tables say whose past a
row goes on from.
"""

import numpy as np

from batcher.errors import InvariantError
from batcher.models.base import Batch, Chunk, IntArray, Pages
from batcher.models.simulated_hash import MULTIPLIER, Hashes, hash_after, hashes_after
from batcher.models.word_tokenizer import BEGIN_TOKEN_ID

# Cells before those of block 0.
_BEGIN = 0  # the hash that every row begins with
_SEED = 1  # the one before it, which an empty prompt is computed from
_SCRATCH = 2
_NUM_FIXED = 3

_MANY_BLOCKS = 16  # of a chunk that are sooner filled all at once than one by one


class _Cells:
    """A number for every cell of every block, behind a few fixed ones."""

    def __init__(self, num_cells: int) -> None:
        self.values: Hashes = np.zeros(_NUM_FIXED + num_cells, np.uint64)

    def prepare(self, pages: Pages) -> None:
        """Make room for new blocks, and copy those that are to be copied."""
        size = pages.block_size
        missing = _NUM_FIXED + pages.num_blocks * size - len(self.values)
        if missing > 0:
            more = np.zeros(max(missing, len(self.values)), np.uint64)
            self.values = np.concatenate([self.values, more])
        for source, target in pages.copies:
            first, last = _NUM_FIXED + source * size, _NUM_FIXED + target * size
            self.values[last : last + size] = self.values[first : first + size]


class PagedHashes:
    """The hash after every token, by cell, and where each slot reads and writes in the next step.

    A slot reads the cell of the token before, which is the one that it wrote last, and writes the
    one behind it, unless `Pages.moved` says where it is.  A slot that does not decode stays at a
    scratch cell, so that nothing real is overwritten.
    """

    def __init__(self, num_slots: int, num_cells: int, seed_hash: int, begin_hash: int) -> None:
        self._cells = _Cells(num_cells)
        self._cells.values[[_BEGIN, _SEED]] = begin_hash, seed_hash
        self._read: IntArray = np.full(num_slots, _SCRATCH)
        self._write: IntArray = np.full(num_slots, _SCRATCH)
        self._strides: IntArray = np.zeros(num_slots, np.int64)  # 1 where a row decodes

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Put the hash before each row's token into `hashes`; return whether any row yields.

        tokens: [num_slots] gets the last token of every chunk.
        """
        pages = _pages_of(batch)
        self._cells.prepare(pages)
        if batch.chunks:
            return self._load_with_chunks(batch, pages, tokens, hashes)
        self._move_on(pages)
        self._cells.values.take(self._read, None, hashes, "clip")
        return True

    def store(self, hashes: Hashes) -> None:
        """Keep the hash after each row's token."""
        self._cells.values[self._write] = hashes

    def release(self, slot: int) -> None:
        """Let `slot` neither read nor write."""
        self._read[slot] = self._write[slot] = _SCRATCH
        self._strides[slot] = 0

    def hash_before(self, chunk: Chunk, pages: Pages) -> int:
        """Return the hash after all tokens before a chunk, which are computed by now."""
        start = chunk.start
        return int(self._cells.values[_cell(pages, chunk.slot, start - 1) if start else _BEGIN])

    def _load_with_chunks(
        self, batch: Batch, pages: Pages, tokens: IntArray, hashes: Hashes
    ) -> bool:
        """Do what `load` does where some rows bring tokens of their own."""
        does_yield = batch.slots.size > 0
        if does_yield:
            self._move_on(pages)
        for chunk in batch.chunks:
            self.release(chunk.slot)
        values = self._cells.values
        if does_yield:  # first of all, since a chunk may begin after what they compute now
            values.take(self._read, None, hashes, "clip")
            values[self._write] = (hashes + tokens.view(np.uint64)) * np.uint64(MULTIPLIER)
        for chunk in batch.chunks:
            self._compute(chunk, pages)
            if batch.holds(chunk.slot):
                self._enter(chunk, pages, tokens)
        values.take(self._read, None, hashes, "clip")
        return does_yield

    def _move_on(self, pages: Pages) -> None:
        self._read, self._write = self._write, self._read
        np.add(self._read, self._strides, self._write)
        for slot, position in pages.moved.items():
            self._point(slot, position, pages)

    def _point(self, slot: int, position: int, pages: Pages) -> None:
        """Let `slot` compute the token at `position` next."""
        size, table = pages.block_size, pages.tables[slot]
        place = position // size
        cell = _NUM_FIXED + table[place] * size + position - place * size
        self._write[slot] = cell
        if position > place * size:
            self._read[slot] = cell - 1
        else:
            self._read[slot] = _NUM_FIXED + table[place - 1] * size + size - 1 if place else _BEGIN
        self._strides[slot] = 1

    def _compute(self, chunk: Chunk, pages: Pages) -> None:
        """Keep the hash after each token of a chunk."""
        slot, start = chunk.slot, chunk.start
        if chunk.token_ids:
            values = self._cells.values
            hashes = hashes_after(self.hash_before(chunk, pages), chunk.token_ids)
            if len(hashes) > _MANY_BLOCKS * pages.block_size:
                values[_cells_of(pages, slot, start, start + len(hashes))] = hashes
            else:
                _put(values, pages, slot, start, hashes)

    def _enter(self, chunk: Chunk, pages: Pages, tokens: IntArray) -> None:
        """Let a slot compute the last token of its chunk, as if it went on by that one."""
        slot, token_ids = chunk.slot, chunk.token_ids
        if token_ids:
            self._point(slot, chunk.start + len(token_ids) - 1, pages)
            tokens[slot] = token_ids[-1]
        else:
            self._read[slot] = _SEED
            tokens[slot] = BEGIN_TOKEN_ID


class AttentivePages:
    """Every token, by cell; the hash of a row is computed from all of its tokens in every step."""

    def __init__(self, num_cells: int, seed_hash: int, begin_hash: int) -> None:
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._cells = _Cells(num_cells)
        self._positions: dict[int, int] = {}  # slot -> that of the token it computes

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Do what that of PagedHashes does."""
        pages, slots = _pages_of(batch), batch.slots.tolist()
        self._cells.prepare(pages)
        values, positions = self._cells.values, self._positions
        if slots:
            for slot in positions:
                positions[slot] += 1
            positions.update(pages.moved)
        for chunk in batch.chunks:
            positions.pop(chunk.slot, None)
            stop = chunk.start + len(chunk.token_ids)
            if chunk.token_ids:
                cells = _cells_of(pages, chunk.slot, chunk.start, stop)
                values[cells] = chunk.token_ids
            if batch.holds(chunk.slot):
                positions[chunk.slot] = stop - 1
                tokens[chunk.slot] = chunk.token_ids[-1] if chunk.token_ids else BEGIN_TOKEN_ID
        for slot in slots:
            if positions[slot] >= 0:
                values[_cell(pages, slot, positions[slot])] = tokens[slot]
        for slot in slots:
            hashes[slot] = self._hash_before(slot, pages)
        return bool(slots)

    def store(self, hashes: Hashes) -> None:
        """Do nothing: no hash is kept."""

    def release(self, slot: int) -> None:
        """Let `slot` neither read nor write."""
        self._positions.pop(slot, None)

    def hash_before(self, chunk: Chunk, pages: Pages) -> int:
        """Do what that of PagedHashes does."""
        return self._hash_of(chunk.slot, chunk.start, pages)

    def _hash_before(self, slot: int, pages: Pages) -> int:
        """Return the hash after all tokens before the one that the row in `slot` computes."""
        position = self._positions[slot]
        return self._seed_hash if position < 0 else self._hash_of(slot, position, pages)

    def _hash_of(self, slot: int, num_tokens: int, pages: Pages) -> int:
        """Return the hash after the first `num_tokens` tokens of the row in `slot`."""
        cells = _cells_of(pages, slot, 0, num_tokens)
        return hash_after(self._begin_hash, self._cells.values[cells].tolist())


def _pages_of(batch: Batch) -> Pages:
    if batch.pages is None:
        raise InvariantError("a model that was to keep pages is given none")
    return batch.pages


def _cell(pages: Pages, slot: int, position: int) -> int:
    """Return the cell of the token at `position` of the row in `slot`."""
    block, offset = divmod(position, pages.block_size)
    return _NUM_FIXED + pages.tables[slot][block] * pages.block_size + offset


def _put(values: Hashes, pages: Pages, slot: int, start: int, hashes: Hashes) -> None:
    """Keep `hashes` of the tokens from position `start` on in their cells, block by block."""
    size, table = pages.block_size, pages.tables[slot]
    done, num_hashes = 0, len(hashes)
    place, offset = divmod(start, size)
    while done < num_hashes:
        num_more = min(size - offset, num_hashes - done)
        first = _NUM_FIXED + table[place] * size + offset
        values[first : first + num_more] = hashes[done : done + num_more]
        done, place, offset = done + num_more, place + 1, 0


def _cells_of(pages: Pages, slot: int, start: int, stop: int) -> IntArray:
    """Return [stop - start] the cells of the tokens from position `start` on."""
    size = pages.block_size
    first = start // size
    blocks = np.array(pages.tables[slot][first : -(-stop // size)], np.int64)
    cells = (blocks * size + _NUM_FIXED)[:, None] + np.arange(size)
    return cells.reshape(-1)[start - first * size : stop - first * size]
