"""Blocks in one list of free ones, searched anew for everything."""


class SlowPool:
    """One list of free blocks; the first is taken, unless another one is worth less.

    keys: block -> what it can be found by, ranks: how long that is worth keeping, nodes: a number
    that no other block ever had, for the keys of what follows.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.holders = [0] * num_blocks
        self.keys: dict[int, list[object]] = {}
        self.ranks: dict[int, int] = {}
        self.nodes: dict[int, int] = {}
        self.num_named = 0

    def find(self, key: object) -> int | None:
        return next((block for block, keys in self.keys.items() if key in keys), None)

    def take(self) -> int:
        block = min(self.free, key=self._worth)
        self.free.remove(block)
        self.forget(block)
        self.holders[block] = 1
        return block

    def _worth(self, block: int) -> int:
        return 1 + self.ranks.get(block, 0) if block in self.keys else 0

    def share(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        self.holders[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.keys:
                    self.free.append(block)
                else:
                    self.free.insert(0, block)

    def name(self, block: int, key: object, rank: int = 0) -> int:
        holder = self.find(key)
        if holder is not None:
            return self.nodes[holder]
        self.keys.setdefault(block, []).append(key)
        self.ranks[block] = max(rank, self.ranks.get(block, 0))
        if block not in self.nodes:
            self.num_named += 1
            self.nodes[block] = self.num_named
        return self.nodes[block]

    def forget(self, block: int) -> None:
        self.keys.pop(block, None)
        self.ranks.pop(block, None)
        self.nodes.pop(block, None)
