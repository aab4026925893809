"""The slot table refuses what must never happen, and fills the lowest slot first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import waiting

from batcher.errors import InvariantError
from batcher.scheduling.slots import SlotTable


def table_with_deadlines(*deadlines: int) -> SlotTable:
    table = SlotTable(len(deadlines))
    for deadline in deadlines:
        table.set_deadline(table.occupy(waiting("x")), deadline)
    return table


def test_the_lowest_free_slot_is_taken() -> None:
    table = SlotTable(4)
    assert [table.occupy(waiting("x")) for _ in range(4)] == [0, 1, 2, 3]
    for slot in (2, 0, 3):
        table.vacate(slot, 5)
    assert [table.occupy(waiting("x")) for _ in range(3)] == [0, 2, 3]
    assert (table.num_free, table.num_occupied) == (0, 4)


def test_holders_are_due_at_their_deadlines_unless_they_leave_before() -> None:
    table = table_with_deadlines(7, 4, 4)
    assert table.due == {7: [0], 4: [1, 2]}
    table.vacate(1, 3)
    assert table.due == {7: [0], 4: [2]}
    table.vacate(2, 4)
    assert table.due == {7: [0]}
    assert (table.was_used_in(2, 4), table.was_used_in(0, 4)) == (True, False)


def test_a_deadline_can_be_taken_back_and_set_anew() -> None:
    table = table_with_deadlines(9, 9)
    table.clear_deadline(1)
    assert table.due == {9: [0]}
    table.set_deadline(1, 6)
    assert table.due == {9: [0], 6: [1]}
    table.vacate(1, 6)
    assert table.due == {9: [0]}


def test_a_holder_may_have_no_deadline() -> None:
    table = SlotTable(2)
    table.occupy(waiting("x"))
    table.clear_deadline(0)
    assert table.due == {}
    table.vacate(0, 3)
    assert table.num_free == 2


def test_the_holders_of_a_request_are_found_by_slot() -> None:
    table = SlotTable(4)
    rows = [waiting(name) for name in "abab"]
    for row in rows:
        table.occupy(row)
    table.vacate(0, 0)
    assert table.find("a") == [rows[2]]
    assert table.find("b") == [rows[1], rows[3]]
    assert table.find("c") == []


def test_a_slot_cannot_be_vacated_twice() -> None:
    table = table_with_deadlines(1)
    table.vacate(0, 0)
    with pytest.raises(InvariantError, match="vacated twice"):
        table.vacate(0, 0)


def test_a_held_slot_is_never_given_away() -> None:
    table = SlotTable(1)
    table.occupy(waiting("x"))
    table._free.append(0)
    with pytest.raises(InvariantError, match="free and held"):
        table.occupy(waiting("y"))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_who_is_due_follows_from_the_deadlines_of_the_holders(
    moves: list[tuple[bool, int]],
) -> None:
    table = SlotTable(4)
    deadlines: dict[int, int] = {}
    for comes, number in moves:
        if comes and table.num_free:
            slot = table.occupy(waiting("x"))
            assert slot == min(set(range(4)) - set(deadlines))
            table.set_deadline(slot, number)
            deadlines[slot] = number
        elif deadlines:
            slot = sorted(deadlines)[number % len(deadlines)]
            table.vacate(slot, number)
            del deadlines[slot]
        due: dict[int, set[int]] = {}
        for slot, deadline in deadlines.items():
            due.setdefault(deadline, set()).add(slot)
        assert {deadline: set(slots) for deadline, slots in table.due.items()} == due
        assert table.num_occupied == len(deadlines)
