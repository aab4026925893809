"""Conversations: requests that go on from what the one before them has left.

Rule: of one session at most one turn is in the engine; the others wait here, in input order.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from batcher.events import ArriveReason
from batcher.request import Request
from batcher.result import FinishReason, Result
from batcher.tokens import Tokens


class Turn(NamedTuple):
    """A request as it was added to the engine."""

    request: Request
    request_id: str
    place: int
    reason: ArriveReason
    known: Mapping[int, Result]


class Session:
    """What one conversation has come to.

    tokens: of all turns that have ended, prompts and outputs.  end: when the last of them did; None
    before the first has.  failure: why no turn can go on from here, if that is so.
    active: the id of the turn that is in the engine; None if there is none.
    """

    __slots__ = ("active", "end", "failure", "tokens", "waiting")

    def __init__(self) -> None:
        self.tokens: Tokens = []
        self.end: float | None = None
        self.failure: str | None = None
        self.active: str | None = None
        self.waiting: deque[Turn] = deque()

    def arrival_time(self, request: Request) -> float:
        """Return when a turn arrives, the one before it having ended."""
        if self.end is None:
            return request.arrival_time
        return max(request.arrival_time, self.end + request.think_time)


class Sessions:
    """All conversations, by name; they are remembered as long as the engine is."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def enter(self, name: str, turn: Turn) -> Session | None:
        """Take in a turn; return what it goes on from or fails with, or None if it has to wait."""
        session = self._sessions.setdefault(name, Session())
        if session.failure is None:
            if session.active is not None:
                session.waiting.append(turn)
                return None
            session.active = turn.request_id
        return session

    def leave(
        self, name: str, request_id: str, tokens: Tokens, end: float, outcome: FinishReason
    ) -> list[Turn]:
        """Take note that a turn has ended at `end`; return those that go on now, or fail.

        tokens: of the whole conversation so far.
        """
        session = self._sessions[name]
        if session.active != request_id:  # it has failed without ever going on
            return []
        session.tokens, session.end, session.active = tokens, end, None
        if outcome in {"error", "aborted"}:
            return self._break_off(session, request_id, outcome, 0)
        if session.waiting:
            turn = session.waiting.popleft()
            session.active = turn.request_id
            return [turn]
        return []

    def of(self, name: str) -> Session:
        """Return the session of a turn that has entered."""
        return self._sessions[name]

    def abort(self, request_id: str) -> list[Turn]:
        """Return the turn of that id, if it waits here, and all behind it, which fail with it."""
        for session in self._sessions.values():
            for place, turn in enumerate(session.waiting):
                if turn.request_id == request_id:
                    return self._break_off(session, request_id, "aborted", place)
        return []

    def _break_off(
        self, session: Session, request_id: str, outcome: FinishReason, place: int
    ) -> list[Turn]:
        """Let nothing go on after a turn; return those that wait, from `place` on."""
        if session.failure is None:
            session.failure = (
                f"a turn before it in its session, request {request_id!r}, ended with {outcome!r}"
            )
        turns = list(session.waiting)[place:]
        for _ in turns:
            session.waiting.pop()
        return turns
