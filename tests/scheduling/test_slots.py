"""The slot table refuses what must never happen, and fills the lowest slot first."""

import pytest

from batcher.decoding.machine import state_machine
from batcher.errors import InvariantError
from batcher.request import Request
from batcher.scheduling.slots import SlotTable
from batcher.sequence import Sequence


def sequence(name: str) -> Sequence:
    request = Request(prompt="")
    machine = state_machine(request, None)
    return Sequence(request, name, 0, 0, [], machine, "input", None, is_plain=True)


def test_the_lowest_free_slot_is_taken() -> None:
    table = SlotTable(4)
    assert [table.occupy(sequence("x"), 9) for _ in range(4)] == [0, 1, 2, 3]
    for slot in (2, 0, 3):
        table.vacate(slot, 5)
    assert [table.occupy(sequence("x"), 9) for _ in range(3)] == [0, 2, 3]
    assert table.num_free == 0


def test_holders_are_due_at_their_deadlines_unless_they_leave_before() -> None:
    table = SlotTable(3)
    for deadline in (7, 4, 4):
        table.occupy(sequence("x"), deadline)
    assert table.due == {7: [0], 4: [1, 2]}
    table.vacate(1, 3)
    assert table.due == {7: [0], 4: [2]}
    table.vacate(2, 4)
    assert table.due == {7: [0]}
    assert (table.was_used_in(2, 4), table.was_used_in(0, 4)) == (True, False)


def test_a_deadline_can_come_nearer() -> None:
    table = SlotTable(2)
    table.occupy(sequence("x"), 9)
    table.occupy(sequence("y"), 9)
    table.advance_deadline(1, 3)
    assert table.due == {9: [0], 6: [1]}
    table.vacate(1, 6)
    assert table.due == {9: [0]}


def test_a_companion_has_no_deadline_of_its_own() -> None:
    table = SlotTable(2)
    table.occupy(sequence("x"))
    assert table.due == {}
    table.vacate(0, 3)
    assert table.num_free == 2


def test_a_slot_cannot_be_vacated_twice() -> None:
    table = SlotTable(1)
    table.occupy(sequence("x"), 1)
    table.vacate(0, 0)
    with pytest.raises(InvariantError, match="vacated twice"):
        table.vacate(0, 0)


def test_a_held_slot_is_never_given_away() -> None:
    table = SlotTable(1)
    table.occupy(sequence("x"), 1)
    table._free.append(0)
    with pytest.raises(InvariantError, match="free and held"):
        table.occupy(sequence("y"), 1)
