"""Requests on their way into the waiting queue: as sequences, at their time, turn by turn."""

from collections.abc import Callable, Mapping
from copy import copy

from msgspec.structs import replace

from batcher.decoding.logprobs import PromptLogprobs
from batcher.decoding.stops import stop_automaton
from batcher.engine.outputs import Outputs
from batcher.engine.recorder import Recorder
from batcher.engine.sequence import Sequence, SequenceExtras
from batcher.engine.sessions import NOTHING_DROPPED, PastTurn, Session, Turn
from batcher.errors import BatchdecodeError, Failure, InvariantError, id_in_use
from batcher.events import ArriveReason, Role
from batcher.models.base import Model, eos_token_ids_of
from batcher.models.context import ANY_LENGTH, UNLIMITED, Context, context_of
from batcher.prompts import Prompt, count_tokens, num_lasting_tokens, prefix_of, read_prompt
from batcher.request import TO_THE_END, Request, is_plain, num_queued_as
from batcher.result import Result
from batcher.scheduling.clock import Clock
from batcher.scheduling.scheduler import Scheduler
from batcher.tokens import NO_TOKENS, Tokens, joined

Heal = Callable[[Tokens], tuple[list[int], bytes]]


class Inputs:
    """Makes sequences of requests, and lets them join the queue.

    has_sessions: whether any request has been part of a session.
    latest_arrival: the latest arrival time that a request has named.
    """

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        outputs: Outputs,
        recorder: Recorder,
        clock: Clock,
        model: Model,
        heal: Heal,
    ) -> None:
        self.has_sessions = False
        self.latest_arrival = 0.0
        self._scheduler, self._queue = scheduler, scheduler.queue
        self._outputs, self._recorder, self._clock = outputs, recorder, clock
        self._model, self._context = model, context_of(model)
        self._maker = SequenceMaker(model, self._context, heal)
        settings = scheduler.settings
        self._can_replay = not settings.is_paged and settings.preempt_for is None
        self._sessions: dict[str, Session] = {}  # by name, as long as the engine is there

    def id_of(self, request: Request, input_index: int | None) -> str:
        """Return the id of a request; by default its number in the input, from 1.

        input_index: that number, from 0; by default the order of adding.
        """
        if request.id is not None:
            return request.id
        return str((self._outputs.num_requests if input_index is None else input_index) + 1)

    def add(
        self,
        request: Request,
        input_index: int | None,
        arrive_reason: ArriveReason,
        replayed: Mapping[int, Result],
        name: str | None = None,
        *,
        is_streamed: bool = True,
    ) -> str:
        """Take in a request, whose sequences join the queue once they have arrived; return its id.

        name, is_streamed: see Engine.enqueue.

        Raises:
            RequestError: its id is that of a request that has not ended, or the model's tokenizer
                fails on its prompt.
            BatchdecodeError: it is replayed where sequences may be preempted or share blocks.
        """
        outputs, request_id = self._outputs, name or self.id_of(request, input_index)
        if request_id in outputs.num_open:
            raise id_in_use(request_id)
        if replayed and not self._can_replay:
            raise BatchdecodeError(
                "results are replayed only without KV blocks and without preemption: "
                "what a replayed sequence would have computed is not there"
            )
        if input_index is None:
            input_index = outputs.num_requests
        sequences = self._maker.make(
            request, request_id, input_index, arrive_reason, replayed, is_streamed
        )
        outputs.open_request(request, request_id, len(sequences))
        if request.arrival_time > self.latest_arrival:  # noqa: PLR1730 - max() takes longer
            self.latest_arrival = request.arrival_time
        if request.session is not None:
            turn = Turn(request, request_id, input_index, arrive_reason, replayed, is_streamed)
            self._add_turn(request.session, turn)
            return request_id
        for sequence in sequences:
            self._queue.add(sequence, self._clock.now)
        return request_id

    def join_arrivals(self) -> None:
        """Let what has arrived wait for a slot; if all is idle, jump to the next arrival.

        What needs no slot or can never run ends at once.
        """
        scheduler, queue, clock = self._scheduler, self._queue, self._clock
        if not (queue.num_waiting or scheduler.batch.num_occupied):
            arrival = queue.next_arrival
            if arrival is not None and arrival > clock.now:
                clock.jump(arrival)
        arrived, time, step = self._recorder.arrived, -1.0, 0
        for first in queue.take_arrivals(clock.now):
            if first.arrival_time != time:  # many come at one time
                time = first.arrival_time
                step = clock.step_at(time)
            first.arrived_step = step
            for other in first.others:
                other.arrived_step = step
            arrived(first, step)
            extras, failure, has_none = first.extras, None, first.max_tokens == 0
            if extras is not None:
                failure, replayed = extras.failure, extras.replayed
                has_none = has_none or (replayed is not None and replayed.slot is None)
            if failure is None and has_none:
                # now, and not in the step of its arrival if that was missed: results come in order
                self._outputs.finish_waiting(first, clock.step, "length")
                continue
            if failure is None and scheduler.kv_cache is not None:
                failure = self._why_never(first)
            if failure is None:
                queue.push(first)
            else:
                self._outputs.finish_waiting(first, clock.step, "error", failure)

    def _why_never(self, first: Sequence) -> Failure | None:
        """Return why a group can never run in the blocks there are, if so.

        One that states no limit runs, and fails only if it fills all of them.
        """
        failure, room = self._scheduler.why_never(first), 0
        if failure is not None and first.has_default_limit:
            room = self._scheduler.room_for_output(first)
        if failure is None or not room:
            return failure
        message = (
            f"it has filled all KV blocks: they hold {first.num_prompt_tokens} prompt tokens and "
            f"{room} more, and its request has no max_tokens; use more --kv-blocks"
        )
        for row in first.group:
            row.max_tokens, row.request = room, replace(row.request, max_tokens=room)
            row.extras = row.extras or SequenceExtras()
            row.extras.overflow = Failure(failure.code, message)
        return None

    def abort(self, request_id: str) -> None:
        """End what of a request waits: for its time, for a slot, or for the turn before it."""
        step = self._clock.step
        for waiting in self._queue.find(request_id):
            self._queue.remove(waiting)
            self._outputs.finish_waiting(waiting, step, "aborted")
        for session in self._sessions.values():
            for place, turn in enumerate(session.turns):
                if turn.request_id == request_id:
                    aborted, *others = session.break_off(request_id, "aborted", place)
                    [sequence] = self._maker.make(*aborted)
                    self._outputs.finish_waiting(sequence, step, "aborted")
                    for other in others:
                        self._begin_turn(session, other, session.failure)
                    return

    @property
    def num_turns(self) -> int:
        """How many turns of sessions wait for the turn before them."""
        return sum(len(session.turns) for session in self._sessions.values())

    def continue_sessions(self) -> None:
        """Let the turns of sessions go on whose predecessors have ended."""
        while turns := self._outputs.take_turns():
            for sequence, result in turns:
                name = sequence.request.session
                session = None if name is None else self._sessions[name]
                if session is None or session.active != sequence.id:
                    continue  # it has failed without ever going on
                session.past.append(self._past_turn(sequence, result, session.num_history))
                session.end, session.active = self._clock.now, None
                outcome = result.finish_reason
                if outcome in {"error", "aborted"}:
                    for turn in session.break_off(sequence.id, outcome, 0):
                        self._begin_turn(session, turn, session.failure)
                elif session.turns:
                    turn = session.turns.popleft()
                    session.active = turn.request_id
                    self._begin_turn(session, turn, None)

    def _add_turn(self, name: str, turn: Turn) -> None:
        """Take in a turn, which goes on at once if none of its session is on its way."""
        self.has_sessions = True
        session = self._sessions.setdefault(name, Session())
        if session.failure is None:
            if session.active is not None:
                session.turns.append(turn)
                return
            session.active = turn.request_id
        self._begin_turn(session, turn, session.failure)

    def _begin_turn(self, session: Session, turn: Turn, why: str | None) -> None:
        """Let a turn arrive, the one before it having ended, or fail for the reason `why`."""
        request, vocab_size, dropped = turn.request, self._model.vocab_size, NOTHING_DROPPED
        if self._context.drops_oldest and session.past:
            num_own = count_tokens(request.prompt, self._model.tokenizer)
            num_more = num_own + self._context.num_reserved(request.output_limit)
            dropped = session.drop(num_more, self._context, vocab_size)
        history = session.history(vocab_size)
        session.num_history = len(history)
        [sequence] = self._maker.make(*turn, history)
        if dropped.num_turns:
            sequence.extras = sequence.extras or SequenceExtras()
            sequence.extras.dropped = dropped
        if why is not None:
            failure = Failure("session-failed", why)
            self._outputs.finish_waiting(sequence, self._clock.step, "error", failure)
            return
        if session.end is not None:
            arrival = max(request.arrival_time, session.end + request.think_time)
            if arrival > request.arrival_time:
                sequence.arrival_time, sequence.arrive_reason = arrival, "turn"
        self._queue.add(sequence, self._clock.now)

    def _past_turn(self, sequence: Sequence, result: Result, num_history: int) -> PastTurn:
        """Return the turn that has ended, which went on from so many tokens."""
        own, tokenizer = sequence.prompt_tokens[num_history:], self._model.tokenizer
        num_lasting = num_lasting_tokens(sequence.request.prompt, tokenizer)
        if not num_history:
            num_lasting += len(prefix_of(sequence.request.prompt, tokenizer))
        return PastTurn(joined((own, result.token_ids), self._model.vocab_size), num_lasting)


