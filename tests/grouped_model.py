"""A model with several cache groups, which insists that each has what it reads."""

from itertools import pairwise
from typing import NamedTuple

from batcher import SimulatedModel

BEGIN = 0


class Cell(NamedTuple):
    """What a group keeps of the token at a position, or of a recurrent state after it."""

    position: int
    token: int
    chain: int  # a hash of the token and all before it


class GroupedModel(SimulatedModel):
    """The simulated model, which reads its first group; the others are looked at beside it.

    kinds: of each group its window, or "state".
    """

    def __init__(self, *kinds):
        self.kinds = kinds
        self.cache_windows = tuple(2 if kind == "state" else kind for kind in kinds)
        super().__init__()

    def allocate_pages(self, num_slots, num_blocks, block_size):
        self.blocks = {}
        self.lengths = [0] * num_slots
        self.num_read = 0
        super().allocate_pages(num_slots, num_blocks, block_size)

    def forward(self, batch):
        if batch.pages is not None:
            self._look(batch, batch.pages)
        return super().forward(batch)

    def _look(self, batch, pages):
        for source, target in pages.copies:
            self.blocks[target] = self.blocks[source].copy()
        chunks = {chunk.slot for chunk in batch.chunks}
        rows = [
            (slot, pages.moved.get(slot, self.lengths[slot]), [batch.tokens.item(slot)])
            for slot in batch.slots.tolist()
            if slot not in chunks
        ]
        rows += [(chunk.slot, chunk.start, [*chunk.token_ids]) for chunk in batch.chunks]
        for slot, start, tokens in rows:
            tables = [pages.tables[slot], *(tables[slot] for tables in pages.group_tables)]
            assert len(tables) == len(self.kinds)
            assert len({len(table) for table in tables}) == 1
            ends = {
                self._compute(kind, table, pages.block_size, start, tokens)
                for kind, table in zip(self.kinds, tables, strict=True)
                if tokens
            }
            assert len(ends) <= 1, "groups have seen other tokens"
            self.lengths[slot] = start + len(tokens)

    def _compute(self, kind, table, size, start, tokens):
        """Compute tokens in one group; return the hash of the last."""
        if kind == "state":
            known = [self._state(table, size, start - 1)] if start else []
        else:
            first = 0 if kind is None else max(start - kind + 1, 0)
            known = [self._cell(table, size, at) for at in range(first, start)]
        self.num_read += len(known)
        for before, after in pairwise(known):
            assert after.chain == hash((before.chain, after.token)), "not of one sequence"
        chain = known[-1].chain if known else BEGIN  # with a window of 1 it reads no others
        for position, token in enumerate(tokens, start):
            chain = hash((chain, token))
            cells = self.blocks.setdefault(self._block(table, size, position), {})
            cells[0 if kind == "state" else position % size] = Cell(position, token, chain)
        return 0 if kind == 1 else chain

    def _block(self, table, size, position):
        block = table[position // size]
        assert block >= 0, f"the block of position {position} is freed"
        return block

    def _cell(self, table, size, position):
        cell = self.blocks[self._block(table, size, position)][position % size]
        assert cell.position == position, "another token stands there"
        return cell

    def _state(self, table, size, position):
        state = self.blocks[self._block(table, size, position)][0]
        assert state.position == position, "the state is that after another token"
        return state
