"""`--preempt-for`: who may not wait takes the place of one that runs, and it changes no token."""

import pytest
from engine_runs import drained
from msgspec.structs import replace

from batcher import Engine, Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.events import AdmitEvent, PreemptEvent
from batcher.settings import SchedulingSettings
from batcher.trace.timeline import Timeline

BULK = [
    Request(id=f"bulk-{number}", prompt="Some work", max_tokens=40, ignore_eos=True, priority=5)
    for number in range(6)
]
VIP = Request(
    id="vip", prompt="Now", max_tokens=5, ignore_eos=True, arrival_time=3.0, deadline=10.0
)


def settings(measure, **more):
    return SchedulingSettings(preempt_for=measure, **more)


def run(requests, chosen, num_slots=4):
    engine = Engine(SimulatedModel(is_attentive=True), num_slots, settings=chosen, is_checked=True)
    for request in requests:
        engine.add(request)
    done = drained(engine)
    return {result.id: result for result in done.results}, done.events


def preemptions(events):
    found = [event for event in events if isinstance(event, PreemptEvent)]
    return [(event.step, event.id, event.for_id, event.reason) for event in found]


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
@pytest.mark.parametrize(("measure", "step"), [("priority", 3), ("deadline", 5)])
def test_who_may_not_wait_takes_the_slot_of_the_worst(policy, measure, step):
    # by its deadline it has to begin at 5.0: it takes five steps
    results, events = run([*BULK, VIP], settings(measure, policy=policy))
    assert preemptions(events) == [(step, "bulk-3", "vip", measure)]
    assert results["vip"].steps.admitted == step
    waiting, _ = run([*BULK, VIP], settings(None, policy=policy))
    assert waiting["vip"].steps.admitted == 40, "behind full slots"
    assert {id_: result.tokens for id_, result in results.items()} == {
        id_: result.tokens for id_, result in waiting.items()
    }


def test_groups_give_way_and_come_together():
    beams = replace(VIP, id="beams", num_beams=3, priority=2)
    pair = replace(BULK[0], id="pair", cfg_scale=1.5, negative_prompt="bad", priority=6)
    results, events = run([pair, *BULK[:2], beams], settings("priority"))
    assert {row[1:3] for row in preemptions(events)} == {("pair", "beams"), ("bulk-1", "beams")}
    assert len(preemptions(events)) == 3, "the pair has two rows"
    admitted = [event.step for event in events if isinstance(event, AdmitEvent)][4:7]
    assert admitted == [3, 3, 3]
    alone, _ = run([beams], settings(None))
    assert results["beams"].tokens == alone["beams"].tokens
    # of three beams none is let in where only two rows are less urgent
    others = [replace(row, priority=0) for row in BULK[2:4]]
    _, events = run([*others, *BULK[:2], beams], settings("priority"))
    assert preemptions(events) == []


def test_no_one_as_urgent_overtakes_who_cannot_be_let_in_or_gave_way():
    # else single ones that keep coming would take each slot that the beams need
    top = replace(BULK[0], id="top", priority=0, max_tokens=10)
    beams = replace(VIP, id="beams", priority=1, num_beams=3, arrival_time=2.0)
    one = replace(VIP, priority=1, max_tokens=20, deadline=None)
    stream = [
        replace(one, id=f"one-{number}", arrival_time=3.0 + 5 * number) for number in range(10)
    ]
    results, _ = run([top, *BULK[:2], beams, *stream], settings("priority"), num_slots=3)
    assert results["beams"].steps.admitted == 10
    # the beams leave two slots; who is less urgent than they were gets neither
    beams = replace(BULK[0], id="beams", num_beams=3, priority=4)
    top = replace(BULK[1], id="top", priority=6)
    vips = [replace(VIP, id="first", num_beams=2), replace(VIP, id="second", priority=5)]
    _, events = run([beams, top, *vips], settings("priority"))
    moves = [(event.step, event.id) for event in events if isinstance(event, AdmitEvent)]
    assert {id_ for step, id_ in moves if step == 3} == {"first"}


@pytest.mark.parametrize(
    ("more", "told"), [({"batching": "static"}, "--batching"), ({"capacity": "no-evict"}, "--cap")]
)
def test_what_preempts_nobody_is_refused(more, told):
    with pytest.raises(BatchdecodeError, match=f"--preempt-for deadline does not work with {told}"):
        Engine(SimulatedModel(), 4, settings=settings("deadline", kv_blocks=9, **more))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_cannot_be_let_in_keeps_back_no_one_less_urgent(policy):
    top = replace(BULK[0], id="top", priority=0, max_tokens=50)
    beams = replace(VIP, id="beams", priority=1, num_beams=3, arrival_time=2.0)
    vip = replace(VIP, priority=2, max_tokens=100)
    bulk = [replace(row, max_tokens=200) for row in BULK[:2]]
    chosen = settings("priority", policy=policy)
    _, events = run([top, *bulk, beams, vip], chosen, num_slots=3)
    assert preemptions(events)[0] == (3, "bulk-1", "vip", "priority")
    # as soon as all less urgent are enough they give way to the beams, this vip, too
    assert sorted(preemptions(events)[1:]) == [
        (50, "bulk-0", "beams", "priority"),
        (50, "vip", "beams", "priority"),
    ]


def test_beams_that_are_aborted_when_they_are_back_may_have_whole_outputs():
    settings = SchedulingSettings(
        kv_blocks=60,
        block_size=1,
        max_batch_tokens=4,
        long_prefill_threshold=1,
        preempt_for="priority",
        prefix_cache=False,
    )
    engine = Engine(SimulatedModel(), 3, settings=settings)
    beams = {"num_beams": 2, "n": 2, "length_penalty": 2.0, "stop": [" the", "c"]}
    engine.add(Request(id="beams", prompt=[*range(15, 20)], max_tokens=22, **beams))
    for name in "pq":
        engine.add(replace(VIP, id=name, prompt=[*range(11, 16)], priority=-1, arrival_time=9.0))
    events = [engine.run_event()]
    while not any(isinstance(event, AdmitEvent) and event.generated for event in events):
        events += engine.step().events
    engine.abort("beams")
    outcome = engine.step()
    assert "stop" in [result.finish_reason for result in outcome.results]
    while engine.has_work:
        outcome.events.extend(engine.step().events)
    Timeline.from_events([*events, *outcome.events, engine.end_event()]).check_integrity()
