"""A trace that no run can have written is refused with its line, and what engines write is not."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_drafts import drafted_workloads, play_drafts
from reference_paged import paged_workloads, play_paged
from reference_schedule import play, workloads
from reference_units import play_units, unit_workloads

from batcher.errors import BatchdecodeError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    EndEvent,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    RunEvent,
)
from batcher.trace.files import encode_events, read_trace
from batcher.trace.run import TraceChecks

RUN = RunEvent(batch=2, model="simulated", settings={})
ARRIVE = ArriveEvent(0, 0.0, "a", 0, "input", 5, 6)
ADMIT = AdmitEvent(0, 0.0, "a", 0, 0, "empty")


def finish(step, tokens, slot=0, reason="length"):
    return FinishEvent(step, float(step), "a", 0, slot, reason, None, tokens)


def preempt(step, generated):
    return PreemptEvent(step, float(step), "a", 0, 0, "kv", "b", 0, 5, generated)


def read(events):
    lines = encode_events(events).splitlines(keepends=True)
    return list(read_trace(lines, "t", TraceChecks().complaint))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([ADMIT], "t:2: 'a' is admitted, and has not arrived"),
        (
            [ARRIVE, ADMIT, finish(3, 4), AdmitEvent(4, 4.0, "a", 0, 0, "refill")],
            "t:5: 'a' is admitted, and has not arrived",
        ),
        ([ARRIVE, ADMIT, finish(8, 7)], "t:4: 'a' ends with 7 tokens, and can have 6 at most"),
        ([ARRIVE, ADMIT, finish(2, 4)], "t:4: 'a' ends with 4 tokens, and can have 3 at most"),
        ([finish(3, 4)], "t:2: 'a' ends with 4 tokens, and has not arrived"),
        (
            [ARRIVE, ADMIT, finish(9, 7, None, "aborted")],
            "t:4: 'a' ends with 7 tokens, and can have 6 at most",
        ),
        ([ARRIVE, finish(9, 5, None, "aborted")], "t:3: 'a' ends with 5 tokens, and can have 0 at"),
        ([ARRIVE, finish(9, 5)], "t:3: 'a' ends with 5 tokens, and can have 0 at most"),
        (
            [ARRIVE, ADMIT, finish(0, 5, None, "aborted")],
            "t:4: 'a' ends with 5 tokens, and can have 1 at most",
        ),
        (
            [ARRIVE, ADMIT, preempt(1, 1), finish(9, 5, None, "aborted")],
            "t:5: 'a' ends with 5 tokens, and can have 1 at most",
        ),
        ([ARRIVE, ADMIT, finish(2, -1)], "t:4: not a line of a trace: Expected `int` >= 0"),
        ([ArriveEvent(0, -1.5, "a", 0, "input", 5, 6)], "t:2: not a line of a trace: Expected `fl"),
        ([ARRIVE, AdmitEvent(0, 0.0, "a", 0, -1, "empty")], "t:3: not a line of a trace: Expected"),
        ([EndEvent(1, -1.0, 1, 1)], "t:2: not a line of a trace: Expected `float` >= 0.0"),
    ],
)
def test_what_no_run_can_have_written_is_refused_with_its_line(events, message):
    with pytest.raises(BatchdecodeError, match=re.escape(message)):
        read([RUN, *events])


@pytest.mark.parametrize(
    "events",
    [
        [],
        [ARRIVE],
        [ARRIVE, ADMIT],
        [finish(0, 0, None, "aborted")],
        [ARRIVE, finish(9, 0, None, "aborted")],
        [ARRIVE, ADMIT, JumpEvent(1, 1.0, "a", 0, 0, 3), finish(1, 5)],
        [ARRIVE, ADMIT, AcceptEvent(1, 1.0, "a", 0, 0, 6, 2), finish(1, 4)],
        [
            *(ARRIVE, ADMIT, PreemptEvent(3, 3.0, "a", 0, 0, "kv", "a", 0, 8, 3)),
            *(AdmitEvent(7, 7.0, "a", 0, 0, "empty", generated=3), finish(9, 6)),
        ],
        [AdmitEvent(0, 0.0, "a", 1, 1, "empty", role="beam")],
    ],
)
def test_what_a_run_may_leave_is_read_however_it_broke_off(events):
    assert read([RUN, *events]) == [RUN, *events]


PLAYED = [
    workloads().map(lambda jobs: play(jobs, 2)),
    paged_workloads().map(lambda workload: play_paged(*workload)),
    unit_workloads().map(lambda workload: play_units(*workload, 5)),
    drafted_workloads().map(lambda workload: play_drafts(*workload)),
]


@given(st.one_of(PLAYED), st.data())
def test_what_a_run_writes_is_right_wherever_it_breaks_off(run, data):
    read(run.events[: data.draw(st.integers(1, len(run.events)))])
