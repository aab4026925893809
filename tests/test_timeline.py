import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_schedule import DESIGN_JOBS, Job, jobs_of, play, workloads

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import AdmitEvent, ArriveEvent, EndEvent, FinishEvent, RunEvent
from batcher.timeline import Selection, Span, Timeline, Wait


def timeline_of(jobs, batch=2):
    return Timeline.from_events(play(jobs, batch).events)


def test_the_example_of_the_design_gives_its_steps():
    rows = list(timeline_of(DESIGN_JOBS).select_steps())
    assert [row.slots for row in rows] == [
        ["a", "b"],
        ["a", "c"],
        ["a", "c"],
        ["d", None],
        ["d", None],
        ["d", None],
        ["d", None],
    ]
    assert [row.waiting for row in rows] == [2, 1, 1, 0, 0, 0, 0]
    assert [row.step for row in rows] == list(range(7))


def test_the_example_of_the_design_gives_its_spans_and_waits():
    timeline = timeline_of(DESIGN_JOBS)
    assert timeline.spans == [
        Span(0, "a", 0, 0, 3, "length"),
        Span(1, "b", 1, 0, 1, "length"),
        Span(1, "c", 2, 1, 3, "length"),
        Span(0, "d", 3, 3, 7, "length"),
    ]
    assert timeline.waits == [Wait("c", 2, 0, 1), Wait("d", 3, 0, 3)]


@given(workloads(), st.integers(1, 5))
def test_the_events_alone_give_every_step(jobs, batch):
    played = play(jobs, batch)
    timeline = Timeline.from_events(played.events)
    timeline.check_integrity()
    rows = list(timeline.select_steps())
    assert [row.slots for row in rows] == [row.slots for row in played.rows]
    assert [row.waiting for row in rows] == [row.waiting for row in played.rows]
    assert timeline.occupied == [batch - row.slots.count(None) for row in played.rows]
    assert timeline.num_steps == len(played.rows)


@given(workloads(), st.integers(1, 5), st.data())
def test_events_that_break_off_anywhere_give_the_timeline_up_to_there(jobs, batch, data):
    played = play(jobs, batch)
    kept = played.events[: data.draw(st.integers(1, len(played.events)))]
    timeline = Timeline.from_events(kept)
    timeline.check_integrity()
    assert timeline.num_steps <= len(played.rows)
    admitted = {event.index for event in kept if isinstance(event, AdmitEvent)}
    finished = {event.index for event in kept if isinstance(event, FinishEvent)}
    assert {span.index for span in timeline.spans} == admitted
    running = {span.index for span in timeline.spans if span.outcome is None}
    assert running == admitted - finished
    for span in timeline.spans:
        assert span.outcome is not None or span.end == timeline.num_steps


@given(workloads(), st.integers(1, 4), st.integers(-3, 12), st.integers(-3, 12))
def test_a_selection_is_a_slice_of_the_steps(jobs, batch, start, stop):
    timeline = timeline_of(jobs, batch)
    chosen = Selection(start=start, stop=stop)
    steps = range(timeline.num_steps)[start:stop]
    everything = list(timeline.select_steps())
    assert list(timeline.select_steps(chosen)) == everything[start:stop]
    touched = [span for span in timeline.spans if set(steps) & set(range(span.start, span.end))]
    assert list(timeline.select_spans(chosen)) == touched
    waits = [wait for wait in timeline.waits if set(steps) & set(range(wait.start, wait.end))]
    assert list(timeline.select_waits(chosen)) == waits


def test_chosen_requests_are_the_only_spans_and_keep_their_neighbours_in_the_steps():
    timeline = timeline_of(DESIGN_JOBS)
    chosen = Selection(request_ids=frozenset({"c"}))
    assert [span.id for span in timeline.select_spans(chosen)] == ["c"]
    assert [wait.id for wait in timeline.select_waits(chosen)] == ["c"]
    assert [(row.step, row.slots) for row in timeline.select_steps(chosen)] == [
        (1, ["a", "c"]),
        (2, ["a", "c"]),
    ]


def test_chosen_slots_are_the_only_columns():
    timeline = timeline_of(DESIGN_JOBS)
    chosen = Selection(slots=frozenset({1}), start=2, stop=4)
    assert [span.id for span in timeline.select_spans(chosen)] == ["c"]
    assert [row.slots for row in timeline.select_steps(chosen)] == [["c"], [None]]


def test_a_run_without_requests_has_no_steps():
    timeline = timeline_of([])
    timeline.check_integrity()
    assert (timeline.num_steps, timeline.spans, list(timeline.select_steps())) == (0, [], [])
    assert list(timeline.select_spans()) == []


