"""The KV cache where nobody finds anything, nor asks which block is whose: blocks are counted.

Rule: after each call as many are held, and free, as KVCache would say.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NoReturn

from batcher.errors import InvariantError
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.sequence import S
from batcher.settings import SchedulingSettings


class CountedPool(BlockPool):
    """As many blocks as a BlockPool has, in no list: none is known by itself."""

    def __init__(self, num_blocks: int | None) -> None:
        super().__init__(0)
        self._is_growing = num_blocks is None
        self.num_total = self.num_free = num_blocks or 0


class CountedBlocks(KVCache[S]):
    """Blocks of sequences that share none.

    Nothing is done for rows that decode, one by one: each holds the blocks that its tokens fill,
    and one more if it is among those that have grown in the current step.
    """

    def __init__(self, settings: SchedulingSettings) -> None:
        """Have as many blocks as the settings say, without a prefix cache."""
        super().__init__(settings, _no_contents)
        self._given: dict[S, int] = {}  # how many a sequence took before it decoded
        self._grown: list[S] = []
        self._held: dict[S, int] = {}  # by rows whose drafts have blocks of their own

    def _make_pool(self, max_grown: int) -> BlockPool:  # noqa: ARG002 - others keep some
        return CountedPool(self.max_blocks)

    def admit(self, sequence: S, stop: int, max_tokens: int, *, is_alone: bool) -> int:
        """Give a sequence blocks to compute its first tokens: see KVCache, but nothing is found."""
        capacity, size = self._capacity, self.block_size
        if stop > max_tokens or stop < 0:
            stop = max(min(stop, max_tokens), 0)
        num_held = stop or sequence.num_tokens
        if capacity == "no-evict":
            num_held = sequence.most_tokens
        num_blocks = num_needed = -(-num_held // size)
        if capacity == "watermark":
            num_needed = -(-sequence.num_tokens // size) + (0 if is_alone else self.num_spare)
        if num_needed > self.pool.num_free and not self.has_room(num_needed):
            return num_needed
        if num_blocks:
            self._given[sequence] = num_blocks
            self.pool.num_free -= num_blocks
        sequence.num_computed_tokens = stop
        return 0

    def num_blocks_to_grow(self, sequence: S, num_tokens: int) -> int:
        """Return how many free blocks it takes to let a running sequence hold `num_tokens`."""
        if sequence.is_decoding:  # it begins a block, or nobody would ask
            return int(self._capacity != "no-evict")
        return max(self.num_blocks(num_tokens) - self._given.get(sequence, 0), 0)

    def extend(self, sequence: S, num_tokens: int) -> None:
        """Let `sequence` hold `num_tokens`."""
        if sequence.is_decoding:
            self.grow_all([sequence])
            return
        num_blocks, num_given = -(-num_tokens // self.block_size), self._given.get(sequence, 0)
        if num_blocks > num_given:
            self._given[sequence] = num_blocks
            self.pool.num_free -= num_blocks - num_given

    def grow_all(self, rows: list[S]) -> None:
        """Give rows that decode the block that they begin in this step."""
        if self._capacity != "no-evict":  # else they have it already
            self._grown += rows
            self.pool.num_free -= len(rows)

    def grow_in_turn(self, growing: Iterable[Collection[S]], num_blocks: int) -> None:  # noqa: ARG002 - they are counted
        """Give rows that decode the block that each begins, in so many steps in which all go on."""
        self.pool.num_free -= num_blocks

    def extend_for_drafts(self, sequence: S, num_tokens: int, num_wanted: int) -> int:
        """Let a decoding row hold drafts behind so many tokens, until it is truncated.

        Returns how many of those wanted there is room for.
        """
        num_held = self._num_held(sequence, num_tokens)
        num_new = max(self.num_blocks(num_tokens + num_wanted) - num_held, 0)
        num_new = min(num_new, max(self.pool.num_free - self.num_spare, 0))
        if num_new:
            self._held[sequence] = num_held + num_new
            self.pool.num_free -= num_new
        return min(num_wanted, (num_held + num_new) * self.block_size - num_tokens)

    def truncate(self, num_tokens: Mapping[S, int]) -> dict[S, int]:
        """Take from rows the blocks behind so many tokens of each.

        Returns how many each had there, of those that had any.
        """
        num_behind = {
            row: num
            for row, kept in num_tokens.items()
            if (num := self._held.pop(row, 0) - self._num_held(row, kept)) > 0
        }
        self.pool.num_free += sum(num_behind.values())
        return num_behind

    def _num_held(self, sequence: S, num_tokens: int) -> int:
        """Return how many blocks a row holds that decodes, with so many tokens and no drafts."""
        return max(self.num_blocks(num_tokens), self._given.get(sequence, 0))

    def end_step(self) -> None:
        """Count the blocks of rows that have grown among those that their tokens fill."""
        self._grown.clear()

    def close(self, sequence: S, num_computed_tokens: int) -> None:
        """Take its blocks from `sequence`, of which so many tokens are computed."""
        num_filled = -(-num_computed_tokens // self.block_size) + (sequence in self._grown)
        self.pool.num_free += max(self._given.pop(sequence, 0), num_filled)


def _no_contents(sequence: S, start: int, stop: int, size: int) -> NoReturn:  # noqa: ARG001
    raise InvariantError("nothing is to be found by its tokens")
