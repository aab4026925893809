"""The pool of KV blocks: which blocks are held, which are free, and what the free ones still hold.

A full block is registered: a dictionary maps (node of the previous block, content) to the block.  A
node is the number under which a block was registered, and is never reused.  So equal keys have
equal tokens back to the first, and nothing is found behind an evicted block.

Free blocks are taken in vLLM's order: blank blocks first, last freed first; then registered blocks,
least recently freed first.  Typed content is evicted later, priority by priority.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import eq, itemgetter
from typing import NamedTuple

from msgspec import Struct

from batcher.errors import InvariantError
from batcher.events import SequenceName

NO_BLOCK = -1
NO_NODE = 0
KNOWN = ()  # the keys behind this node are made
ROOT = -1  # the node before the first block of a sequence without a salt

Node = int | str
"""The number of a registered block, or a salt, which is before the first block of its sequences."""

BlockKey = tuple[Node, Hashable]

UnreadChain = tuple[Sequence[int], int, Iterator[Hashable]]
"""Blocks on end, the node of the first, from which the others count up, and their contents."""

NUM_EVICTION_PRIORITIES = 4  # none or assistant, user, system, pinned

SegmentEnds = tuple[tuple[int, int], ...]
"""Where segments of a prompt end, each with the eviction priority of its blocks."""

_end_of = itemgetter(0)


def ends_between(ends: SegmentEnds, start: int, stop: int) -> SegmentEnds:
    first = bisect_right(ends, start, key=_end_of)
    return ends[first : bisect_right(ends, stop, first, key=_end_of)]


def eviction_priorities(ends: SegmentEnds, first: int, stop: int, size: int) -> list[int]:
    """Return the eviction priority of each block first..stop: the highest of its segments."""
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


class PrefixMatch(Struct, gc=False):
    """The cached prefix of a sequence.

    blocks: held by others or idle.  num_tokens: tokens in these blocks.
    num_planned: tokens after them that the admitting step computes.
    stop: tokens that the sequence holds after admission: all known tokens, or fewer.
    node: of the last block.
    missed: the next content, if it was looked up and not found.  contents: of this and all later
    full blocks; None if they are still to compute.
    nodes, num_lost: of the blocks and of the pool at the time of the lookup, for a remembered
    match.
    source: a block to copy, which begins with the last of these tokens; or NO_BLOCK.
    group_blocks: the blocks of further cache groups; NO_BLOCK where nothing is read.
    sibling: the sample of the same request that has `blocks`, if they were not found by content.
    """

    blocks: list[int]
    num_tokens: int
    stop: int
    node: Node = ROOT
    missed: Hashable = None
    contents: Iterator[Hashable] | None = None
    nodes: list[int] = []
    num_lost: int = 0
    num_planned: int = 0
    source: int = NO_BLOCK
    group_blocks: tuple[list[int], ...] = ()
    sibling: SequenceName | None = None

    @property
    def found(self) -> list[int]:
        return [*self.blocks, *held([*chain.from_iterable(self.group_blocks)])]


def held(table: list[int]) -> list[int]:
    """Return the blocks of a table that have not been freed."""
    return table if NO_BLOCK not in table else [block for block in table if block != NO_BLOCK]


class BlockUse(NamedTuple):
    """The numbers of blocks: held, free and registered, and blank.

    free: the blank blocks; None without a limit.
    """

    used: int
    cached: int
    free: int | None


class IdleQueue:
    """Registered blocks without a holder, of one priority; the least recently freed first.

    A block that is shared from the middle stays in the queue, and is skipped at the front.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self._queue: deque[int] = deque()
        self._skips: dict[int, int] = {}  # block -> number of stale entries to skip

    def extend(self, blocks: Collection[int]) -> None:
        self._queue += blocks
        self.num_blocks += len(blocks)

    def take(self, most: int) -> list[int]:
        queue, num_blocks = self._queue, min(most, self.num_blocks)
        self.num_blocks -= num_blocks
        if not self._skips:
            return [*map(deque.popleft, repeat(queue, num_blocks))]
        blocks: list[int] = []
        while len(blocks) < num_blocks:
            block = queue.popleft()
            if not self._skip(block):
                blocks.append(block)
        return blocks

    def remove(self, block: int) -> None:
        self._skips[block] = self._skips.get(block, 0) + 1
        self.num_blocks -= 1
        if 2 * self.num_blocks < len(self._queue):
            self._queue = deque([entry for entry in self._queue if not self._skip(entry)])

    def _skip(self, block: int) -> bool:
        num_entries = self._skips.get(block, 0)
        if num_entries > 1:
            self._skips[block] = num_entries - 1
        elif num_entries:
            del self._skips[block]
        return num_entries > 0


