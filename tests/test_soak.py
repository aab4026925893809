"""Many requests through one engine leave nothing behind; `python tests/bench soak` takes longer."""

import gc
import tracemalloc

import pytest
from soaking import SETTINGS, soak

from batcher.sequence import Sequence

NUM_REQUESTS = 20_000


@pytest.mark.timeout(300)
def test_nothing_is_left_of_requests_that_have_ended() -> None:
    soaked = soak(NUM_REQUESTS)
    assert soaked.kept == {}
    assert soaked.outcomes.total() == NUM_REQUESTS + NUM_REQUESTS // 50
    assert set(soaked.outcomes) == {"stop", "length", "aborted"}
    assert soaked.outcomes["aborted"] > NUM_REQUESTS / 100
    assert soaked.num_preemptions > 100, "there is no pressure on the blocks"
    assert soaked.num_hits > NUM_REQUESTS / 10, "nothing was found in the cache"
    assert SETTINGS.kv_blocks is not None


def test_no_sequence_and_no_memory_leaks() -> None:
    soak(1000)
    gc.collect()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            soak(1500)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[2] - sizes[1] < 50_000, "bytes are left of every run"
    assert not any(isinstance(thing, Sequence) for thing in gc.get_objects())
