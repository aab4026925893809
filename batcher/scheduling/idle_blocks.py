"""Free blocks that can be found again, in the order in which they were freed.

Rule: one that is taken out of the middle stays in the queue until its turn comes, and is passed
over then; so nothing is searched, and blocks come and go many at once.
"""

from collections import deque
from collections.abc import Iterable


class IdleBlocks:
    """Blocks that are worth the same; the least recently freed go first."""

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._gone: dict[int, int] = {}  # block -> how many of its first entries are passed over
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._queue) - self._num_gone

    def extend(self, blocks: Iterable[int]) -> None:
        """Take in blocks that have just been freed, one after the other."""
        self._queue.extend(blocks)

    def take(self, num_blocks: int) -> list[int]:
        """Return so many blocks; there have to be as many."""
        pop = self._queue.popleft
        if not self._num_gone:
            return [pop() for _ in range(num_blocks)]
        blocks: list[int] = []
        while len(blocks) < num_blocks:
            block = pop()
            if not self._passes_over(block):
                blocks.append(block)
        return blocks

    def remove(self, block: int) -> None:
        """Take out a block, wherever it is."""
        self._gone[block] = self._gone.get(block, 0) + 1
        self._num_gone += 1
        if self._num_gone > len(self._queue) // 2:
            self._queue = deque(entry for entry in self._queue if not self._passes_over(entry))

    def _passes_over(self, block: int) -> bool:
        """Whether the next entry of a block is one that has gone; it is forgotten then."""
        num_entries = self._gone.get(block, 0)
        if not num_entries:
            return False
        self._num_gone -= 1
        if num_entries > 1:
            self._gone[block] = num_entries - 1
        else:
            del self._gone[block]
        return True
