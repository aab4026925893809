"""The fold of events into request timelines, against a slow look through all events so far."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import admit, arrive, jump, prefill
from played_runs import PLAYED
from reference_paged import paged_workloads, play_paged
from reference_units import play_units, unit_workloads

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    StepsEvent,
)
from batcher.metrics.summary import RunMetrics, encode_summary
from batcher.trace.run import RequestFold, is_follower, key_of
from cli.screen.live_state import RunState

OF_A_SEQUENCE = (ArriveEvent, AdmitEvent, PrefillEvent, PreemptEvent, FinishEvent)


def key(event):
    return key_of(event.id, event.index, getattr(event, "role", "sample"))


def slow_look(events):
    """What is open after `events`: by key, all that was told of each since it became known."""
    found = {}
    for event in events:
        if isinstance(event, FinishEvent):
            found.pop(key(event), None)
        elif isinstance(event, OF_A_SEQUENCE):
            found.setdefault(key(event), []).append(event)
    return found


def told(request):
    """The same of a request timeline, from what the fold has kept of it."""
    events = [request.arrive] if request.arrive is not None else []
    for admission in request.admissions:
        events.append(admission.event)
        events += [("chunk", step) for step in admission.chunks or ()]
        events += [admission.preempt] if admission.preempt is not None else []
    return events


def check(events, prefix):
    fold = RequestFold()
    for event in events[:prefix]:
        fold.take(event)
    expected = slow_look(events[:prefix])
    found = {key_of(r.id, r.index, r.role): told(r) for r in fold.open}
    assert found == {
        name: [("chunk", e.step) if isinstance(e, PrefillEvent) else e for e in all_told]
        for name, all_told in expected.items()
    }
    for request in fold.open:
        own = expected[key_of(request.id, request.index, request.role)]
        last = [e for e in own if isinstance(e, AdmitEvent | PreemptEvent)][-1:]
        assert (request.admission is not None) == any(isinstance(e, AdmitEvent) for e in last)
        if request.admission is not None and not is_follower(request):
            assert fold.slots[request.admission.event.slot] is request


@given(PLAYED, st.data())
@examples(200)
def test_what_is_open_is_what_a_slow_look_finds(events, data):
    check(events, data.draw(st.integers(0, len(events))))


@given(unit_workloads(), st.integers(0, 2**32))
@examples(100)
def test_jumps_and_forks_are_told_of_the_admission_they_are_in(workload, seed):
    units, batch = workload
    events = play_units(units, batch, seed).events
    fold = RequestFold()
    news = fold.news = []
    for event in events:
        fold.take(event)
    ended = [found for event, found in news if isinstance(event, FinishEvent)]
    jumps = sum(event.tokens for event in events if isinstance(event, JumpEvent))
    assert sum(a.num_jumped for request in ended for a in request.admissions) == jumps
    forks = sum(isinstance(event, ForkEvent) for event in events)
    assert sum(len(a.forks or ()) for request in ended for a in request.admissions) == forks
    assert not list(fold.open)


@given(paged_workloads())
@examples(100)
def test_readers_that_share_a_fold_tell_what_each_tells_alone(workload):
    events = play_paged(*workload).events
    alone, own = RunMetrics(), RunState(workload[1].batch)
    alone.observe(events)
    for event in events:
        own.fold.take(event)
        own.catch_up()
    state = RunState(workload[1].batch)
    metrics = RunMetrics(fold=state.fold)
    metrics.observe(events)
    state.catch_up()
    assert encode_summary(metrics.summary()) == encode_summary(alone.summary())
    assert [(slot.label, slot.end, slot.outcome, slot.num_steps) for slot in state.slots] == [
        (slot.label, slot.end, slot.outcome, slot.num_steps) for slot in own.slots
    ]
    assert list(state.notes) == list(own.notes)
    assert [found.finish for found in state.ends] == [found.finish for found in own.ends]
    assert [slot.mark for slot in state.slots] == [slot.mark for slot in own.slots]
    assert np.array_equal(state.history.used(99, 9, []), own.history.used(99, 9, []))
    assert (
        state.num_done,
        state.fold.num_asked,
        state.fold.num_found,
        state.num_tokens(10**6),
    ) == (own.num_done, own.fold.num_asked, own.fold.num_found, own.num_tokens(10**6))


def test_neither_two_slots_nor_what_was_forced_is_a_second_standstill():
    fold = RequestFold()
    fold.take(arrive("a"))
    fold.take(admit("a", 0))
    fold.take(PreemptEvent(2, 2.0, "a", 0, 0, "kv", "z", 0, 7, 2))
    fold.take(admit("a", 1, 3, generated=2))
    fold.take(StepsEvent(4, [5.0], [0], [3], [1], [1], [0], [0]))
    (request,) = fold.open
    assert [request.tokens_after(step) for step in (4, 5)] == [3, 4]
    fold = RequestFold()
    jumps = [jump("a", 0, step) for step in (0, 1)]
    for event in [*FORCED[:2], *jumps, *STEPS]:
        fold.take(event)
    (request,) = fold.open
    assert request.tokens_after(2) == 7


STEPS = [
    StepsEvent(step, [step + 1.0], [0], [tokens], [1], [1], [0], [0])
    for step, tokens in enumerate([5, 2, 1])
]
FORCED = [
    arrive("a"),
    admit("a", 0),
    jump("a", 0),
    prefill("a", 0, 1, 2, 1),
    prefill("a", 0, 2, 1, 0),
]


@pytest.mark.parametrize(
    "events",
    [
        [*FORCED, *STEPS],
        [*STEPS, *FORCED],
        [*FORCED[:3], STEPS[0], STEPS[1], FORCED[3], STEPS[2], FORCED[4]],
        [*FORCED[:3], STEPS[0], FORCED[3], STEPS[1], FORCED[4], STEPS[2]],
    ],
)
def test_a_step_that_computes_what_was_forced_is_no_standstill_of_others(events):
    fold = RequestFold()
    for event in events:
        fold.take(event)
    (request,) = fold.open
    assert [request.tokens_after(step) for step in (2, 3)] == [4, 5]
