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
    held = {slot: [each for each in spans if each.slot == slot] for slot in range(num_slots)}
    busy = {slot: sum(each.end - each.start for each in held[slot]) for slot in held}
    return choose_slots(held, busy, num_rows, request_ids)


def test_where_there_is_room_all_have_a_row():
    assert choose([span(1)], 3, 3) == ([0, 1, 2], "")


def test_slots_that_are_used_go_before_those_that_never_are():
    assert choose([span(5), span(7)], 9, 3) == ([0, 5, 7], "2 slots in use")


def test_trouble_takes_half_the_rows_and_the_idlest_and_the_busiest_the_rest():
    spans = [span(slot, 10 + slot) for slot in range(20)]
    spans += [span(slot, outcome="preempted") for slot in (3, 4, 5, 5)]
    spans += [span(6, outcome="error") for _ in range(3)]
    assert choose(spans, 20, 4) == (
        [0, 5, 6, 19],
        "slots: 2 with most preemptions or failures, 1 idlest, 1 busiest",
    )


def test_what_was_asked_for_goes_first():
    spans = [span(slot, 10 + slot, name=f"r{slot}") for slot in range(9)]
    slots, reason = choose(spans, 9, 3, {"r5"})
    assert slots == [0, 5, 8]
    assert reason == "slots: 1 asked for, 1 idlest, 1 busiest"


def test_of_slots_that_are_alike_it_says_so():
    assert choose([span(slot) for slot in range(9)], 9, 2) == (
        [0, 1],
        "slots: 2 equally busy",
    )


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
    used = {each.slot for each in spans}
    assert used <= set(slots) or set(slots) <= used
    wanted = {each.slot for each in spans if each.id in asked}
    assert wanted <= set(slots) or set(slots) <= wanted
    if not wanted and len(used) > num_rows > 1:
        trouble = Counter(each.slot for each in spans if each.outcome != "length")
        assert max(trouble.values(), default=0) == max((trouble[slot] for slot in slots), default=0)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_the_words_count_the_rows(num_rows):
    spans = [span(slot, 1 + slot, outcome="preempted") for slot in range(5)]
    reason = choose(spans, 5, num_rows).reason
    assert sum(int(word) for word in reason.split() if word.isdecimal()) == num_rows
