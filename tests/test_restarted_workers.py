"""A worker that is replaced goes on with its steps: a trace tells what both engines have done."""

from collections import Counter
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from worker_runs import BATCH, SETTINGS, interleaved

from batcher import SimulatedModel
from batcher.engine import Engine
from batcher.errors import InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    FinishEvent,
    PreemptEvent,
    RestartEvent,
    RunEvent,
)
from batcher.explaining.story import PhaseFollower, answer_of, read_requests
from batcher.metrics.summary import RunMetrics
from batcher.scheduling.clock import ConstantClock, FormulaClock, WallClock
from batcher.timing.profiles import step_time_of
from batcher.trace.files import encode_events, read_trace
from batcher.trace.timeline import Timeline
from batcher.trace.views import encode_chrome
from cli.views.gantt import render_gantt
from cli.views.svg import render_svg


class Life:
    """What one engine did in the place of a worker, and how it ended: by `restart`, if it did."""

    def __init__(self, events, num_steps, restart):
        self.events, self.num_steps, self.restart = events, num_steps, restart


def lives_of(requests, draw, settings):
    """Decode `requests` in one place, in which engines die at random; return their lives."""
    left, begin, lives = list(requests), None, []
    while left or not lives:
        engine = Engine(SimulatedModel(), BATCH, **settings)
        run = engine.run_event()
        if begin is not None:
            engine.go_on_from(begin.step, begin.time)
        for request in left:
            engine.add(request)
        until = engine.num_steps + draw.randint(0, 12) if len(lives) < 3 else 10**9
        events, ended = [], Counter()
        while engine.has_work and engine.num_steps < until:
            events += engine.step().events
        num_open = Counter({request.id: request.n for request in left})
        ended.update(event.id for event in events if isinstance(event, FinishEvent))
        left = [request for request in left if ended[request.id] < num_open[request.id]]
        events += engine.tell_steps()
        begin = RestartEvent(step=engine.num_steps, time=engine.now, reason="killed", code=9)
        end = begin if left else engine.end_event()
        lives.append(Life([*events, end], engine.num_steps, begin if left else None))
    return run, lives


def places(drawn, num_workers, seed, kind):
    """The lives in each of several places, and the trace of them all, read from its bytes."""
    draw = Random(seed)
    named = [replace(each, id=f"r{number}", n=1) for number, each in enumerate(drawn)]
    shares = [named[number::num_workers] for number in range(num_workers)]
    found = [lives_of(share, draw, SETTINGS[kind]) for share in shares]
    run = found[0][0]
    own = [[run, *(event for life in lives for event in life.events)] for _, lives in found]
    trace = encode_events(interleaved(own, BATCH, draw))
    return run, [lives for _, lives in found], list(read_trace(trace.splitlines(keepends=True)))


cases = given(
    st.lists(english_requests(), min_size=1, max_size=12),
    st.integers(2, 4),
    st.integers(0, 2**32),
    st.sampled_from(list(SETTINGS)),
)


@cases
@examples(60)
def test_a_trace_and_its_numbers_are_what_all_engines_did_one_after_the_other(
    drawn, num_workers, seed, kind
):
    run, of_places, events = places(drawn, num_workers, seed, kind)
    timeline = Timeline.from_events(events)
    timeline.check_integrity()
    assert sum(each.total for each in timeline.occupied()) == sum(
        each.total
        for lives in of_places
        for each in Timeline.from_events(
            [run, *(e for life in lives for e in life.events)]
        ).occupied()
    )
    told = [e for lives in of_places for life in lives for e in life.events]
    outcomes = Counter(e.reason for e in told if isinstance(e, FinishEvent) and e.slot is not None)
    outcomes["preempted"] = sum(isinstance(event, PreemptEvent) for event in told)
    num_admitted = sum(isinstance(event, AdmitEvent) for event in told)
    outcomes["lost"] = num_admitted - sum(outcomes.values())
    assert Counter(span.outcome for span in timeline.spans) == +outcomes
    restarts = [life.restart for lives in of_places for life in lives if life.restart is not None]
    assert Counter(each.step for each in timeline.restarts) == Counter(r.step for r in restarts)
    assert list(encode_chrome(timeline))
    metrics = RunMetrics(worker_series=[None] * num_workers)
    metrics.observe(events)
    summary = metrics.summary()
    assert summary.steps == timeline.num_steps
    assert summary.busy_slot_steps == sum(each.total for each in timeline.occupied())
    assert summary.requests == summary.outputs == len(drawn)
    ends = [e for e in events if isinstance(e, FinishEvent) and e.role == "sample"]
    assert summary.generated_tokens == sum(e.tokens for e in ends)
    idle = summary.idle
    assert sum(getattr(idle, n) for n in idle.__struct_fields__) == summary.idle_slot_steps


