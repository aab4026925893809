"""A trace of several workers is read as one timeline, made of what each did in a run of its own."""

from collections import Counter
from random import Random

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import by_step, metrics_of, read_trace
from msgspec.structs import replace
from reference import english_requests
from worker_runs import BATCH, SETTINGS, interleaved, worker_runs

from batcher import Request, SimulatedModel
from batcher.engine import Engine
from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    FinishEvent,
    PreemptEvent,
    RestartEvent,
    RunEvent,
)
from batcher.explaining.story import PhaseFollower, answer_of, read_requests
from batcher.scheduling.clock import ConstantClock, FormulaClock, WallClock
from batcher.timing.profiles import step_time_of
from batcher.trace.files import encode_events
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps
from cli.views.gantt import render_gantt
from cli.views.svg import render_svg

encode = msgspec.json.encode
SEEDS = st.integers(0, 2**32)


def requests_of(drawn):
    return [replace(request, id=f"r{number}") for number, request in enumerate(drawn)]


def traced(drawn, num_workers, seed, kind="plain"):
    draw = Random(seed)
    runs = worker_runs(requests_of(drawn), num_workers, BATCH, draw, **SETTINGS[kind])
    own = [run.events for run in runs]
    trace = encode_events(interleaved(own, BATCH, draw))
    return own, list(read_trace(trace.splitlines(keepends=True)))


def spans_of(timeline, worker):
    first = worker * BATCH
    return {encode(replace(s, slot=first + s.slot, worker=worker)) for s in timeline.spans}


drawn_requests = st.lists(english_requests(), min_size=1, max_size=16)


@given(drawn_requests, st.integers(2, 5), SEEDS, st.sampled_from(list(SETTINGS)))
@examples(60)
def test_it_is_the_timelines_of_the_workers_side_by_side(drawn, num_workers, seed, kind):
    own, events = traced(drawn, num_workers, seed, kind)
    merged, workers = Timeline.from_events(events), [Timeline.from_events(run) for run in own]
    merged.check_integrity()
    assert merged.num_steps == max(timeline.num_steps for timeline in workers)
    assert merged.num_slots == num_workers * BATCH
    assert {encode(span) for span in merged.spans} == set[bytes]().union(
        *(spans_of(timeline, worker) for worker, timeline in enumerate(workers))
    )
    for counts in (Timeline.occupied, Timeline.waiting):
        of_workers = [by_step(counts(timeline)) for timeline in workers]
        padded = [counts + [0] * (merged.num_steps - len(counts)) for counts in of_workers]
        assert by_step(counts(merged)) == [sum(at) for at in zip(*padded, strict=True)]
    for row in merged.select_steps():
        at = [list(t.select_steps(Selection(start=row.step, stop=row.step + 1))) for t in workers]
        slots = [found[0].slots if found else [None] * BATCH for found in at]
        assert row.slots == [label for own_slots in slots for label in own_slots]
        assert (row.begin, row.tokens) == (None, None), "each worker has a clock of its own"


@given(drawn_requests, st.integers(2, 4), SEEDS, st.sampled_from(list(SETTINGS)))
@examples(30)
def test_views_do_not_depend_on_the_order_of_workers_and_a_story_is_that_of_its_worker(
    drawn, num_workers, seed, kind
):
    own, events = traced(drawn, num_workers, seed, kind)
    again = interleaved(own, BATCH, Random(seed + 1))
    for view in (encode_spans, encode_steps, encode_csv, encode_chrome):
        assert list(view(Timeline.from_events(events))) == list(view(Timeline.from_events(again)))
    found = {story.id: story for story in answer_of(read_requests(events)).stories}
    assert len(found) == len(drawn)
    for worker, run in enumerate(own):
        for story in answer_of(read_requests(run)).stories:
            spans = [replace(span, slot=worker * BATCH + span.slot) for span in story.spans]
            assert found[story.id] == replace(story, worker=worker, spans=spans)


@given(drawn_requests, SEEDS, st.data())
@examples(30)
def test_a_trace_that_breaks_off_is_read_up_to_there(drawn, seed, data):
    _, events = traced(drawn, 3, seed)
    kept = events[: data.draw(st.integers(1, len(events)))]
    merged = Timeline.from_events(kept)
    merged.check_integrity()
    admitted = {event.id for event in kept if isinstance(event, AdmitEvent)}
    ended = {event.id for event in kept if isinstance(event, FinishEvent)}
    assert {span.id for span in merged.spans if span.outcome is None} == admitted - ended


REQUESTS = [Request(id=f"r{n}", prompt="One two", max_tokens=3 + n % 4) for n in range(12)]


def few_events():
    return traced(REQUESTS, 2, 1)[1]


