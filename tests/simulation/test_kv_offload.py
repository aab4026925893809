"""Blocks that are found in the memory of the host, and read back in place of computing them."""

from random import Random
from typing import Any

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulated_workloads import STEP_TIMES, random_requests, random_settings
from test_simulator import PlannedSimulation, outcome

from batcher import Request, SimulatedModel
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import KVOffload, SimulationResult, simulate, simulate_steps
from batcher.planning.workload import workload_of
from batcher.settings import SchedulingSettings
from batcher.timing.formulas import ConstantStepTime
from batcher.timing.step_time import TICKS_PER_SECOND

PLENTY = 10**6


def with_tier(num_blocks: int = PLENTY, seconds_per_block: float = 0) -> KVOffload:
    return KVOffload(num_blocks, round(seconds_per_block * TICKS_PER_SECOND))


def ran(
    requests: list[Request], num_slots: int, offload: KVOffload | None = None, **chosen: Any
) -> SimulationResult:
    """What requests come to whose steps take a second each, in blocks of four tokens."""
    settings = SchedulingSettings(block_size=4, **chosen)
    workload = workload_of(requests, SimulatedModel())
    return simulate(workload, num_slots, settings, ConstantStepTime(), offload=offload)


def of_prompt(tokens: list[int], max_tokens: int = 4, **more: Any) -> Request:
    return Request(prompt=tokens, max_tokens=max_tokens, ignore_eos=True, **more)


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0, 1, 10**12, 10**15]))
def test_from_event_to_event_is_exactly_step_by_step(
    seed: int, num_blocks: int, ticks_per_block: int
) -> None:
    random = Random(seed)
    workload = workload_of(random_requests(random, may_stop=False), SimulatedModel())
    num_slots, chosen = random_settings(random)
    step_time, offload = random.choice(STEP_TIMES), KVOffload(num_blocks, ticks_per_block)
    turns = Turns(workload)
    planned = PlannedSimulation(turns, num_slots, chosen, step_time, offload=offload).run()
    again = simulate_steps(workload, num_slots, chosen, step_time, offload=offload)
    assert outcome(again) == outcome(planned)
    assert outcome(simulate(workload, num_slots, chosen, step_time, offload=offload)) == outcome(
        planned
    )
    ended = [sequence for sequence in planned.sequences if not sequence.has_failed]
    alone = simulate(workload, num_slots, chosen, step_time)
    assert len(ended) == sum(not sequence.has_failed for sequence in alone.sequences)
    assert planned.totals.loading_ticks == planned.totals.num_loaded_blocks * ticks_per_block


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 9)), max_size=12),
    st.integers(20, 30),
)
def test_one_after_another_a_large_tier_finds_what_unlimited_blocks_would(
    drawn: list[tuple[int, int, int]], kv_blocks: int
) -> None:
    requests = [of_prompt([kind] * length, most) for kind, length, most in drawn]
    offloaded = ran(requests, 1, with_tier(), kv_blocks=kv_blocks)
    unlimited = ran(requests, 1, prefix_cache=True)
    assert [one.num_cached_at_first for one in offloaded.sequences] == [
        one.num_cached_at_first for one in unlimited.sequences
    ]
    assert offloaded.totals.computed_tokens == unlimited.totals.computed_tokens


def test_what_was_evicted_is_read_back_and_takes_as_long_as_it_is() -> None:
    first, second = [5] * 32, [6] * 32
    requests = [of_prompt(first), of_prompt(second), of_prompt(first)]
    alone = ran(requests, 1, kv_blocks=9)
    tier = ran(requests, 1, with_tier(seconds_per_block=0.5), kv_blocks=9)
    assert [one.num_cached_at_first for one in alone.sequences] == [0, 0, 0]
    assert [one.num_cached_at_first for one in tier.sequences] == [0, 0, 28], "one has to be left"
    assert tier.totals.num_loaded_blocks == 7
    assert tier.end == alone.end + 3.5


def test_blocks_that_are_still_there_are_not_read() -> None:
    requests = [of_prompt([5] * 32), of_prompt([5] * 32)]
    tier = ran(requests, 1, with_tier(seconds_per_block=0.5), kv_blocks=20)
    assert tier.totals.num_loaded_blocks == 0
    assert tier.sequences[1].num_cached_at_first == 28


def test_a_tier_that_is_too_small_has_forgotten() -> None:
    requests = [of_prompt([5] * 32), of_prompt([6] * 32), of_prompt([5] * 32)]
    assert ran(requests, 1, with_tier(8), kv_blocks=9).totals.num_loaded_blocks == 0


def test_who_was_preempted_reads_back_what_it_had_computed() -> None:
    requests = [of_prompt([kind] * 30, 40) for kind in (5, 6, 7)]
    alone = ran(requests, 3, kv_blocks=30, capacity="on-demand")
    tier = ran(requests, 3, with_tier(), kv_blocks=30, capacity="on-demand")
    assert alone.totals.num_preemptions > 0
    assert tier.totals.num_preemptions > 0
    assert alone.totals.recomputed_tokens > 50
    assert tier.totals.recomputed_tokens <= 4 * tier.totals.num_preemptions, "a part of a block"


def test_with_another_salt_nothing_is_found() -> None:
    requests = [of_prompt([5] * 32, cache_salt=salt) for salt in "aba"]
    assert ran(requests, 1, with_tier(), kv_blocks=9).totals.num_loaded_blocks == 7
    assert ran(requests[:2], 1, with_tier(), kv_blocks=9).totals.num_loaded_blocks == 0
