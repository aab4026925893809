"""A pool without a limit: what can be found again does not make it grow for ever."""

from batcher.scheduling import kv_cache
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.cached_blocks import ROOT
from batcher.scheduling.kv_cache import KVCache
from batcher.settings import SchedulingSettings


def pool_of(block_size: int) -> BlockPool:
    settings = SchedulingSettings(prefix_cache=True, block_size=block_size)
    return KVCache(settings, lambda *_: iter([])).pool


def use(pool: BlockPool, content: object, num_blocks: int) -> None:
    table = pool.take(num_blocks)
    pool.cache(table, ROOT, iter([(content, place) for place in range(num_blocks)]))
    pool.give_back(table)
    pool.check([])


def test_it_keeps_a_number_of_blocks_and_then_the_latest(monkeypatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_GROWN_BLOCKS", 30)
    pool = pool_of(block_size=16)
    for content in range(50):
        use(pool, content, 5)
    assert pool.num_total == 40
    assert pool.use.cached == 40
    assert {key[0] for _, key in pool._found} == {*range(42, 50)}


def test_what_runs_gets_as_many_as_it_needs(monkeypatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_GROWN_BLOCKS", 30)
    pool = pool_of(block_size=16)
    tables = [pool.take(25) for _ in range(4)]
    assert pool.num_used == 100
    pool.check(tables)


def test_large_blocks_are_fewer(monkeypatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_GROWN_TOKENS", 1000)
    pool = pool_of(block_size=100)
    for content in range(50):
        use(pool, content, 3)
    assert pool.num_total == 12
