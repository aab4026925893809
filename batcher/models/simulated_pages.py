"""The simulated model in pages: in each cell the hash after its token."""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.models.base import Batch, Chunk, IntArray, Pages
from batcher.models.simulated_cells import (
    BEGIN,
    NUM_FIXED,
    SCRATCH,
    Cells,
    Drafts,
    pages_of,
    together,
)
from batcher.models.simulated_hash import (
    MULTIPLIER,
    Hashes,
    Runs,
    Tree,
    hash_after_first,
    hashes_after,
)
from batcher.models.tokenizers import BEGIN_TOKEN_ID
from batcher.tokens import Tokens

_UNMADE = 0x5DEECE66D  # in cells whose hash is still to be made: for who reads them wrongly


def _has_drafts(chunk: Chunk) -> bool:
    return chunk.num_drafts > 0


def _is_plain(chunk: Chunk) -> bool:
    """Return whether a chunk has one token before its drafts, which are a line."""
    return len(chunk.token_ids) - chunk.num_drafts == 1 and not chunk.draft_parents


def _without(chunk: Chunk, num_tokens: int) -> Chunk:
    """Return a chunk without its first so many tokens."""
    return replace(
        chunk,
        token_ids=chunk.token_ids[num_tokens:],
        start=chunk.start + num_tokens,
        draft_parents=tuple(parent - num_tokens for parent in chunk.draft_parents),
    )


_PARTS = attrgetter("slot", "start", "num_drafts", "token_ids")


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


