"""Block tables of slots whose rows share nothing: blocks come as rows grow, and go with them."""

from collections.abc import Iterator, Sequence

from batcher.transformer.cache_groups import CacheGroup

OWN_BLOCK_SIZE = 64  # tokens
NO_BLOCK = -1


class OwnTables:
    """A table of each slot for each group of layers, over blocks of which there are ever more.

    num_blocks: how many there are so far.
    """

    def __init__(self, num_slots: int, groups: Sequence[CacheGroup]) -> None:
        self.num_blocks = 0
        self._groups = groups
        self._free: list[int] = []
        self._tables: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_slots)]

    def grow(self, slot: int, start: int, stop: int) -> list[list[int]]:
        """Return the tables of a slot, by groups, with blocks to compute the tokens start..stop.

        What no token from `start` on reads is given back, and its place is NO_BLOCK.  So are those
        of states after tokens in the middle: nobody goes on from there.
        """
        tables, num_blocks = self._tables[slot], -(-stop // OWN_BLOCK_SIZE)
        for group, table in zip(self._groups, tables, strict=True):
            if group.window is not None:
                passed = max(start - group.window + 1, 0) // OWN_BLOCK_SIZE - 1
                while passed >= 0 and table[passed] != NO_BLOCK:
                    self._free.append(table[passed])
                    table[passed] = NO_BLOCK
                    passed -= 1
            if group.is_recurrent:
                table.extend([NO_BLOCK] * (num_blocks - 1 - len(table)))
            table.extend([self._take() for _ in range(num_blocks - len(table))])
        return tables

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self.num_blocks += 1
        return self.num_blocks - 1

    def fork(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """Give `target` as many blocks as `source` has; return which are to be copied to which."""
        self.release(target)
        for table, copied in zip(self._tables[source], self._tables[target], strict=True):
            for block in table:
                copied.append(NO_BLOCK if block == NO_BLOCK else self._take())
                if block != NO_BLOCK:
                    yield block, copied[-1]

    def release(self, slot: int) -> None:
        """Take its blocks from a slot."""
        for table in self._tables[slot]:
            self._free += [block for block in table if block != NO_BLOCK]
            table.clear()
