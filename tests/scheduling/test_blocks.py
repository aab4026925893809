"""Blocks are taken, shared, found and forgotten as in a plain list of free ones."""

import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_pool import SlowPool

from batcher.errors import InvariantError
from batcher.events import SequenceName
from batcher.scheduling.blocks import NO_BLOCK, NO_NODE, NUM_EVICTION_PRIORITIES, ROOT, BlockPool

NUM_BLOCKS = 7


class Pools(RuleBasedStateMachine):
    """Does the same to both pools; `tables` are those of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.slow = BlockPool(NUM_BLOCKS), SlowPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.hashes: dict[int, object] = {ROOT: ROOT}  # slow: fast
        self.num_fillers = 0

    def new_filler(self) -> SequenceName:
        self.num_fillers += 1
        return SequenceName("filler", self.num_fillers)

    @rule(num_blocks=st.integers(1, 4))
    def take(self, num_blocks: int) -> None:
        if not self.pool.has_room(num_blocks):
            assert num_blocks > len(self.slow.free)
            with pytest.raises(InvariantError, match="are taken where"):
                self.pool.take(num_blocks)
            return
        expected = [self.slow.take() for _ in range(num_blocks)]
        blocks = self.pool.take(num_blocks)
        assert blocks == expected, "not those that are worth the least"
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.give_back(table)
        self.slow.give_back(table)

    @precondition(lambda self: self.tables)
    @rule(
        data=st.data(), content=st.integers(0, 9), rank=st.integers(0, NUM_EVICTION_PRIORITIES - 1)
    )
    def cache(self, data: st.DataObject, content: int, rank: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        filler = self.new_filler()
        found = self.pool.register([block], ROOT, iter([content]), rank, filler)
        self.hashes[self.slow.cache(block, (ROOT, content), rank, filler)] = found

    @precondition(lambda self: self.tables)
    @rule(
        data=st.data(),
        contents=st.lists(st.integers(10, 12), max_size=4),
        rank=st.integers(0, NUM_EVICTION_PRIORITIES - 1),
    )
    def cache_a_chain(self, data: st.DataObject, contents: list[int], rank: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        num_blocks = min(len(contents), len(table))
        num_first = data.draw(st.integers(0, num_blocks))
        filler = self.new_filler()
        node = self.pool.register(table[:num_first], ROOT, iter(contents), rank, filler)
        seen = ROOT
        for content in contents[: data.draw(st.integers(0, num_first))]:  # these have keys then
            seen = self.pool.nodes[self.pool.find(seen, content)]
        more, rest = table[num_first:num_blocks], iter(contents[num_first:])
        before = table[num_first - 1] if num_first else NO_BLOCK
        node = self.pool.register(more, node, rest, rank, filler, before)
        parent = ROOT
        for block, content in zip(table, contents, strict=False):
            parent = self.slow.cache(block, (parent, content), rank, filler)
        self.hashes[parent] = node
        if data.draw(st.booleans()):
            blocks, filler = table[:num_blocks], self.new_filler()
            again = self.pool.register(blocks, ROOT, iter(contents), filler=filler)
            assert again == node, "cached again, it is the same"

    @rule(contents=st.lists(st.integers(10, 12), max_size=5))
    def look(self, contents: list[int]) -> None:
        parent, node = ROOT, ROOT
        for content in contents:
            expected = self.slow.find((parent, content))
            assert self.pool.find(node, content) == (NO_BLOCK if expected is None else expected)
            if expected is None:
                break
            parent, node = self.slow.hashes[expected], self.pool.nodes[expected]

    @precondition(lambda self: self.slow.keys)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.slow.keys)))
        assert self.pool.num_idle([block]) == (block in self.slow.free)
        self.pool.share([block])
        self.slow.share(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.pool.lose(block)
        self.slow.forget(block)

    @invariant()
    def both_are_the_same(self) -> None:
        pool, slow = self.pool, self.slow
        pool.check(self.tables)
        assert pool.num_free == len(slow.free)
        assert pool.num_used + pool.num_free == NUM_BLOCKS, "invariant 10"
        for block, found in slow.hashes.items():
            assert self.hashes.setdefault(found, pool.nodes[block]) == pool.nodes[block]
        hashes = self.hashes
        expected = {
            (hashes[parent], content): block
            for block, keys in slow.keys.items()
            for parent, content in keys
            if parent in hashes
        }
        assert pool._found.items() <= expected.items(), "what is evicted is found no longer"
        fillers = {block: pool.fillers[block] for block in pool._found.values()}
        assert fillers.items() <= slow.fillers.items(), "not who let it be found"
        cached = {block for block, found in enumerate(pool.nodes) if found != NO_NODE}
        assert cached == slow.hashes.keys()
        counts = Counter(block for table in self.tables for block in table)
        for block, count in counts.items():
            assert pool.is_shared(block) == (count > 1)


TestPools = Pools.TestCase
TestPools.settings = settings(examples(100), stateful_step_count=40)


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1], [1]], [[0, 1, 2]], [[0, 2]]])
def test_tables_that_are_not_those_of_the_pool_are_found_out(tables: list[list[int]]) -> None:
    pool = BlockPool(5)  # of which two are made
    pool.take(2)
    with pytest.raises(InvariantError):
        pool.check(tables)


def test_blocks_that_nobody_has_wanted_take_no_memory() -> None:
    tracemalloc.start()
    pool = BlockPool(2**24)
    taken = [pool.take(3), pool.take(1000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert [block for blocks in taken for block in blocks] == [*range(1003)]
    assert pool.use == (1003, 0, 2**24 - 1003)
    pool.check(taken)


CORRUPTIONS: dict[str, Callable[[BlockPool], object]] = {
    "a block is lost": lambda pool: pool._blank.pop(),
    "one is free twice": lambda pool: pool._blank.append(pool._blank[0]),
    "a held one is free": lambda pool: pool._blank.__setitem__(0, 0),
    "a holder too many": lambda pool: pool._holders.__setitem__(0, 2),
    "a wrong count": lambda pool: setattr(pool, "num_free", pool.num_free + 1),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupt_pool_is_found_out(what: str) -> None:
    pool = BlockPool(5)
    pool.give_back(pool.take(5))
    tables = [pool.take(2)]
    pool.check(tables)
    CORRUPTIONS[what](pool)
    with pytest.raises(InvariantError):
        pool.check(tables)
