"""Blocks in one list of free ones, searched anew for everything."""


class SlowPool:
    """One list of free blocks; the first is taken, unless another one is worth less.

    keys: block -> what it can be found by, priorities: how long that is worth keeping,
    hashes: a number that no other block ever had, for the keys of what follows,
    fillers: who let it be found first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.holders = [0] * num_blocks
        self.keys: dict[int, list[object]] = {}
        self.priorities: dict[int, int] = {}
        self.hashes: dict[int, int] = {}
        self.fillers: dict[int, object] = {}
        self.num_hashes = 0

    def find(self, key: object) -> int | None:
        return next((block for block, keys in self.keys.items() if key in keys), None)

    def take(self) -> int:
        block = min(self.free, key=self._worth)
        self.free.remove(block)
        self.forget(block)
        self.holders[block] = 1
        return block

    def _worth(self, block: int) -> int:
        return 1 + self.priorities.get(block, 0) if block in self.keys else 0

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

    def cache(self, block: int, key: object, priority: int = 0, filler: object = None) -> int:
        holder = self.find(key)
        if holder is not None:
            return self.hashes[holder]
        self.keys.setdefault(block, []).append(key)
        self.fillers.setdefault(block, filler)
        self.priorities[block] = max(priority, self.priorities.get(block, 0))
        if block not in self.hashes:
            self.num_hashes += 1
            self.hashes[block] = self.num_hashes
        return self.hashes[block]

    def forget(self, block: int) -> None:
        self.keys.pop(block, None)
        self.priorities.pop(block, None)
        self.hashes.pop(block, None)
        self.fillers.pop(block, None)