class SequenceMaker:
    """Makes sequences of requests for a model.

    context: what its rows may be.  heal: see Decoder.heal.
    """

    def __init__(self, model: Model, context: Context, heal: Heal) -> None:
        self._model, self._context, self._heal = model, context, heal
        self._eos_token_ids = eos_token_ids_of(model)

    def make(
        self,
        request: Request,
        request_id: str,
        input_index: int,
        arrive_reason: ArriveReason,
        replayed: Mapping[int, Result],
        is_streamed: bool,  # noqa: FBT001 - one of the fields of a Turn, in their order
        history: Tokens = NO_TOKENS,
    ) -> list[Sequence]:
        """Return what a request waits with: a sequence for each sample, or the first of its beams.

        history: the tokens of the turns before it in its session.

        Raises:
            RequestError: the model's tokenizer fails on a prompt.
        """
        prompt = read_prompt(request.prompt, "prompt", request_id, self._model, history)
        num_tokens, context = prompt.num_tokens, self._context
        stated = max_tokens = request.max_tokens
        if max_tokens is None or max_tokens == TO_THE_END:
            max_tokens = context.output_limit(request.output_limit, num_tokens)
        if stated == TO_THE_END:
            request = replace(request, max_tokens=max_tokens)
        first = Sequence(
            id=request_id,
            input_index=input_index,
            arrival_time=request.arrival_time,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            has_default_limit=stated is None or stated == TO_THE_END,
            request=request,
            prompt=prompt,
            automaton=stop_automaton(request, self._eos_token_ids),
            arrive_reason=arrive_reason,
            is_streamed=is_streamed,
        )
        if stated == TO_THE_END and context.max_context != UNLIMITED:
            first.limit = "max_context"
        if prompt.segment_ends:
            first.segment_ends = prompt.segment_ends
        if request.cache_salt is not None:
            first.cache_salt = request.cache_salt
        if request.priority or request.deadline is not None:
            first.priority, first.deadline = request.priority, request.deadline
        has_room = context is ANY_LENGTH or context.holds(num_tokens, max_tokens)
        if has_room and not replayed and is_plain(request):
            return [first]
        return self._make_more(first, replayed)

    def _make_more(self, first: Sequence, replayed: Mapping[int, Result]) -> list[Sequence]:
        """Return the sequences of a request that is not plain, or replayed, or cut by the context.

        first: one of them.
        """
        request, prompt = first.request, first.prompt
        first.extras = extras = SequenceExtras()
        if request.prompt_logprobs is not None:
            extras.prompt_logprobs = PromptLogprobs(prompt, request.prompt_logprobs)
            first.skips_prefix_cache = True  # what is found there is not computed
        if request.heal:
            kept, extras.healing = self._heal(prompt.tokens)
            extras.num_healed = first.num_tokens - len(kept)
            first = _beginning_with(prompt.cut(len(kept)), first)
        negative = None
        if request.cfg_scale != 1 and _num_steps(request, None) > 0:
            text = request.negative_prompt or []
            negative = read_prompt(text, "negative_prompt", first.id, self._model)
        first = _fitted(first, negative, self._context)
        request = first.request
        if request.num_beams > 1 and request.output_limit:
            return [_with_beams(first)]
        num_samples = num_queued_as(request)
        first.has_siblings = num_samples > 1
        samples = [_another(first, index, replayed.get(index)) for index in range(num_samples)]
        if negative is not None:
            for sample in samples:
                partner = _another(first, sample.index, replayed.get(sample.index), role="negative")
                partner = _beginning_with(negative, partner)
                sample.others, sample.num_slots = (partner,), 2
        return samples


