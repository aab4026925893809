"""The conversations of a run: each turn continues the turns before it, after they end.

Rule: at most one turn of a session is a sequence; the others wait here, in input order.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from batcher.engine.sequence import DroppedTurns, More, Sequence, SequenceMaker
from batcher.errors import Failure, InvariantError
from batcher.events import ArriveReason
from batcher.models.base import Model, context_of
from batcher.prompts import count_tokens, num_lasting_tokens, prefix_of
from batcher.request import Request
from batcher.result import FinishReason, Result
from batcher.scheduling.clock import Clock
from batcher.tokens import NO_TOKENS, Tokens, joined


class Turn(NamedTuple):
    """A request of a session, as it was added to the engine.

    replayed: results of an earlier run, by index.  is_streamed: see Engine.enqueue.
    """

    request: Request
    request_id: str
    input_index: int
    arrive_reason: ArriveReason
    replayed: Mapping[int, Result]
    is_streamed: bool


T = TypeVar("T")


class Session(Generic[T]):
    """The turns of one conversation: one is active, the others wait in input order.

    active: the id of the active turn, or None.  turns: those that wait.
    end: when the last turn ended; None before that.
    failure: why no turn can continue, if so.
    """

    def __init__(self) -> None:
        self.active: str | None = None
        self.turns: deque[T] = deque()
        self.end: float | None = None
        self.failure: str | None = None

    def arrival_of(self, request: Request) -> float:
        if self.end is None:
            return request.arrival_time
        return max(request.arrival_time, self.end + request.think_time)

    def fail(self, request_id: str, outcome: str) -> None:
        """Fail all turns after that of a request."""
        if self.failure is None:
            self.failure = (
                f"an earlier turn of its session, request {request_id!r}, ended with {outcome!r}"
            )


class TokenSession(Session[Turn]):
    """The tokens of one conversation.

    kept: tokens that remain of dropped turns.
    past: for each turn that has ended, its prompt with its output, and how many of these tokens,
    from the first, remain if the turn is dropped.
    num_history: the number of tokens before the active turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tokens = NO_TOKENS
        self.past: list[tuple[Tokens, int]] = []
        self.num_history = 0

    def break_off(self, request_id: str, outcome: str, place: int = 0) -> list[Turn]:
        """Fail all later turns; return the waiting ones from `place` on."""
        self.fail(request_id, outcome)
        turns = list(self.turns)[place:]
        for _ in turns:
            self.turns.pop()
        return turns


class Sessions:
    """The sessions of an engine, by name.

    begin: queues a turn until its arrival.  end: ends a turn that never started.
    """

    def __init__(
        self,
        model: Model,
        maker: SequenceMaker,
        clock: Clock,
        begin: Callable[[Sequence], None],
        end: Callable[[Sequence, FinishReason, int, Failure | None], None],
    ) -> None:
        self._model, self._maker, self._clock = model, maker, clock
        self._context, self._begin, self._end = context_of(model), begin, end
        self._sessions: dict[str, TokenSession] = {}
        self._ended: list[tuple[Sequence, Result]] = []

    @property
    def num_turns(self) -> int:
        """The number of turns that wait for an earlier one."""
        return sum(len(session.turns) for session in self._sessions.values())

    def add(self, name: str, turn: Turn) -> None:
        session = self._sessions.setdefault(name, TokenSession())
        if session.failure is None:
            if session.active is not None:
                session.turns.append(turn)
                return
            session.active = turn.request_id
        self._begin_turn(session, turn, session.failure)

    def note_end(self, sequence: Sequence, result: Result) -> None:
        self._ended.append((sequence, result))

    def abort(self, request_id: str) -> None:
        """End a turn that waits for an earlier one."""
        for session in self._sessions.values():
            for place, turn in enumerate(session.turns):
                if turn.request_id == request_id:
                    aborted, *others = session.break_off(request_id, "aborted", place)
                    [sequence] = self._maker.make(*aborted)
                    self._end(sequence, "aborted", self._clock.step, None)
                    for other in others:
                        self._begin_turn(session, other, session.failure)
                    return

    def start_turns(self) -> None:
        """Start the turns whose previous turn has ended since the last call."""
        while turns := self._ended:
            self._ended = []
            for sequence, result in turns:
                self._end_turn(sequence, result)

    def _end_turn(self, sequence: Sequence, result: Result) -> None:
        request, tokenizer = sequence.request, self._model.tokenizer
        if request.session is None:
            raise InvariantError(f"request {request.id!r} is no turn of a session")
        session = self._sessions[request.session]
        if session.active != sequence.id:
            return  # it failed before it began
        own = sequence.prompt.tokens[session.num_history :]
        num_lasting = num_lasting_tokens(request.prompt, tokenizer)
        if not session.num_history:
            num_lasting += len(prefix_of(request.prompt, tokenizer))
        tokens = joined((own, result.token_ids), self._model.vocab_size)
        session.past.append((tokens, num_lasting))
        session.end, session.active = self._clock.now, None
        outcome = result.finish_reason
        if outcome in {"error", "aborted"}:
            for turn in session.break_off(sequence.id, outcome):
                self._begin_turn(session, turn, session.failure)
        elif session.turns:
            turn = session.turns.popleft()
            session.active = turn.request_id
            self._begin_turn(session, turn, None)

    def _begin_turn(self, session: TokenSession, turn: Turn, why: str | None) -> None:
        """Start the next turn of a session, or fail it for the reason `why`."""
        request, vocab_size, context = turn.request, self._model.vocab_size, self._context
        dropped: list[tuple[Tokens, int]] = []
        if context.drops_oldest and session.past:  # drop turns until this one fits
            num_own = count_tokens(request.prompt, self._model.tokenizer)
            num_more = num_own + context.num_reserved(request.output_limit)
            lengths = [(len(tokens), num_lasting) for tokens, num_lasting in session.past]
            number = context.num_dropped(lengths, len(session.kept) + num_more)
            dropped, session.past = session.past[:number], session.past[number:]
        if dropped:
            lasting = [tokens[:num_lasting] for tokens, num_lasting in dropped]
            session.kept = joined((session.kept, *lasting), vocab_size)
        history = joined((session.kept, *(tokens for tokens, _ in session.past)), vocab_size)
        session.num_history = len(history)
        [sequence] = self._maker.make(*turn, history)
        if dropped:
            num_tokens = sum(len(tokens) - num_lasting for tokens, num_lasting in dropped)
            sequence.more = sequence.more or More()
            sequence.more.dropped = DroppedTurns(len(dropped), num_tokens)
        if why is not None:
            self._end(sequence, "error", self._clock.step, Failure("session-failed", why))
            return
        arrival = session.arrival_of(request)
        if arrival > request.arrival_time:
            sequence.arrival_time, sequence.arrive_reason = arrival, "turn"
        self._begin(sequence)