def test_views_name_the_worker_and_chrome_has_a_process_for_each():
    timeline = Timeline.from_events(few_events())
    spans = [msgspec.json.decode(line) for line in encode_spans(timeline)]
    assert all(span["worker"] == span["slot"] // BATCH for span in spans)
    assert {span["worker"] for span in spans} == {0, 1}
    header, first, *_ = encode_csv(timeline)
    assert header.endswith(b",worker\n")
    assert first.endswith(b",0\n")
    events = msgspec.json.decode(b"".join(encode_chrome(Timeline.from_events(few_events()))))[
        "traceEvents"
    ]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {n + 1: f"batchdecode (worker {n}, simulated)" for n in range(2)}
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(1 + slot // BATCH, f"slot {slot}") for slot in range(2 * BATCH)}
    waits = [(e["id"], e["pid"]) for e in events if e.get("cat") == "queue" and e["ph"] == "b"]
    assert len({number for number, _ in waits}) == len(waits)
    assert {pid for _, pid in waits} == {1, 2}
    timeline = Timeline.from_events(few_events())
    page = msgspec.json.decode(b"".join(encode_chrome(timeline, Selection(slots=frozenset({4})))))
    assert {event["pid"] for event in page["traceEvents"]} == {2}


def test_what_a_worker_found_in_its_cache_is_of_that_worker():
    requests = [replace(request, prompt=[5] * 9) for request in REQUESTS]
    read = Timeline.from_events(traced(requests, 2, 1, "few blocks")[1])
    events = msgspec.json.decode(b"".join(encode_chrome(read)))["traceEvents"]
    ends = [(e["ph"], e["id"], e["pid"]) for e in events if e["ph"] in "sf"]
    assert {pid for _, _, pid in ends} == {1, 2}
    begun = {number: pid for phase, number, pid in ends if phase == "s"}
    assert begun == {number: pid for phase, number, pid in ends if phase == "f"}
    assert 2 * len(begun) == len(ends), "no two flows have one number"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"worker": None}, "an event has no worker, but the number of workers is 2"),
        ({"worker": 2}, "an event has worker 2, but the number of workers is 2"),
        ({"worker": 1, "slot": 0}, "worker 1 has 3 slots, and slot 0 is not one of them"),
        ({"worker": 0, "slot": 3}, "worker 0 has 3 slots, and slot 3 is not one of them"),
    ],
)
def test_an_event_of_no_worker_or_of_the_slot_of_another_is_refused(change, complaint):
    events = few_events()
    number = next(n for n, event in enumerate(events) if isinstance(event, AdmitEvent))
    events[number] = replace(events[number], **change)
    with pytest.raises(InvariantError, match=complaint):
        Timeline.from_events(events)


def test_a_run_of_one_has_no_worker():
    (own, *_), _ = traced(REQUESTS, 2, 1)
    with pytest.raises(
        InvariantError, match="an event has worker 0, but the number of workers is 1"
    ):
        Timeline.from_events([own[0], *(replace(event, worker=0) for event in own[1:])])


@pytest.mark.parametrize(
    ("batch", "workers", "most"),
    [(2**19, 4, "1048576"), (-8, 2, "1048576"), (1, 10**12, "1024"), (8, 0, "1024")],
)
def test_so_many_slots_are_refused_before_there_is_anything_for_them(batch, workers, most):
    run = RunEvent(batch=batch, workers=workers, model="simulated", settings={})
    with pytest.raises(BatchdecodeError, match=f"a run has 1 to {most}"):
        Timeline.from_events([run])


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
            engine.start_at(begin.step, begin.time)
        for request in left:
            engine.add(request)
        until = engine.num_steps + draw.randint(0, 12) if len(lives) < 3 else 10**9
        events, ended = [], Counter()
        while engine.has_work and engine.num_steps < until:
            events += engine.step().events
        num_open = Counter({request.id: request.n for request in left})
        ended.update(event.id for event in events if isinstance(event, FinishEvent))
        left = [request for request in left if ended[request.id] < num_open[request.id]]
        events += engine.take_step_events()
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
    summary = metrics_of(events, worker_series=[None] * num_workers).summary()
    assert summary.steps == timeline.num_steps
    assert summary.busy_slot_steps == sum(each.total for each in timeline.occupied())
    assert summary.requests == summary.outputs == len(drawn)
    ends = [e for e in events if isinstance(e, FinishEvent) and e.role == "sample"]
    assert summary.generated_tokens == sum(e.tokens for e in ends)
    assert sum(summary.idle.values()) == summary.idle_slot_steps


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


def test_a_restart_ends_waits_and_is_marked_but_not_before_what_was_done():
    restart = RestartEvent(step=3, time=2.0, reason="lost")
    with pytest.raises(InvariantError, match="replaced before step 3, and has made 4"):
        Timeline.from_events([RUN, ARRIVE, ADMIT, restart])
    restart = RestartEvent(step=5, time=5.0, reason="exited", code=3)
    timeline = Timeline.from_events([RUN, ARRIVE, restart])
    assert [(wait.start, wait.end) for wait in timeline.waits] == [(0, 5)]
    assert timeline.num_steps == 5
    restart = RestartEvent(step=0, time=0.0, reason="killed", code=9)
    finish = FinishEvent(4, 4.0, "a", 0, 0, "stop", None, 2)
    timeline = Timeline.from_events([RUN, restart, ARRIVE, replace(ADMIT, step=0), finish])
    shown = b"".join(encode_chrome(timeline))
    assert b'"worker replaced"' in shown
    gantt = ["".join(text for text, _ in line) for line in render_gantt(timeline, width=60)]
    assert any(line.split()[:2] == ["died", "!"] for line in gantt if line)
    assert b"restart" in render_svg(timeline).partition(b"</style>")[2]


@pytest.mark.parametrize(
    "make", [ConstantClock, lambda: FormulaClock(step_time_of("h100_llama3.1-8b_tp1"))]
)
@given(step=st.integers(0, 50), time=st.floats(0.001, 500))
def test_a_clock_goes_on_with_the_step_and_the_time_it_is_told(make, step, time):
    clock = make()
    clock.start_at(step, time)
    assert (clock.step, clock.now, clock.start_of(step)) == (step, time, time)
    assert clock.step_at(0.0) == 0
    assert 0 <= clock.step_at(time / 2) <= clock.step_at(time) == step
    clock.jump(time + 3)
    assert clock.step_at(time + 1) == step
    assert clock.now >= time + 3


def test_a_clock_on_the_wall_goes_on_from_the_time_it_is_told():
    seconds = iter([100.0, 100.5, 101.0])
    clock = WallClock(lambda: next(seconds), lambda _: None)
    clock.start_at(4, 7.0)
    clock.advance(None)
    assert (clock.step, clock.now) == (5, 7.5)
