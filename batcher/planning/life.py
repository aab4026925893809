"""The life of a replica: it starts, serves, fails and comes back, drains, and is down.

Rule: nothing outside the table here decides whether a move is legal; failures and autoscaling make
their moves through it, and all that is told of a replica's time follows from them.
"""

from collections.abc import Collection, Iterable
from enum import Enum
from heapq import merge
from itertools import pairwise
from math import inf

from batcher.errors import InvariantError


class ReplicaState(Enum):
    """What a replica is doing."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    DRAINING = "draining"
    DOWN = "down"


MOVES: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.STARTING: frozenset({ReplicaState.SERVING, ReplicaState.DOWN}),
    ReplicaState.SERVING: frozenset({ReplicaState.FAILED, ReplicaState.DRAINING}),
    ReplicaState.FAILED: frozenset({ReplicaState.SERVING, ReplicaState.DOWN}),
    ReplicaState.DRAINING: frozenset({ReplicaState.DOWN}),
    ReplicaState.DOWN: frozenset(),
}
PAID = frozenset(ReplicaState) - {ReplicaState.DOWN}
STEPPING = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})


class Life:
    """The moves of one replica, each with its time in seconds; the first is what it begins as."""

    def __init__(self, state: ReplicaState, time: float) -> None:
        self.moves = [(time, state)]
        self.num_starts = int(state is ReplicaState.SERVING)

    @property
    def state(self) -> ReplicaState:
        """What it is doing now."""
        return self.moves[-1][1]

    def move(self, state: ReplicaState, time: float) -> None:
        """Go on to another state.

        Raises:
            InvariantError: the table has no such move, or it is before the last one.
        """
        if state not in MOVES[self.state] or time < self.moves[-1][0]:
            raise InvariantError(f"a replica that is {self.moves[-1]} cannot be {state} at {time}")
        self.moves.append((time, state))
        self.num_starts += state is ReplicaState.SERVING

    def seconds(self, states: Collection[ReplicaState], begin: float, end: float) -> float:
        """Return for how long it was in one of `states` from `begin` to `end`."""
        return sum(
            max(min(until, end) - max(since, begin), 0.0)
            for (since, state), (until, _) in pairwise([*self.moves, (inf, self.state)])
            if state in states
        )


def timeline_of(lives: Iterable[Life], end: float) -> list[tuple[float, int, int]]:
    """Return how many replicas served, and how many were paid for, from each time on, up to `end`.

    It begins with the time of the first move; neither number is the same as before.
    """
    changes = merge(*(_changes(life) for life in lives))
    timeline: list[tuple[float, int, int]] = []
    num_serving = num_paid = 0
    for time, serving, paid in changes:
        num_serving += serving
        num_paid += paid
        if time > end:
            break
        if timeline and timeline[-1][0] == time:
            timeline.pop()
        if not timeline or timeline[-1][1:] != (num_serving, num_paid):
            timeline.append((time, num_serving, num_paid))
    return timeline


def _changes(life: Life) -> Iterable[tuple[float, int, int]]:
    """Yield by how much each move changes how many serve, and how many are paid for."""
    was_serving = was_paid = False
    for time, state in life.moves:
        is_serving, is_paid = state is ReplicaState.SERVING, state in PAID
        yield time, is_serving - was_serving, is_paid - was_paid
        was_serving, was_paid = is_serving, is_paid