def _fitted(first: Sequence, negative: Prompt | None, context: Context) -> Sequence:
    """Return `first` with as many tokens to generate as its context has room for.

    negative: the prompt of the row beside it, if there is one, which is given the same tokens.
    """
    request, extras = first.request, first.extras
    whole = "prompt" if request.session is None else "conversation"
    prompts = {whole: first.num_tokens}
    if negative is not None:
        prompts["negative prompt"] = negative.num_tokens
    most, longest = request.output_limit, max(prompts.values())
    if extras is None or all(context.holds(n, most) for n in prompts.values()):
        return first
    is_computed = _num_steps(request, None) > 0
    extras.failure = context.why_never(prompts, most, is_computed=is_computed)
    room = context.max_context - longest
    if extras.failure is not None or room >= most:
        return first
    request = replace(request, max_tokens=room)
    return replace(first, request=request, max_tokens=room, limit="max_context")


def _with_beams(first: Sequence) -> Sequence:
    """Return `first` as the first of the beams of its request."""
    num_beams = first.request.num_beams
    beam, *others = [_another(first, index, None, role="beam") for index in range(num_beams)]
    beam.others = tuple(replace(other, num_tokens=0) for other in others)  # before the first fork
    beam.num_slots = num_beams
    return beam


def _another(
    first: Sequence, index: int, replayed: Result | None, *, role: Role = "sample"
) -> Sequence:
    """Return a sequence like `first` that has not begun."""
    extras = copy(first.extras) or SequenceExtras()
    extras.replayed = replayed
    if role == "negative":
        extras.prompt_logprobs = None
    max_tokens = _num_steps(first.request, replayed)
    return replace(
        first, index=index, role=role, extras=extras, max_tokens=max_tokens, block_table=[]
    )


def _beginning_with(prompt: Prompt, sequence: Sequence) -> Sequence:
    """Return a sequence like `sequence` that starts with another prompt than its request's."""
    num_tokens = prompt.num_tokens
    return replace(
        sequence,
        prompt=prompt,
        segment_ends=prompt.segment_ends,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
    )


def _num_steps(request: Request, replayed: Result | None) -> int:
    """Return for how many steps a sequence decodes at most; exactly so many if it is replayed.

    A prompt whose log-probabilities are told is computed even if nothing is generated after it.
    """
    if replayed is None or replayed.slot is None:
        return max(request.output_limit, int(request.prompt_logprobs is not None))
    steps = replayed.steps
    if steps.finished is None or steps.admitted is None:
        raise InvariantError(f"the result of {replayed.id!r} has a slot, and was never admitted")
    return steps.finished - steps.admitted + 1
