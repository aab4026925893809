"""The table of legal moves is the only one there is."""

from itertools import product

import pytest

from batcher.errors import InvariantError
from batcher.lifecycle import TRANSITIONS, Move, State, move


class Holder:
    def __init__(self, state: State) -> None:
        self.state = state


@pytest.mark.parametrize(("state", "what"), list(product(State, Move)))
def test_every_move_is_in_the_table_or_refused(state: State, what: Move) -> None:
    holder = Holder(state)
    if (state, what) in TRANSITIONS:
        move(holder, what)
        assert holder.state is TRANSITIONS[state, what]
    else:
        with pytest.raises(InvariantError, match=f"{state} sequence cannot {what}"):
            move(holder, what)


def test_a_sequence_ends_once() -> None:
    assert not any(state is State.FINISHED for state, _ in TRANSITIONS)
