"""The hash of the simulated model, h <- (h + token) * M modulo 2^64, and where it is in pages.

There is one for each token, in the cell where the token is.  Nothing is kept by slot but where its
row stands, so that only the block tables say whose past a row goes on from.
"""

from array import array

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.errors import InvariantError
from batcher.models.base import Batch, Chunk, IntArray, Pages
from batcher.models.tokenizers import BEGIN_TOKEN_ID
from batcher.tokens import Tokens

Hashes = NDArray[np.uint64]

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX generator
MASK = 2**64 - 1
_INVERSE = pow(MULTIPLIER, -1, 2**64)
_PIECE = 2**16  # tokens that are hashed at once, at most
_NUM_ONE_BY_ONE = 16  # tokens that are hashed sooner one by one than all at once


class _Powers:
    """Powers of M and of its inverse, as many as the longest piece needs: a cache of constants."""

    def __init__(self) -> None:
        self.falling = self.rising = self.inverse = np.zeros(0, np.uint64)

    def make(self, count: int) -> None:
        """Have at least `count` of each: M^n ... M^1, M^1 ... M^n, and M^0 ... M^(1-n)."""
        if count > len(self.rising):
            self.rising = np.full(2 * count, MULTIPLIER, np.uint64).cumprod()
            self.falling = self.rising[::-1].copy()
            self.inverse = np.full(2 * count, _INVERSE, np.uint64)
            self.inverse[0] = 1
            self.inverse = self.inverse.cumprod()


_powers = _Powers()


def hash_after(state: int, token_ids: Tokens) -> int:
    """Return the hash after `token_ids`: many at once, state * M^n + sum of token_i * M^(n-i)."""
    return hash_after_first(state, token_ids, len(token_ids))


def hash_after_first(state: int, token_ids: Tokens, num_tokens: int) -> int:
    """Return the hash after the first `num_tokens` of `token_ids`."""
    if num_tokens <= _NUM_ONE_BY_ONE:
        for token_id in token_ids[:num_tokens]:
            state = (state + token_id) * MULTIPLIER & MASK
        return state
    if num_tokens > _PIECE:
        for start in range(0, num_tokens, _PIECE):
            state = hash_after(state, token_ids[start : min(start + _PIECE, num_tokens)])
        return state
    _powers.make(num_tokens)
    powers = _powers.falling[-num_tokens:]
    # Over an array, which is made of a list in half the time that numpy takes.
    terms = np.frombuffer(array("Q", token_ids), np.uint64, num_tokens).dot(powers)
    return int(terms) + state * int(powers[0]) & MASK


def hashes_after(state: int, token_ids: Tokens) -> Hashes:
    """Return [tokens] the hash after each of `token_ids`: M^i * (state + sum of token_j * M^(1-j)).

    M is odd, so that it has an inverse modulo 2^64.
    """
    num_tokens = len(token_ids)
    if num_tokens > _PIECE:
        whole = np.empty(num_tokens, np.uint64)
        for start in range(0, num_tokens, _PIECE):
            piece = hashes_after(state, token_ids[start : start + _PIECE])
            whole[start : start + _PIECE], state = piece, int(piece[-1])
        return whole
    _powers.make(num_tokens)
    sums = (np.array(token_ids, np.uint64) * _powers.inverse[:num_tokens]).cumsum()
    hashes: Hashes = (sums + np.uint64(state)) * _powers.rising[:num_tokens]
    return hashes


# Cells before those of block 0.
_BEGIN = 0  # the hash that every row begins with
_SCRATCH = 1
_NUM_FIXED = 2

_UNMADE = 0x5DEECE66D  # in cells whose hash is still to be made: for who reads them wrongly