@cases
@examples(40)
def test_each_attempt_has_a_story_and_what_has_ended_its_phases(drawn, num_workers, seed, kind):
    _, _, events = places(drawn, num_workers, seed, kind)
    stories = answer_of(read_requests(events)).stories
    ended = [story for story in stories if story.ended.reason != "lost"]
    assert Counter(story.id for story in ended) == Counter(f"r{n}" for n in range(len(drawn)))
    arrived = sum(isinstance(event, ArriveEvent) for event in events)
    assert len(stories) == arrived
    followers = [PhaseFollower() for _ in range(num_workers)]
    told = []
    for event in events:
        own = range(num_workers) if isinstance(event, RunEvent) else [event.worker]
        for worker in own:
            told += followers[worker].take(event)
    assert Counter(each.arrive.id for each in told) == Counter(story.id for story in ended)
    ends = {each.arrive.id: each.end for each in told}
    assert all(ends[story.id] == pytest.approx(story.ended.time) for story in ended if story.spans)


RUN = RunEvent(batch=1, model="simulated", settings={})
ARRIVE = ArriveEvent(step=0, time=0, id="a", index=0, reason="input", prompt_tokens=1, max_tokens=9)
ADMIT = AdmitEvent(step=3, time=3, id="a", index=0, slot=0, reason="empty")


def test_a_worker_is_not_replaced_before_what_it_has_done():
    restart = RestartEvent(step=3, time=2.0, reason="lost")
    with pytest.raises(InvariantError, match="replaced before step 3, and has made 4"):
        Timeline.from_events([RUN, ARRIVE, ADMIT, restart])


def test_what_waits_when_a_worker_dies_has_waited_up_to_there():
    restart = RestartEvent(step=5, time=5.0, reason="exited", code=3)
    timeline = Timeline.from_events([RUN, ARRIVE, restart])
    assert [(wait.start, wait.end) for wait in timeline.waits] == [(0, 5)]
    assert timeline.num_steps == 5


@pytest.mark.parametrize(
    "make", [ConstantClock, lambda: FormulaClock(step_time_of("h100_llama3.1-8b_tp1"))]
)
@given(step=st.integers(0, 50), time=st.floats(0.001, 500))
def test_a_clock_goes_on_with_the_step_and_the_time_it_is_told(make, step, time):
    clock = make()
    clock.go_on_from(step, time)
    assert (clock.step, clock.now, clock.start_of(step)) == (step, time, time)
    assert clock.step_at(0.0) == 0
    assert 0 <= clock.step_at(time / 2) <= clock.step_at(time) == step
    clock.jump(time + 3)
    assert clock.step_at(time + 1) == step
    assert clock.now >= time + 3


def test_a_clock_on_the_wall_goes_on_from_the_time_it_is_told():
    seconds = iter([100.0, 100.5, 101.0])
    clock = WallClock(lambda: next(seconds), lambda _: None)
    clock.go_on_from(4, 7.0)
    clock.advance(None)
    assert (clock.step, clock.now) == (5, 7.5)


def test_a_worker_that_died_before_its_first_step_is_marked_at_the_first():
    restart = RestartEvent(step=0, time=0.0, reason="killed", code=9)
    finish = FinishEvent(4, 4.0, "a", 0, 0, "stop", None, 2)
    timeline = Timeline.from_events([RUN, restart, ARRIVE, replace(ADMIT, step=0), finish])
    shown = b"".join(encode_chrome(timeline))
    assert b'"worker replaced"' in shown
    gantt = ["".join(text for text, _ in line) for line in render_gantt(timeline, width=60)]
    assert any(line.split()[:2] == ["died", "!"] for line in gantt if line)
    assert b"restart" in render_svg(timeline).partition(b"</style>")[2]
