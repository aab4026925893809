"""The timeline of runs with limits: chunks of prompts, preemptions, blocked steps and times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_paged import CROWDED, Limits, PagedJob, paged_workloads, play_paged

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    EndEvent,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RunEvent,
    StepsEvent,
)
from batcher.trace.run import BlockedSpan, SlotSpan, SpanPreemption, Wait
from batcher.trace.timeline import Timeline


def timeline_of(jobs, limits):
    return Timeline.from_events(play_paged(jobs, limits).events)


@given(paged_workloads())
def test_the_events_alone_give_every_step(workload):
    run = play_paged(*workload)
    timeline = Timeline.from_events(run.events)
    timeline.check_integrity()
    rows = list(timeline.select_steps())
    assert [row.slots for row in rows] == run.slots
    assert [row.waiting for row in rows] == run.waiting
    assert [row.end for row in rows] == run.ends
    assert timeline.figures.ends.tolist() == run.ends
    assert [timeline.figures.start_of(step) for step in range(len(run.ends))] == run.starts
    for span in timeline.spans:
        states = [run.states[span.id][step].phase for step in range(span.start, span.end)]
        num_decodes = len(states) - span.prefill
        assert states == ["prefill"] * span.prefill + ["decode"] * num_decodes


@given(paged_workloads(), st.data())
def test_events_that_break_off_anywhere_give_the_timeline_up_to_there(workload, data):
    run = play_paged(*workload)
    kept = run.events[: data.draw(st.integers(1, len(run.events)))]
    timeline = Timeline.from_events(kept)
    timeline.check_integrity()
    for step in range(timeline.num_steps):
        figures = timeline.figures
        assert figures.start_of(step) <= figures.end_of(step) <= figures.start_of(step + 1)
        if step < len(figures.ends):
            assert figures.end_of(step) == run.ends[step]


def test_a_preempted_sequence_waits_again_from_that_step():
    timeline = timeline_of(CROWDED, Limits())
    assert list(timeline.spans) == [
        SlotSpan(0, "a", 0, 0, 9, "length"),
        SlotSpan(1, "b", 0, 0, 7, "preempted", preemption=SpanPreemption("kv", "a", 0, 8, 7)),
        SlotSpan(0, "b", 0, 9, 13, "length", prefill=3, generated=7, resumed=True),
        SlotSpan(0, "c", 0, 13, 16, "length", prefill=2),
    ]
    assert list(timeline.waits) == [Wait("c", 0, 0, 13), Wait("b", 0, 7, 9)]
    assert list(timeline.blocked) == [
        BlockedSpan("b", 0, 7, 8, "preemption", 0),
        BlockedSpan("b", 0, 8, 9, "kv", 5),
        BlockedSpan("c", 0, 9, 13, "kv", 4),
    ]


def test_what_was_found_in_the_cache_is_in_the_span():
    (span,) = timeline_of([PagedJob("a", 9, 1, cached=6)], Limits()).spans
    assert (span.cached, span.prefill) == (6, 1)


RUN = RunEvent(batch=2, model="test", settings={})


def arrive(name):
    return ArriveEvent(0, 0.0, name, 0, "input", 1, 9)


def admit(name, slot, step=0, **fields):
    return AdmitEvent(step, float(step), name, fields.pop("index", 0), slot, "empty", **fields)


def finish(name, slot, step, reason="length", **fields):
    index = fields.pop("index", 0)
    return FinishEvent(step, float(step), name, index, slot, reason, None, 1, **fields)


def preempt(name, slot, step, **fields):
    index = fields.pop("index", 0)
    return PreemptEvent(step, float(step), name, index, slot, "kv", "z", 0, 5, 2, **fields)


def prefill(name, slot, step, tokens, left):
    return PrefillEvent(step, float(step), name, 0, slot, tokens, left)


def hold(name, step):
    return BlockedEvent(step, float(step), name, 0, "kv", 3)


def steps(step, ends, decodes=None):
    ones = [1] * len(ends)
    return StepsEvent(step, ends, ones if decodes is None else decodes, *[ones] * 5)


def test_a_partner_and_beams_leave_and_come_back_with_their_first():
    rows = [{}, {"role": "negative"}]
    events = [
        RUN,
        arrive("g"),
        *(admit("g", slot, **row) for slot, row in enumerate(rows)),
        *(preempt("g", slot, 3, **row) for slot, row in enumerate(rows)),
        *(admit("g", 1 - slot, 5, generated=2, **row) for slot, row in enumerate(rows)),
        *(finish("g", 1 - slot, 6, **row) for slot, row in enumerate(rows)),
    ]
    timeline = Timeline.from_events(events)
    timeline_spans = [(s.label, s.slot, s.start, s.end, s.resumed) for s in timeline.spans]
    assert timeline_spans == [
        ("g", 0, 0, 3, False),
        ("g~", 1, 0, 3, False),
        ("g~", 0, 5, 7, True),
        ("g", 1, 5, 7, True),
    ]
    assert list(timeline.waits) == [Wait("g", 0, 3, 5)]
    beams = [{"role": "beam"}, {"role": "beam", "index": 1}]
    apart = [RUN, *(admit("b", slot, **row) for slot, row in enumerate(beams))]
    timeline = Timeline.from_events(
        [*apart, preempt("b", 1, 3, **beams[1]), finish("b", 0, 4, **beams[0])]
    )
    with pytest.raises(InvariantError, match="'b' does not"):
        timeline.check_integrity()


@pytest.mark.parametrize("slot", [None, 0])
def test_a_preempted_request_may_be_aborted_while_it_waits(slot):
    events = [
        RUN,
        *map(arrive, "ab"),
        admit("a", 0),
        admit("b", 1),
        preempt("a", 0, 2),
        finish("a", slot, 4, "aborted"),
        finish("b", 1, 5),
        EndEvent(6, 6.0, 1, 2),
    ]
    timeline = Timeline.from_events(events)
    assert [(s.id, s.end, s.outcome) for s in timeline.spans] == [
        ("a", 2, "preempted"),
        ("b", 6, "length"),
    ]
    assert list(timeline.waits) == [Wait("a", 0, 2, 4)]


@pytest.mark.parametrize(
    ("complaint", "events"),
    [
        ("'a' is preempted in slot 0, which it does not hold", [preempt("a", 0, 1)]),
        ("preempted in step 3, but was admitted in 3", [admit("a", 0, 3), preempt("a", 0, 3)]),
        ("2 tokens of its own, but was not preempted", [admit("a", 0, generated=2)]),
        ("'a' is blocked in step 1, but does not wait", [hold("a", 1)]),
        ("blocked in step 1, after a later one", [*map(arrive, "ab"), hold("a", 2), hold("b", 1)]),
        ("'a' computes in slot 0, which it does not", [prefill("a", 0, 0, 1, 0)]),
        ("computes 1 tokens .* but 0 were left", [admit("a", 0), prefill("a", 0, 1, 1, 0)]),
        ("leaves 3, but 5 were", [admit("a", 0, left=5), prefill("a", 0, 1, 1, 3)]),
        ("computes 5 tokens in step 0", [admit("a", 0, left=5), prefill("a", 0, 0, 5, 0)]),
        ("computes 0 tokens", [admit("a", 0, left=5), prefill("a", 0, 1, 0, 5)]),
        ("with -1 tokens left", [admit("a", 0, left=-1)]),
        ("before its prompt was computed", [admit("a", 0, left=5), finish("a", 0, 1)]),
        ("steps from 1 on follow those of 0 steps", [steps(1, [1.0])]),
        ("not whole", [steps(0, [1.0, 2.0], [1])]),
        ("time goes back in the steps from 0 on", [steps(0, [2.0, 1.0])]),
    ],
)
def test_contradictions_are_refused(complaint, events):
    with pytest.raises(InvariantError, match=complaint):
        Timeline.from_events([RUN, *events])


def test_a_step_beyond_all_bounds_is_refused():
    with pytest.raises(BatchdecodeError, match="a timeline has steps"):
        Timeline.from_events([RUN, admit("a", 0), preempt("a", 0, 2**30)])


def test_an_error_may_end_a_prompt_that_is_half_computed():
    (span,) = Timeline.from_events([RUN, admit("a", 0, left=5), finish("a", 0, 1, "error")]).spans
    assert (span.prefill, span.outcome) == (2, "error")


def test_what_a_constraint_forced_may_be_computed_in_several_steps_too():
    jump = JumpEvent(3, 3.0, "a", 0, 0, 6)
    events = [RUN, admit("a", 0, left=2), prefill("a", 0, 1, 2, 0), jump]
    chunks = [prefill("a", 0, 4, 3, 4), prefill("a", 0, 6, 4, 0)]
    again = [admit("a", 1, 9), finish("a", 1, 9)]
    timeline = Timeline.from_events([*events, *chunks, finish("a", 0, 8), *again])
    assert [(span.prefill, span.jumped) for span in timeline.spans] == [(2, 6), (1, 0)]
    with pytest.raises(InvariantError, match="but 4 were left"):
        Timeline.from_events([*events, chunks[0], prefill("a", 0, 5, 4, 1)])


def test_a_time_that_nobody_tells_lies_between_those_that_are_told():
    told = [RUN, steps(0, [10.0]), admit("a", 0), AdmitEvent(3, 12.0, "b", 0, 1, "empty")]
    figures = Timeline.from_events(told).figures
    assert [figures.start_of(step) for step in range(5)] == [0.0, 10.0, 12.0, 12.0, 22.0]
    assert [figures.end_of(step) for step in range(4)] == [10.0, 12.0, 12.0, 22.0]
