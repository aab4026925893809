"""The slot table refuses what must never happen, and fills the lowest slot first."""

import pytest

from batcher.decoding.stops import StopSet
from batcher.errors import InvariantError
from batcher.request import Request
from batcher.scheduling.slots import NEVER, SlotTable
from batcher.sequence import Sequence


def sequence(name: str) -> Sequence:
    return Sequence(Request(prompt=""), name, 0, [], StopSet(), "input", None)


def test_the_lowest_free_slot_is_taken() -> None:
    table = SlotTable(4)
    assert [table.occupy(sequence("x"), 9) for _ in range(4)] == [0, 1, 2, 3]
    for slot in (2, 0, 3):
        table.vacate(slot, 5)
    assert [table.occupy(sequence("x"), 9) for _ in range(3)] == [0, 2, 3]
    assert table.num_free == 0


def test_deadlines_are_the_earliest_of_the_holders() -> None:
    table = SlotTable(3)
    assert table.next_deadline == NEVER
    for deadline in (7, 4, 4):
        table.occupy(sequence("x"), deadline)
    assert (table.next_deadline, table.due(3), table.due(4)) == (4, [], [1, 2])
    table.vacate(1, 4)
    table.vacate(2, 4)
    table.refresh_deadline()
    assert (table.next_deadline, table.was_used_in(1, 4), table.was_used_in(0, 4)) == (
        7,
        True,
        False,
    )


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
