"""The life of a sequence: one table of legal moves.

Rule: nothing outside this file decides whether a move is legal, and nothing else assigns
`Sequence.state`. The diagram in docs/architecture.md is generated from the table.
"""

from enum import StrEnum
from typing import Protocol

from batcher.errors import InvariantError


class State(StrEnum):
    """Where a sequence stands."""

    PENDING = "pending"  # known, but its arrival time has not come
    WAITING = "waiting"  # in the waiting queue
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"  # has its result


class Move(StrEnum):
    """What can happen to a sequence."""

    ARRIVE = "arrive"
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"


TRANSITIONS = {
    (State.PENDING, Move.ARRIVE): State.WAITING,
    (State.PENDING, Move.ABORT): State.FINISHED,
    (State.PENDING, Move.FINISH): State.FINISHED,  # the turn before it in its session failed
    (State.WAITING, Move.ADMIT): State.RUNNING,
    (State.WAITING, Move.FINISH): State.FINISHED,  # done without a slot, or too large for one
    (State.WAITING, Move.ABORT): State.FINISHED,
    (State.RUNNING, Move.PREEMPT): State.WAITING,
    (State.RUNNING, Move.FINISH): State.FINISHED,
    (State.RUNNING, Move.ABORT): State.FINISHED,
}


class HasState(Protocol):
    """Anything that goes through the table."""

    state: State


def move(sequence: HasState, what: Move) -> None:
    """Take `sequence` to its next state.

    Raises:
        InvariantError: the table has no such move.
    """
    try:
        sequence.state = TRANSITIONS[sequence.state, what]
    except KeyError:
        raise InvariantError(f"a {sequence.state} sequence cannot {what}") from None
