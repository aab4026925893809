"""What a timeline tells of drafts, against a run that was played with them."""

import json

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from reference_drafts import drafted_workloads, play_drafts

from batcher.errors import InvariantError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    FinishEvent,
    RollbackEvent,
    RunEvent,
    SpeculateEvent,
)
from batcher.trace.files import encode_events, read_trace
from batcher.trace.run import DraftCounts, RequestFold
from batcher.trace.timeline import Timeline
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps


def sums(verified):
    return sum(one.drafted for one in verified), sum(one.accepted for one in verified)


@given(drafted_workloads(), st.booleans())
@examples(100)
def test_spans_and_steps_tell_what_was_drafted_and_accepted(workload, is_timed):
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


@given(drafted_workloads(), st.booleans())
@examples(100)
def test_after_each_step_a_sequence_has_the_tokens_it_was_given(workload, is_timed):
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


@given(drafted_workloads(), st.data())
@examples(50)
def test_events_that_break_off_anywhere_give_the_drafts_up_to_there(workload, data):
    events = play_drafts(*workload).events
    kept = events[: data.draw(st.integers(1, len(events)))]
    timeline = Timeline.from_events(read_trace(encode_events(kept).splitlines(keepends=True)))
    drafted = sum(event.tokens for event in kept if isinstance(event, DraftEvent))
    accepted = sum(event.tokens for event in kept if isinstance(event, AcceptEvent))
    assert sum(span.drafted for span in timeline.spans) == drafted
    assert sum(drafts.accepted for drafts in timeline.drafts) == accepted


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


def test_drafts_are_counted_by_their_position_in_the_draft():
    fold = RequestFold()
    for event in EVENTS[1:-1]:
        (request,) = [fold.take(event)]
    counts = request.admission.drafts.counts
    assert counts.by_position() == [(2, 1), (2, 1), (2, 0), (1, 0)]
    assert (counts.num_steps, counts.num_rejecting, counts.num_rejected) == (2, 2, 5)
    assert (counts.num_drafted, counts.num_accepted, counts.blocks) == (7, 2, 1)


def test_of_endless_drafts_only_the_first_are_told_by_position():
    counts = DraftCounts()
    counts.lengths[10**15] += 1
    assert counts.by_position() == [(1, 0)] * 64


START = EVENTS[:3]
DRAFT, ACCEPT, ROLLBACK = EVENTS[3:6]
PARENTS = (0, 0, 1, 2, 4)
TREE = DraftEvent(1, 1.0, "a", 0, 0, 6, 5, PARENTS)


def accepts(*drafts: int, tokens: int | None = None) -> AcceptEvent:
    return AcceptEvent(1, 1.0, "a", 0, 0, 6, len(drafts) if tokens is None else tokens, drafts)


def test_of_a_tree_each_level_counts_as_one_draft():
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


def test_that_another_number_of_drafts_is_wanted_is_kept():
    fold = RequestFold()
    changes = [SpeculateEvent(step, step, "a", 0, 0, 0, "cost") for step in (4, 6)]
    for event in [*EVENTS[1:-1], *changes]:
        (request,) = [fold.take(event)]
    drafts = request.admission.drafts
    assert (drafts.num_changes, drafts.last_change) == (2, changes[1])


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([ACCEPT], "'a' accepts drafts in step 1, which has none for it"),
        ([ROLLBACK], "'a' rejects drafts in step 1, which has none for it"),
        ([DRAFT, AcceptEvent(1, 1.0, "a", 0, 0, 6, 4)], "accepts 4 drafts in step 1, and 3 are"),
        ([DRAFT, ACCEPT, RollbackEvent(1, 1.0, "a", 0, 0, 7, 2)], "2 drafts in step 1, and 1 are"),
        ([DRAFT, AcceptEvent(1, 1.0, "a", 0, 0, 7, 2)], "from position 7 on in step 1, and those"),
        ([DRAFT, AcceptEvent(1, 1.0, "a", 0, 0, 6, 1)] * 2, "drafts in step 1 again"),
        ([DRAFT, ACCEPT, RollbackEvent(1, 1.0, "a", 0, 0, 7, 1)], "up to position 8 in step 1"),
        ([TREE, accepts(2, 3)], r"accepts drafts \[2, 3\] in step 1, which are not 2 on end"),
        ([TREE, accepts(2, 4, tokens=1)], "which are not 1 on end"),
        ([DRAFT, accepts(1, 2)], "which are not 2 on end"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 2, (0, 2))], "'a' has draft 2 follow draft 2 in step 1"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 2, (0, -1))], "has draft 2 follow draft -1"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 3, (0, 1))], "3 tokens in step 1, and 2 have parents"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 6, 0)], "'a' drafts 0 tokens in step 1"),
        ([DraftEvent(1, 1.0, "a", 0, 0, 0, 1)], "where it was given all before 1"),
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