class BlockPool:
    """A pool of `num_blocks` blocks, or of as many as are needed.

    num_total: blocks so far.  num_free: blocks without a holder.
    num_lost: registered blocks that have been evicted or dropped.
    nodes: [blocks made] the node of each block; NO_NODE: not registered.
    fillers: [blocks made] the sequence that filled each block, if it is registered and known.
    """

    def __init__(self, num_blocks: int | None, max_grown: int = 2**62) -> None:
        """Make a pool; with None it doubles when no blank block is left.

        max_grown: from this size on it evicts instead, and grows only if too few blocks are free.
        """
        self._is_growing, self._max_grown = num_blocks is None, max_grown
        self.num_total = self.num_free = num_blocks or 0
        self.num_lost = 0
        self._num_made = 0  # blocks that were ever used; the others are only counted
        self._blank: list[int] = []  # made, free and not registered; a stack
        self._idle = [IdleQueue() for _ in range(NUM_EVICTION_PRIORITIES)]
        self._found: dict[BlockKey, int] = {}
        # Nodes without keys behind them: None, or blocks registered without keys.
        self._behind: dict[Node, UnreadChain | None] = {}
        self._num_nodes = NO_NODE
        self.nodes: list[int] = []
        self.fillers: list[SequenceName | None] = []
        # [blocks made] holders; 0 for a free registered block, 1 for a free blank one
        self._holders: list[int] = []
        self._keys: dict[int, tuple[BlockKey, ...]] = {}  # of blocks with keys
        self._priorities: dict[int, int] = {}  # of blocks above priority 0

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
        """Return blocks for one holder; their content is undefined.

        Raises:
            InvariantError: there are not enough; call has_room first.
        """
        blank = self._blank
        if num_blocks > len(blank) and (
            self._num_made < self.num_total or self._is_growing or num_blocks > self.num_free
        ):
            self._make(num_blocks)
        self.num_free -= num_blocks
        split = len(blank) - num_blocks
        if split >= 0:
            blocks = blank[split:]
            del blank[split:]
            blocks.reverse()
            return blocks
        blocks = blank[::-1]
        blank.clear()
        for idle in self._idle:
            if idle.num_blocks:
                evicted = idle.take(num_blocks - len(blocks))
                self._evict(evicted)
                blocks += evicted
                if len(blocks) == num_blocks:
                    break
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to registered or held blocks."""
        holders = self._holders
        for block in blocks:
            if not holders[block]:
                self._idle[self._priorities.get(block, 0)].remove(block)
                self.num_free -= 1
            holders[block] += 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return the number of `blocks`, registered or held, without a holder."""
        return [*map(self._holders.__getitem__, blocks)].count(0)

    def is_shared(self, block: int) -> bool:
        return block != NO_BLOCK and self._holders[block] > 1

    def num_only_in(self, tables: Iterable[Sequence[int]], but: Collection[int]) -> int:
        """Return the number of blocks, except those in `but`, that only these tables hold."""
        counts = Counter(block for table in tables for block in table)
        return sum(
            block not in but and count == self._holders[block] for block, count in counts.items()
        )

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each of the blocks of a sequence, first to last.

        The last blocks are reused first.
        """
        holders, nodes, blank = self._holders, self.nodes, self._blank
        idle: list[int] = []
        num_kept = 0
        for block in reversed(blocks):
            if holders[block] > 1:
                holders[block] -= 1
                num_kept += 1
            elif nodes[block]:
                holders[block] = 0
                idle.append(block)
            else:
                blank.append(block)
        self.num_free += len(blocks) - num_kept
        if not self._priorities:
            self._idle[0].extend(idle)
        else:
            for block in idle:
                self._idle[self._priorities.get(block, 0)].extend((block,))

    # -- registered and found --------------------------------------------------------------------

    def find_all(
        self, node: Node, contents: Iterable[Hashable]
    ) -> tuple[list[int], Node, Hashable | None]:
        """Return the blocks after `node` with these contents, as far as they are cached.

        Also the node of the last one, and the first content that is not cached, if any.
        """
        found, nodes, behind, blocks = self._found, self.nodes, self._behind, list[int]()
        for content in contents:
            if unread := behind.get(node):
                self._make_keys(node, unread)
            block = found.get((node, content), NO_BLOCK)
            if block == NO_BLOCK:
                return blocks, node, content
            blocks.append(block)
            node = nodes[block]
        return blocks, node, None

    def find(self, node: Node, content: Hashable) -> int:
        chain = self._behind.get(node)
        if chain is not None:
            self._make_keys(node, chain)
        return self._found.get((node, content), NO_BLOCK)

    def nodes_of(self, blocks: Iterable[int]) -> list[int]:
        return [*map(self.nodes.__getitem__, blocks)]

    def num_same(self, match: PrefixMatch) -> int:
        """Return the number of leading blocks of a match that have not been evicted since."""
        if match.num_lost == self.num_lost:
            return len(match.nodes)
        nodes = self.nodes_of(match.blocks)
        return len(nodes) if nodes == match.nodes else [*map(eq, nodes, match.nodes)].index(False)

    def register(
        self,
        blocks: Sequence[int],
        node: Node,
        contents: Iterator[Hashable],
        priority: int = 0,
        filler: SequenceName | None = None,
        before: int = NO_BLOCK,
    ) -> Node:
        """Register held blocks after `node`, each under a key that has no block yet.

        Nothing follows a new node, so the next blocks need no keys yet.  Their keys are made at the
        first lookup behind that node; most are never made.

        contents: of these blocks, and perhaps of more; the caller must not read it afterwards.
        priority: of eviction.  filler: the sequence that fills the blocks.
        before: the previous block in the table of that sequence, if it still holds it.
        Returns the node of the last content.
        """
        nodes, fillers, found = self.nodes, self.fillers, self._found
        is_own = before != NO_BLOCK and nodes[before] == node
        needs_keys = any(map(nodes.__getitem__, blocks))
        for place, block in enumerate(blocks):
            key, behind = None, self._behind.get(node, KNOWN)
            if needs_keys or not is_own or behind is not None:
                if behind:
                    self._make_keys(node, behind)
                elif behind is None:
                    del self._behind[node]
                key = node, next(contents)
                if key in found:
                    node, is_own = nodes[found[key]], False
                    continue
                found[key], is_own = block, True
                self._keys[block] = (*self._keys.get(block, ()), key)
                if nodes[block]:
                    node = nodes[block]
                    if priority:
                        self._priorities[block] = max(self._priorities.get(block, 0), priority)
                    continue
            new = [block] if needs_keys else blocks[place:]
            last = first = self._num_nodes + 1
            for last, one in enumerate(new, first):
                nodes[one], fillers[one] = last, filler
            self._num_nodes, self._behind[last] = last, None
            if key is None:
                self._behind[node] = new, first, contents
            elif last > first:
                self._behind[first] = new[1:], first + 1, contents
            if priority:
                self._priorities |= dict.fromkeys(new, priority)
            if not needs_keys:
                return last
            node = last
        return node

    def _make_keys(self, node: Node, chain: UnreadChain) -> None:
        """Make the keys of blocks that one sequence registered behind `node`."""
        del self._behind[node]
        blocks, first, contents = chain
        for number, (block, content) in enumerate(zip(blocks, contents), first):  # noqa: B905 - contents may go on
            if self.nodes[block] != number:
                break  # nothing is found behind an evicted block
            key = node, content
            self._keys[block] = (*self._keys.get(block, ()), key)
            self._found[key], node = block, number

    def register_beside(self, block: int, neighbour: int, group: int) -> None:
        """Register a held block of another cache group under a registered block."""
        if not self.nodes[block]:
            priority = self._priorities.get(neighbour, 0)
            self.register([block], self.nodes[neighbour], iter([group]), priority)

    def lose(self, block: int) -> None:
        """Drop a block from the cache, held or not, because its content is not as registered."""
        if self.nodes[block]:
            self.share([block])
            self._evict([block])
            self.give_back([block])

    def _evict(self, blocks: list[int]) -> None:
        nodes, holders, behind, keys = self.nodes, self._holders, self._behind, self._keys
        for block in blocks:
            node = nodes[block]
            nodes[block], holders[block] = NO_NODE, holders[block] or 1
            if node in behind:
                del behind[node]
            if block in keys:
                for key in keys.pop(block):
                    del self._found[key]
        self.num_lost += len(blocks)
        for block in self._priorities.keys() & blocks if self._priorities else ():
            del self._priorities[block]

    # -- all of them -----------------------------------------------------------------------------

    def _make(self, num_blocks: int) -> None:
        """Make blank blocks until there are `num_blocks`, up to the limit.

        They are used after the other blank blocks, in order.
        """
        if num_blocks > self.num_free and not self._is_growing:
            raise InvariantError(f"{num_blocks} blocks are taken where {self.num_free} are free")
        if self._is_growing and (self.num_total < self._max_grown or num_blocks > self.num_free):
            num_more = max(num_blocks, self.num_total)
            self.num_total += num_more
            self.num_free += num_more
        first = self._num_made
        if first == self.num_total:
            return
        num_wanted = max(num_blocks - len(self._blank), first)
        self._num_made = stop = min(first + num_wanted, self.num_total)
        self._blank[:0] = range(stop - 1, first - 1, -1)
        num_new = stop - first
        self.nodes += [NO_NODE] * num_new
        self.fillers += [None] * num_new
        self._holders += [1] * num_new

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Check that every block is either free or held by exactly the `tables` that name it.

        Raises:
            InvariantError: a block is lost, held twice, or both free and held.
        """
        holders = Counter(block for table in tables for block in table)
        idle = [block for block, count in enumerate(self._holders) if not count]
        free = [*self._blank, *idle]
        if sorted([*free, *holders]) != [*range(self._num_made)]:
            raise InvariantError("a block is lost, free twice, or free and held")
        num_idle = sum(queue.num_blocks for queue in self._idle)
        num_free = len(free) + self.num_total - self._num_made
        if (num_idle, num_free) != (len(idle), self.num_free):
            raise InvariantError(
                f"found {num_free} free blocks, {len(idle)} of them registered; "
                f"{self.num_free} and {num_idle} are counted"
            )
        for block, count in holders.items():
            if count != self._holders[block]:
                raise InvariantError(
                    f"block {block} has {count} holders, not {self._holders[block]}"
                )


class CountedPool(BlockPool):
    """A pool for sequences that share no blocks: it only counts, and all blocks are number 0."""

    def take(self, num_blocks: int) -> list[int]:
        self.num_free -= num_blocks
        return [0] * num_blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        self.num_free += len(blocks)

    def is_shared(self, block: int) -> bool:  # noqa: ARG002
        return False
