"""What is found in two tiers, of sequences that come, go, and are given up before their step."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batcher import Request, SimulatedModel
from batcher.planning.simulated_sequence import SimulatedContents, SimulatedSequence, make_sequence
from batcher.planning.workload import workload_of
from batcher.scheduling.offloading_kv_cache import OffloadingKVCache
from batcher.settings import SchedulingSettings

SIZE, NUM_TOKENS = 4, 16  # with one token to be computed, three of four blocks can be found
Cache = OffloadingKVCache[SimulatedSequence]


def new_cache(num_blocks: int = 4, num_host_blocks: int = 100) -> Cache:
    settings = SchedulingSettings(kv_blocks=num_blocks, block_size=SIZE)
    return OffloadingKVCache(settings, SimulatedContents().blocks, num_host_blocks)


def of_kind(kind: int, num_tokens: int = NUM_TOKENS) -> SimulatedSequence:
    request = Request(prompt=[kind] * num_tokens, max_tokens=1, ignore_eos=True)
    (job,) = workload_of([request], SimulatedModel()).jobs
    return make_sequence(job)


def admit(cache: Cache, sequence: SimulatedSequence) -> None:
    assert cache.admit(sequence, sequence.num_tokens, 1000, is_alone=True) == 0


def run(cache: Cache, sequence: SimulatedSequence) -> None:
    """Compute a sequence in a step, after which it leaves."""
    admit(cache, sequence)
    cache.take_loaded()
    cache.end_step()
    cache.close(sequence, sequence.num_tokens)
    cache.check([])


@pytest.fixture
def cache() -> Cache:
    """One in which a sequence of kind 1 has been, and is found in the second tier alone."""
    cache = new_cache()
    run(cache, of_kind(1))
    run(cache, of_kind(2))
    found = cache.match(of_kind(1))
    assert (found.blocks, found.num_tokens) == ([], 12)
    return cache


def test_blocks_that_are_read_back_are_counted_once_and_found_in_blocks_from_then_on(
    cache: Cache,
) -> None:
    again = of_kind(1)
    admit(cache, again)
    assert (cache.take_loaded(), cache.take_loaded()) == (3, 0)
    assert len(cache.match(of_kind(1)).blocks) == 3


def test_what_was_to_be_read_back_and_is_not_is_found_in_no_block(cache: Cache) -> None:
    given_up = of_kind(1)
    admit(cache, given_up)
    cache.forget(given_up)
    cache.close(given_up, 0)
    assert cache.take_loaded() == 0
    found = cache.match(of_kind(1))
    assert (found.blocks, found.num_tokens) == ([], 12), "the tier has it still"


def test_what_was_to_be_computed_and_is_not_comes_into_no_tier(cache: Cache) -> None:
    given_up = of_kind(3)
    admit(cache, given_up)
    cache.forget(given_up)
    cache.close(given_up, 0)
    cache.end_step()
    assert cache.match(of_kind(3)).num_tokens == 0


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, NUM_TOKENS)), max_size=20),
)
@example(8, [(1, 16), (2, 16), (3, 16)])  # the tier loses what nobody else has
def test_the_outlook_changes_whenever_something_else_is_found(
    num_host_blocks: int, drawn: list[tuple[int, int]]
) -> None:
    cache = new_cache(num_host_blocks=num_host_blocks)
    waiting = [of_kind(kind) for kind in (1, 2)]
    for kind, num_tokens in drawn:
        before = [(cache.match(one).num_tokens, cache.outlook(one)) for one in waiting]
        run(cache, of_kind(kind, num_tokens))
        for one, (num_found, outlook) in zip(waiting, before, strict=True):
            if cache.outlook(one) == outlook:
                assert cache.match(one).num_tokens == num_found
