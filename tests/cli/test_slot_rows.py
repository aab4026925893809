from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.trace.run import SlotSpan, SpanPreemption
from cli.views.gantt import choose_slots

PREEMPTION = SpanPreemption("kv", "other", 0, 1, 1)


def span(slot, steps=1, *, name="r", outcome="length"):
    preemption = PREEMPTION if outcome == "preempted" else None
    return SlotSpan(slot, name, 0, 0, steps, outcome, preemption=preemption)


def choose(spans, num_slots, num_rows, request_ids=frozenset()):
    held, _, reason = choose_slots(spans, range(num_slots), range(99), num_rows, request_ids)
    return [*held], reason


AGING = [span(slot, 10 + slot, name=f"r{slot}") for slot in range(20)]
TROUBLE = [
    *(span(slot, outcome="preempted") for slot in (3, 4, 5, 5)),
    *(span(6, outcome="error") for _ in range(3)),
]


@pytest.mark.parametrize(
    ("spans", "num_slots", "num_rows", "request_ids", "slots", "reason"),
    [
        ([span(1)], 3, 3, (), [0, 1, 2], ""),
        ([span(5), span(7)], 9, 3, (), [0, 5, 7], "2 slots in use"),
        (
            *(AGING + TROUBLE, 20, 4, (), [0, 5, 6, 19]),
            "slots: 2 with most preemptions or failures, 1 idlest, 1 busiest",
        ),
        (AGING[:9], 9, 3, {"r5"}, [0, 5, 8], "slots: 1 asked for, 1 idlest, 1 busiest"),
        ([span(slot) for slot in range(9)], 9, 2, (), [0, 1], "slots: 2 equally busy"),
    ],
)
def test_the_slots_that_tell_the_most_are_shown_and_why(
    spans, num_slots, num_rows, request_ids, slots, reason
):
    assert choose(spans, num_slots, num_rows, request_ids) == (slots, reason)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(1, 5),
            st.sampled_from(["length", "error", "preempted"]),
            st.sampled_from("abc"),
        )
    ),
    st.integers(1, 12),
    st.sampled_from([frozenset(), frozenset("a")]),
)
def test_every_row_is_filled_and_nothing_that_tells_more_is_left_out(drawn, num_rows, asked):
    spans = [span(slot, steps, outcome=end, name=name) for slot, steps, end, name in drawn]
    slots, reason = choose(spans, 12, num_rows, asked)
    assert slots == sorted(set(slots))
    assert len(slots) == num_rows
    assert bool(reason) == (num_rows < 12)
    counts = [int(word) for word in reason.split() if word.isdecimal()]
    assert sum(counts) in (0, num_rows) or reason.endswith(" in use")
    used = {each.slot for each in spans}
    assert used <= set(slots) or set(slots) <= used
    wanted = {each.slot for each in spans if each.id in asked}
    assert wanted <= set(slots) or set(slots) <= wanted
    if not wanted and len(used) > num_rows > 1:
        trouble = Counter(each.slot for each in spans if each.outcome != "length")
        assert max(trouble.values(), default=0) == max((trouble[slot] for slot in slots), default=0)
