"""The blocks of the KV cache: which are held, which are free, and what the free ones still hold.

A block whose content is known by a key can be found again until it is taken for something else.
The order in which free blocks are taken is vLLM's: first those that hold nothing worth finding,
last freed first; then those that can be found, the least recently used first.  Typed content goes
later: rank by rank.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from batcher.errors import InvariantError

NUM_RANKS = 4  # nothing special or assistant, user, system, pinned
NO_NODE = -1
ROOT = 0  # the parent of the first block of a sequence without a salt

Node = int | str
Key = tuple[Node, Hashable]
"""Parent node and content: equal keys have equal tokens all the way back to the first."""


class BlockPool:
    """`num_blocks` blocks, or as many as are asked for.

    num_total: how many there are so far.  num_free: how many nobody holds.
    num_named: how often one could be found that could not before.  num_evicted: how often one that
    could be found was taken.
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
        "found",
        "num_evicted",
        "num_free",
        "num_named",
        "num_total",
    )

    def __init__(self, num_blocks: int | None) -> None:
        self._is_growing = num_blocks is None
        self.num_total = self.num_free = num_blocks or 0
        self.num_evicted = 0
        self.found: dict[Key, int] = {}  # what can be found, and in which block
        self._blank = list(range(self.num_total - 1, -1, -1))  # free, and holding nothing; a stack
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NUM_RANKS)]
        self._extra_holders: dict[int, int] = {}  # of blocks that more than one sequence holds
        # By block: the key it is found by and its node, if it is; further keys, if it has any.
        self._keys: list[Key | None] = [None] * self.num_total
        self._nodes = [NO_NODE] * self.num_total
        self._ranks = [0] * self.num_total
        self._more_keys: dict[int, list[Key]] = {}
        self.num_named = ROOT

    @property
    def num_used(self) -> int:
        """How many blocks are held."""
        return self.num_total - self.num_free

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

    def share(self, block: int) -> None:
        """Give a block that can be found, or that another holds, one more holder."""
        idle = self._idle[self._ranks[block]]
        if block in idle:
            del idle[block]
            self.num_free -= 1
        else:
            self._extra_holders[block] = self._extra_holders.get(block, 0) + 1

    def is_idle(self, block: int) -> bool:
        """Whether a block that can be found is held by nobody."""
        return block in self._idle[self._ranks[block]]

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds `block`."""
        return block in self._extra_holders

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of `blocks`: a sequence's, first to last.

        The last of them are the first to be taken again.
        """
        extra, nodes, ranks, idle = self._extra_holders, self._nodes, self._ranks, self._idle
        if not extra and not self.found:
            self._blank += blocks[::-1]
            self.num_free += len(blocks)
            return
        for block in reversed(blocks):
            if block in extra:
                self._let_go(block)
                continue
            self.num_free += 1
            if nodes[block] == NO_NODE:
                self._blank.append(block)
            else:
                idle[ranks[block]][block] = None

    def name(self, block: int, key: Key, rank: int = 0) -> int:
        """Let a held block be found by `key`, if no other is; return the node of the key."""
        holder = self.found.get(key)
        if holder is not None:
            return self._nodes[holder]
        self.found[key] = block
        if self._nodes[block] == NO_NODE:
            self.num_named += 1
            self._nodes[block], self._keys[block] = self.num_named, key
        else:
            self._more_keys.setdefault(block, []).append(key)
        self._ranks[block] = max(self._ranks[block], rank)
        return self._nodes[block]

    def name_all(self, blocks: Iterable[int], node: Node, contents: Iterable[Hashable]) -> Node:
        """Do what `name` does with the blocks of a chain that goes on from `node`.

        Returns the node of the last one.
        """
        found, nodes, keys = self.found, self._nodes, self._keys
        for block, content in zip(blocks, contents, strict=True):
            key = node, content
            holder = found.get(key)
            if holder is not None:
                node = nodes[holder]
                continue
            found[key] = block
            if nodes[block] == NO_NODE:
                self.num_named += 1
                node = nodes[block] = self.num_named
                keys[block] = key
            else:  # it could be found in part
                self._more_keys.setdefault(block, []).append(key)
                node = nodes[block]
        return node

    def forget(self, block: int) -> None:
        """Let a held block be found no longer: it does not hold what was promised."""
        key = self._keys[block]
        if key is not None:
            del self.found[key]
            for other in self._more_keys.pop(block, ()) if self._more_keys else ():
                del self.found[other]
            self._keys[block] = None
            self._nodes[block] = NO_NODE
            self._ranks[block] = 0

    def node_of(self, block: int) -> int:
        """Return the node of a block that can be found: the parent in the keys of what follows."""
        return self._nodes[block]

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

    def _evict(self, num_blocks: int, evicted: list[int]) -> None:
        """Add to `evicted` the free blocks that are worth the least, and forget what they hold."""
        keys, nodes, found = self._keys, self._nodes, self.found
        self.num_evicted += num_blocks
        for rank, idle in enumerate(self._idle):
            is_usual = not (rank or self._more_keys)
            for _ in range(min(num_blocks, len(idle))):
                block, _ = idle.popitem(last=False)
                evicted.append(block)
                if is_usual:  # as in `forget`
                    del found[keys[block]]  # type: ignore[arg-type]  # what is idle has a key
                    keys[block], nodes[block] = None, NO_NODE
                else:
                    self.forget(block)
                num_blocks -= 1
            if not num_blocks:
                return
        raise InvariantError("there is no free block")

    def _let_go(self, block: int) -> None:
        """Take one holder from a block that has several."""
        num_others = self._extra_holders[block] - 1
        if num_others:
            self._extra_holders[block] = num_others
        else:
            del self._extra_holders[block]
