"""Sums over the rows that decode are those of adding up row by row."""

from hypothesis import given
from hypothesis import strategies as st
from waiting import waiting

from batcher.scheduling.decoding_rows import DecodingRows
from batcher.scheduling.sequence import ScheduledSequence

SIZE = 3


def row_at(position: int, step: int) -> ScheduledSequence:
    """Return a row that computes the token at `position` in `step`."""
    return waiting("x", offset=position - step, is_decoding=True)


MOVES = st.lists(st.tuples(st.sampled_from(["add", "remove", "step"]), st.integers(-1, 9)))


@given(MOVES)
def test_sums_and_borders_are_those_of_going_through_all_rows(moves: list[tuple]) -> None:
    decoding, rows, step = DecodingRows(SIZE), [], 0
    for move, number in moves:
        if move == "add":
            rows.append(row_at(number, step))
            decoding.add(rows[-1])
        elif move == "step":
            step += 1
        elif rows:
            decoding.remove(rows.pop(number % len(rows)))
        positions = [row.offset + step for row in rows]
        assert decoding.num_rows == len(rows)
        assert decoding.num_read(step) == sum(positions)
        assert decoding.padding([None, *rows]) == sum(
            max(positions) - position for position in positions
        )
        at_border = [row for row in rows if (row.offset + step) % SIZE == 0]
        assert set(decoding.at_border(step)) == set(at_border)
        assert decoding.is_growing(step) == bool(at_border)
        by_border = {border: set(some) for border, some in decoding.by_border() if some}
        assert by_border == {
            border: some
            for border in range(SIZE)
            if (some := {row for row in rows if (row.offset + border) % SIZE == 0})
        }
        if rows:
            check_steps_ahead(decoding, rows, step)


def check_steps_ahead(decoding: DecodingRows, rows: list[ScheduledSequence], step: int) -> None:
    def num_begun(steps: range) -> int:
        return sum((row.offset + ahead) % SIZE == 0 for row in rows for ahead in steps)

    to_border = decoding.num_steps_to_border(step)
    assert num_begun(range(step, step + to_border)) == 0
    assert num_begun(range(step + to_border, step + to_border + 1)) > 0
    for num_blocks in range(2 * len(rows) + 1):
        num_steps = decoding.num_steps_for(step, num_blocks)
        assert num_begun(range(step, step + num_steps)) <= num_blocks
        assert num_begun(range(step, step + num_steps + 1)) > num_blocks


def test_rows_without_blocks_are_only_counted() -> None:
    decoding = DecodingRows(0)
    row = row_at(4, 0)
    decoding.add(row)
    assert (decoding.num_rows, decoding.num_read(2)) == (1, 6)
    decoding.remove(row)
    assert (decoding.num_rows, decoding.num_read(2), decoding.padding([])) == (0, 0, 0)


def test_forked_rows_are_told_once_unless_they_have_gone() -> None:
    decoding = DecodingRows(SIZE)
    rows = [row_at(4, 0) for _ in range(3)]
    for row in rows:
        decoding.add(row)
        decoding.note_fork(row)
    assert decoding.is_growing(0)
    decoding.remove(rows[1])
    assert decoding.take_forked() == [rows[0], rows[2]]
    assert decoding.take_forked() == []
    assert not decoding.is_growing(0)
