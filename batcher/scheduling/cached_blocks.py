"""What is known of cached blocks: how they are found, what of a sequence was, who is evicted next.

Rule: an idle block that is taken out of the middle stays in its queue until its turn comes, and is
passed over then; so nothing is searched, and blocks come and go many at once.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from batcher.events import SequenceName

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
        """All blocks of it."""
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
        """Take in blocks that have just been freed, one after the other."""
        self._queue += blocks
        self.num_blocks += len(blocks)

    def take(self, num_blocks: int) -> list[int]:
        """Return so many blocks, or all there are."""
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
        """Take out a block, wherever it is."""
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
    """Return those after `start`, up to `stop`."""
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