class _Tails:
    """The last known tokens of several rows, each with its drafts, one row after the other.

    chunks: one of each row, with one token and its drafts; a single one if these are a tree.
    slots: [rows].  runs: all tokens.  cells: [tokens] where each is.  reads: [rows] the cell of the
    token before.  blocks: all in which one of these is.
    """

    def __init__(self, chunks: list[Chunk], pages: Pages) -> None:
        size = pages.block_size
        slots, all_starts, nums, token_ids = zip(*map(_PARTS, chunks), strict=True)
        self.slots: IntArray = np.array(slots, np.int64)
        starts, num_drafts = np.array(all_starts, np.int64), np.array(nums, np.int64)
        tokens, parents = np.array([*chain(*token_ids)], np.int64), chunks[0].draft_parents
        self.runs = Tree(tokens, parents) if parents else Runs(tokens, num_drafts + 1)
        before = np.maximum(starts - 1, 0)
        places, stop_places = before // size, (starts + num_drafts) // size + 1
        bounds = zip(slots, places.tolist(), stop_places.tolist(), strict=True)
        own = [pages.tables[slot][place:stop] for slot, place, stop in bounds]
        self.blocks = [*chain(*own)]
        first_cells = np.array(self.blocks, np.int64) * size + NUM_FIXED
        num_blocks = stop_places - places
        numbers = num_blocks.cumsum() - num_blocks  # of each row's first block among all
        self.reads: IntArray = first_cells[numbers] + before % size
        self.reads[starts == 0] = BEGIN
        # Where a token would be if the blocks were on end.
        rows = self.runs.rows
        on_end = ((numbers - places) * size + starts)[rows] + self.runs.places
        self.cells: IntArray = first_cells[on_end // size] + on_end % size


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
        self._cells = Cells(num_blocks, block_size)
        self._cells.values[BEGIN] = begin_hash
        self._unmade = np.full(block_size, _UNMADE, np.uint64).data
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._computed: dict[int, _Computed] = {}
        self._read: IntArray = np.full(num_slots, SCRATCH)
        self._write: IntArray = np.full(num_slots, SCRATCH)
        self._strides: IntArray = np.zeros(num_slots, np.int64)  # 1 where a row decodes
        # Of the same memory, as one by one Python reads and writes these several times as fast.
        self._reads, self._writes = self._read.data, self._write.data
        self._stride_of = self._strides.data
        self.drafts: Drafts | None = None  # of the step

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Put the hash before each row's token into `hashes`; return whether any row yields.

        tokens: [num_slots] gets the last token of every chunk.
        """
        pages, chunks, self.drafts = pages_of(batch), batch.chunks, None
        if pages.copies or pages.moves or pages.num_blocks > self._cells.num_blocks:
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
        has_drafts, strides = False, self._stride_of
        for chunk in chunks:
            if strides[chunk.slot]:
                self.release(chunk.slot)
            if chunk.start:
                goes_on = True
            if chunk.num_drafts:
                has_drafts = True
        does_yield = batch.holds(chunk.slot) or batch.slots.size > 0
        if does_yield:
            self._move_on(pages)
            if goes_on:
                values.take(self._read, None, hashes, "clip")
                values[self._write] = (hashes + tokens.view(np.uint64)) * np.uint64(MULTIPLIER)
        if has_drafts:
            entered = self._compute_with_drafts(chunks, batch, pages, tokens)
        else:
            entered = self._compute_others(chunks, batch, pages, tokens)
        if does_yield:
            values.take(self._read, None, hashes, "clip")
        for slot, before in entered.items():
            hashes[slot] = before
        return does_yield

    def _compute_with_drafts(
        self, chunks: list[Chunk], batch: Batch, pages: Pages, tokens: IntArray
    ) -> dict[int, int]:
        """Do that for chunks of which some have drafts; return what `_compute_others` does."""
        entered: dict[int, int] = {}
        drafts: list[Drafts] = []
        for has_drafts, group in groupby(chunks, _has_drafts):
            if has_drafts:
                drafts += self._compute_drafts(group, pages, tokens)
            else:
                entered |= self._compute_others(group, batch, pages, tokens)
        self.drafts = together(drafts)
        return entered

    def _compute_others(
        self, chunks: Iterable[Chunk], batch: Batch, pages: Pages, tokens: IntArray
    ) -> dict[int, int]:
        """Do that for chunks without drafts; return by slot the hash before the last token."""
        entered, size = {}, pages.block_size
        for chunk in chunks:
            slot, token_ids, before = chunk.slot, chunk.token_ids, self._compute(chunk, pages)
            if not batch.holds(slot):
                continue
            if not token_ids:
                tokens[slot], entered[slot] = BEGIN_TOKEN_ID, self._seed_hash
                continue
            # As if it went on by the last of its tokens.
            last = len(token_ids) - 1
            tokens[slot], entered[slot] = token_ids[last], hash_after_first(before, token_ids, last)
            position = chunk.start + last
            cell = pages.tables[slot][position // size] * size + position % size
            self._writes[slot], self._stride_of[slot] = NUM_FIXED + cell, 1
        return entered

    def store(self, hashes: Hashes) -> None:
        """Keep the hash after each row's token."""
        self._cells.values[self._write] = hashes

    def release(self, slot: int) -> None:
        """Let `slot` neither read nor write."""
        self._reads[slot] = self._writes[slot] = SCRATCH
        self._stride_of[slot] = 0

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
        return int(self._cells.values[NUM_FIXED + block * pages.block_size + offset])

    def _move_on(self, pages: Pages) -> None:
        """Let every slot that decodes compute its next token."""
        self._read, self._write = read, write = self._write, self._read
        self._reads, self._writes = reads, writes = self._writes, self._reads
        np.add(read, self._strides, write)
        if not pages.moved:
            return
        size, tables, computed = pages.block_size, pages.tables, self._computed
        strides, before = self._stride_of, NUM_FIXED - 1
        for slot, position in pages.moved.items():
            table, place = tables[slot], position // size
            block = table[place]
            strides[slot] = 1
            if offset := position % size:
                self._settle(block, position - offset, size)
                writes[slot] = cell = NUM_FIXED + block * size + offset
                reads[slot] = cell - 1
                continue
            writes[slot] = NUM_FIXED + block * size
            reads[slot] = (table[place - 1] + 1) * size + before if place else BEGIN
            if block in computed:
                del computed[block]

    def _compute(self, chunk: Chunk, pages: Pages) -> int:
        """Let the hash after each token of a chunk be found in its cell; return that before it."""
        start, token_ids, size = chunk.start, chunk.token_ids, pages.block_size
        before = self.hash_before(chunk, pages) if start else self._begin_hash
        stop = start + len(token_ids)
        if start == stop:
            return before
        blocks = pages.tables[chunk.slot][start // size : -(-stop // size)]
        cells, unmade, offset = self._cells.view, self._unmade, start % size
        if offset:  # some of the first block is there
            self._settle(blocks[0], start - offset, size)
            cell = NUM_FIXED + blocks[0] * size
            cells[cell + offset : cell + size] = unmade[offset:]
        for block in blocks[1:] if offset else blocks:
            cell = NUM_FIXED + block * size
            cells[cell : cell + size] = unmade
        self._computed.update(dict.fromkeys(blocks, _Computed(before, token_ids, start)))
        return before

    def _compute_drafts(
        self, chunks: Iterable[Chunk], pages: Pages, tokens: IntArray
    ) -> Iterator[Drafts]:
        """Do that for rows with drafts, which go on by the token before these; yield the drafts.

        tokens: [num_slots] gets those tokens.
        """
        for is_plain, group in groupby(chunks, _is_plain):
            if is_plain:
                yield self._compute_tails([*group], pages, tokens)
                continue
            for chunk in group:
                tail = len(chunk.token_ids) - chunk.num_drafts - 1
                if tail:
                    head = Chunk(chunk.slot, chunk.token_ids[:tail], chunk.start)
                    self._compute(head, pages)
                yield self._compute_tails([_without(chunk, tail)], pages, tokens)

    def _compute_tails(self, chunks: list[Chunk], pages: Pages, tokens: IntArray) -> Drafts:
        """Do that for rows that have one token before their drafts."""
        tails, values = _Tails(chunks, pages), self._cells.values
        self._settle_all(tails, chunks, pages)
        before = values[tails.reads]
        for _ in chunks:
            hashes = tails.runs.hashes_after(before)
            values[tails.cells] = hashes
            used, before = before, values[tails.reads]
            if (used == before).all():  # else one goes on after what another has just computed
                break
        slots, firsts, token_ids = tails.slots, tails.runs.firsts, tails.runs.token_ids
        self._read[slots], self._write[slots] = tails.reads, tails.cells[firsts]
        self._strides[slots] = 1
        tokens[slots] = token_ids[firsts]
        is_draft = tails.runs.places > 0
        return Drafts(token_ids[is_draft], hashes[is_draft])

    def _settle_all(self, tails: _Tails, chunks: list[Chunk], pages: Pages) -> None:
        """Put hashes into the cells that are read, where that is still to be done."""
        computed, size = self._computed, pages.block_size
        if computed.keys().isdisjoint(tails.blocks):
            return
        for chunk in chunks:
            table = pages.tables[chunk.slot]
            place = (chunk.start - 1) // size
            if chunk.start:
                self._settle(table[place], place * size, size)
            for block in table[place + 1 : (chunk.start + chunk.num_drafts) // size + 1]:
                computed.pop(block, None)

    def _settle(self, block: int, first: int, size: int) -> None:
        """Put the hashes of a block into its cells, of which some are about to be written.

        first: the position of its first cell.
        """
        computed = self._computed.pop(block, None)
        if computed is not None:
            begin = max(computed.start - first, 0)
            part = computed.hashes[max(first - computed.start, 0) :][: size - begin]
            cell = NUM_FIXED + block * size + begin
            self._cells.values[cell : cell + len(part)] = part
