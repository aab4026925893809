"""The blocks of the KV cache: which are held, which are free, and what the free ones still hold.

A block whose content is known by a key can be found again until it is taken for something else.
Of blocks that are named as a chain nobody looks for one before the one ahead of it is found, so its
key is made only then: most are never made.
The order in which free blocks are taken is vLLM's: first those that hold nothing worth finding,
last freed first; then those that can be found, the least recently used first.  Typed content goes
later: rank by rank.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import eq
from typing import NamedTuple

from msgspec import Struct

from batcher.errors import InvariantError
from batcher.scheduling.idle_blocks import IdleBlocks

NUM_RANKS = 4  # nothing special or assistant, user, system, pinned
NO_NODE = -1
ROOT = 0  # the parent of the first block of a sequence without a salt

Node = int | str
Key = tuple[Node, Hashable]
"""Parent node and content: equal keys have equal tokens all the way back to the first."""


class Prefix(Struct, gc=False):
    """Blocks in which the first tokens of a sequence were found, and the node of each.

    num_lost: how many had been lost by then, see BlockPool.
    """

    blocks: list[int] = []
    nodes: list[int] = []
    num_lost: int = 0


class _Chain(NamedTuple):
    """Blocks that were named as a chain, of which some have no keys yet.

    first: the node of the first of them; those after it have the numbers that follow.
    contents: of those that have no keys.
    """

    first: int
    blocks: Sequence[int]
    contents: Iterator[Hashable]


class BlockUse(NamedTuple):
    """How many blocks are held, how many nobody holds that can be found, and how many are empty."""

    used: int
    cached: int
    free: int


class BlockPool:
    """`num_blocks` blocks, or as many as are asked for.

    num_total: how many there are so far.  num_free: how many nobody holds.
    num_named: how often one could be found that could not before.  num_lost: how often one could no
    longer be.
    """

    __slots__ = (
        "_blank",
        "_extra_holders",
        "_has_ranks",
        "_idle",
        "_is_growing",
        "_keys",
        "_more_keys",
        "_nodes",
        "_ranks",
        "_rests",
        "_unmade",
        "found",
        "num_free",
        "num_lost",
        "num_named",
        "num_total",
    )

    def __init__(self, num_blocks: int | None) -> None:
        self._is_growing = num_blocks is None
        self.num_total = self.num_free = num_blocks or 0
        self.num_lost = 0
        self.found: dict[Key, int] = {}  # what can be found, and in which block
        self._blank = list(range(self.num_total - 1, -1, -1))  # free, and holding nothing; a stack
        self._idle = [IdleBlocks() for _ in range(NUM_RANKS)]
        self._extra_holders: dict[int, int] = {}  # of blocks that more than one sequence holds
        self._unmade: dict[int, _Chain] = {}  # by the node before the first block without a key
        # By block: its node, if it is named, and its key, if that is made; further keys, if any.
        self._keys: dict[int, Key] = {}
        self._nodes = array("q", [NO_NODE]) * self.num_total
        self._ranks, self._has_ranks = [0] * self.num_total, False
        self._rests = bytearray(self.num_total)  # 1: it is idle
        self._more_keys: dict[int, list[Key]] = {}
        self.num_named = ROOT

    @property
    def num_used(self) -> int:
        """How many blocks are held."""
        return self.num_total - self.num_free

    @property
    def use(self) -> BlockUse:
        """What the blocks there are so far are used for."""
        num_blank = len(self._blank)
        return BlockUse(self.num_used, self.num_free - num_blank, num_blank)

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks can be taken."""
        return self._is_growing or num_blocks <= self.num_free

    def take(self, num_blocks: int) -> list[int]:
        """Return blocks for one holder, whatever they held before.

        Raises:
            InvariantError: there are not so many; ask has_room first.
        """
        if num_blocks > (len(self._blank) if self._is_growing else self.num_free):
            self._grow(num_blocks)
        self.num_free -= num_blocks
        blank = self._blank
        if num_blocks == 1 and blank:
            return [blank.pop()]
        if num_blocks <= len(blank):
            first = len(blank) - num_blocks
            blocks = blank[: first - 1 if first else None : -1]
            del blank[first:]
            return blocks
        blocks = blank[::-1]
        blank.clear()
        self._evict(num_blocks - len(blocks), blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Give blocks that can be found, or that another holds, one more holder."""
        extra, rests = self._extra_holders, self._rests
        for block in blocks:
            if rests[block]:
                rests[block] = 0
                self._idle[self._ranks[block]].remove(block)
                self.num_free -= 1
            else:
                extra[block] = extra.get(block, 0) + 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks`, each of which can be found or is held, nobody holds."""
        return sum(map(self._rests.__getitem__, blocks))

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds `block`."""
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
        extra, nodes, rests = self._extra_holders, self._nodes, self._rests
        freed = blocks[::-1]
        if extra and not extra.keys().isdisjoint(freed):
            shared = [block for block in freed if block in extra]
            freed = [block for block in freed if block not in extra]
            for block in shared:
                self._let_go(block)
        self.num_free += len(freed)
        if self.num_named == ROOT:
            self._blank += freed
            return
        idle = [block for block in freed if nodes[block] != NO_NODE]
        if len(idle) != len(freed):
            self._blank += [block for block in freed if nodes[block] == NO_NODE]
        for block in idle:
            rests[block] = 1
        if self._has_ranks:
            for rank, alike in groupby(idle, self._ranks.__getitem__):
                self._idle[rank].extend(alike)
        else:
            self._idle[0].extend(idle)

    def name(
        self, blocks: Sequence[int], node: Node, contents: Iterable[Hashable], rank: int = 0
    ) -> Node:
        """Let held blocks be found, each by a key for which no other is, as a chain from `node` on.

        contents: may be asked for later than now, or never.
        Returns the node of the last key.
        """
        nodes, keys, find = self._nodes, self._keys, self.found.setdefault
        unread = iter(contents)
        for place, block in enumerate(blocks):
            if node in self._unmade:
                self._make_key(node)
            key = node, next(unread)
            holder = find(key, block)
            if holder != block:
                node = nodes[holder]
            elif nodes[block] != NO_NODE:
                node = nodes[block]
                self._name_again(block, key, rank)
            else:
                keys[block] = key
                chain = blocks[place:]
                if max(map(nodes.__getitem__, chain)) == NO_NODE:
                    return self._name_new(chain, unread, rank)
                node = self._name_new([block], unread, rank)
        return node

    def _name_new(self, chain: Sequence[int], contents: Iterator[Hashable], rank: int) -> int:
        """Give nodes to blocks that have none, of which the first has its key; return the last."""
        nodes, first = self._nodes, self.num_named + 1
        for node, block in enumerate(chain, first):
            nodes[block] = node
        if len(chain) > 1:
            self._unmade[first] = _Chain(first, chain, contents)
        if rank:
            self._has_ranks = True
            for block in chain:
                self._ranks[block] = rank
        self.num_named += len(chain)
        return self.num_named

    def _make_key(self, node: int) -> None:
        """Make the key of the block after `node` in its chain, if it still holds what it did."""
        chain, child = self._unmade.pop(node), node + 1
        place = child - chain.first
        block = chain.blocks[place]
        if self._nodes[block] != child:
            return  # and nobody gets past it
        key = node, next(chain.contents)
        self.found[key], self._keys[block] = block, key
        if place + 1 < len(chain.blocks):
            self._unmade[child] = chain

    def follow(self, prefix: Prefix, root: Node, contents: Iterable[Hashable]) -> None:
        """Let `prefix` hold what can be found of the chain from `root` that goes on by `contents`.

        contents: of what comes after the blocks that `prefix` has; as far as they can be found.
        """
        found, nodes, unmade = self.found, self._nodes, self._unmade
        node = prefix.nodes[-1] if prefix.nodes else root
        for content in contents:
            if node in unmade:
                self._make_key(node)
            block = found.get((node, content))
            if block is None:
                break
            node = nodes[block]
            prefix.blocks.append(block)
            prefix.nodes.append(node)

    def cut(self, prefix: Prefix) -> None:
        """Leave in `prefix` only what can still be found of it."""
        if prefix.num_lost == self.num_lost:
            return
        prefix.num_lost = self.num_lost
        nodes = [*map(self._nodes.__getitem__, prefix.blocks)]  # each is given only once
        if nodes != prefix.nodes:
            first = [*map(eq, nodes, prefix.nodes)].index(False)
            del prefix.blocks[first:], prefix.nodes[first:]

    def forget(self, block: int) -> None:
        """Let a held block be found no longer: it does not hold what was promised."""
        if self._nodes[block] != NO_NODE:
            self.num_lost += 1
            if block in self._keys:
                del self.found[self._keys.pop(block)]
                self._unmade.pop(self._nodes[block], None)
            for other in self._more_keys.pop(block, ()) if self._more_keys else ():
                del self.found[other]
            self._nodes[block] = NO_NODE
            self._ranks[block] = 0

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Make sure that every block is free or held, by exactly those whose `tables` name it.

        Raises:
            InvariantError: one is lost, held twice, or free and held.
        """
        holders: dict[int, int] = {}
        for table in tables:
            for block in table:
                holders[block] = holders.get(block, 0) + 1
        idle = [block for queue in self._idle for block in queue]
        free = {*self._blank, *idle}
        if len(free) != len(self._blank) + len(idle):
            raise InvariantError("a block is free twice")
        if len(free) != self.num_free or len(free) + len(holders) != self.num_total:
            raise InvariantError(
                f"{len(holders)} blocks held and {len(free)} free, of {self.num_total}; "
                f"{self.num_free} are counted as free"
            )
        if free & holders.keys():
            raise InvariantError(f"blocks {sorted(free & holders.keys())} are free and held")
        for block, count in holders.items():
            if count != 1 + self._extra_holders.get(block, 0):
                raise InvariantError(f"block {block} has {count} holders, and counts others")
        if self._extra_holders.keys() - holders.keys():
            raise InvariantError("a block that nobody holds has holders")

    def _grow(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks to be taken.

        Raises:
            InvariantError: the pool is not one that grows.
        """
        if not self._is_growing:
            raise InvariantError(f"{num_blocks} blocks are taken where {self.num_free} are free")
        num_more = max(num_blocks, self.num_total)
        new = range(self.num_total + num_more - 1, self.num_total - 1, -1)
        self._blank[:0] = new  # after those there were, as if they had been there
        self.num_total += num_more
        self.num_free += num_more
        self._nodes += array("q", [NO_NODE]) * num_more
        self._ranks += [0] * num_more
        self._rests += bytes(num_more)

    def _evict(self, num_blocks: int, evicted: list[int]) -> None:
        """Add to `evicted` the free blocks that are worth the least, and forget what they hold."""
        keys, nodes, rests = self._keys, self._nodes, self._rests
        found, unmade = self.found, self._unmade
        for rank, idle in enumerate(self._idle):
            num_taken = min(num_blocks, len(idle))
            blocks = idle.take(num_taken)
            evicted += blocks
            self.num_lost += num_taken
            for block in keys.keys() & blocks:  # as in `forget`
                del found[keys.pop(block)]
                unmade.pop(nodes[block], None)
            for block in blocks:
                nodes[block] = NO_NODE
                rests[block] = 0
            if rank:
                for block in blocks:
                    self._ranks[block] = 0
            if self._more_keys:
                for block in self._more_keys.keys() & blocks:
                    for key in self._more_keys.pop(block):
                        del found[key]
            num_blocks -= num_taken
            if not num_blocks:
                return
        raise InvariantError("there is no free block")

    def _name_again(self, block: int, key: Key, rank: int) -> None:
        """Take note of a key of a block that can be found already, by another key or by this."""
        if key != self._keys.get(block) and key not in self._more_keys.get(block, ()):
            self._more_keys.setdefault(block, []).append(key)
            self._ranks[block] = max(self._ranks[block], rank)
            self._has_ranks |= rank > 0

    def _let_go(self, block: int) -> None:
        """Take one holder from a block that has several."""
        num_others = self._extra_holders[block] - 1
        if num_others:
            self._extra_holders[block] = num_others
        else:
            del self._extra_holders[block]
