"""When the first of the queue is let in: the capacities, one next to the other."""

import pytest
from jobs import job_of, simulate

from batcher import Engine, Request, SimulatedModel
from batcher.events import AdmitEvent, BlockedEvent, PreemptEvent
from batcher.planning.workload import Workload
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import ConstantStepTime


def limits(**more):
    """10 blocks of 4 tokens, of which a step computes 8."""
    return SchedulingSettings(
        kv_blocks=10, block_size=4, max_batch_tokens=8, prefix_cache=False, **more
    )


@pytest.mark.parametrize(("kv_blocks", "is_let_in"), [(20, True), (19, False), (15, False)])
def test_all_that_beams_may_ever_need_is_theirs_before_they_fork(kv_blocks, *, is_let_in):
    # 7 blocks for the first beam; the second shares the two of the prompt; 8 for the other request
    settings = SchedulingSettings(kv_blocks=kv_blocks, block_size=4, capacity="no-evict")
    engine = Engine(SimulatedModel(), 3, settings=settings, is_checked=True)
    engine.add(Request(id="beams", prompt=[9] * 8, max_tokens=20, num_beams=2, ignore_eos=True))
    engine.add(Request(id="other", prompt=[7] * 8, max_tokens=25, ignore_eos=True))
    events = []
    while engine.has_work:
        events += engine.step().events
        engine.scheduler.check()
    assert not [event for event in events if isinstance(event, PreemptEvent)]
    admitted = {event.id: event.step for event in events if isinstance(event, AdmitEvent)}
    assert (admitted["other"] == 0) == is_let_in
    assert engine.scheduler.kv_cache.pool.num_used == 0


def test_long_prompts_do_not_drive_each_other_out():
    # each prompt takes 24 of 40 tokens: two at a time would preempt each other for ever
    workload = Workload([job_of(place, 24, 4) for place in range(6)])
    kept = simulate(workload, 4, limits(), ConstantStepTime())
    thrashing = simulate(workload, 4, limits(capacity="on-demand"), ConstantStepTime())
    assert (kept.totals.num_preemptions, kept.totals.recomputed_tokens) == (0, 0)
    assert thrashing.totals.num_preemptions > 0
    assert kept.totals.computed_tokens < thrashing.totals.computed_tokens


def test_who_was_refused_is_let_in_as_soon_as_enough_of_it_is_found():
    settings = SchedulingSettings(
        kv_blocks=7, block_size=4, long_prefill_threshold=4, watermark=0.0
    )
    engine = Engine(SimulatedModel(), 3, settings=settings)
    shared, events = [*range(300, 324)], []
    engine.add(Request(id="long", prompt=shared, max_tokens=1))
    engine.add(Request(id="short", prompt=[5, 6], max_tokens=2, ignore_eos=True))
    engine.add(Request(id="refused", prompt=[*shared, 7, 8, 9], max_tokens=1, arrival_time=1))
    for _ in range(3):
        events += engine.step().events
    # 5 blocks of it are missing when 4 are free; a step later both are 4, as one was given back.
    admitted = {event.id: event.step for event in events if isinstance(event, AdmitEvent)}
    assert admitted == {"long": 0, "short": 0, "refused": 2}
    assert [event.step for event in events if isinstance(event, BlockedEvent)] == [1]


def test_who_comes_back_is_refused_for_all_the_tokens_it_has_by_then():
    more = {"kv_blocks": 10, "block_size": 4, "prefix_cache": False, "watermark": 0.4}
    engine = Engine(SimulatedModel(), 2, settings=SchedulingSettings(policy="priority", **more))
    for name, num_prompt, max_tokens, priority, arrival in (
        ("a", 16, 3, 0, 0.0),
        ("last", 12, 20, 1, 0.0),
        ("b", 4, 24, 0, 5.0),
    ):
        prompt = [9] * num_prompt
        fields = {"max_tokens": max_tokens, "priority": priority, "arrival_time": arrival}
        engine.add(Request(id=name, prompt=prompt, ignore_eos=True, **fields))
    generated, refused = 0, []
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, PreemptEvent) and event.id == "last":
                generated = event.generated
            elif isinstance(event, BlockedEvent) and (event.id, event.reason) == ("last", "kv"):
                refused.append((generated, event.blocks))
    assert len(refused) == 2
    assert refused == [(num, -(-(12 + num) // 4) + 4) for num, _ in refused]
    assert refused[0][0] < refused[1][0]
