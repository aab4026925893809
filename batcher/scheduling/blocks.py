"""The blocks of the KV cache: which are held, which are free, and what the free ones still hold.

A cached block is found by a key, its parent and its content.  Blocks that one sequence fills are
cached as a run, of which only the first needs its key at once: nobody looks for one before the one
ahead of it is found, so that most keys are never made.
The order in which free blocks are taken is vLLM's: first those that hold nothing worth finding,
last freed first; then those that are cached, the least recently used first.  Typed content goes
later: priority by priority.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, compress, groupby
from operator import eq, itemgetter, not_
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.events import SequenceName

# What is known of cached blocks: how they are found, what of a sequence was, who is evicted next.
#
# Rule: an idle block that is taken out of the middle stays in its queue until its turn comes, and
# is passed over then; so nothing is searched, and blocks come and go many at once.

NO_BLOCK = -1
NO_HASH = 0
ROOT = -1  # the parent of the first block of a sequence without a salt

BlockHash = int | str
"""A number that no other content after the same tokens has, or a salt as the first parent."""

BlockKey = tuple[BlockHash, Hashable]
"""Parent and content: equal keys have equal tokens all the way back to the first."""


class CachedPrefix(Struct, gc=False):
    """Blocks in which the first tokens of a sequence were found, and the hash of each.

    num_lost: how many had been lost by then, see BlockPool.
    missed: what would have been the next content, if there is one.
    """

    blocks: list[int] = []
    hashes: list[int] = []
    num_lost: int = 0
    missed: Hashable = None


class BlockRun(Struct, gc=False):
    """Cached blocks on end that one sequence has filled.

    first: the hash of the first of them; those after it have the numbers that follow, and no other
    block has one of the first `size_limit` of these.
    num_keys: how many of them have their keys.  contents: of the others, in parts.
    num_contents: how many blocks there are contents for, with or without a key.
    is_open: whether it may go on: nobody else has cached a block behind its last one.
    filler: that sequence, if it was told.
    """

    first: int
    blocks: list[int]
    size_limit: int
    contents: list[Iterator[Hashable]]
    num_contents: int
    num_keys: int = 1
    is_open: bool = True
    filler: SequenceName | None = None

    def next_content(self) -> Hashable:
        """Return the content of the first of its blocks that has no key."""
        for content in self.contents[0]:
            return content
        del self.contents[0]
        return self.next_content()


class PrefixMatch(Struct, frozen=True, gc=False):
    """What of a sequence stands in blocks already.

    blocks: held by others or idle, whole or up to where the sequence goes on.
    num_tokens: how many of its tokens they hold.
    source: a block that holds the last of these beside tokens of another sequence; NO_BLOCK: none.
    parent: the hash of the last of the whole blocks, if num_cached_blocks of them were found by
    content.
    missed, contents: of the whole blocks after these, the first, if it was looked for, and the
    others; None if they have to be asked for.
    group_blocks: what further cache groups have beside `blocks`; NO_BLOCK where nothing is read.
    sibling: the sample of the same request that has `blocks`, if they were not found by content.
    """

    blocks: list[int]
    num_tokens: int
    source: int = NO_BLOCK
    num_cached_blocks: int = 0
    parent: BlockHash = ROOT
    missed: Hashable = None
    contents: Iterator[Hashable] | None = None
    group_blocks: tuple[list[int], ...] = ()
    sibling: SequenceName | None = None

    @property
    def found(self) -> list[int]:
        blocks = chain.from_iterable(self.group_blocks)
        return [*self.blocks, *(block for block in blocks if block != NO_BLOCK)]

    def without_source(self, block_size: int) -> "PrefixMatch":
        """Return what of it can be shared without a copy."""
        if self.source == NO_BLOCK:
            return self
        return replace(self, num_tokens=len(self.blocks) * block_size, source=NO_BLOCK)


NO_MATCH = PrefixMatch([], 0)


class IdleBlocks:
    """Blocks that are worth the same; the least recently freed go first.

    num_blocks: how many there are.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self._queue: list[int] = []
        self._first = 0  # the place of the first in the queue; who was before it has been taken
        self._gone: dict[int, int] = {}  # block -> how many of its first entries are passed over

    def extend(self, blocks: Sequence[int]) -> None:
        self._queue += blocks
        self.num_blocks += len(blocks)

    def take(self, num_blocks: int) -> list[int]:
        first, queue = self._first, self._queue
        blocks = queue[first : first + num_blocks]
        stop = first + len(blocks)
        if self._gone:
            blocks = [block for block in blocks if not self._passes_over(block)]
            while len(blocks) < num_blocks and stop < len(queue):
                if not self._passes_over(queue[stop]):
                    blocks.append(queue[stop])
                stop += 1
        self.num_blocks -= len(blocks)
        if stop > len(queue) // 2:
            del queue[:stop]
            stop = 0
        self._first = stop
        return blocks

    def remove(self, block: int) -> None:
        self._gone[block] = self._gone.get(block, 0) + 1
        self.num_blocks -= 1
        if 2 * self.num_blocks < len(self._queue) - self._first:
            queue = self._queue[self._first :]
            self._queue = [entry for entry in queue if not self._passes_over(entry)]
            self._first = 0

    def _passes_over(self, block: int) -> bool:
        """Whether the next entry of a block is one that has gone; it is forgotten then."""
        num_entries = self._gone.get(block, 0)
        if not num_entries:
            return False
        if num_entries > 1:
            self._gone[block] = num_entries - 1
        else:
            del self._gone[block]
        return True


