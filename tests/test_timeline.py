import pytest
from by_step import by_step
from hypothesis import given
from hypothesis import strategies as st
from reference_schedule import DESIGN_JOBS, Job, play, workloads
from reference_units import beams, guided, play_units, samples, unit_workloads

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DropEvent,
    EndEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RunEvent,
)
from batcher.trace.run import Fork, SlotSpan, Wait, label_of
from batcher.trace.timeline import Selection, Timeline


def timeline_of(jobs, batch=2):
    return Timeline.from_events(play(jobs, batch).events)


def test_the_example_of_the_design_gives_its_spans_and_waits():
    timeline = timeline_of(DESIGN_JOBS)
    assert list(timeline.spans) == [
        SlotSpan(0, "a", 0, 0, 3, "length"),
        SlotSpan(1, "b", 0, 0, 1, "length"),
        SlotSpan(1, "c", 0, 1, 3, "length"),
        SlotSpan(0, "d", 0, 3, 7, "length"),
    ]
    assert list(timeline.waits) == [Wait("c", 0, 0, 1), Wait("d", 0, 0, 3)]


@given(workloads(), st.integers(1, 5), st.data())
def test_events_that_break_off_anywhere_give_the_timeline_up_to_there(jobs, batch, data):
    played = play(jobs, batch)
    kept = played.events[: data.draw(st.integers(1, len(played.events)))]
    timeline = Timeline.from_events(kept)
    timeline.check_integrity()
    assert timeline.num_steps <= len(played.rows)
    admitted = {event.id for event in kept if isinstance(event, AdmitEvent)}
    finished = {event.id for event in kept if isinstance(event, FinishEvent)}
    assert {span.id for span in timeline.spans} == admitted
    running = {span.id for span in timeline.spans if span.outcome is None}
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


def test_an_id_may_come_again():
    timeline = timeline_of([Job("a", 2), Job("a", 3)], batch=1)
    assert [(span.id, span.index, span.start, span.end) for span in timeline.spans] == [
        ("a", 0, 0, 2),
        ("a", 0, 2, 5),
    ]


RUN = RunEvent(batch=2, model="test", settings={})


def arrive(number, step=0, index=0):
    return ArriveEvent(step, float(step), f"r{number}", index, "input", 1, 9)


def admit(number, slot, step=0, index=0, role="sample"):
    return AdmitEvent(step, float(step), f"r{number}", index, slot, "empty", role)


def finish(number, slot, step=0, index=0, role="sample"):
    return FinishEvent(step, float(step), f"r{number}", index, slot, "length", None, 1, role)


def jump(number, slot, step=0, index=0, tokens=2):
    return JumpEvent(step, float(step), f"r{number}", index, slot, tokens)


def fork(number, slot, parent, step=0, index=0):
    return ForkEvent(step, float(step), f"r{number}", index, slot, parent)


def drop(number, step=0, reason="length", index=0):
    return DropEvent(step, float(step), f"r{number}", index, reason)


BEAMS = [admit(0, 0, role="beam"), admit(0, 1, index=1, role="beam")]


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
        ("'r0' does not run in slot 0 in step 0", [RUN, jump(0, 0)]),
        ("'r1' does not run in slot 0", [RUN, admit(0, 0), jump(1, 0)]),
        ("in slot 0 in step 4", [RUN, admit(0, 0, 5), jump(0, 0, 4)]),
        ("jumps over 0 tokens", [RUN, admit(0, 0), jump(0, 0, tokens=0)]),
        ("'r0#1' does not run in slot 1", [RUN, BEAMS[0], fork(0, 1, 0, index=1)]),
        ("from 'r0#2'; both have to be running beams", [RUN, *BEAMS, fork(0, 1, 2, index=1)]),
        (
            "from 'r0'; both have to be running",
            [RUN, *BEAMS, finish(0, 0, role="beam"), fork(0, 1, 0, index=1)],
        ),
        ("both have to be", [RUN, admit(0, 0), admit(0, 1, index=1), fork(0, 1, 0, index=1)]),
        (
            "both have to be",
            [RUN, admit(1, 0, role="beam"), admit(0, 1, 0, 1, "beam"), fork(0, 1, 0, index=1)],
        ),
        ("'r0~' is admitted", [RUN, admit(0, 0, role="negative"), admit(0, 1, role="negative")]),
        ("'r0~' leaves slot 0", [RUN, admit(0, 0), finish(0, 0, role="negative")]),
        ("'r0' leaves slot 0", [RUN, admit(0, 0), finish(0, 0, role="beam")]),
        ("'r0' is dropped in step 0, and has not finished", [RUN, drop(0)]),
        ("'r0#1' is dropped", [RUN, admit(0, 0), finish(0, 0), drop(0, index=1)]),
        ("'r0' is dropped", [RUN, admit(0, 0), finish(0, 0), drop(0), drop(0)]),
        ("'r0' is dropped", [RUN, admit(0, 0), finish(0, 0), admit(0, 0, 1), drop(0, 1)]),
        (
            "with the reason 'stop', not 'length'",
            [RUN, admit(0, 0), finish(0, 0), drop(0, 0, "stop")],
        ),
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
        ("step 4611686018427387904", [RUN, admit(0, 0), jump(0, 0, 2**62)]),
        ("step 4611686018427387904", [RUN, *BEAMS, fork(0, 0, 1, 2**62)]),
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
        (r"'r0~' .* \[0, 1\), but 'r0' does not", [RUN, admit(0, 0, role="negative")]),
        (
            r"'r0~' .* \[0, 4\), but 'r0' does not",
            [RUN, admit(0, 0), admit(0, 1, role="negative"), finish(0, 0), jump(0, 1, 3)],
        ),
        ("'r0#1~' .* but 'r0#1' does not", [RUN, admit(0, 0), admit(0, 1, 0, 1, "negative")]),
        (
            "'r0#1' .* but 'r0' does not",
            [RUN, admit(0, 0, role="beam"), admit(0, 1, 2, 1, "beam"), jump(0, 0, 2)],
        ),
        ("'r0#1' .* but 'r0' does not", [RUN, admit(0, 0), admit(0, 1, 0, 1, "beam")]),
    ],
)
def test_check_integrity_finds_what_cannot_have_happened(complaint, events):
    timeline = Timeline.from_events(events)
    with pytest.raises(InvariantError, match=complaint):
        timeline.check_integrity()


