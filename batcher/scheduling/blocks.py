"""The pool of KV blocks: which are held, which are free, and what the free ones still hold.

A full block is registered: a dictionary maps (node of the block before it, its content) to the
block.  A node is the number under which a block was registered, and is never used again.  So equal
keys have equal tokens all the way back to the first, and nothing is found behind an evicted block.

Free blocks are taken in vLLM's order: first blank ones, last freed first; then registered ones, the
least recently freed first.  Typed content goes later: priority by priority.
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
KNOWN = ()  # there may be keys that begin with a node
ROOT = -1  # the node before the first block of a sequence without a salt

Node = int | str
"""The number of a registered block, or a salt, which is before the first block of its sequences."""

BlockKey = tuple[Node, Hashable]

UnreadChain = tuple[Sequence[int], int, Iterator[Hashable]]
"""Blocks on end, the node of the first, from which the others count up, and their contents."""

NUM_EVICTION_PRIORITIES = 4  # nothing special or assistant, user, system, pinned

SegmentEnds = tuple[tuple[int, int], ...]
"""Where segments of a prompt end, each with the eviction priority of its blocks."""

_end_of = itemgetter(0)


def ends_between(ends: SegmentEnds, start: int, stop: int) -> SegmentEnds:
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


class PrefixMatch(Struct, gc=False):
    """What is found of a sequence, which starts from there.

    blocks: held by others or idle.  num_tokens: how many of its tokens are in blocks.
    num_planned: how many of the tokens behind these the step computes that admits it.
    stop: how many tokens it is to hold when it is admitted: all that are known, or fewer.
    node: of what is before the next block.
    missed: the next content, if it was looked for and not found.  contents: of this and all further
    full blocks; None if they have to be asked for.
    nodes, num_lost: of the blocks and of the pool when they were found, if that is remembered.
    source: a block with the last of these tokens and others behind them, to be copied; or NO_BLOCK.
    group_blocks: what the further cache groups have beside `blocks`; NO_BLOCK if nothing is read.
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
    """Return the blocks of a table, or of a part of one, that have not been freed."""
    return table if NO_BLOCK not in table else [block for block in table if block != NO_BLOCK]


class BlockUse(NamedTuple):
    """How many blocks are held, how many are free and registered, and how many are blank.

    free: the blank ones; None without a limit.
    """

    used: int
    cached: int
    free: int | None


class IdleQueue:
    """Registered blocks that nobody holds, of one priority; the least recently freed come first.

    A block that is shared from the middle stays in the queue, and is skipped when its turn comes.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self._queue: deque[int] = deque()
        self._skips: dict[int, int] = {}  # block -> how many of its entries, the first, are skipped

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
    """`num_blocks` blocks, or as many as are asked for.

    num_total: how many there are so far.  num_free: how many nobody holds.
    num_lost: how many registered blocks have been evicted or forgotten.
    nodes: [blocks made] the node of each; NO_NODE: not registered.
    fillers: [blocks made] the sequence that filled each, if it is registered and that was told.
    """

    def __init__(self, num_blocks: int | None, max_grown: int = 2**62) -> None:
        """Make a pool; with None it doubles whenever no blank block is left.

        max_grown: from this size on it evicts, and grows only if too few blocks are free.
        """
        self._is_growing, self._max_grown = num_blocks is None, max_grown
        self.num_total = self.num_free = num_blocks or 0
        self.num_lost = 0
        self._num_made = 0  # blocks that were ever wanted: the others are blank, and only counted
        self._blank: list[int] = []  # made, free, and not registered; a stack
        self._idle = [IdleQueue() for _ in range(NUM_EVICTION_PRIORITIES)]
        self._found: dict[BlockKey, int] = {}
        # The nodes that no key begins with: None, or what is registered behind it without keys.
        self._behind: dict[Node, UnreadChain | None] = {}
        self._num_nodes = NO_NODE
        self.nodes: list[int] = []
        self.fillers: list[SequenceName | None] = []
        # [blocks made] how many hold each; 0 where a registered one is free, 1 where a blank one is
        self._holders: list[int] = []
        self._keys: dict[int, tuple[BlockKey, ...]] = {}  # of the blocks that have some
        self._priorities: dict[int, int] = {}  # of those above 0

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
        """Give blocks that are registered, or held, one more holder."""
        holders = self._holders
        for block in blocks:
            if not holders[block]:
                self._idle[self._priorities.get(block, 0)].remove(block)
                self.num_free -= 1
            holders[block] += 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks`, each of which is registered or held, nobody holds."""
        return [*map(self._holders.__getitem__, blocks)].count(0)

    def is_shared(self, block: int) -> bool:
        return block != NO_BLOCK and self._holders[block] > 1

    def num_only_in(self, tables: Iterable[Sequence[int]], but: Collection[int]) -> int:
        """Return how many blocks only these tables hold, not counting some."""
        counts = Counter(block for table in tables for block in table)
        return sum(
            block not in but and count == self._holders[block] for block, count in counts.items()
        )

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of `blocks`: a sequence's, first to last.

        The last of them are the first to be taken again.
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
        """Return the blocks on end behind `node` with these contents, as far as they are found.

        And the node of the last of them, and the first content that is not found, if there is one.
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
        """Return how many blocks of a match, from the first on, have not been evicted since."""
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
        """Let held blocks be found behind `node`, each by a key for which no other block is found.

        Nothing is behind a new node, so blocks that follow it need no keys yet: these are made when
        somebody looks behind that node, and most never are.

        contents: of these blocks, and perhaps of more; not to be read by others afterwards.
        priority: of eviction.  filler: the sequence that fills them.
        before: the block before them in the table of that sequence, if it holds this as long.
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
        """Let blocks be found that one sequence registered behind `node`."""
        del self._behind[node]
        blocks, first, contents = chain
        for number, (block, content) in enumerate(zip(blocks, contents), first):  # noqa: B905 - contents may go on
            if self.nodes[block] != number:
                break  # nothing is found behind an evicted block
            key = node, content
            self._keys[block] = (*self._keys.get(block, ()), key)
            self._found[key], node = block, number

    def register_beside(self, block: int, neighbour: int, group: int) -> None:
        """Let a held block be found as what another cache group has beside a registered block."""
        if not self.nodes[block]:
            priority = self._priorities.get(neighbour, 0)
            self.register([block], self.nodes[neighbour], iter([group]), priority)

    def lose(self, block: int) -> None:
        """Let a block be found no longer, whether it is held or not: it lacks what was promised."""
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
        """Make blank blocks so that `num_blocks` are, as far as there can be more; or some more.

        They are taken after the other blank ones, in order.
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
        """Make sure that every block is free or held, by exactly those whose `tables` name it.

        Raises:
            InvariantError: one is lost, held twice, or free and held.
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
                f"{num_free} blocks are free, {len(idle)} of them registered; "
                f"{self.num_free} and {num_idle} are counted"
            )
        for block, count in holders.items():
            if count != self._holders[block]:
                raise InvariantError(
                    f"block {block} has {count} holders, not {self._holders[block]}"
                )


class CountedPool(BlockPool):
    """Blocks of sequences that share none: they are only counted, and all are called 0."""

    def take(self, num_blocks: int) -> list[int]:
        self.num_free -= num_blocks
        return [0] * num_blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        self.num_free += len(blocks)

    def is_shared(self, block: int) -> bool:  # noqa: ARG002
        return False
