"""The running batch refuses what must never happen; its sums are those of adding row by row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import waiting

from batcher.errors import InvariantError
from batcher.lifecycle import FINISH
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.sequence import NEVER

SIZE = 3


def admitted(batch, name="x", **fields):
    sequence = waiting(name, **fields)
    batch.admit(sequence)
    return sequence


def batch_that_ends(*steps):
    batch = RunningBatch(len(steps), 0)
    for step in steps:
        batch.end_after(admitted(batch), step + 1)
    return batch


def test_the_last_step_of_a_holder_can_be_set_anew():
    batch = batch_that_ends(9, 9)
    batch.end_after(batch.slots[1], 7)
    assert batch.ending == {9: [0], 6: [1]}
    batch.release(batch.slots[1], 6, FINISH)
    assert batch.ending == {9: [0]}


def test_the_sequences_of_a_group_come_and_go_together():
    batch = RunningBatch(4, 0)
    other = waiting("a", role="negative")
    first = admitted(batch, "a", others=(other,), num_slots=2)
    alone = admitted(batch, "b")
    assert batch.slots == [first, other, alone, None]
    assert batch.firsts == [first, alone]
    assert batch.first_of(other) is first
    batch.release(first, 0, FINISH)
    assert (batch.slots, batch.num_free) == ([None, None, alone, None], 3)


def test_a_slot_cannot_be_vacated_twice():
    batch = RunningBatch(1, 0)
    sequence = admitted(batch)
    batch.release(sequence, 0, FINISH)
    with pytest.raises(InvariantError, match="does not hold"):
        batch.release(sequence, 0, FINISH)


def test_a_held_slot_is_never_given_away():
    batch = RunningBatch(1, 0)
    admitted(batch)
    batch._free.append(0)
    with pytest.raises(InvariantError, match="free and held"):
        admitted(batch, "y")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_who_ends_when_follows_from_the_last_steps_of_the_holders(moves):
    batch = RunningBatch(4, 0)
    holders = {}
    for comes, number in moves:
        if comes and batch.num_free:
            sequence = admitted(batch)
            assert sequence.slot == min(set(range(4)) - set(holders))
            batch.end_after(sequence, number + 1)
            holders[sequence.slot] = sequence
        elif holders:
            slot = sorted(holders)[number % len(holders)]
            batch.release(holders.pop(slot), number, FINISH)
        ending = {}
        for slot, sequence in holders.items():
            ending.setdefault(sequence.last_decode_step, set()).add(slot)
        assert {step: set(slots) for step, slots in batch.ending.items()} == ending
        assert batch.num_occupied == len(holders)


def row_at(batch, position):
    """Return a row that computes the token at `position` in the current decode step."""
    row = admitted(batch, num_tokens=position + 1, num_prompt_tokens=position + 1, max_tokens=99)
    batch.begin_decoding(row)
    batch.end_after(row, row.max_tokens - row.num_generated)
    return row


KINDS = ["add", "remove", "step", "advance"]
MOVES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(-1, 9)))


@given(MOVES)
def test_sums_and_boundaries_are_those_of_going_through_all_rows(moves):
    batch = RunningBatch(60, SIZE)
    rows = []
    for move, number in moves[:60]:
        if move == "add":
            rows.append(row_at(batch, number))
        elif move == "step":
            ended = {row.slot for row in rows if row.last_decode_step == batch.decode_step}
            assert {*batch.end_decode_step()} == ended
        elif move == "advance":
            ahead = [row for row in rows[::2] if row.last_decode_step != NEVER]
            ends = [row.last_decode_step - number - 2 for row in ahead]
            batch.advance(dict.fromkeys(ahead, number + 2))
            assert [row.last_decode_step for row in ahead] == ends
        elif rows:
            row = rows.pop(number % len(rows))
            batch.stop_decoding(row)
            batch.release(row, batch.decode_step, FINISH)
            assert row.last_decode_step == NEVER
        step = batch.decode_step
        positions = [row.offset + step for row in rows]
        assert batch.num_decoding == len(rows)
        assert batch.num_read == sum(positions)
        assert batch.padding == sum(max(positions) - position for position in positions)
        at_boundary = [row for row in rows if (row.offset + step) % SIZE == 0]
        assert set(batch.rows_at_boundary()) == set(at_boundary)
        assert batch.may_need_blocks == bool(at_boundary)
        by_boundary = {at: set(some) for at, some in batch.by_boundary.items() if some}
        assert by_boundary == {
            at: some
            for at in range(SIZE)
            if (some := {row for row in rows if (row.offset + at) % SIZE == 0})
        }
        ending = {}
        for row in rows:
            if row.last_decode_step != NEVER:
                ending.setdefault(row.last_decode_step, set()).add(row.slot)
        assert {step: set(slots) for step, slots in batch.ending.items()} == ending
        if rows:
            check_steps_ahead(batch, rows)


def check_padding(batch, rows):
    offsets = [row.offset for row in rows]
    assert batch.padding == sum(max(offsets) - offset for offset in offsets)


def batch_with_a_longest_row(*positions):
    """Return a batch in which the longest row was looked for among rows at these positions."""
    batch = RunningBatch(6, SIZE)
    longer, *rows = [row_at(batch, position) for position in (9, *positions)]
    check_padding(batch, [longer, *rows])
    batch.stop_decoding(longer)
    check_padding(batch, rows)
    return batch, rows


def test_the_longest_row_may_be_one_that_has_come_back():
    batch, (short, middle, long) = batch_with_a_longest_row(1, 4, 5)
    batch.stop_decoding(middle)
    middle.num_tokens = 3
    batch.begin_decoding(middle)
    batch.stop_decoding(long)
    check_padding(batch, [short, middle])


def check_steps_ahead(batch, rows):
    step = batch.decode_step

    def num_begun(steps):
        return sum((row.offset + ahead) % SIZE == 0 for row in rows for ahead in steps)

    to_boundary = batch.num_steps_to_boundary()
    assert num_begun(range(step, step + to_boundary)) == 0
    assert num_begun(range(step + to_boundary, step + to_boundary + 1)) > 0
    for num_blocks in range(2 * len(rows) + 1):
        num_steps = batch.num_steps_for(num_blocks)
        assert num_begun(range(step, step + num_steps)) <= num_blocks
        assert num_begun(range(step, step + num_steps + 1)) > num_blocks


def test_rows_without_blocks_are_only_counted():
    batch = RunningBatch(1, 0)
    row = row_at(batch, 4)
    batch.decode_step = 2
    assert (batch.num_decoding, batch.num_read) == (1, 6)
    batch.stop_decoding(row)
    assert (batch.num_decoding, batch.num_read, batch.padding) == (0, 0, 0)


def test_forked_rows_are_told_once_unless_they_have_gone():
    batch = RunningBatch(3, SIZE)
    rows = [row_at(batch, 4) for _ in range(3)]
    batch.fork(rows[0], rows[1])
    batch.fork(rows[0], rows[2])
    assert batch.may_need_blocks
    batch.stop_decoding(rows[1])
    assert batch.take_forked() == [rows[0], rows[2]]
    assert batch.take_forked() == []
    assert not batch.may_need_blocks
