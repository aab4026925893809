"""The life of a sequence: one table of legal moves.

Rule: only this table decides whether a move is legal.  `Sequence.state` is assigned only as
`sequence.state = MOVE[sequence.state]`.  The diagram in
docs/inside/architecture.md is generated from the table.
"""

from enum import StrEnum
from typing import NoReturn

from batcher.errors import InvariantError


class State(StrEnum):
    """The state of a sequence."""

    PENDING = "pending"  # known, but its arrival time has not come
    WAITING = "waiting"  # in the waiting queue
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"  # has its result


class Move(dict[State, State]):
    """A possible move of a sequence: the next state for each state that allows it.

    Raises:
        InvariantError: `move[state]` does not exist.
    """

    def __init__(self, name: str, moves: dict[State, State]) -> None:
        super().__init__(moves)
        self.name = name

    def __missing__(self, state: State) -> NoReturn:
        raise InvariantError(f"a {state} sequence cannot {self.name}")


ARRIVE = Move("arrive", {State.PENDING: State.WAITING})
ADMIT = Move("admit", {State.WAITING: State.RUNNING})
PREEMPT = Move("preempt", {State.RUNNING: State.WAITING})
FINISH = Move(
    "finish",
    {
        State.PENDING: State.FINISHED,  # the turn before it in its session failed
        State.WAITING: State.FINISHED,  # done without a slot, or too large for one
        State.RUNNING: State.FINISHED,
    },
)
ABORT = Move("abort", dict.fromkeys((State.PENDING, State.WAITING, State.RUNNING), State.FINISHED))

MOVES = (ARRIVE, ADMIT, PREEMPT, FINISH, ABORT)
