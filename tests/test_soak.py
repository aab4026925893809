"""Many requests through one engine leave nothing behind."""

import gc
import tracemalloc

import pytest
from soaking import SETTINGS, soak

from batcher.engine.sequence import Sequence


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_requests", [1000, pytest.param(20_000, marks=pytest.mark.heavy)])
def test_nothing_is_left_of_requests_that_have_ended(num_requests):
    soaked = soak(num_requests)
    assert soaked.kept == {}
    assert soaked.outcomes.total() == num_requests + num_requests // 50
    assert set(soaked.outcomes) == {"stop", "length", "aborted"}
    assert soaked.outcomes["aborted"] > num_requests / 100
    assert soaked.num_preemptions > 100, "there is no pressure on the blocks"
    assert soaked.num_hits > num_requests / 10, "nothing was found in the cache"
    assert SETTINGS.kv_blocks is not None


@pytest.mark.parametrize("num_requests", [150, pytest.param(1500, marks=pytest.mark.heavy)])
def test_no_sequence_and_no_memory_leaks(num_requests):
    soak(num_requests)
    gc.collect()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            soak(num_requests)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[2] - sizes[1] < 33 * num_requests, "bytes are left of every run"
    assert not any(isinstance(thing, Sequence) for thing in gc.get_objects())
