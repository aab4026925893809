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
from batcher.scheduling.blocks import (
    NO_HASH,
    NUM_EVICTION_PRIORITIES,
    ROOT,
    BlockPool,
    CachedPrefix,
)

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
        found, _ = self.pool.cache([block], ROOT, iter([content]), rank, filler=filler)
        self.hashes[self.slow.cache(block, (ROOT, content), rank, filler)] = found

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), contents=st.lists(st.integers(10, 12), max_size=4))
    def cache_a_chain(self, data: st.DataObject, contents: list[int]) -> None:
        table = data.draw(st.sampled_from(self.tables))
        num_blocks = min(len(contents), len(table))
        num_first = data.draw(st.integers(0, num_blocks))
        num_told = data.draw(st.integers(num_first, num_blocks))
        unread, room = iter(contents[:num_told]), (num_told, len(table))
        filler = self.new_filler()
        found, run = self.pool.cache(table[:num_first], ROOT, unread, 0, room, None, filler)
        more, rest = table[num_first:num_blocks], iter(contents[num_first:])
        is_blank = all(self.pool._hashes[block] == NO_HASH for block in more)
        if run is not None and is_blank and data.draw(st.booleans()):
            seen = data.draw(st.integers(0, num_first))  # so some have their keys by then
            self.pool.follow(CachedPrefix(), ROOT, contents[:seen])
            found = self.pool.extend(run, more)
            run.contents.append(iter(contents[num_told:num_blocks]))
        else:
            found, _ = self.pool.cache(more, found, rest, filler=filler)
        parent = ROOT
        for block, content in zip(table, contents, strict=False):
            parent = self.slow.cache(block, (parent, content), filler=filler)
        self.hashes[parent] = found
        if data.draw(st.booleans()):
            unread, filler = iter(contents), self.new_filler()
            again, _ = self.pool.cache(table[:num_blocks], ROOT, unread, filler=filler)
            assert again == found, "cached again, it is the same"

    @rule(contents=st.lists(st.integers(10, 12), max_size=5))
    def look(self, contents: list[int]) -> None:
        parent, blocks = ROOT, []
        for content in contents:
            block = self.slow.find((parent, content))
            if block is None:
                break
            parent = self.slow.hashes[block]
            blocks.append(block)
        prefix = CachedPrefix()
        self.pool.follow(prefix, ROOT, contents)
        assert prefix.blocks == blocks
        assert prefix.missed == (contents[len(blocks)] if len(blocks) < len(contents) else None)

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
        self.pool.forget(block)
        self.slow.forget(block)

    @invariant()
    def both_are_the_same(self) -> None:
        pool, slow = self.pool, self.slow
        pool.check(self.tables)
        assert pool.num_free == len(slow.free)
        assert pool.num_used + pool.num_free == NUM_BLOCKS, "invariant 10"
        for block, found in slow.hashes.items():
            assert self.hashes.setdefault(found, pool._hashes[block]) == pool._hashes[block]
        hashes = self.hashes
        expected = {
            (hashes[parent], content): block
            for block, keys in slow.keys.items()
            for parent, content in keys
            if parent in hashes
        }
        assert pool._found.items() <= expected.items(), "what is evicted is found no longer"
        fillers = {block: pool.filler_of(block) for block in pool._found.values()}
        assert fillers.items() <= slow.fillers.items(), "not who let it be found"
        cached = {block for block, found in enumerate(pool._hashes) if found != NO_HASH}
        assert cached == slow.hashes.keys()
        counts = Counter(block for table in self.tables for block in table)
        assert [pool.is_shared(block) for block in range(NUM_BLOCKS)] == [
            counts[block] > 1 for block in range(NUM_BLOCKS)
        ]


TestPools = Pools.TestCase
TestPools.settings = settings(examples(100), stateful_step_count=40)


def test_a_run_is_found_as_far_as_it_is_there_though_only_its_first_block_has_a_key() -> None:
    pool = BlockPool(4)
    table = pool.take(4)
    _, run = pool.cache(table[:3], ROOT, iter("abcd"), 0, (4, 4))
    assert run is not None
    assert list(pool._found) == [(ROOT, "a")]
    pool.follow(found := CachedPrefix(), ROOT, "abc")
    assert found.blocks == table[:3]
    pool.extend(run, table[3:])
    parent, _ = pool.cache(table[3:], run.first + 2, iter("d"))
    assert parent == run.first + 3, "it is in the run"
    pool.follow(found := CachedPrefix(), ROOT, "abcd")
    assert found.blocks == table


def test_a_run_goes_on_until_somebody_else_has_cached_a_block_behind_it() -> None:
    pool = BlockPool(6)
    table, other = pool.take(3), pool.take(2)
    _, run = pool.cache(table[:1], ROOT, iter("a"), 0, (1, 3))
    assert run is not None
    pool.extend(run, table[1:2])
    run.contents.append(iter("b"))
    assert run.is_open
    parent, _ = pool.cache(other[:1], run.first, iter("b"))
    assert parent == run.first + 1, "that is there already"
    pool.cache(other[1:], parent, iter("x"))
    assert not run.is_open
    pool.cache(table[2:], parent, iter("c"))
    for content, block in (("x", other[1]), ("c", table[2])):
        pool.follow(found := CachedPrefix(), ROOT, f"ab{content}")
        assert found.blocks == [*table[:2], block]


def test_a_pool_without_a_limit_grows_and_takes_old_blocks_first() -> None:
    pool = BlockPool(None)
    assert pool.has_room(10**9)
    first = pool.take(3)
    pool.cache(first[:1], ROOT, iter(["kept"]))
    pool.give_back(first)
    assert set(first[1:]) <= set(pool.take(4))
    assert pool._found == {(ROOT, "kept"): first[0]}
    pool.take(100)
    assert len(pool._found) == 1, "nothing is evicted while there can be more blocks"
    assert pool.num_used + pool.num_free == pool.num_total


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
    "a holder too many": lambda pool: pool._extra_holders.__setitem__(0, 1),
    "holders of a free one": lambda pool: pool._extra_holders.__setitem__(pool._blank[0], 1),
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
