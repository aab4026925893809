"""The way of requests into the waiting queue: as sequences, at their time, turn by turn."""

from collections.abc import Mapping
from typing import cast

from batcher.engine.endings import Endings
from batcher.engine.journal import Journal
from batcher.engine.roster import Roster
from batcher.engine.sessions import Session, Sessions, Turn
from batcher.errors import Failure, InvariantError
from batcher.events import ArriveReason
from batcher.lifecycle import Move, move
from batcher.models.base import Model
from batcher.request import Request
from batcher.result import Result
from batcher.scheduling.clock import Clock
from batcher.scheduling.scheduler import Scheduler
from batcher.sequence import Heal, Sequence, make_sequences
from batcher.tokens import Tokens, joined

NO_TOKENS: Tokens = []


class Entrance:
    """Lets requests arrive.

    has_turns: whether any request has been part of a session.  latest_arrival: the latest arrival
    time that a request has named.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roster: Roster,
        endings: Endings,
        journal: Journal,
        clock: Clock,
        model: Model,
        heal: Heal,
    ) -> None:
        self.has_turns = False
        self.latest_arrival = 0.0
        self._scheduler, self._roster = scheduler, roster
        self._endings, self._journal = endings, journal
        self._queue, self._clock = scheduler.queue, clock
        self._model, self._heal = model, heal
        self._sessions = Sessions()

    def enter(
        self,
        request: Request,
        request_id: str,
        place: int,
        reason: ArriveReason,
        known: Mapping[int, Result],
    ) -> None:
        """Take in a request.

        Raises:
            RequestError: the model's tokenizer fails on its prompt.
        """
        sequences = make_sequences(
            request, request_id, place, reason, known, self._model, self._heal, NO_TOKENS
        )
        self._roster.enter(request, request_id, len(sequences))
        if request.arrival_time > self.latest_arrival:  # noqa: PLR1730 - max() takes longer
            self.latest_arrival = request.arrival_time
        if request.session is not None:
            self.has_turns = True
            turn = Turn(request, request_id, place, reason, known)
            session = self._sessions.enter(request.session, turn)
            if session is not None:
                self._begin_turn(turn, session, session.failure)
            return
        for sequence in sequences:
            self._queue.add(sequence, self._clock.now)

    def abort(self, request_id: str) -> None:
        """End what of a request waits: for its time, for a slot, or for the turn before it."""
        step = self._clock.step
        for waiting in cast(list[Sequence], self._queue.find(request_id)):
            self._queue.remove(waiting)
            self._endings.end_waiting(waiting, step, "aborted")
        turns = self._sessions.abort(request_id)
        if turns:
            (sequence,) = self._make(turns[0], NO_TOKENS)
            self._endings.end_waiting(sequence, step, "aborted")
        for turn in turns[1:]:
            session = self._sessions.of(cast(str, turn.request.session))
            self._begin_turn(turn, session, session.failure)

    def join_arrivals(self) -> None:
        """Let what has arrived wait for a slot; if all is idle, jump to the next arrival."""
        queue, clock = self._queue, self._clock
        if not (queue.num_waiting or self._scheduler.slots.num_occupied):
            arrival = queue.next_arrival
            if arrival is not None and arrival > clock.now:
                clock.jump(arrival)
        for sequence in cast(list[Sequence], queue.take_arrivals(clock.now)):
            self._arrive(sequence)

    def check_progress(self) -> None:
        """Make sure that a step in which nothing has happened was one before an arrival.

        Raises:
            InvariantError: it was not, so all that follow would be the same.
        """
        queue = self._queue
        if queue.num_waiting or not queue.num_pending:
            raise InvariantError(f"step {self._clock.step}: requests are left, and none can run")

    def go_on_with_turns(self) -> None:
        """Let the turns of sessions go on whose predecessors have ended."""
        while turns := self._endings.take_turns():
            for sequence, result in turns:
                name = cast(str, sequence.request.session)
                whole = sequence.prompt_tokens, result.tokens
                tokens = joined(whole, self._model.vocab_size)
                has_failed = result.finish_reason in {"error", "aborted"}
                for turn in self._sessions.leave(
                    name, sequence.id, tokens, self._clock.now, result.finish_reason
                ):
                    session = self._sessions.of(name)
                    self._begin_turn(turn, session, session.failure if has_failed else None)

    def _make(self, turn: Turn, history: Tokens) -> list[Sequence]:
        """Return what a request waits with; `history` is what its session has come to."""
        return make_sequences(*turn, self._model, self._heal, history)

    def _begin_turn(self, turn: Turn, session: Session, why: str | None) -> None:
        """Let a turn arrive, the one before it having ended, or fail for the reason `why`."""
        (sequence,) = self._make(turn, session.tokens)
        if why is not None:
            failure = Failure("session-failed", why)
            self._endings.end_waiting(sequence, self._clock.step, "error", failure)
            return
        arrival = session.arrival_time(turn.request)
        if arrival > turn.request.arrival_time:
            sequence.arrival_time, sequence.reason = arrival, "turn"
        self._queue.add(sequence, self._clock.now)

    def _arrive(self, sequence: Sequence) -> None:
        move(sequence, Move.ARRIVE)
        sequence.arrived_step = self._clock.step_at(sequence.arrival_time)
        self._journal.arrived(sequence)
        for companion in sequence.companions:
            companion.arrived_step = sequence.arrived_step
            move(companion, Move.ARRIVE)
        known = sequence.known
        if sequence.max_tokens == 0 or (known is not None and known.slot is None):
            # now, and not in the step of its arrival if that was missed: results come in order
            self._endings.end_waiting(sequence, self._clock.step, "length")
            return
        scheduler = self._scheduler
        failure = None if scheduler.kv_cache is None else scheduler.why_never(sequence)
        if failure is not None:
            self._endings.end_waiting(sequence, self._clock.step, "error", failure)
        else:
            self._queue.push(sequence)