class _Cells:
    """A number for every cell of every block, behind a few fixed ones.

    view: of the same memory; Python reads and writes it several times as fast one by one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self.values: Hashes = np.zeros(_NUM_FIXED + num_blocks * block_size, np.uint64)
        self.view = self.values.data

    def prepare(self, pages: Pages) -> None:
        """Make room for new blocks, and copy those that are to be copied."""
        if pages.num_blocks > self._num_blocks:
            num_more = max(pages.num_blocks - self._num_blocks, self._num_blocks)
            more = np.zeros(num_more * pages.block_size, np.uint64)
            self.values = np.concatenate([self.values, more])
            self.view, self._num_blocks = self.values.data, self._num_blocks + num_more
        size = pages.block_size
        for source, target in pages.copies:
            first, last = _NUM_FIXED + source * size, _NUM_FIXED + target * size
            self.values[last : last + size] = self.values[first : first + size]


class _Computed(Struct, gc=False):
    """A chunk that is computed, whose hashes are made when the first of them is asked for.

    before: the hash before its first token, which is at position `start`.
    """

    before: int
    token_ids: Tokens
    start: int
    made: Hashes | None = None

    @property
    def hashes(self) -> Hashes:
        """The hash after each of its tokens."""
        if self.made is None:
            self.made = hashes_after(self.before, self.token_ids)
        return self.made


class PagedHashes:
    """The hash after every token, by cell, and where each slot reads and writes in the next step.

    A slot reads the cell of the token before, which is the one that it wrote last, and writes the
    one behind it, unless `Pages.moved` says where it is.  A slot that does not decode stays at a
    scratch cell, so that nothing real is overwritten.  What a chunk has put into its cells is told
    by block: every row that has a block has it at the same place of its table.
    """

    def __init__(
        self, num_slots: int, num_blocks: int, block_size: int, seed_hash: int, begin_hash: int
    ) -> None:
        self._cells = _Cells(num_blocks, block_size)
        self._cells.values[_BEGIN] = begin_hash
        self._unmade = np.full(block_size, _UNMADE, np.uint64).data
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._computed: dict[int, _Computed] = {}
        self._read: IntArray = np.full(num_slots, _SCRATCH)
        self._write: IntArray = np.full(num_slots, _SCRATCH)
        self._strides: IntArray = np.zeros(num_slots, np.int64)  # 1 where a row decodes

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Put the hash before each row's token into `hashes`; return whether any row yields.

        tokens: [num_slots] gets the last token of every chunk.
        """
        pages, chunks = _pages_of(batch), batch.chunks
        self._cells.prepare(pages)
        for source, target in pages.copies:  # in order, as a target may be the next source
            self._computed.pop(target, None)
            if source in self._computed:
                self._computed[target] = self._computed[source]
        if chunks:
            return self._compute_chunks(chunks, batch, pages, tokens, hashes)
        self._move_on(pages)
        self._cells.values.take(self._read, None, hashes, "clip")
        return True

    def _compute_chunks(
        self, chunks: list[Chunk], batch: Batch, pages: Pages, tokens: IntArray, hashes: Hashes
    ) -> bool:
        """Do that in a step that has chunks."""
        values, goes_on = self._cells.values, False  # perhaps after what others compute now
        for chunk in chunks:
            if self._strides[chunk.slot]:
                self.release(chunk.slot)
            goes_on |= chunk.start > 0
        does_yield = batch.holds(chunk.slot) or batch.slots.size > 0
        if does_yield:
            self._move_on(pages)
            if goes_on:
                values.take(self._read, None, hashes, "clip")
                values[self._write] = (hashes + tokens.view(np.uint64)) * np.uint64(MULTIPLIER)
        entered = {}
        for chunk in chunks:
            before = self._compute(chunk, pages)
            if batch.holds(chunk.slot):
                tokens[chunk.slot] = chunk.token_ids[-1] if chunk.token_ids else BEGIN_TOKEN_ID
                entered[chunk.slot] = self._enter(chunk, before, pages)
        if does_yield:
            values.take(self._read, None, hashes, "clip")
        for slot, before in entered.items():
            hashes[slot] = before
        return does_yield

    def store(self, hashes: Hashes) -> None:
        """Keep the hash after each row's token."""
        self._cells.values[self._write] = hashes

    def release(self, slot: int) -> None:
        """Let `slot` neither read nor write."""
        self._read[slot] = self._write[slot] = _SCRATCH
        self._strides[slot] = 0

    def hash_before(self, chunk: Chunk, pages: Pages) -> int:
        """Return the hash after all tokens before a chunk, which are computed by now."""
        if not chunk.start:
            return self._begin_hash
        position = chunk.start - 1
        place, offset = divmod(position, pages.block_size)
        block = pages.tables[chunk.slot][place]
        computed = self._computed.get(block)
        if computed is not None:
            number = position - computed.start
            if 0 <= number < len(computed.token_ids):
                return int(computed.hashes[number])
        return int(self._cells.values[_NUM_FIXED + block * pages.block_size + offset])

    def _move_on(self, pages: Pages) -> None:
        """Let every slot that decodes compute its next token."""
        self._read, self._write = read, write = self._write, self._read
        np.add(read, self._strides, write)
        if not pages.moved:
            return
        size, tables, computed = pages.block_size, pages.tables, self._computed
        reads, writes, strides = read.data, write.data, self._strides.data
        last = _NUM_FIXED + size - 1  # cell of a block
        for slot, position in pages.moved.items():
            table, place, offset = tables[slot], position // size, position % size
            block = table[place]
            writes[slot] = cell = _NUM_FIXED + block * size + offset
            strides[slot] = 1
            if offset:
                self._settle(block, position - offset, size)
                reads[slot] = cell - 1
            else:
                reads[slot] = table[place - 1] * size + last if place else _BEGIN
                if block in computed:
                    del computed[block]

    def _compute(self, chunk: Chunk, pages: Pages) -> int:
        """Let the hash after each token of a chunk be found in its cell; return that before it."""
        start, token_ids = chunk.start, chunk.token_ids
        before = self.hash_before(chunk, pages) if start else self._begin_hash
        if not token_ids:
            return before
        size, table = pages.block_size, pages.tables[chunk.slot]
        cells, unmade = self._cells.view, self._unmade
        place, offset = start // size, start % size
        if offset:
            self._settle(table[place], start - offset, size)
        computed = _Computed(before, token_ids, start)
        for block in table[place : -(-(start + len(token_ids)) // size)]:
            self._computed[block] = computed
            cell = _NUM_FIXED + block * size
            cells[cell + offset : cell + size] = unmade[offset:]
            offset = 0
        return before

    def _settle(self, block: int, first: int, size: int) -> None:
        """Put the hashes of a block into its cells, of which some are about to be written.

        first: the position of its first cell.
        """
        computed = self._computed.pop(block, None)
        if computed is not None:
            begin = max(computed.start - first, 0)
            part = computed.hashes[max(first - computed.start, 0) :][: size - begin]
            cell = _NUM_FIXED + block * size + begin
            self._cells.values[cell : cell + len(part)] = part

    def _enter(self, chunk: Chunk, before: int, pages: Pages) -> int:
        """Let a slot compute the last token of its chunk, as if it went on by that one.

        Returns the hash before that.
        """
        slot, token_ids, size = chunk.slot, chunk.token_ids, pages.block_size
        if not token_ids:
            return self._seed_hash
        position = chunk.start + len(token_ids) - 1
        block = pages.tables[slot][position // size]
        self._write[slot] = _NUM_FIXED + block * size + position % size
        self._strides[slot] = 1
        return hash_after_first(before, token_ids, len(token_ids) - 1)


class AttentivePages:
    """Every token, by cell; the hash of a row is computed from all of its tokens in every step."""

    def __init__(self, num_blocks: int, block_size: int, seed_hash: int, begin_hash: int) -> None:
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._cells = _Cells(num_blocks, block_size)
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


def _cells_of(pages: Pages, slot: int, start: int, stop: int) -> IntArray:
    """Return [stop - start] the cells of the tokens from position `start` on."""
    size = pages.block_size
    first = start // size
    blocks = np.array(pages.tables[slot][first : -(-stop // size)], np.int64)
    cells = (blocks * size + _NUM_FIXED)[:, None] + np.arange(size)
    return cells.reshape(-1)[start - first * size : stop - first * size]