SegmentEnds = tuple[tuple[int, int], ...]
"""Where segments of a prompt end, each with how long its blocks are worth keeping."""

_end_of = itemgetter(0)


def ends_between(ends: SegmentEnds, start: int, stop: int) -> SegmentEnds:
    if not ends:
        return ()
    first = bisect_right(ends, start, key=_end_of)
    return ends[first : bisect_right(ends, stop, first, key=_end_of)]


def eviction_priorities(ends: SegmentEnds, first: int, stop: int, size: int) -> list[int]:
    """Return those of the blocks first..stop: the highest of segments that reach into each."""
    highest = [0] * (stop - first)
    place = bisect_right(ends, first * size, key=_end_of)
    begin = ends[place - 1][0] if place else 0
    for end, priority in ends[place:]:
        if begin >= stop * size:
            break
        if priority:
            for block in range(max(begin // size, first), min(-(-end // size), stop)):
                highest[block - first] = max(highest[block - first], priority)
        begin = end
    return highest


NUM_EVICTION_PRIORITIES = 4  # nothing special or assistant, user, system, pinned


class BlockUse(NamedTuple):
    """How many blocks are held, how many nobody holds that can be found, and how many are empty.

    free: None if there is no limit.
    """

    used: int
    cached: int
    free: int | None


class BlockPool:
    """`num_blocks` blocks, or as many as are asked for.

    num_total: how many there are so far.  num_free: how many nobody holds.
    num_cached: how often one could be found that could not before.  num_lost: how often one could
    no longer be.
    """

    def __init__(self, num_blocks: int | None, max_grown: int = 2**62) -> None:
        """Have `num_blocks` blocks; with None there are more and more, to twice as many at a time.

        max_grown: above so many there are more only if too few are free, and not for the sake of
        what is cached.
        """
        self._is_growing, self._max_grown = num_blocks is None, max_grown
        self.num_total = self.num_free = num_blocks or 0
        self.num_cached = self.num_lost = 0
        self._num_made = 0  # those that were ever wanted: the others are free, and only counted
        self._blank: list[int] = []  # made, free, and holding nothing; a stack
        self._idle = [IdleBlocks() for _ in range(NUM_EVICTION_PRIORITIES)]
        self._extra_holders: dict[int, int] = {}  # of blocks that more than one sequence holds
        self._found: dict[BlockKey, int] = {}  # by the keys that are made
        self._runs: dict[BlockHash, BlockRun] = {}  # by the hash of the last block with a key
        self._next_hash = NO_HASH + 1
        # By block: its hash and who filled it, if it is cached, and its key, if that is made;
        # further keys, if any.
        self._keys: dict[int, BlockKey] = {}
        self._hashes: list[int] = []
        self._fillers: list[SequenceName | None] = []
        self._priorities: list[int] = []
        self._has_priorities = False
        self._is_idle = bytearray()
        self._more_keys: dict[int, list[BlockKey]] = {}

    @property
    def num_used(self) -> int:
        return self.num_total - self.num_free

    @property
    def use(self) -> BlockUse:
        num_blank = len(self._blank) + self.num_total - self._num_made
        free = None if self._is_growing else num_blank
        return BlockUse(self.num_used, self.num_free - num_blank, free)

    # -- held and free ---------------------------------------------------------------------------

    def has_room(self, num_blocks: int) -> bool:
        return self._is_growing or num_blocks <= self.num_free

    def take(self, num_blocks: int) -> list[int]:
        """Return blocks for one holder, whatever they held before.

        Raises:
            InvariantError: there are not so many; ask has_room first.
        """
        blank = self._blank
        num_more = num_blocks - len(blank)
        if num_more > 0:
            if self._is_growing or num_blocks > self.num_free:
                self._grow(num_blocks)
            if self._num_made < self.num_total:
                self._make(num_more)
                num_more = num_blocks - len(blank)
        self.num_free -= num_blocks
        if num_more <= 0:
            blocks = blank[-1 : -1 - num_blocks : -1]
            del blank[-num_more:]
            return blocks
        blocks = []
        if blank:
            blocks = blank[::-1]
            blank.clear()
        for idle in self._idle:
            if idle.num_blocks:
                evicted = idle.take(num_more)
                self._evict(evicted)
                blocks += evicted
                num_more -= len(evicted)
                if not num_more:
                    break
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Give blocks that are cached, or that another holds, one more holder."""
        extra, is_idle = self._extra_holders, self._is_idle
        for block in blocks:
            if is_idle[block]:
                is_idle[block] = 0
                self._idle[self._priorities[block]].remove(block)
                self.num_free -= 1
            else:
                extra[block] = extra.get(block, 0) + 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks`, each of which is cached or held, nobody holds."""
        return sum(map(self._is_idle.__getitem__, blocks))

    def is_shared(self, block: int) -> bool:
        return block in self._extra_holders

    def num_only_in(self, tables: Iterable[Sequence[int]], but: Collection[int]) -> int:
        """Return how many blocks only these tables hold, not counting some."""
        counts = Counter(block for table in tables for block in table)
        return sum(
            block not in but and count == 1 + self._extra_holders.get(block, 0)
            for block, count in counts.items()
        )

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of `blocks`: a sequence's, first to last.

        The last of them are the first to be taken again.
        """
        freed, is_idle = blocks[::-1], self._is_idle
        if self._extra_holders:
            freed = self._without_shared(freed)
        self.num_free += len(freed)
        if not self.num_cached:
            self._blank += freed
            return
        are_cached = [*map(self._hashes.__getitem__, freed)]
        idle = [*compress(freed, are_cached)]
        if len(idle) < len(freed):
            self._blank += compress(freed, map(not_, are_cached))
        for block in idle:
            is_idle[block] = 1
        if self._has_priorities:
            for priority, alike in groupby(idle, self._priorities.__getitem__):
                self._idle[priority].extend([*alike])
        elif idle:
            self._idle[0].extend(idle)

    def _without_shared(self, blocks: Sequence[int]) -> Sequence[int]:
        extra = self._extra_holders
        if extra.keys().isdisjoint(blocks):
            return blocks
        own = [block for block in blocks if block not in extra]
        for block in filter(extra.__contains__, blocks):
            if extra[block] > 1:
                extra[block] -= 1
            else:
                del extra[block]
        return own

    # -- cached and found ------------------------------------------------------------------------

    def find(self, parent: BlockHash, content: Hashable) -> int:
        run = self._runs.get(parent)
        if run is not None and run.num_keys < len(run.blocks):
            self._make_key(run)
        return self._found.get((parent, content), NO_BLOCK)

    def follow(self, prefix: CachedPrefix, root: BlockHash, contents: Iterable[Hashable]) -> None:
        """Let `prefix` hold what is cached of the chain from `root` that goes on by `contents`.

        contents: of what comes after the blocks that `prefix` has; as far as they are found.
        """
        hashes = self._hashes
        found, runs = self._found, self._runs
        parent = prefix.hashes[-1] if prefix.hashes else root
        prefix.missed = None
        for content in contents:
            run = runs.get(parent)  # as in `find`, which this would call for every block
            if run is not None and run.num_keys < len(run.blocks):
                self._make_key(run)
            block = found.get((parent, content), NO_BLOCK)
            if block == NO_BLOCK:
                prefix.missed = content
                break
            parent = hashes[block]
            prefix.blocks.append(block)
            prefix.hashes.append(parent)

    def is_whole(self, prefix: CachedPrefix) -> bool:
        """Whether all that `prefix` holds is still cached."""
        if prefix.num_lost != self.num_lost:
            if [*map(self._hashes.__getitem__, prefix.blocks)] != prefix.hashes:
                return False  # each hash is given only once
            prefix.num_lost = self.num_lost
        return True

    def cut(self, prefix: CachedPrefix) -> None:
        """Leave in `prefix` only what is still cached of it."""
        if not self.is_whole(prefix):
            hashes = map(self._hashes.__getitem__, prefix.blocks)
            first = [*map(eq, hashes, prefix.hashes)].index(False)
            del prefix.blocks[first:], prefix.hashes[first:]
            prefix.num_lost = self.num_lost

    def cache(
        self,
        blocks: list[int],
        parent: BlockHash,
        contents: Iterator[Hashable],
        priority: int = 0,
        room: tuple[int, int] = (0, 0),
        content: Hashable = None,
        filler: SequenceName | None = None,
    ) -> tuple[BlockHash, BlockRun | None]:
        """Let held blocks be found after `parent`, each by a key for which no other is.

        contents: some may be asked for later than now, or never.
        room: how many contents there are, and how many blocks the sequence may fill with more.
        content: the first, if it was asked for by now.
        filler: the sequence that fills the blocks, for `filler_of`.
        Returns the hash of the last content, and the run of the last block if that may go on.
        """
        hashes, found, runs = self._hashes, self._found, self._runs
        for place, block in enumerate(blocks):
            if place or content is None:
                content = next(contents)
            before = runs.get(parent)  # as in `follow`
            if before is not None and before.num_keys < len(before.blocks):
                self._make_key(before)
            key = parent, content
            if key in found:
                parent = hashes[found[key]]
                continue
            if (before := runs.pop(parent, None)) is not None:
                before.is_open = False
            found[key] = block
            if hashes[block] != NO_HASH:
                self._more_keys.setdefault(block, []).append(key)
                if priority:
                    self._raise_priority([block], priority)
                parent = hashes[block]
                continue
            self._keys[block] = key
            rest = blocks[place:]
            if any(map(hashes.__getitem__, rest)):
                run = BlockRun(self._next_hash, [block], 1, [], 1, filler=filler)
            else:
                limit = room[1] - place if room[1] > len(blocks) else len(rest)
                run = BlockRun(
                    self._next_hash, rest, limit, [contents], room[0] - place, filler=filler
                )
            parent = self._begin(run, priority)
            if run.blocks is rest:
                return parent, run
        return parent, None

    def extend(self, run: BlockRun, blocks: Sequence[int]) -> BlockHash:
        """Let held blocks be found behind those of a run that is open, which has to have room.

        Returns the hash of the last of them.
        """
        hashes, fillers, filler = self._hashes, self._fillers, run.filler
        first = run.first + len(run.blocks)
        for block_hash, block in enumerate(blocks, first):
            hashes[block] = block_hash
            fillers[block] = filler
        run.blocks += blocks
        self.num_cached += len(blocks)
        return first + len(blocks) - 1

    def cache_beside(self, block: int, neighbour: int, group: int) -> None:
        """Let a held block be found as what another cache group has beside a cached block.

        Unless it can be found already, or another is found there.
        """
        key = self._hashes[neighbour], group
        if self._hashes[block] != NO_HASH or key in self._found:
            return
        self._found[key], self._keys[block] = block, key
        self._hashes[block] = self._next_hash
        self._next_hash += 1
        self.num_cached += 1
        if self._priorities[neighbour]:
            self._raise_priority([block], self._priorities[neighbour])

    def find_beside(self, block_hash: BlockHash, group: int) -> int:
        return self._found.get((block_hash, group), NO_BLOCK)

    def hash_of(self, block: int) -> BlockHash:
        return self._hashes[block]

    def filler_of(self, block: int) -> SequenceName | None:
        """Return the sequence that filled a block which is found by its content, if it was told."""
        return self._fillers[block]

    def forget(self, block: int) -> None:
        """Let a held block be found no longer: it does not hold what was promised."""
        if self._hashes[block] != NO_HASH:
            self._evict([block])

    def lose(self, block: int) -> None:
        """Let a block be found no longer, whether it is held or not, if it is found at all."""
        if self._hashes[block] != NO_HASH:
            self.share([block])
            self._evict([block])
            self.give_back([block])

    def _begin(self, run: BlockRun, priority: int) -> BlockHash:
        """Let the blocks of a new run, of which the first has its key, be found.

        Returns the hash of the last of them.
        """
        blocks, filler, hashes, fillers = run.blocks, run.filler, self._hashes, self._fillers
        self._runs[run.first] = run
        self._next_hash += run.size_limit
        self.num_cached += len(blocks)
        block_hash = NO_HASH
        for block_hash, block in enumerate(blocks, run.first):
            hashes[block] = block_hash
            fillers[block] = filler
        if priority:
            self._raise_priority(blocks, priority)
        return block_hash

    def _raise_priority(self, blocks: Iterable[int], priority: int) -> None:
        self._has_priorities = True
        for block in blocks:
            self._priorities[block] = max(self._priorities[block], priority)

    def _make_key(self, run: BlockRun) -> None:
        """Make the next key of a run, if its block still holds what it did."""
        block, block_hash = run.blocks[run.num_keys], run.first + run.num_keys
        del self._runs[block_hash - 1]
        if self._hashes[block] != block_hash:
            return  # and nobody gets past it
        key = block_hash - 1, run.next_content()
        self._found[key], self._keys[block] = block, key
        self._runs[block_hash] = run
        run.num_keys += 1

    def _evict(self, blocks: list[int]) -> None:
        keys, hashes, is_idle = self._keys, self._hashes, self._is_idle
        for block in blocks:
            if block in keys:
                del self._found[keys.pop(block)]
                self._runs.pop(hashes[block], None)
            hashes[block] = NO_HASH
            is_idle[block] = 0
        self.num_lost += len(blocks)
        if self._has_priorities:
            for block in blocks:
                self._priorities[block] = 0
        if self._more_keys:
            for block in self._more_keys.keys() & blocks:
                for key in self._more_keys.pop(block):
                    del self._found[key]

    # -- all of them -----------------------------------------------------------------------------

    def _grow(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks to be taken, unless there is and they are enough."""
        if not self._is_growing:
            raise InvariantError(f"{num_blocks} blocks are taken where {self.num_free} are free")
        if self.num_total >= self._max_grown and self.num_free >= num_blocks:
            return
        num_more = max(num_blocks, self.num_total)
        self.num_total += num_more
        self.num_free += num_more

    def _make(self, num_wanted: int) -> None:
        """Make so many of the blocks that nobody has wanted yet, if there are, or more.

        They are taken after those that hold nothing, in order.
        """
        first = self._num_made
        self._num_made = stop = min(first + max(num_wanted, first), self.num_total)
        self._blank[:0] = range(stop - 1, first - 1, -1)
        num_new = stop - first
        self._hashes += [NO_HASH] * num_new
        self._fillers += [None] * num_new
        self._priorities += [0] * num_new
        self._is_idle += bytes(num_new)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Make sure that every block is free or held, by exactly those whose `tables` name it.

        Raises:
            InvariantError: one is lost, held twice, or free and held.
        """
        holders = Counter(block for table in tables for block in table)
        idle = [block for block, is_idle in enumerate(self._is_idle) if is_idle]
        free = {*self._blank, *idle}
        if len(free) != len(self._blank) + sum(idle.num_blocks for idle in self._idle):
            raise InvariantError("a block is free twice")
        num_free = len(free) + self.num_total - self._num_made
        if num_free != self.num_free or free | holders.keys() != {*range(self._num_made)}:
            raise InvariantError(
                f"{len(holders)} blocks held and {num_free} free, of {self.num_total}; "
                f"{self.num_free} are counted as free"
            )
        if free & holders.keys():
            raise InvariantError(f"blocks {sorted(free & holders.keys())} are free and held")
        for block, count in holders.items():
            if count != 1 + self._extra_holders.get(block, 0):
                raise InvariantError(f"block {block} has {count} holders, and counts others")
        if self._extra_holders.keys() - holders.keys():
            raise InvariantError("a block that nobody holds has holders")
