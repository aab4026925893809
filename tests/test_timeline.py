"""What events tell of a run: its steps and who held which slot, waited, was held back or left."""

import json
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import (
    RUN,
    admit,
    arrive,
    by_step,
    drop,
    finish,
    fork,
    hold,
    jump,
    metrics_of,
    preempt,
    prefill,
    steps,
)
from reference_drafts import drafted_workloads, play_drafts
from reference_paged import Limits, PagedJob, paged_workloads, play_paged
from reference_schedule import Job, timeline_of, workloads
from reference_units import beams, guided, play_units, samples, unit_workloads

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    FinishEvent,
    PreemptEvent,
    RollbackEvent,
    RunEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.metrics.summary import RunMetrics, encode_summary
from batcher.trace.run import DraftCounts, Fork, RequestFold, Wait
from batcher.trace.timeline import EVERYTHING, Selection, Timeline, worst_bubble
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps
from cli.screen.live_state import RunState
from cli.views.gantt import choose_zoom


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


BEAMS = [admit("r0", 0, role="beam"), admit("r0", 1, index=1, role="beam")]


@pytest.mark.parametrize(
    ("complaint", "events"),
    [
        ("no run event", []),
        ("while it runs", [RUN, admit("r0", 0), admit("r0", 1)]),
        ("does not hold", [RUN, finish("r0", 0)]),
        ("while requests hold slots", [RUN, admit("r0", 0), EndEvent(1, 1.0, 0, 1)]),
        ("over by step 2", [RUN, admit("r0", 0), finish("r0", 0, 2), EndEvent(4, 4.0, 1, 1)]),
        ("-1 steps", [RUN, EndEvent(-1, 2.0, 1, 1)]),
        ("arrives in step -3", [RUN, arrive("r0", -3), admit("r0", 0)]),
        ("'r0' does not run in slot 0 in step 0", [RUN, jump("r0", 0)]),
        ("'r1' does not run in slot 0", [RUN, admit("r0", 0), jump("r1", 0)]),
        ("in slot 0 in step 4", [RUN, admit("r0", 0, 5), jump("r0", 0, 4)]),
        ("jumps over 0 tokens", [RUN, admit("r0", 0), jump("r0", 0, tokens=0)]),
        ("'r0#1' does not run in slot 1", [RUN, BEAMS[0], fork("r0", 1, 0, index=1)]),
        ("from 'r0#2'; both have to be running beams", [RUN, *BEAMS, fork("r0", 1, 2, index=1)]),
        (
            "from 'r0'; both have to be running",
            [RUN, *BEAMS, finish("r0", 0, role="beam"), fork("r0", 1, 0, index=1)],
        ),
        (
            "both have to be",
            [RUN, admit("r0", 0), admit("r0", 1, index=1), fork("r0", 1, 0, index=1)],
        ),
        (
            "both have to be",
            [
                RUN,
                admit("r1", 0, role="beam"),
                admit("r0", 1, 0, 1, "beam"),
                fork("r0", 1, 0, index=1),
            ],
        ),
        (
            "'r0~' is admitted",
            [RUN, admit("r0", 0, role="negative"), admit("r0", 1, role="negative")],
        ),
        ("'r0~' leaves slot 0", [RUN, admit("r0", 0), finish("r0", 0, role="negative")]),
        ("'r0' is dropped in step 0, and has not finished", [RUN, drop("r0")]),
        ("'r0#1' is dropped", [RUN, admit("r0", 0), finish("r0", 0), drop("r0", index=1)]),
        ("'r0' is dropped", [RUN, admit("r0", 0), finish("r0", 0), drop("r0"), drop("r0")]),
        (
            "'r0' is dropped",
            [RUN, admit("r0", 0), finish("r0", 0), admit("r0", 0, 1), drop("r0", 1)],
        ),
        (
            "with the reason 'stop', not 'length'",
            [RUN, admit("r0", 0), finish("r0", 0), drop("r0", 0, "stop")],
        ),
        ("'a' is preempted in slot 0, which it does not hold", [RUN, preempt("a", 0, 1)]),
        ("preempted in step 3, but was admitted in 3", [RUN, admit("a", 0, 3), preempt("a", 0, 3)]),
        ("2 tokens of its own, but was not preempted", [RUN, admit("a", 0, generated=2)]),
        ("'a' is blocked in step 1, but does not wait", [RUN, hold("a", 1)]),
        (
            "blocked in step 1, after a later one",
            [RUN, *map(arrive, "ab"), hold("a", 2), hold("b", 1)],
        ),
        ("'a' computes in slot 0, which it does not", [RUN, prefill("a", 0, 0, 1, 0)]),
        ("computes 1 tokens .* but 0 were left", [RUN, admit("a", 0), prefill("a", 0, 1, 1, 0)]),
        ("leaves 3, but 5 were", [RUN, admit("a", 0, left=5), prefill("a", 0, 1, 1, 3)]),
        ("computes 5 tokens in step 0", [RUN, admit("a", 0, left=5), prefill("a", 0, 0, 5, 0)]),
        ("computes 0 tokens", [RUN, admit("a", 0, left=5), prefill("a", 0, 1, 0, 5)]),
        ("before its prompt was computed", [RUN, admit("a", 0, left=5), finish("a", 0, 1)]),
        ("step figures start at step 1, expected 0", [RUN, steps(1, [1.0])]),
        ("not whole", [RUN, steps(0, [1.0, 2.0], [1])]),
        ("time goes back in the steps from 0 on", [RUN, steps(0, [2.0, 1.0])]),
        # more than a timeline holds
        ("a batch of 1000000000000", [RunEvent(batch=10**12, model="test", settings={})]),
        ("step -1", [RUN, admit("r0", 0, -1)]),
        ("step 4611686018427387904", [RUN, admit("r0", 0, 2**62)]),
        ("step 4611686018427387904", [RUN, *BEAMS, fork("r0", 0, 1, 2**62)]),
        ("a timeline has steps", [RUN, admit("a", 0), preempt("a", 0, 2**30)]),
        # spans that cannot have happened
        ("in slot 2 of 2", [RUN, admit("r0", 2)]),
        (
            "share slot 0",
            [RUN, admit("r0", 0), admit("r1", 0), finish("r1", 0), finish("r0", 0, 3)],
        ),
        ("of 2 steps", [RUN, admit("r0", 0), finish("r0", 0, 2), EndEvent(2, 2.0, 1, 1)]),
        ("of 4 steps", [RUN, admit("r0", 0, 3), finish("r0", 0, 1)]),
        ("nothing runs in step 1", [RUN, admit("r0", 0), finish("r0", 0), admit("r1", 0, 2)]),
        (r"'r0~' .* \[0, 1\), but 'r0' does not", [RUN, admit("r0", 0, role="negative")]),
        (
            r"'r0~' .* \[0, 4\), but 'r0' does not",
            [
                RUN,
                admit("r0", 0),
                admit("r0", 1, role="negative"),
                finish("r0", 0),
                jump("r0", 1, 3),
            ],
        ),
        ("'r0#1~' .* but 'r0#1' does not", [RUN, admit("r0", 0), admit("r0", 1, 0, 1, "negative")]),
        (
            "'r0#1' .* but 'r0' does not",
            [RUN, admit("r0", 0, role="beam"), admit("r0", 1, 2, 1, "beam"), jump("r0", 0, 2)],
        ),
        ("'r0#1' .* but 'r0' does not", [RUN, admit("r0", 0), admit("r0", 1, 0, 1, "beam")]),
    ],
)
def test_events_that_contradict_each_other_or_exceed_limits_are_refused(complaint, events):
    with pytest.raises((InvariantError, BatchdecodeError), match=complaint):
        Timeline.from_events(events).check_integrity()


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


