"""Each step of a request's life is explained once, and by what really happened."""

from contextlib import suppress
from itertools import groupby

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import RUN, admit, arrive, finish, hold, jump, prefill
from reference_paged import CROWDED, Limits, paged_workloads, play_paged
from reference_units import beams, guided, play_units, samples, unit_workloads
from scheduling_settings import requests_of_all_kinds, scheduling_settings, sharing, step_times

from batcher import Engine, Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.events import BlockedEvent, RejectEvent
from batcher.explaining.story import PhaseFollower, PhaseTotals, answer_of, read_requests, story_of
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunMetrics
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings


def stories_of(events, request_id=None):
    return answer_of(read_requests(events, request_id)).stories


def steps_of(story):
    """Which part each step belongs to; a step in two parts is an error."""
    found = {}
    for part in story.parts:
        for step in range(part.start, part.end):
            assert step not in found
            found[step] = part
    return found


@given(paged_workloads())
def test_every_step_is_explained_once_and_by_what_happened_in_it(workload):
    jobs, limits = workload
    run = play_paged(jobs, limits)
    arrivals = {job.id: job.arrival for job in jobs}
    stories = stories_of(run.events)
    assert {story.id for story in stories} == {job.id for job in jobs}
    for story in stories:
        found = steps_of(story)
        assert {step: (p.phase, p.cause, p.behind) for step, p in found.items()} == run.states[
            story.id
        ]
        assert story.steps.sum == story.ended.step + 1 - story.arrived.step == len(found)
        assert story.ended.time == run.ends[story.ended.step]
        assert story.seconds.sum == pytest.approx(story.ended.time - arrivals[story.id])


@given(paged_workloads(), st.data())
def test_events_that_break_off_are_explained_up_to_there(workload, data):
    jobs, limits = workload
    run = play_paged(jobs, limits)
    kept = run.events[: data.draw(st.integers(1, len(run.events)))]
    found = read_requests(kept)
    for request, story in zip(found.all, answer_of(found).stories, strict=True):
        assert sorted(steps_of(story)) == list(request.steps(found.timeline.num_steps))


@given(unit_workloads())
def test_samples_partners_and_beams_are_told_once_each(workload):
    units, batch = workload
    stories = stories_of(play_units(units, batch, 5).events)
    assert sorted((s.id, s.index) for s in stories) == sorted((u.id, u.rows[0][0]) for u in units)
    rows = {(unit.id, unit.rows[0][0]): len(unit.rows) for unit in units}
    for story in stories:
        assert story.num_rows == rows[story.id, story.index]
        assert len(steps_of(story)) == story.ended.step + 1 - story.arrived.step


def test_a_unit_that_needs_more_slots_than_are_free_waits_for_slots_and_holds_up_the_rest():
    units = [*samples("z", 3), *beams("m", 2, 1), *guided("s", 2)]
    stories = {story.id: story for story in stories_of(play_units(units, 2).events)}
    assert [(p.cause, p.start, p.end, p.by) for p in stories["m"].parts[:1]] == [
        ("slots", 0, 3, ("z",))
    ]
    one = [*samples("z", 3), *beams("m", 2, 1), *samples("s", 1)]
    waits = next(s for s in stories_of(play_units(one, 2).events) if s.id == "s").parts[:-1]
    assert [(p.cause, p.start, p.end) for p in waits] == [("queue", 0, 3), ("slots", 3, 4)]


def test_a_preempted_request_has_two_stays_and_what_it_cost():
    (story,) = stories_of(play_paged(CROWDED, Limits()).events, "b")
    first, second = story.spans
    assert (first.start, first.end, first.preemption.for_label) == (0, 7, "a")
    assert (first.preemption.tokens, first.preemption.generated) == (8, 7)
    assert (second.start, second.end, second.first_token, second.generated) == (9, 13, 11, 7)
    assert story.steps == PhaseTotals(wait=0, preempted=2, prefill=4, decode=7, standstill=0)
    assert story.seconds == PhaseTotals(0, 0.75, 2.625, 3.375, 0)


def test_holds_and_what_was_forced_are_told_for_what_they_are():
    events = [
        RUN,
        *map(arrive, "abc"),
        admit("a", 0),
        BlockedEvent(0, 0.0, "b", 0, "batch"),
        finish("b", None, 2, reason="aborted"),
        BlockedEvent(3, 3.0, "c", 0, "batch"),
        finish("a", 0, 5),
        admit("c", 0, 6),
        finish("c", 0, 6),
    ]
    stories = {story.id: story for story in stories_of(events)}
    assert [(p.cause, p.behind, p.start, p.end) for p in stories["c"].parts] == [
        ("batch", "b", 0, 2),
        ("queue", None, 2, 3),
        ("batch", None, 3, 6),
        ("", None, 6, 7),
    ]
    assert [(p.cause, p.start, p.end) for p in stories["b"].parts] == [("batch", 0, 2)]
    events = [
        RUN,
        *map(arrive, "ab"),
        admit("a", 0),
        hold("b", 0),
        arrive("first", 2),  # the policy puts it before b
        admit("first", 1, 2),
        finish("first", 1, 3),
        finish("a", 0, 5),
        admit("b", 0, 6),
        finish("b", 0, 6),
    ]
    (story,) = stories_of(events, "b")
    waits = [(p.cause, p.start, p.end, p.num_passed) for p in story.parts if p.phase == "wait"]
    assert waits == [("kv", 0, 2, 1), ("slots", 2, 4, 1), ("kv", 4, 6, 0)]
    events = [
        RUN,
        arrive("a"),
        admit("a", 0),
        jump("a", 0, 1, tokens=6),
        prefill("a", 0, 2, 3, 4),
        prefill("a", 0, 3, 4, 0),
        finish("a", 0, 4),
    ]
    (story,) = stories_of(events)
    assert [(part.phase, part.start, part.end) for part in story.parts] == [
        ("prefill", 0, 1),
        ("decode", 1, 5),
    ]


