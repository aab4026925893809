"""A trace that no run can have written is refused with its line, and what engines write is not."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_events import RUN, admit, finish, jump, preempt, read_trace
from played_runs import PLAYED

from batcher.errors import BatchdecodeError
from batcher.events import AcceptEvent, ArriveEvent, EndEvent
from batcher.trace.files import encode_events
from batcher.trace.run import TraceChecks

ARRIVE = ArriveEvent(0, 0.0, "a", 0, "input", 5, 6)
ADMIT = admit("a", 0)


def ended(step, tokens):
    return finish("a", 0, step, tokens=tokens)


def aborted(step, tokens):
    return finish("a", None, step, reason="aborted", tokens=tokens)


def read(events):
    lines = encode_events(events).splitlines(keepends=True)
    return list(read_trace(lines, "t", TraceChecks().complaint))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([ADMIT], "t:2: 'a' is admitted, and has not arrived"),
        (
            [ARRIVE, ADMIT, ended(3, 4), admit("a", 0, 4)],
            "t:5: 'a' is admitted, and has not arrived",
        ),
        ([ARRIVE, ADMIT, ended(8, 7)], "t:4: 'a' ends with 7 tokens, and can have 6 at most"),
        ([ARRIVE, ADMIT, ended(2, 4)], "t:4: 'a' ends with 4 tokens, and can have 3 at most"),
        ([ended(3, 4)], "t:2: 'a' ends with 4 tokens, and has not arrived"),
        ([ARRIVE, aborted(9, 5)], "t:3: 'a' ends with 5 tokens, and can have 0 at"),
        ([ARRIVE, ended(9, 5)], "t:3: 'a' ends with 5 tokens, and can have 0 at most"),
        ([ARRIVE, ADMIT, aborted(0, 5)], "t:4: 'a' ends with 5 tokens, and can have 1 at most"),
        (
            [ARRIVE, ADMIT, preempt("a", 0, 1, generated=1), aborted(9, 5)],
            "t:5: 'a' ends with 5 tokens, and can have 1 at most",
        ),
        ([ARRIVE, ADMIT, ended(2, -1)], "t:4: not a line of a trace: Expected `int` >= 0"),
        ([ArriveEvent(0, -1.5, "a", 0, "input", 5, 6)], "t:2: not a line of a trace: Expected `fl"),
        ([ARRIVE, admit("a", -1)], "t:3: not a line of a trace: Expected"),
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
        [aborted(0, 0)],
        [ARRIVE, aborted(9, 0)],
        [ARRIVE, ADMIT, jump("a", 0, 1, tokens=3), ended(1, 5)],
        [ARRIVE, ADMIT, AcceptEvent(1, 1.0, "a", 0, 0, 6, 2), ended(1, 4)],
        [
            *(ARRIVE, ADMIT, preempt("a", 0, 3, generated=3)),
            *(admit("a", 0, 7, generated=3), ended(9, 6)),
        ],
        [admit("a", 1, 0, 1, "beam")],
    ],
)
def test_what_a_run_may_leave_is_read_however_it_broke_off(events):
    assert read([RUN, *events]) == [RUN, *events]


@given(PLAYED, st.data())
def test_what_a_run_writes_is_right_wherever_it_breaks_off(events, data):
    read(events[: data.draw(st.integers(1, len(events)))])
