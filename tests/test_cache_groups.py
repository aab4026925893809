"""Models whose layers read more or less: each group of layers has a block table of its own."""

import pytest
from control_requests import control_requests
from engine_runs import drained, of_kind
from examples import examples
from grouped_model import GroupedModel
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from test_scheduling_invariance import cases, check, run

from batcher import BatchdecodeError, Engine, ModelError, Request, SimulatedModel
from batcher.events import AdmitEvent
from batcher.scheduling.blocks import NO_NODE, ROOT, BlockPool
from batcher.settings import SchedulingSettings

KINDS = [(5,), (None, 3), (None, 5, "state"), (None, "state"), ("state",), (None, 9, 2, None)]


@given(case=cases(st.one_of(english_requests(), control_requests())), kinds=st.sampled_from(KINDS))
@settings(examples(30), derandomize=True)
def test_every_group_has_what_it_reads(case, kinds):
    num_blocks = case.settings.kv_blocks
    if num_blocks is not None:
        case = case._replace(settings=replace(case.settings, kv_blocks=num_blocks * len(kinds)))
    check(case, lambda: GroupedModel(*kinds), SimulatedModel)


def decoded(engine, *requests):
    """Return how many tokens of each request were found, and the most blocks that were held."""
    found, most = [], 0
    pool = engine.scheduler.kv_cache.pool
    for request in requests:
        engine.add(request)
        while engine.has_work:
            found += [
                event.cached for event in engine.step().events if isinstance(event, AdmitEvent)
            ]
            most = max(most, pool.num_used)
    return found, most


def test_blocks_before_the_window_are_freed_and_not_counted_as_needed():
    request = Request(prompt=[5] * 40, max_tokens=60, ignore_eos=True)
    limits = SchedulingSettings(block_size=4, max_batch_tokens=8, prefix_cache=True)
    _, full = decoded(Engine(GroupedModel(None), 1, settings=limits), request)
    _, window = decoded(Engine(GroupedModel(9), 1, settings=limits), request)
    _, mixed = decoded(Engine(GroupedModel(None, 9, "state"), 1, settings=limits), request)
    # 99 tokens are computed: 25 blocks of 4.  A window of 9 reads 2 blocks before its own, and a
    # chunk of 8 fills 2 more; a state reads one block.
    assert (full, window) == (25, 4)
    assert mixed <= 25 + 3 + 2
    request = Request(prompt=[5] * 40, max_tokens=60, ignore_eos=True)
    limits = SchedulingSettings(block_size=4, max_batch_tokens=8, kv_blocks=5)
    (result,) = run(engine_of(GroupedModel(9), limits, request)).values()
    assert result.finish_reason == "length"
    (refused,) = run(engine_of(GroupedModel(9, 9), limits, request)).values()
    assert refused.error.code == "kv-too-small"
    assert "up to 10 KV blocks" in refused.error.message


def engine_of(model, limits, *requests):
    engine = Engine(model, 2, settings=limits, is_checked=True)
    for request in requests:
        engine.add(request)
    return engine


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_prefix_and_the_next_turn_are_found_as_far_as_every_group_has_them(kinds):
    limits = SchedulingSettings(block_size=4, prefix_cache=True)
    engine = Engine(GroupedModel(*kinds), 1, settings=limits, is_checked=True)
    prompt = [*range(10, 50)]
    first = Request(prompt=prompt, max_tokens=7, ignore_eos=True)
    found, _ = decoded(engine, first, replace(first, prompt=[*prompt, 3, 3]), first)
    assert found == [0, 40, 36]
    limits = SchedulingSettings(block_size=4, prefix_cache=True)
    engine = Engine(GroupedModel(*kinds), 1, settings=limits, is_checked=True)
    for number in range(3):
        engine.add(
            Request(id=str(number), prompt=[7] * 9, max_tokens=9, ignore_eos=True, session="one")
        )
    admits = of_kind(drained(engine).events, AdmitEvent)
    assert [event.cached for event in admits] == [0, 16, 32]  # of 17 and 35


def test_a_prefix_whose_window_is_gone_is_computed_again_and_found_from_then_on():
    limits = SchedulingSettings(block_size=4, kv_blocks=32, max_batch_tokens=8)
    engine = Engine(GroupedModel(None, 5), 1, settings=limits, is_checked=True)
    system = [*range(10, 42)]
    long = Request(prompt=[*system, *range(100, 120)], max_tokens=1)
    other = Request(prompt=[*range(200, 252)], max_tokens=1)
    again = Request(prompt=[*system, 3, 3, 3], max_tokens=1)
    found, _ = decoded(engine, long, other, again, again)
    assert found[1] == 0
    assert found[2] < found[3] == 32


class FailingModel(GroupedModel):
    """Computes nothing while it is failing."""

    is_failing = False

    def forward(self, batch):
        if self.is_failing:
            raise ModelError("no memory")
        return super().forward(batch)


def test_what_a_failed_row_was_to_compute_is_not_found():
    limits = SchedulingSettings(block_size=4, kv_blocks=40, max_batch_tokens=8)
    model = FailingModel(None, 5)
    engine = Engine(model, 1, settings=limits, is_checked=True)
    system = [*range(10, 42)]
    long = Request(prompt=[*system, *range(100, 120)], max_tokens=1)
    other = Request(prompt=[*range(200, 252)], max_tokens=1)  # takes what `long` had in its window
    again = Request(prompt=[*system, 3, 3, 3], max_tokens=1)
    decoded(engine, long, other)
    model.is_failing = True
    (before,), _ = decoded(engine, again)
    model.is_failing = False
    (after,), _ = decoded(engine, again)
    assert before == after < 32


def test_what_a_group_has_is_worth_as_much_as_the_block_it_is_beside():
    pool = BlockPool(2)
    neighbour, block = pool.take(2)
    node = pool.register([neighbour], ROOT, iter([b"a"]), priority=2)
    pool.register_beside(block, neighbour, 1)
    assert pool.find(node, 1) == block
    pool.give_back([block, neighbour])
    assert pool.take(1) == [neighbour]  # of equal worth, the last goes first
    pool.take(1)
    assert pool.nodes[block] == NO_NODE


def test_what_a_model_says_of_its_windows_is_checked():
    for windows in ((), (0,), [4], (True,), "all"):
        model = GroupedModel(None)
        model.cache_windows = windows
        with pytest.raises(BatchdecodeError, match="cache_windows are a tuple"):
            Engine(model, 1)
