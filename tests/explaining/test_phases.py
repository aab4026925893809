"""The phases of a request are those of its story, to the last bit of its times."""

from contextlib import suppress
from itertools import groupby

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from reference import english_requests
from scheduling_settings import scheduling_settings, sharing, step_times

from batcher import Engine, Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.explaining.story import PhaseFollower, read_requests, story_of
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunMetrics
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings

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


def requests():
    sampled, no_stops = {"temperature": 1.0}, dict.fromkeys(("stop", "stop_token", "stop_sequence"))
    several = [{}, {}, sampled | {"n": 2}, sampled | {"best_of": 3}, no_stops | {"num_beams": 3}]
    more = st.sampled_from(several)
    return st.builds(lambda one, more: Request(**asdict(one) | more), english_requests(), more)


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
    st.lists(sharing(requests()), max_size=10),
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
