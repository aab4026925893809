"""Sequences of requests for a server: when they arrive, and the turns of sessions."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from batcher.engine.sessions import Session, Turn
from batcher.events import ArriveReason
from batcher.remote.protocol import is_chat
from batcher.remote.reply import Reply
from batcher.request import MAX_ANSWER, Request
from batcher.result import Result
from batcher.scheduling.clock import Clock
from batcher.scheduling.queue import WaitingQueue
from batcher.scheduling.sequence import Schedulable


class RemoteSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """One sample of a request; of what Schedulable has, that of slots and queues alone is used.

    Set here: request: what it is an output of.  arrive_reason: why it arrives when it does.
    context: the text, or the messages, that it goes on from.
    Set by attempts.py: reply: what has come of its answer; text: what of that is still to be told.
    num_told: how many ids are.
    """

    request: Request
    arrive_reason: ArriveReason
    context: Any = None
    reply: Reply
    text: str = ""
    num_told: int = 0

    def take_told(self) -> tuple[list[int] | None, str]:
        """Return the ids since the last call, None if they are not known, and the text."""
        text, self.text = self.text, ""
        ids = self.reply.token_ids
        start, self.num_told = self.num_told, len(ids or ())
        return None if ids is None else ids[start:], text


class Conversation(Session):
    """A session whose turns go on from texts, or from messages, and not from tokens.

    said: all that was, None before the first turn has ended.
    """

    __slots__ = ("said",)

    def __init__(self) -> None:
        super().__init__()
        self.said: Any = None


class Over(NamedTuple):
    """A sample that is not sent: an earlier run has its result, or its session was broken off."""

    sequence: RemoteSequence
    result: Result | None


class RemoteInputs:
    """Makes sequences of requests, and keeps the turns of sessions until it is theirs.

    has_sessions: whether any request has been part of a session.
    latest_arrival: the latest arrival time that a request has named.
    """

    def __init__(self, queue: WaitingQueue[RemoteSequence]) -> None:
        self.has_sessions = False
        self.latest_arrival = 0.0
        self._queue = queue
        self._sessions: dict[str, Conversation] = {}

    def add(
        self,
        request: Request,
        request_id: str,
        input_index: int,
        reason: ArriveReason,
        replayed: Mapping[int, Result],
        now: float,
    ) -> list[Over]:
        """Queue the samples of a request; return those that are over already."""
        self.latest_arrival = max(self.latest_arrival, request.arrival_time)
        turn = Turn(request, request_id, input_index, reason, replayed, is_streamed=True)
        if request.session is not None:
            self.has_sessions = True
            session = self._sessions.setdefault(request.session, Conversation())
            if session.active is not None:
                session.turns.append(turn)
                return []
            return self._begin(session, turn, now)
        over = []
        for index in range(request.n):
            sequence = _sequence(turn, index)
            if index in replayed:
                over.append(Over(sequence, replayed[index]))
            else:
                self._queue.add(sequence, now)
        return over

    @property
    def num_turns(self) -> int:
        """How many turns of sessions wait for the turn before them."""
        return sum(len(session.turns) for session in self._sessions.values())

    def end_turn(self, sequence: RemoteSequence, result: Result, now: float) -> list[Over]:
        """Start the turn after one that has ended; return the turns that are over by that."""
        session = self._sessions[sequence.request.session or ""]
        if session.active != sequence.id:  # it was over without ever going on
            return []
        session.end, session.active = now, None
        if result.finish_reason in {"error", "aborted"}:
            turns = session.break_off(sequence.id, result.finish_reason, 0)
            return [Over(_sequence(turn, 0), None) for turn in turns]
        session.said = _with_answer(sequence.request, session.said, result)
        return self._begin(session, session.turns.popleft(), now) if session.turns else []

    def arrive(self, clock: Clock) -> Iterator[tuple[RemoteSequence, int]]:
        """Yield those that have arrived by now, each with the step in which it has."""
        for sequence in self._queue.take_arrivals(clock.now):
            sequence.arrived_step = step = clock.step_at(sequence.arrival_time)
            yield sequence, step

    def why_broken(self, request: Request) -> str:
        """Return why no turn of a session can go on."""
        return self._sessions[request.session or ""].failure or ""

    def _begin(self, session: Conversation, turn: Turn, now: float) -> list[Over]:
        """Queue a turn, or return it as over."""
        request, said = turn.request, session.said
        sequence = _sequence(turn, 0, said)
        if said is not None and isinstance(said, str) == is_chat(request):
            session.failure = "its session goes on from texts, or from messages, not from both"
        if session.failure is not None:
            return [Over(sequence, None)]
        session.active = turn.request_id
        if turn.replayed:
            return [Over(sequence, turn.replayed[0])]
        if session.end is not None:
            arrival = max(request.arrival_time, session.end + request.think_time)
            if arrival > request.arrival_time:
                sequence.arrival_time, sequence.arrive_reason = arrival, "turn"
        self._queue.add(sequence, now)
        return []


def _sequence(turn: Turn, index: int, said: Any = None) -> RemoteSequence:
    """Return sample `index` of a request; how long a text is, in tokens, only the server knows."""
    request = turn.request
    num_tokens = 0 if isinstance(request.prompt, str) else len(request.prompt)
    return RemoteSequence(
        id=turn.request_id,
        index=index,
        input_index=turn.input_index,
        arrival_time=request.arrival_time,
        num_prompt_tokens=num_tokens,
        max_tokens=MAX_ANSWER if request.max_tokens is None else request.max_tokens,
        has_default_limit=request.max_tokens is None,
        priority=request.priority,
        deadline=request.deadline,
        request=request,
        arrive_reason=turn.arrive_reason,
        context=said,
        reply=Reply(),
    )


def _with_answer(request: Request, said: Any, result: Result) -> Any:
    """Return what was said in a session up to this turn, its answer included."""
    if not is_chat(request):
        return (said or "") + str(request.prompt) + result.text
    messages = (request.extra_body or {})["messages"]
    answer: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.tool_calls is not None:
        answer["tool_calls"] = result.tool_calls
    if result.function_call is not None:
        answer["function_call"] = result.function_call
    return [*(said or []), *messages, answer]