def test_waits_and_notes_are_of_their_own_request_in_order():
    units = [*samples("z", 2), *beams("m", 2, 1), *guided("b", 1, 1), *samples("a", 1)]
    timeline = Timeline.from_events(play_units(units, 2).events)
    assert [wait.label for wait in timeline.waits] == ["m", "b", "b#1", "a"]
    arrived = [RUN, *map(arrive, ["r0", "r1", "r2"])]
    aborted = [*arrived, admit("r0", 0), finish("r2", None, 1), admit("r1", 0, 3)]
    assert [wait.id for wait in Timeline.from_events(aborted).waits] == ["r1", "r2"]
    first, second = (
        [
            admit("r0", 0, step, role="beam"),
            admit("r0", 1, step, 1, "beam"),
            finish("r0", 0, step, 0, "beam"),
        ]
        for step in (0, 1)
    )
    end = finish("r0", 1, 0, 1, "beam")
    notes = [fork("r0", 0, 1), jump("r0", 0), fork("r0", 1, 0, index=1)]
    timeline = Timeline.from_events([RUN, *first[:2], *notes, first[2], end, *second])
    assert [(span.start, span.jumped, len(span.forks)) for span in timeline.spans] == [
        (0, 2, 1),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 0),
    ]


def test_a_dropped_sample_is_known_by_its_span_if_it_had_a_slot():
    run = [
        RUN,
        admit("r0", 0),
        admit("r0", 1, index=1),
        finish("r0", 0),
        finish("r0", 1, 1, index=1),
    ]
    timeline = Timeline.from_events([*run, drop("r0", 1), admit("r0", 0, 2)])
    assert [(span.start, span.index, span.dropped) for span in timeline.spans] == [
        (0, 0, True),
        (0, 1, False),
        (2, 0, False),
    ]
    events = [RUN, arrive("r0"), finish("r0", None), drop("r0")]
    assert list(Timeline.from_events(events).spans) == []


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
    num_admitted = sum(isinstance(event, AdmitEvent) for event in kept)
    left = [e for e in kept if isinstance(e, FinishEvent | PreemptEvent) and e.slot is not None]
    running = [span for span in timeline.spans if span.outcome is None]
    assert (len(timeline.spans), len(running)) == (num_admitted, num_admitted - len(left))
    assert {span.end for span in running} <= {timeline.num_steps}
    figures = timeline.figures
    for step in range(timeline.num_steps):
        assert figures.start_of(step) <= figures.end_of(step) <= figures.start_of(step + 1)
        if step < len(figures.ends):
            assert figures.end_of(step) == run.ends[step]