def test_a_request_without_a_slot_takes_no_step():
    timeline = timeline_of([Job("none", 0), Job("one", 1)])
    assert [span.id for span in timeline.spans] == ["one"]
    assert timeline.waits == []


def test_an_id_may_come_again():
    timeline = timeline_of([Job("a", 2), Job("a", 3)], batch=1)
    assert [(span.id, span.index, span.start, span.end) for span in timeline.spans] == [
        ("a", 0, 0, 2),
        ("a", 1, 2, 5),
    ]


RUN = RunEvent(batch=2, model="test", settings={})


def arrive(index, step=0):
    return ArriveEvent(step, float(step), f"r{index}", index, "input", 1, 9)


def admit(index, slot, step=0):
    return AdmitEvent(step, float(step), f"r{index}", index, slot, "empty")


def finish(index, slot, step=0):
    return FinishEvent(step, float(step), f"r{index}", index, slot, "length", None, 1)


def test_a_request_aborted_in_the_queue_waits_until_then():
    events = [RUN, arrive(0), arrive(1), admit(0, 0), finish(1, None, 2), finish(0, 0, 4)]
    assert Timeline.from_events(events).waits == [Wait("r1", 1, 0, 2)]


def test_a_request_that_still_waits_does_so_up_to_the_last_known_step():
    events = [RUN, arrive(0), arrive(1), admit(0, 0), finish(0, 0, 4)]
    assert Timeline.from_events(events).waits == [Wait("r1", 1, 0, 5)]


@pytest.mark.parametrize(
    ("complaint", "events"),
    [
        ("no run event", []),
        ("while it runs", [RUN, admit(0, 0), admit(0, 1)]),
        ("does not hold", [RUN, finish(0, 0)]),
        ("does not hold", [RUN, admit(0, 0), finish(0, 1)]),
        ("while requests hold slots", [RUN, admit(0, 0), EndEvent(1, 1.0, 0, 1)]),
        ("over by step 2", [RUN, admit(0, 0), finish(0, 0, 2), EndEvent(4, 4.0, 1, 1)]),
        ("over by step -1", [RUN, EndEvent(2**62, 2.0, 1, 1)]),
        ("-1 steps", [RUN, EndEvent(-1, 2.0, 1, 1)]),
        ("arrives in step -3", [RUN, arrive(0, -3), admit(0, 0)]),
    ],
)
def test_events_that_contradict_each_other_are_refused(complaint, events):
    with pytest.raises(InvariantError, match=complaint):
        Timeline.from_events(events)


@pytest.mark.parametrize(
    ("complaint", "events"),
    [
        ("a batch of 1000000000000", [RunEvent(batch=10**12, model="test", settings={})]),
        ("a batch of 0", [RunEvent(batch=0, model="test", settings={})]),
        ("step -1", [RUN, admit(0, 0, -1)]),
        ("step 4611686018427387904", [RUN, admit(0, 0, 2**62)]),
        ("step 4611686018427387904", [RUN, arrive(0), finish(0, None, 2**62)]),
        ("step 4611686018427387904", [RUN, admit(0, 0), finish(0, 0, 2**62)]),
    ],
)
def test_a_run_that_no_memory_has_room_for_is_refused(complaint, events):
    with pytest.raises(BatchdecodeError, match=complaint):
        Timeline.from_events(events)


@pytest.mark.parametrize(
    ("complaint", "events"),
    [
        ("in slot 2 of 2", [RUN, admit(0, 2)]),
        ("share slot 0", [RUN, admit(0, 0), admit(1, 0), finish(1, 0), finish(0, 0, 3)]),
        ("of 2 steps", [RUN, admit(0, 0), finish(0, 0, 2), EndEvent(2, 2.0, 1, 1)]),
        ("of 4 steps", [RUN, admit(0, 0, 3), finish(0, 0, 1)]),
        ("nothing runs in step 1", [RUN, admit(0, 0), finish(0, 0), admit(1, 0, 2)]),
    ],
)
def test_check_integrity_finds_what_cannot_have_happened(complaint, events):
    timeline = Timeline.from_events(events)
    with pytest.raises(InvariantError, match=complaint):
        timeline.check_integrity()


def test_a_long_run_can_be_looked_at_from_its_middle():
    timeline = timeline_of(jobs_of(*[50] * 100), batch=4)
    rows = list(timeline.select_steps(Selection(start=620, stop=622)))
    assert [row.slots for row in rows] == [["r48", "r49", "r50", "r51"]] * 2