def test_ids_that_come_again_and_those_without_a_slot_have_stories():
    once = [arrive("a"), admit("a", 0), finish("a", 0, 0)]
    again = [arrive("a", 1), admit("a", 0, 1), finish("a", 0, 2)]
    stories = stories_of([RUN, *once, *again], "a")
    assert [(s.arrived.step, s.ended.step) for s in stories] == [(0, 0), (1, 2)]
    events = [
        RUN,
        arrive("a"),
        finish("a", None, 0),
        finish("b", None, reason="aborted"),
        RejectEvent(0, 0.0, "c", 0, "invalid-type"),
    ]
    kept = read_requests(events)
    answer = answer_of(kept)
    assert [(s.id, s.arrived is None, s.parts) for s in answer.stories] == [
        ("a", False, []),
        ("b", True, []),
    ]
    assert [reject.id for reject in answer.rejects] == ["c"]
    assert kept.is_known
    others = read_requests(events, "d")
    assert (others.is_known, others.ids) == (False, {"a", "b", "c"})


DRAFTS = SpeculationSettings(draft="simulated:0.7")


def phases_by_story(timeline, request):
    """Return the phases of a request as (name, start, end) by looking at each part of its story."""
    figures, story = timeline.figures, story_of(timeline, request)
    told = [(phase, list(parts)) for phase, parts in groupby(story.parts, lambda p: p.phase)]
    begins = [("queue", request.arrive.time)]
    for phase, parts in told:
        if phase != "wait":
            begins.append((phase, figures.start_of(parts[0].start)))
        elif len(begins) > 1:
            begins.append(("preempted", figures.start_of(parts[0].start)))
    ends = [begin for _, begin in begins[1:]] + [story.ended.time]
    return [(n, begin, end) for (n, begin), end in zip(begins, ends, strict=True) if end > begin]


def drained(engine, wanted, aborted):
    """Return the events of a run; some of the requests are aborted on the way."""
    ids = [engine.add(request) for request in wanted]
    events = [engine.run_event()]
    while engine.has_work:
        if engine.num_steps in aborted and ids:
            with suppress(BatchdecodeError):  # it has ended
                engine.abort(ids[engine.num_steps % len(ids)])
        events += engine.step().events
    return [*events, engine.end_event()]


def test_no_phase_goes_on_while_the_clock_jumps_behind_an_abort():
    wanted = [Request(prompt="", max_tokens=1, arrival_time=3), Request(prompt="", max_tokens=2)]
    settings = SchedulingSettings(aging=4.0)  # so the trace tells of each step
    events = drained(Engine(SimulatedModel(), 3, settings=settings), wanted, {1})
    follower = PhaseFollower()
    aborted, other = [one for event in events for one in follower.take(event)]
    assert (aborted.end, aborted.phases) == (1.0, [("prefill", 0.0, 1.0, 0)])
    assert (other.end, other.phases) == (4.0, [("prefill", 3.0, 4.0, 0)])


@given(
    st.data(),
    st.lists(sharing(requests_of_all_kinds()), max_size=10),
    st.integers(3, 5),
    step_times(),
    st.sets(st.integers(0, 30), max_size=3),
)
@examples(60)
def test_phases_are_those_of_the_story(data, wanted, batch, time, aborted):
    settings = data.draw(scheduling_settings(batch, st.sampled_from([None, 60]), 4))
    drafts = data.draw(st.sampled_from([None, DRAFTS]))
    model = SimulatedModel()
    engine = Engine(model, batch, settings=settings, step_time=time, speculation=drafts)
    events = drained(engine, wanted, aborted)
    follower, metrics = PhaseFollower(), RunMetrics(Slo({"ttft": 1.0}))
    ended = [one for event in events for one in follower.take(event)]
    metrics.observe(events)
    kept = read_requests(events)
    told = {(one.arrive.id, one.arrive.index): one for one in ended}
    assert len(told) == len(ended)
    arrived = [request for request in kept.all if request.arrive is not None]
    assert set(told) == {(request.id, request.index) for request in arrived}
    for request in arrived:
        one = told[request.id, request.index]
        assert [phase[:3] for phase in one.phases] == phases_by_story(kept.timeline, request)
        assert one.end == pytest.approx(story_of(kept.timeline, request).ended.time)
    latencies = metrics.summary().latencies
    ttfts = [one.first_token - one.arrive.time for one in ended if one.first_token is not None]
    expected = latencies.ttft.mean * latencies.ttft.count if latencies and latencies.ttft else 0
    assert sum(ttfts) == pytest.approx(expected, abs=1e-6 * max(1, len(ttfts)))