def test_a_span_has_what_was_found_in_the_cache_and_how_far_its_prompt_came():
    run = play_paged([PagedJob("a", 9, 1, cached=6)], Limits())
    (span,) = Timeline.from_events(run.events).spans
    assert (span.cached, span.prefill) == (6, 1)
    events = [RUN, admit("a", 0, left=5), finish("a", 0, 1, reason="error")]
    (span,) = Timeline.from_events(events).spans
    assert (span.prefill, span.outcome) == (2, "error")


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
        finish("a", slot, 4, reason="aborted"),
        finish("b", 1, 5),
        EndEvent(6, 6.0, 1, 2),
    ]
    timeline = Timeline.from_events(events)
    assert [(s.id, s.end, s.outcome) for s in timeline.spans] == [
        ("a", 2, "preempted"),
        ("b", 6, "length"),
    ]
    assert list(timeline.waits) == [Wait("a", 0, 2, 4)]


def test_what_a_constraint_forced_may_be_computed_in_several_steps_too():
    events = [RUN, admit("a", 0, left=2), prefill("a", 0, 1, 2, 0), jump("a", 0, 3, tokens=6)]
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


def idle_of(timeline):
    rows = list(timeline.select_steps())
    last = max((span.start for span in timeline.spans), default=0)
    return [row.slots.count(None) for row in rows[:last]]


@given(workloads(), st.integers(1, 5))
@examples(200)
def test_it_is_the_best_of_all_steps_in_a_row(jobs, batch):
    timeline = timeline_of(jobs, batch)
    idle = idle_of(timeline)
    mean = Fraction(sum(idle), max(len(idle), 1))
    gains = {
        (start, stop): sum(idle[start:stop]) - mean * (stop - start)
        for start, stop in combinations(range(len(idle) + 1), 2)
    }
    bubble, most = worst_bubble(timeline), max(gains.values(), default=0)
    assert (bubble is None) == (most == 0)
    if bubble is not None:
        steps = bubble.start, bubble.stop
        assert gains[steps] == most
        assert bubble.num_idle == sum(idle[slice(*steps)])


def test_every_width_names_the_same_bubble():
    jobs = [Job(f"r{n}", 20, n * 7.0 + 300 * (n > 60)) for n in range(200)]
    timeline = timeline_of(jobs, 8)
    bubble = worst_bubble(timeline)
    assert bubble is not None
    for num_cells in (20, 64, 150, 300):
        zoom, (named, _) = choose_zoom(timeline, EVERYTHING, num_cells)
        assert named == f"worst bubble: steps {bubble.start}:{bubble.stop}"
        assert bubble.start in zoom


def sums(verified):
    return sum(one.drafted for one in verified), sum(one.accepted for one in verified)


