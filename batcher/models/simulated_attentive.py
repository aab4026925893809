"""The simulated model in pages, reading every token of every row again in every step."""

import numpy as np

from batcher.models.base import Batch, Chunk, IntArray, Pages, draft_parents
from batcher.models.simulated_cells import Cells, Drafts, cell_of, cells_of, pages_of, together
from batcher.models.simulated_hash import Hashes, Tree, hash_after
from batcher.models.tokenizers import BEGIN_TOKEN_ID


class AttentivePages:
    """Every token, by cell; the hash of a row is computed from all of its tokens in every step."""

    def __init__(self, num_blocks: int, block_size: int, seed_hash: int, begin_hash: int) -> None:
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._cells = Cells(num_blocks, block_size)
        self._positions: dict[int, int] = {}  # slot -> that of the token it computes
        self.drafts: Drafts | None = None  # of the step

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Do what that of PagedHashes does."""
        pages, slots, self.drafts = pages_of(batch), batch.slots.tolist(), None
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
                cells = cells_of(pages, chunk.slot, chunk.start, stop)
                values[cells] = chunk.token_ids
            if batch.holds(chunk.slot):
                last = len(chunk.token_ids) - chunk.num_drafts - 1
                positions[chunk.slot] = chunk.start + last
                tokens[chunk.slot] = chunk.token_ids[last] if chunk.token_ids else BEGIN_TOKEN_ID
        for slot in slots:
            if positions[slot] >= 0:
                values[cell_of(pages, slot, positions[slot])] = tokens[slot]
        for slot in slots:
            hashes[slot] = self._hash_before(slot, pages)
        drafts = [self._drafts_of(chunk, pages) for chunk in batch.chunks if chunk.num_drafts]
        if drafts:
            self.drafts = together(drafts)
        return bool(slots)

    def _drafts_of(self, chunk: Chunk, pages: Pages) -> Drafts:
        """Return the drafts of a chunk, which are in their cells."""
        last = len(chunk.token_ids) - chunk.num_drafts - 1
        before, stop = chunk.start + last, chunk.start + len(chunk.token_ids)
        token_ids = self._cells.values[cells_of(pages, chunk.slot, before, stop)].view(np.int64)
        parents = [parent - last for parent in draft_parents(chunk)]
        state = np.array([self._hash_of(chunk.slot, before, pages)], np.uint64)
        hashes = Tree(token_ids, parents).hashes_after(state)
        return Drafts(token_ids[1:], hashes[1:])

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
        cells = cells_of(pages, slot, 0, num_tokens)
        return hash_after(self._begin_hash, self._cells.values[cells].tolist())
