"""The blocks of the KV cache: which are held, which are free, and what the free ones still hold.

A block whose content is known by a key can be found again until it is taken for something else.
The order in which free blocks are taken is vLLM's: first those that hold nothing worth finding,
last freed first; then those that can be found, the least recently used first.  Typed content goes
later: rank by rank.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
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
        "_idle",
        "_is_growing",
        "_keys",
        "_more_keys",
        "_nodes",
        "_ranks",
        "_rests",
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
        # By block: the key it is found by and its node, if it is; further keys, if it has any.
        self._keys: list[Key | None] = [None] * self.num_total
        self._nodes = [NO_NODE] * self.num_total
        self._ranks = [0] * self.num_total
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
        if not self.found:
            self._blank += freed
            return
        idle = [block for block in freed if nodes[block] != NO_NODE]
        if len(idle) != len(freed):
            self._blank += [block for block in freed if nodes[block] == NO_NODE]
        for block in idle:
            rests[block] = 1
        for rank, alike in groupby(idle, self._ranks.__getitem__):
            self._idle[rank].extend(alike)

    def name(
        self, blocks: Iterable[int], node: Node, contents: Iterable[Hashable], rank: int = 0
    ) -> Node:
        """Let held blocks be found, each by a key for which no other is, as a chain from `node` on.

        Returns the node of the last key.
        """
        nodes, keys, find = self._nodes, self._keys, self.found.setdefault
        num_named = self.num_named
        for block, content in zip(blocks, contents, strict=True):
            key = node, content
            holder = find(key, block)
            if holder != block:
                node = nodes[holder]
            elif nodes[block] == NO_NODE:
                num_named += 1
                node = nodes[block] = num_named
                keys[block] = key
                if rank:
                    self._ranks[block] = rank
            else:
                node = nodes[block]
                self._name_again(block, key, rank)
        self.num_named = num_named
        return node

    def follow(self, prefix: Prefix, root: Node, contents: Iterable[Hashable]) -> None:
        """Let `prefix` hold what can be found of the chain from `root` that goes on by `contents`.

        contents: of what comes after the blocks that `prefix` has; as far as they can be found.
        """
        found, nodes = self.found, self._nodes
        node = prefix.nodes[-1] if prefix.nodes else root
        for content in contents:
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
        key = self._keys[block]
        if key is not None:
            self.num_lost += 1
            del self.found[key]
            for other in self._more_keys.pop(block, ()) if self._more_keys else ():
                del self.found[other]
            self._keys[block] = None
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
        self._keys += [None] * num_more
        self._nodes += [NO_NODE] * num_more
        self._ranks += [0] * num_more
        self._rests += bytes(num_more)

    def _evict(self, num_blocks: int, evicted: list[int]) -> None:
        """Add to `evicted` the free blocks that are worth the least, and forget what they hold."""
        keys, nodes, rests, found = self._keys, self._nodes, self._rests, self.found
        for rank, idle in enumerate(self._idle):
            num_taken = min(num_blocks, len(idle))
            blocks = idle.take(num_taken)
            evicted += blocks
            self.num_lost += num_taken
            for block in blocks:  # as in `forget`
                del found[keys[block]]  # type: ignore[arg-type]  # what is idle has a key
                keys[block], nodes[block], rests[block] = None, NO_NODE, 0
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
        if key != self._keys[block] and key not in self._more_keys.get(block, ()):
            self._more_keys.setdefault(block, []).append(key)
            self._ranks[block] = max(self._ranks[block], rank)

    def _let_go(self, block: int) -> None:
        """Take one holder from a block that has several."""
        num_others = self._extra_holders[block] - 1
        if num_others:
            self._extra_holders[block] = num_others
        else:
            del self._extra_holders[block]