@given(drafted_workloads(), st.booleans())
@examples(100)
def test_spans_steps_and_sequences_tell_what_was_drafted_and_given(workload, is_timed):
    run = play_drafts(*workload, is_timed=is_timed)
    timeline = Timeline.from_events(run.events)
    timeline.check_integrity()
    for span in timeline.spans:
        steps = range(span.start, span.end)
        own = [one for one in run.verified if one.id == span.id and one.step in steps]
        assert (span.drafted, span.accepted) == sums(own)
    found = [(d.step, d.slot, d.drafted, d.accepted) for d in timeline.drafts]
    expected = [(v.step, v.slot, v.drafted, v.accepted) for v in run.verified]
    assert found == sorted(expected)
    rows = [(row.drafted, row.accepted) for row in timeline.select_steps()]
    steps = range(timeline.num_steps)
    assert rows == [sums([one for one in run.verified if one.step == step]) for step in steps]
    run = play_drafts(*workload, is_timed=is_timed)
    fold, running = RequestFold(), {}
    for event in [*run.events[1:], None]:
        step = None if event is None else getattr(event, "step", None)
        for done in [done for done in running if step is None or done < step]:
            for request, num_tokens in running.pop(done):
                assert request.tokens_after(done) == num_tokens
        if event is None:
            break
        found = fold.take(event)
        if found is not None and found.admission is not None and step < len(run.tokens):
            tokens = run.tokens[step].get(found.id)
            running[step] = [*running.get(step, ()), (found, tokens)] if tokens else []


EVENTS = [
    RunEvent(batch=1, model="test", settings={}),
    ArriveEvent(0, 0.0, "a", 0, "input", 5, 9),
    AdmitEvent(0, 0.0, "a", 0, 0, "empty"),
    DraftEvent(1, 1.0, "a", 0, 0, 6, 3),
    AcceptEvent(1, 1.0, "a", 0, 0, 6, 2),
    RollbackEvent(1, 1.0, "a", 0, 0, 8, 1, 1),
    DraftEvent(2, 2.0, "a", 0, 0, 9, 4),
    RollbackEvent(2, 2.0, "a", 0, 0, 9, 4),
    FinishEvent(3, 3.0, "a", 0, 0, "length", None, 6),
]


def test_a_run_that_speculates_is_told_in_every_view():
    timeline = Timeline.from_events(EVENTS)
    assert b"".join(encode_spans(timeline)) == (
        b'{"slot":0,"id":"a","index":0,"start":0,"end":4,"outcome":"length",'
        b'"drafted":7,"accepted":2}\n'
    )
    assert b"".join(encode_csv(timeline)) == (
        b"slot,id,index,start,end,outcome,role,jumped,dropped,drafted,accepted\n"
        b"0,a,0,0,4,length,sample,0,false,7,2\n"
    )
    assert b"".join(encode_steps(timeline)).splitlines() == [
        b'{"step":0,"slots":["a"],"waiting":0}',
        b'{"step":1,"slots":["a"],"waiting":0,"drafted":3,"accepted":2}',
        b'{"step":2,"slots":["a"],"waiting":0,"drafted":4}',
        b'{"step":3,"slots":["a"],"waiting":0}',
    ]
    slices = [e for e in json.loads(b"".join(encode_chrome(timeline)))["traceEvents"] if "cat" in e]
    assert slices[0]["args"] == {"index": 0, "outcome": "length", "drafted": 7, "accepted": 2}


def test_drafts_are_counted_by_their_position_in_the_draft_the_first_of_them():
    fold = RequestFold()
    for event in EVENTS[1:-1]:
        (request,) = [fold.take(event)]
    counts = request.admission.drafts.counts
    assert counts.by_position() == [(2, 1), (2, 1), (2, 0), (1, 0)]
    assert (counts.num_steps, counts.num_rejecting, counts.num_rejected) == (2, 2, 5)
    assert (counts.num_drafted, counts.num_accepted, counts.blocks) == (7, 2, 1)
    counts = DraftCounts()
    counts.lengths[10**15] += 1
    assert counts.by_position() == [(1, 0)] * 64


START = EVENTS[:3]
DRAFT, ACCEPT, ROLLBACK = EVENTS[3:6]
PARENTS = (0, 0, 1, 2, 4)
TREE = DraftEvent(1, 1.0, "a", 0, 0, 6, 5, PARENTS)


def accepts(*drafts, tokens=None):
    return AcceptEvent(1, 1.0, "a", 0, 0, 6, len(drafts) if tokens is None else tokens, drafts)


