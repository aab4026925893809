"""A trace of several workers is read as one timeline, made of what each did in a run of its own."""

from random import Random

import msgspec
import pytest
from by_step import by_step
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from worker_runs import BATCH, SETTINGS, interleaved, worker_runs

from batcher import Request
from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import AdmitEvent, FinishEvent, RunEvent
from batcher.explaining.story import answer_of, read_requests
from batcher.trace.files import encode_events, read_trace
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps

encode = msgspec.json.encode
SEEDS = st.integers(0, 2**32)


def requests_of(drawn: list[Request]) -> list[Request]:
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


def test_views_name_the_worker():
    timeline = Timeline.from_events(few_events())
    spans = [msgspec.json.decode(line) for line in encode_spans(timeline)]
    assert all(span["worker"] == span["slot"] // BATCH for span in spans)
    assert {span["worker"] for span in spans} == {0, 1}
    header, first, *_ = encode_csv(timeline)
    assert header.endswith(b",worker\n")
    assert first.endswith(b",0\n")


def test_each_worker_is_a_process_of_chrome_with_its_slots_by_their_numbers():
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


def test_what_a_worker_found_in_its_cache_is_of_that_worker():
    requests = [replace(request, prompt=[5] * 9) for request in REQUESTS]
    read = Timeline.from_events(traced(requests, 2, 1, "few blocks")[1])
    events = msgspec.json.decode(b"".join(encode_chrome(read)))["traceEvents"]
    ends = [(e["ph"], e["id"], e["pid"]) for e in events if e["ph"] in "sf"]
    assert {pid for _, _, pid in ends} == {1, 2}
    begun = {number: pid for phase, number, pid in ends if phase == "s"}
    assert begun == {number: pid for phase, number, pid in ends if phase == "f"}
    assert 2 * len(begun) == len(ends), "no two flows have one number"


def test_slots_that_are_chosen_may_be_of_one_worker():
    timeline = Timeline.from_events(few_events())
    page = msgspec.json.decode(b"".join(encode_chrome(timeline, Selection(slots=frozenset({4})))))
    assert {event["pid"] for event in page["traceEvents"]} == {2}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"worker": None}, "an event of no worker in a run of 2"),
        ({"worker": 2}, "an event of worker 2 in a run of 2"),
        ({"worker": 1, "slot": 0}, "slot 0 is none of the 3 of worker 1"),
        ({"worker": 0, "slot": 3}, "slot 3 is none of the 3 of worker 0"),
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
    with pytest.raises(InvariantError, match="an event of worker 0 in a run of 1"):
        Timeline.from_events([own[0], *(replace(event, worker=0) for event in own[1:])])


@pytest.mark.parametrize(
    ("batch", "workers", "most"),
    [(2**19, 4, "1048576"), (-8, 2, "1048576"), (1, 10**12, "1024"), (8, 0, "1024")],
)
def test_so_many_slots_are_refused_before_there_is_anything_for_them(batch, workers, most):
    run = RunEvent(batch=batch, workers=workers, model="simulated", settings={})
    with pytest.raises(BatchdecodeError, match=f"a run has 1 to {most}"):
        Timeline.from_events([run])
