"""The memory of the host as a second tier of the prefix cache: what it holds, and what goes first.

Rule: a block is at least as recently used as all behind it, so none stays without those before it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice

from batcher.scheduling.cached_blocks import BlockHash

_Parent = int | tuple[BlockHash]  # a block before it, or the root of its chain


class HostTier:
    """Copies of `max_blocks` full blocks at most; the least recently used go first.

    num_changes: how often something came or went.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[_Parent, Hashable], int] = OrderedDict()
        self._next_block = self.num_changes = 0

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return len(self._blocks)

    def num_found(self, root: BlockHash, contents: Sequence[Hashable]) -> int:
        """Return how many blocks are here of the chain of `contents`; looking uses none."""
        parent: _Parent = (root,)
        for place, content in enumerate(contents):
            block = self._blocks.get((parent, content))
            if block is None:
                return place
            parent = block
        return len(contents)

    def store(self, root: BlockHash, contents: Sequence[Hashable]) -> None:
        """Use all blocks of a chain, which are here from now on; of a longer one, the first."""
        blocks, num_before = self._blocks, self._next_block
        keys: list[tuple[_Parent, Hashable]] = []
        parent: _Parent = (root,)
        for content in islice(contents, self._max_blocks):
            key = parent, content
            if key not in blocks:
                blocks[key] = self._next_block
                self._next_block += 1
            parent = blocks[key]
            keys.append(key)
        for key in reversed(keys):
            blocks.move_to_end(key)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)
        self.num_changes += self._next_block - num_before