def test_trees_count_by_level_and_changes_of_drafts_are_kept():
    fold = RequestFold()
    rest = RollbackEvent(1, 1.0, "a", 0, 0, 9, 2)
    again = DraftEvent(2, 2.0, "a", 0, 0, 10, 3, (0, 0, 1))
    none = RollbackEvent(2, 2.0, "a", 0, 0, 10, 3)
    for event in [*START[1:], TREE, accepts(2, 4, 5), rest, again, none]:
        (request,) = [fold.take(event)]
    counts = request.admission.drafts.counts
    assert counts.by_position() == [(2, 1), (2, 1), (1, 1)]
    assert (counts.num_steps, counts.num_rejecting, counts.num_rejected) == (2, 1, 5)
    assert (counts.num_drafted, counts.num_accepted) == (8, 3)
    assert request.admission.drafts.latest.parents == (0, 0, 1)
    fold = RequestFold()
    changes = [SpeculateEvent(step, step, "a", 0, 0, 0, "cost") for step in (4, 6)]
    for event in [*EVENTS[1:-1], *changes]:
        (request,) = [fold.take(event)]
    drafts = request.admission.drafts
    assert (drafts.num_changes, drafts.last_change) == (2, changes[1])


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([ACCEPT], "'a' accepts drafts in step 1, which has no drafts for it"),
        ([ROLLBACK], "'a' rejects drafts in step 1, which has no drafts for it"),
        ([DRAFT, AcceptEvent(1, 1.0, "a", 0, 0, 6, 4)], "accepts 4 drafts in step 1, and 3 are"),
        ([DRAFT, ACCEPT, RollbackEvent(1, 1.0, "a", 0, 0, 7, 2)], "2 drafts in step 1, and 1 are"),
        ([DRAFT, AcceptEvent(1, 1.0, "a", 0, 0, 7, 2)], "from position 7 in step 1, but the"),
        (
            [DRAFT, AcceptEvent(1, 1.0, "a", 0, 0, 6, 1)] * 2,
            "drafts in step 1; expected a step after 1",
        ),
        ([DRAFT, ACCEPT, RollbackEvent(1, 1.0, "a", 0, 0, 7, 1)], "up to position 8 in step 1"),
        ([TREE, accepts(2, 3)], r"accepts drafts \[2, 3\] in step 1, which are not a path of 2"),
        ([DRAFT, accepts(1, 2)], "which are not a path of 2"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 2, (0, 2))], "'a' has draft 2 follow draft 2 in step 1"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 3, (0, 1))], "3 tokens in step 1 with 2 parents"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 0)], "'a' drafts 0 tokens in step 1"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 0, 1)], "but already has the tokens before 1"),
        ([DraftEvent(1, 1.0, "a", 0, 1, 6, 3)], "'a' does not run in slot 1 in step 1"),
        (
            [DRAFT, ACCEPT, FinishEvent(1, 1.0, "a", 0, 0, "length", None, 5)],
            "ends in step 1 with 5 tokens, but its steps and drafts gave it 3 to 4",
        ),
        (
            [DRAFT, ACCEPT, FinishEvent(1, 1.0, "a", 0, 0, "length", None, 2)],
            "ends in step 1 with 2 tokens",
        ),
    ],
)
def test_drafts_that_contradict_each_other_are_refused(events, complaint):
    with pytest.raises(InvariantError, match=complaint):
        Timeline.from_events([*START, *events])


@pytest.mark.parametrize(
    "end",
    [
        FinishEvent(1, 1.0, "a", 0, 0, "error", None, 3),
        FinishEvent(1, 1.0, "a", 0, 0, "error", None, 4),
        FinishEvent(1, 1.0, "a", 0, 0, "stop", None, 4),
    ],
)
def test_an_end_with_as_many_tokens_as_there_can_be_is_taken(end):
    (span,) = Timeline.from_events([*START, DRAFT, ACCEPT, end]).spans
    assert span.outcome == end.reason


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
    metrics = metrics_of(events, fold=state.fold)
    state.catch_up()
    assert encode_summary(metrics.summary()) == encode_summary(alone.summary())
    assert list(map(state.stays, range(state.num_slots))) == [
        own.stays(slot) for slot in range(own.num_slots)
    ]
    assert list(state.notes) == list(own.notes)
    assert [found.finish for found in state.ends] == [found.finish for found in own.ends]
    assert state.marks == own.marks
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