@pytest.mark.parametrize(
    ("sequence", "label"),
    [
        (("a", 0, "sample"), "a"),
        (("a", 1, "sample"), "a#1"),
        (("a", 0, "negative"), "a~"),
        (("a", 12, "negative"), "a#12~"),
        (("a", 0, "beam"), "a"),
        (("a", 3, "beam"), "a#3"),
    ],
)
def test_the_label_of_a_sequence(sequence, label):
    assert label_of(*sequence) == label


@given(unit_workloads(), st.integers(0, 2**32))
def test_the_events_of_samples_partners_and_beams_give_every_step_and_stay(workload, seed):
    units, batch = workload
    run = play_units(units, batch, seed)
    timeline = Timeline.from_events(run.events)
    timeline.check_integrity()
    rows = list(timeline.select_steps())
    assert [row.slots for row in rows] == run.labels
    assert [row.waiting for row in rows] == by_step(timeline.waiting()) == run.waiting
    assert by_step(timeline.occupied()) == [batch - row.count(None) for row in run.labels]
    found = [
        (s.slot, s.id, s.index, s.role, s.start, s.end, s.outcome, s.jumped, s.forks)
        for s in timeline.spans
    ]
    stays = sorted(run.stays, key=lambda stay: (stay.start, stay.slot))
    assert found == [(*stay[:-1], tuple(Fork(*fork) for fork in stay.forks)) for stay in stays]


@given(unit_workloads())
def test_a_chosen_request_is_all_its_sequences(workload):
    units, batch = workload
    run = play_units(units, batch)
    timeline = Timeline.from_events(run.events)
    for name in {unit.id for unit in units}:
        chosen = Selection(request_ids=frozenset({name}))
        rows = [
            row for row in run.labels if any(x and x.rstrip("~").split("#")[0] == name for x in row)
        ]
        assert [row.slots for row in timeline.select_steps(chosen)] == rows
        assert {span.id for span in timeline.select_spans(chosen)} == {name}


def test_waits_that_start_together_are_in_order_of_arrival():
    units = [*samples("z", 2), *beams("m", 2, 1), *guided("b", 1, 1), *samples("a", 1)]
    timeline = Timeline.from_events(play_units(units, 2).events)
    assert [wait.label for wait in timeline.waits] == ["m", "b", "b#1", "a"]
    aborted = [
        RUN,
        arrive(0),
        arrive(1),
        arrive(2),
        admit(0, 0),
        finish(2, None, 1),
        admit(1, 0, 3),
    ]
    assert [wait.id for wait in Timeline.from_events(aborted).waits] == ["r1", "r2"]


def test_what_happened_to_an_id_is_not_told_of_the_next_that_has_it():
    first, second = (
        [
            admit(0, 0, step, role="beam"),
            admit(0, 1, step, 1, "beam"),
            finish(0, 0, step, 0, "beam"),
        ]
        for step in (0, 1)
    )
    end = finish(0, 1, 0, 1, "beam")
    notes = [fork(0, 0, 1), jump(0, 0), fork(0, 1, 0, index=1)]
    timeline = Timeline.from_events([RUN, *first[:2], *notes, first[2], end, *second])
    assert [(span.start, span.jumped, len(span.forks)) for span in timeline.spans] == [
        (0, 2, 1),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 0),
    ]


def test_a_dropped_sample_is_known_by_its_span():
    run = [RUN, admit(0, 0), admit(0, 1, index=1), finish(0, 0), finish(0, 1, 1, index=1)]
    timeline = Timeline.from_events([*run, drop(0, 1), admit(0, 0, 2)])
    assert [(span.start, span.index, span.dropped) for span in timeline.spans] == [
        (0, 0, True),
        (0, 1, False),
        (2, 0, False),
    ]


def test_a_sample_that_never_had_a_slot_may_be_dropped():
    events = [RUN, arrive(0), finish(0, None), drop(0)]
    assert list(Timeline.from_events(events).spans) == []
