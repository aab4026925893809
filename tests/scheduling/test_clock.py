"""Steps and times: what starts when, and which step an arrival falls into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import InvariantError
from batcher.scheduling.clock import ConstantClock

MOVES = st.lists(st.one_of(st.integers(1, 6), st.floats(0.01, 50)), max_size=12)


def clock_after(moves: list[float]) -> tuple[ConstantClock, list[float]]:
    """A clock that took steps (int) and jumps (float), and the start of each step it counted."""
    clock, starts = ConstantClock(), []
    for move in moves:
        if isinstance(move, int):
            for _ in range(move):
                starts.append(clock.now)
                clock.advance(None)
        else:
            clock.jump(clock.now + move)
    return clock, starts


@given(MOVES, st.floats(0, 1))
def test_step_at_is_the_first_step_that_starts_then_or_later(
    moves: list[float], part: float
) -> None:
    clock, starts = clock_after(moves)
    time = clock.now * part
    later = [step for step, start in enumerate([*starts, clock.now]) if start >= time]
    assert clock.step_at(time) == later[0]


@given(MOVES)
def test_start_of_gives_every_start_again(moves: list[float]) -> None:
    clock, starts = clock_after(moves)
    assert [clock.start_of(step) for step in range(len(starts))] == starts
    assert [clock.step_at(start) for start in starts] == list(range(len(starts)))
    assert clock.start_of(clock.step) == clock.now


def test_the_clock_never_goes_back() -> None:
    clock = ConstantClock()
    clock.advance(None)
    clock.advance(None)
    for time in (1.5, 2.0):
        with pytest.raises(InvariantError, match="cannot jump"):
            clock.jump(time)


def test_a_jump_is_no_step() -> None:
    clock = ConstantClock()
    clock.advance(None)
    clock.advance(None)
    clock.jump(10.5)
    assert (clock.step, clock.now) == (2, 10.5)
    assert clock.step_at(1.5) == clock.step_at(2.0) == clock.step_at(10.5) == 2
