"""A pool without a limit: what can be found again does not make it grow for ever."""

import pytest
from engine_runs import drained

from batcher import BatchdecodeError, Engine, Request, SimulatedModel
from batcher.scheduling import kv_cache
from batcher.scheduling.blocks import ROOT
from batcher.scheduling.kv_cache import KVCache
from batcher.settings import SchedulingSettings


def pool_of(block_size):
    settings = SchedulingSettings(prefix_cache=True, block_size=block_size)
    return KVCache(settings, lambda *_: iter([])).pool


def use(pool, content, num_blocks):
    table = pool.take(num_blocks)
    pool.register(table, ROOT, iter([(content, place) for place in range(num_blocks)]))
    pool.give_back(table)
    pool.check([])


def test_it_keeps_a_number_of_blocks_and_then_the_latest(monkeypatch):
    monkeypatch.setattr(kv_cache, "MAX_GROWN_BLOCKS", 30)
    pool = pool_of(block_size=16)
    for content in range(50):
        use(pool, content, 5)
    assert pool.num_total == 40
    assert pool.use == (0, 40, None)
    assert {key[0] for _, key in pool._found} == {*range(42, 50)}


def test_large_blocks_are_fewer(monkeypatch):
    monkeypatch.setattr(kv_cache, "MAX_GROWN_TOKENS", 1000)
    pool = pool_of(block_size=100)
    for content in range(50):
        use(pool, content, 3)
    assert pool.num_total == 12


class SizedModel(SimulatedModel):
    """Says that a token takes a MiB."""

    kv_bytes_per_token: object = 2**20


def most_kept(model):
    settings = SchedulingSettings(prefix_cache=True, block_size=16)
    engine = Engine(model, 2, settings=settings, is_checked=True)
    for number in range(60):
        engine.add(Request(prompt=[number + 5] * 100, max_tokens=1))
    drained(engine)
    return engine.scheduler.kv_cache.pool.num_total


def test_blocks_that_take_much_are_fewer():
    assert most_kept(SimulatedModel()) >= 60 * 7
    assert most_kept(SizedModel()) <= 2 * 2**30 // 2**24


def test_what_a_model_says_of_its_blocks_is_checked():
    model = SizedModel()
    for told in (0, -1, 1.5, "much", None):
        model.kv_block_bytes = lambda _, told=told: told
        with pytest.raises(BatchdecodeError, match="kv_block_bytes did not return a number"):
            most_kept(model)
    model.kv_block_bytes = lambda size: size // 0
    with pytest.raises(BatchdecodeError, match="cannot say what a block of 16 tokens takes"):
        most_kept(model)
