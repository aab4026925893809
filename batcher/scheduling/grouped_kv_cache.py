"""The KV cache of models whose layers do not all read the same: a block table for each group.

Groups share one pool, and their tables are of one length, as in vLLM's hybrid allocator: the token
at a position is in the same place of each.  What a group with a window has behind it is freed, and
its place in the table is empty.  Blocks are found by the first group; what the others have beside
such a block is found by its hash.  A prefix is cached as far as every group has all that the next
token reads.

A recurrent state is a window, too: a block holds what was left after the last of its tokens that is
computed, and the next token reads it, so that each full block is a checkpoint.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NoReturn

from batcher.errors import InvariantError
from batcher.scheduling.blocks import NO_BLOCK, NO_MATCH, PrefixMatch
from batcher.scheduling.kv_cache import Contents, KVCache, held, root_of
from batcher.scheduling.sequence import S
from batcher.settings import CacheWindows, SchedulingSettings

# The KV cache where nobody finds anything, nor asks which block is whose: blocks are counted.
#
# Rule: after each call as many are held, and free, as KVCache would say.


class CountedBlocks(KVCache[S]):
    """Blocks of sequences that share none.

    None of its pool is taken, so that none is made: they are only counted.
    Nothing is done for rows that decode, one by one: each holds the blocks that its tokens fill,
    and one more if it is among those that have grown in the current step.
    """

    def __init__(self, settings: SchedulingSettings) -> None:
        super().__init__(settings, _no_contents)
        self._given: dict[S, int] = {}  # how many a sequence took before it decoded
        self._grown: list[S] = []
        self._held: dict[S, int] = {}  # by rows whose drafts have blocks of their own

    def admit(self, sequence: S, stop: int, max_tokens: int, *, is_alone: bool) -> int:
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
        if sequence.is_decoding:  # it begins a block, or nobody would ask
            return int(self._capacity != "no-evict")
        return max(self.num_blocks(num_tokens) - self._given.get(sequence, 0), 0)

    def extend(self, sequence: S, num_tokens: int) -> None:
        if sequence.is_decoding:
            self.grow_all([sequence])
            return
        num_blocks, num_given = -(-num_tokens // self.block_size), self._given.get(sequence, 0)
        if num_blocks > num_given:
            self._given[sequence] = num_blocks
            self.pool.num_free -= num_blocks - num_given

    def grow_all(self, rows: list[S]) -> None:
        if self._capacity != "no-evict":  # else they have it already
            self._grown += rows
            self.pool.num_free -= len(rows)

    def grow_in_turn(self, growing: Iterable[Collection[S]], num_blocks: int) -> None:  # noqa: ARG002 - they are counted
        self.pool.num_free -= num_blocks

    def extend_for_drafts(self, sequence: S, num_tokens: int, num_wanted: int) -> int:
        num_held = self._num_held(sequence, num_tokens)
        num_new = max(self.num_blocks(num_tokens + num_wanted) - num_held, 0)
        num_new = min(num_new, max(self.pool.num_free - self.num_spare, 0))
        if num_new:
            self._held[sequence] = num_held + num_new
            self.pool.num_free -= num_new
        return min(num_wanted, (num_held + num_new) * self.block_size - num_tokens)

    def truncate(self, num_tokens: Mapping[S, int]) -> dict[S, int]:
        num_behind = {
            row: num
            for row, kept in num_tokens.items()
            if (num := self._held.pop(row, 0) - self._num_held(row, kept)) > 0
        }
        self.pool.num_free += sum(num_behind.values())
        return num_behind

    def _num_held(self, sequence: S, num_tokens: int) -> int:
        return max(self.num_blocks(num_tokens), self._given.get(sequence, 0))

    def end_step(self) -> None:
        self._grown.clear()

    def close(self, sequence: S, num_computed_tokens: int) -> None:
        num_filled = -(-num_computed_tokens // self.block_size) + (sequence in self._grown)
        self.pool.num_free += max(self._given.pop(sequence, 0), num_filled)


def _no_contents(sequence: S, start: int, stop: int, size: int) -> NoReturn:  # noqa: ARG001
    raise InvariantError("nothing is to be found by its tokens")


class GroupedKVCache(KVCache[S]):
    """Several block tables of each sequence over one pool.

    Samples of one request share what the prefix cache finds, and nothing else; segments of a prompt
    that end inside a block are not found.

    windows: of the groups; the first is the one whose blocks are found by their tokens, best one
    without a window.
    """

    has_windows = True

    def __init__(
        self,
        settings: SchedulingSettings,
        contents: Contents[S],
        windows: CacheWindows,
        block_bytes: int | None = None,
    ) -> None:
        self.num_groups = len(windows)
        super().__init__(settings, contents, block_bytes)
        size, most = self.block_size, settings.max_batch_tokens
        # Of each group how many blocks before the one that is computed in are read (None: all), and
        # how many a sequence holds at most (None: all, or they are promised from the outset).
        self._num_read = [
            None if window is None else -(-(window - 1) // size) for window in windows
        ]
        self._most_held = [
            None
            if num_read is None or most is None or settings.capacity == "no-evict"
            else num_read + -(-(most + size - 1) // size)
            for num_read in self._num_read
        ]

    def _tables(self, sequence: S) -> list[list[int]]:
        return [sequence.block_table, *sequence.group_tables]

    # -- what is there ---------------------------------------------------------------------------

    def match(self, sequence: S) -> PrefixMatch:
        found = super().match(sequence)
        hashes = [] if sequence.prefix is None or not found.blocks else sequence.prefix.hashes
        tables = [
            [self.pool.find_beside(block_hash, group) for block_hash in hashes]
            for group in range(1, self.num_groups)
        ]
        num_blocks = self._num_whole(len(hashes), tables)
        for table, num_read in zip(tables, self._num_read[1:], strict=True):
            del table[num_blocks:]
            if num_read is not None:
                num_passed = max(num_blocks - num_read, 0)
                table[:num_passed] = [NO_BLOCK] * num_passed
        is_all = num_blocks == len(found.blocks)
        return PrefixMatch(
            found.blocks[:num_blocks],
            num_blocks * self.block_size,
            num_cached_blocks=num_blocks,
            parent=hashes[num_blocks - 1] if num_blocks else root_of(sequence),
            missed=found.missed if is_all else None,
            contents=found.contents if is_all else None,
            group_blocks=tuple(tables),
        )

    def _num_whole(self, num_found: int, tables: list[list[int]]) -> int:
        """Return after how many blocks every group has what is read next."""
        ends: set[int] = {*range(num_found + 1)}
        for table, num_read in zip(tables, self._num_read[1:], strict=True):
            num_there = 0  # on end
            for number, block in enumerate(table, 1):
                num_there = 0 if block == NO_BLOCK else num_there + 1
                if num_there < (number if num_read is None else min(number, num_read)):
                    ends.discard(number)
        return max(ends)

    def outlook(self, sequence: S) -> tuple[int, ...]:  # noqa: ARG002 - of any
        return self.pool.num_cached, self.pool.num_lost, 0

    def num_blocks_to_take(self, match: PrefixMatch, num_tokens: int) -> int:
        num_new = self.num_blocks(num_tokens) - len(match.blocks)
        tables = [match.blocks, *match.group_blocks]
        num_needed = 0
        for table, num_read, most in zip(tables, self._num_read, self._most_held, strict=True):
            kept = held(table if num_read is None else table[max(len(table) - num_read, 0) :])
            num_held = num_new + len(kept)
            if most is not None:
                num_held = min(num_held, most)
            num_needed += num_held - len(kept) + self.pool.num_idle(kept)
        return num_needed

    def num_blocks_to_grow(self, sequence: S, num_tokens: int) -> int:
        num_new = self.num_blocks(num_tokens) - len(sequence.block_table)
        if num_new > 0:
            return num_new * self.num_groups
        return sum(map(int, map(self._has_shared_end, self._tables(sequence))))

    def most_blocks(self, num_tokens: int) -> int:
        num_all = self.num_blocks(num_tokens)
        return sum([num_all if most is None else min(most, num_all) for most in self._most_held])

    def held_blocks(self, sequence: S) -> list[int]:
        return [block for table in self._tables(sequence) for block in held(table)]

    # -- a sequence comes, grows and goes --------------------------------------------------------

    def attach(self, sequence: S, match: PrefixMatch) -> None:
        super().attach(sequence, match)
        for table in match.group_blocks:
            self.pool.share(held(table))
        sequence.group_tables = tuple(table.copy() for table in match.group_blocks)
        self.slide(sequence, match.num_tokens)

    def slide(self, sequence: S, position: int) -> None:
        """Free what no token reads that comes after the one before `position`.

        Nor would any that goes on from the beginning of its block, so that this can be found.
        """
        num_full = position // self.block_size
        for table, num_read in zip(self._tables(sequence), self._num_read, strict=True):
            if num_read is None:
                continue
            start = stop = max(num_full - num_read, 0)
            while start and table[start - 1] != NO_BLOCK:
                start -= 1
            if start == stop:
                continue
            if table is sequence.block_table and self._has_prefix_cache:
                self._cache(sequence, stop)  # as long as there is something to be found
            self.pool.give_back(table[start:stop])
            table[start:stop] = [NO_BLOCK] * (stop - start)

    def extend(self, sequence: S, num_tokens: int) -> None:
        num_new = self.num_blocks(num_tokens) - len(sequence.block_table)
        if num_new > 0:
            for table in self._tables(sequence):
                table.extend(self.pool.take(num_new))

    def _cut(self, sequence: S, num_kept: int) -> list[int]:
        blocks = []
        for table in self._tables(sequence):
            blocks += table[num_kept:]
            del table[num_kept:]
        return blocks

    def compute(self, sequence: S, start: int, stop: int, match: PrefixMatch = NO_MATCH) -> None:  # noqa: ARG002 - segments end in whole blocks
        if self._has_prefix_cache:
            self._cache(sequence, stop // self.block_size, match)

    def grow_all(self, rows: list[S]) -> None:
        if self._capacity == "no-evict":
            return  # they have them already
        for row in rows:
            for table, block in zip(
                self._tables(row), self.pool.take(self.num_groups), strict=True
            ):
                table.append(block)

    def fork(self, parent: S, child: S, num_computed_tokens: int) -> None:
        super().fork(parent, child, num_computed_tokens)
        own = child.group_tables or tuple([] for _ in parent.group_tables)
        child.group_tables = tuple(
            self._forked(table, mine, num_computed_tokens)
            for table, mine in zip(parent.group_tables, own, strict=True)
        )

    def copy_shared_end(self, sequence: S) -> None:
        for table in self._tables(sequence):
            if self._has_shared_end(table):
                self._copy_last(table)

    def note_sibling(self, sequence: S) -> None:
        """Do nothing: what other samples may start from is found by its tokens, if at all."""

    def close(self, sequence: S, num_computed_tokens: int) -> None:
        if self._has_prefix_cache:
            self._cache(sequence, num_computed_tokens // self.block_size)
        for table in self._tables(sequence):
            self.pool.give_back(held(table))
        sequence.block_table, sequence.group_tables, sequence.run = [], (), None

    def forget(self, sequence: S) -> None:
        first = sequence.num_cached_tokens // self.block_size
        for table in self._tables(sequence):
            for block in held(table[first:]):
                self.pool.forget(block)

    # -- by content ------------------------------------------------------------------------------

    def _cache(self, sequence: S, num_blocks: int, match: PrefixMatch = NO_MATCH) -> None:
        first, parent = sequence.num_cached_blocks, sequence.parent
        super()._cache(sequence, num_blocks, match)
        stop, size = sequence.num_cached_blocks, self.block_size
        if not sequence.group_tables or stop <= first:
            return
        contents: Iterator[object] = self._contents(sequence, first * size, stop * size, size)
        for place, content in zip(range(first, stop), contents, strict=False):
            neighbour = self.pool.find(parent, content)
            if neighbour == NO_BLOCK:
                return
            for group, table in enumerate(sequence.group_tables, 1):
                if table[place] != NO_BLOCK:
                    self.pool.cache_beside(table[place], neighbour, group)
            parent = self.pool.hash_of(neighbour)
