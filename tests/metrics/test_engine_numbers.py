"""The engine's own events and results agree on when tokens were given."""

from random import Random

import pytest
from engine_runs import drained, traced
from made_events import metrics_of

from batcher import Engine, Request, SimulatedModel
from batcher.events import ArriveEvent, PreemptEvent, StepsEvent
from batcher.metrics.slo import Slo
from batcher.settings import SchedulingSettings

LIMITED = {
    "a budget": SchedulingSettings(max_batch_tokens=16),
    "prompts first": SchedulingSettings(max_batch_tokens=16, prefill_order="prefill-first"),
    "few blocks": SchedulingSettings(kv_blocks=12, max_batch_tokens=32),
    "few blocks, prompts first": SchedulingSettings(kv_blocks=9, prefill_order="prefill-first"),
    "a policy": SchedulingSettings(policy="priority"),
    "static batching": SchedulingSettings(batching="static"),
}


def decoded(settings, batch=4, num_requests=40):
    """The events and results of requests that come faster than they are served."""
    random = Random(7)
    engine = Engine(SimulatedModel(), batch, settings=settings)
    for number in range(num_requests):
        prompt = [random.randrange(1, 200) for _ in range(random.randint(1, 60))]
        limits = {"max_tokens": random.randint(1, 40), "ignore_eos": number % 2 == 0}
        engine.add(Request(prompt=prompt, id=f"r{number}", arrival_time=number / 3, **limits))
    run = engine.run_event()
    done = drained(engine)
    return [run, *done.events, engine.end_event()], done.results


def summary_of(events):
    return metrics_of(events, Slo({"ttft": 50.0})).summary()


@pytest.mark.parametrize("name", LIMITED)
def test_times_are_those_that_the_steps_of_the_results_tell(name):
    events, results = decoded(LIMITED[name])
    ends = [end for event in events if isinstance(event, StepsEvent) for end in event.ends]
    arrivals = {event.id: event.time for event in events if isinstance(event, ArriveEvent)}
    ttfts = [ends[result.steps.first_token] - arrivals[result.id] for result in results]
    e2es = [ends[result.steps.finished] - arrivals[result.id] for result in results]
    summary = summary_of(events)
    found = summary.latencies
    assert found.ttft.count == found.e2e.count == len(results)
    assert found.ttft.mean == pytest.approx(sum(ttfts) / len(ttfts), abs=2e-6)
    assert found.ttft.max == pytest.approx(max(ttfts), abs=1e-6)
    assert found.e2e.mean == pytest.approx(sum(e2es) / len(e2es), abs=2e-6)
    assert found.itl.count == sum(len(result.tokens) - 1 for result in results)
    if name == "few blocks":
        assert summary.preemptions.count > 5
        assert summary.preemptions.recomputed_tokens > 0
        assert summary.blocked["kv"] > 0
        assert summary.kv.max_share == 1.0
        assert summary.idle["kv"] > 0
    gaps = sum(e2es) - sum(ttfts)
    assert found.itl.mean == pytest.approx(gaps / found.itl.count, abs=2e-6)
    assert summary.first_token.mean == pytest.approx(
        sum(r.steps.first_token + 1 - r.steps.arrived for r in results) / len(results), abs=1e-3
    )


def test_preemptions_for_who_is_more_urgent_are_told_without_a_limit_of_blocks():
    engine = Engine(SimulatedModel(), 1, settings=SchedulingSettings(preempt_for="priority"))
    engine.add(Request(prompt=[5], id="a", max_tokens=9, ignore_eos=True, priority=5))
    engine.add(Request(prompt=[6], id="v", max_tokens=2, ignore_eos=True, arrival_time=3.0))
    preemptions = summary_of(traced(engine)).preemptions
    assert (preemptions.count, preemptions.recomputed_tokens) == (1, 3)


def test_slots_idle_before_a_preemption_wait_for_who_arrives_next():
    settings = SchedulingSettings(kv_blocks=5)
    engine = Engine(SimulatedModel(), 3, settings=settings)
    for number, (max_tokens, arrival) in enumerate([(10, 0.0), (5, 0.0), (5, 3.5)]):
        limits = {"max_tokens": max_tokens, "arrival_time": arrival, "ignore_eos": True}
        engine.add(Request(prompt=[number + 1] * 30, id=f"r{number}", **limits))
    events = traced(engine)
    idle = summary_of(events).idle
    assert any(isinstance(event, PreemptEvent) for event in events)
    assert (idle["arrivals"], idle["too_few"]) == (3, 0)
    assert (idle["tail"], idle["kv"], idle["preemption"]) == (8, 12, 2)
