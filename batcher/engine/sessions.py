"""What the conversation of a session has come to, and which of its turns are dropped.

Rule: of one session at most one turn is a sequence; the others wait here, in input order.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from batcher.events import ArriveReason
from batcher.models.base import Context
from batcher.request import Request
from batcher.result import Result
from batcher.tokens import NO_TOKENS, Tokens, joined


class Turn(NamedTuple):
    """A request of a session as it was added to the engine.

    replayed: what an earlier run found, by index.  is_streamed: see Engine.enqueue.
    """

    request: Request
    request_id: str
    input_index: int
    arrive_reason: ArriveReason
    replayed: Mapping[int, Result]
    is_streamed: bool


class PastTurn(NamedTuple):
    """A turn that has ended.

    tokens: its own prompt, and its output.  num_lasting: how many of them, from the first on, stay
    if it is dropped.
    """

    tokens: Tokens
    num_lasting: int


class DroppedTurns(NamedTuple):
    """How many of the oldest turns are dropped for another one, and how many tokens of them."""

    num_turns: int
    num_tokens: int


NOTHING_DROPPED = DroppedTurns(0, 0)


class Session:
    """What one conversation has come to.

    kept: the tokens that have stayed of turns that were dropped.  past: the turns that have ended
    since.  end: when the last of them did; None before the first has.
    num_history: how many tokens the turn that is a sequence goes on from.
    failure: why no turn can go on from here, if that is so.
    active: the id of the turn that is a sequence; None if there is none.  turns: that wait for it.
    """

    __slots__ = ("active", "end", "failure", "kept", "num_history", "past", "turns")

    def __init__(self) -> None:
        self.kept: Tokens = NO_TOKENS
        self.past: list[PastTurn] = []
        self.num_history = 0
        self.end: float | None = None
        self.failure: str | None = None
        self.active: str | None = None
        self.turns: deque[Turn] = deque()

    def history(self, vocab_size: int | None) -> Tokens:
        """Return all tokens that the next turn goes on from."""
        return joined((self.kept, *(turn.tokens for turn in self.past)), vocab_size)

    def drop(self, num_more: int, context: Context, vocab_size: int | None) -> DroppedTurns:
        """Drop the oldest turns until `num_more` tokens fit behind the others, or none is left."""
        lengths = [(len(turn.tokens), turn.num_lasting) for turn in self.past]
        number = context.num_dropped(lengths, len(self.kept) + num_more)
        if not number:
            return NOTHING_DROPPED
        dropped, self.past = self.past[:number], self.past[number:]
        lasting = [turn.tokens[: turn.num_lasting] for turn in dropped]
        self.kept = joined((self.kept, *lasting), vocab_size)
        return DroppedTurns(number, sum(len(turn.tokens) - turn.num_lasting for turn in dropped))

    def break_off(self, request_id: str, outcome: str, place: int) -> list[Turn]:
        """Let nothing go on after a turn; return those that wait, from `place` on."""
        if self.failure is None:
            self.failure = (
                f"a turn before it in its session, request {request_id!r}, ended with {outcome!r}"
            )
        turns = list(self.turns)[place:]
        for _ in turns:
            self.turns.pop()
        return turns
