"""The life of a sequence: one table of legal moves.

Rule: nothing outside this file decides whether a move is legal, and `Sequence.state` is assigned
only as `sequence.state = MOVE[sequence.state]`.  The diagram in docs/architecture.md is generated
from the table.
"""

from enum import StrEnum
from typing import NoReturn

from batcher.errors import InvariantError


class State(StrEnum):
    """Where a sequence stands."""

    PENDING = "pending"  # known, but its arrival time has not come
    WAITING = "waiting"  # in the waiting queue
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"  # has its result


class Move(dict[State, State]):
    """What can happen to a sequence: where that leads from each state in which it may.

    Raises:
        InvariantError: `move[state]` is asked for where the table has no such move.
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
