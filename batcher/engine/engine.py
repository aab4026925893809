"""The decode loop: schedule (assign slots), execute (one model call), update (end sequences).

docs/inside/architecture.md defines a step.  The engine opens no file, draws on no terminal and
reads the time only from its clock; events and results are its only output.  The scheduler decides
everything that is known ahead of the model call, the model runner everything that depends on its
output.  Both report only rows that change, so a row that only decodes costs no Python in a step.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Ordered
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from batcher.decoding.stop_matcher import read_output
from batcher.engine.base import DrivenEngine
from batcher.engine.model_runner import ModelRunner
from batcher.engine.sequence import (
    NOTHING_DECODED,
    NOTHING_DROPPED,
    Decoded,
    Generated,
    Sequence,
    SequenceMaker,
    limited_to_blocks,
)
from batcher.engine.sessions import Sessions, Turn
from batcher.engine.step_stats import StepStats
from batcher.errors import BatchdecodeError, Failure, InvariantError, RequestError, id_in_use
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    ArriveReason,
    BlockedEvent,
    DropEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RequestEvent,
    RunEvent,
    TokenEvent,
)
from batcher.foreign import check_members
from batcher.lifecycle import ABORT, FINISH, State
from batcher.models.base import (
    Model,
    can_score,
    chat_template_of,
    context_of,
    eos_token_ids_of,
    join_bytes,
    kv_block_bytes_of,
    layout_of,
    special_encoder_of,
)
from batcher.models.loading import as_model, cache_windows_of
from batcher.models.tokenizers import CheckedTokenizer
from batcher.prompts import block_contents, count_tokens
from batcher.request import Request
from batcher.requests.validation import ModelCapabilities, checked_copy
from batcher.result import ErrorInfo, FinishReason, Result, Segment, StepTimes, Usage
from batcher.scheduling.clock import Clock, ConstantClock, FormulaClock
from batcher.scheduling.scheduler import NO_CHANGES, NO_DRAFTS, Scheduler, SchedulerOutput
from batcher.scheduling.sequence import NO_SLOT
from batcher.settings import DEFAULT_SCHEDULING, GRAMMAR_TIMEOUT, SchedulingSettings
from batcher.timing.step_time import StepTime
from batcher.tokens import NO_TOKENS, typecode_of

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes
    from batcher.engine.speculating import Speculator
    from batcher.models.callables import LLM, ModelNext
    from batcher.scheduling.blocks import BlockUse
    from batcher.speculation.settings import Drafter, SpeculationSettings

MAX_BATCH_SIZE = 2**20
NOTHING_REPLAYED: Mapping[int, Result] = {}


class StepOutcome(NamedTuple):
    """The output of one step.

    events: in the order they happened.  results: of the samples that ended: first those that never
    held a slot, then by slot.  tokens: the tokens each row received, by slot, if the engine
    streams.
    """

    events: Ordered[RequestEvent]
    results: Ordered[Result]
    tokens: Ordered[TokenEvent]


NOTHING_HAPPENED = StepOutcome((), (), ())  # as in most steps


class Engine(DrivenEngine):
    """Decodes requests in `batch_size` slots, one `step()` at a time.

    Add and abort requests at any time between steps.  A ModelError in `step` becomes error results;
    after any other exception the engine must not be used any more.

    settings: the scheduling settings.  step_time: computes the duration of a step.  clock: replaces
    `step_time`.  is_streaming: return the tokens of each step.  is_measured: write StepsEvents;
    always on if time or memory is modelled or the model pads.  is_checked: check the blocks after
    every step.
    grammar_timeout: CPU seconds for compiling a constraint.  strict_constraints: refuse a schema
    that masks cannot enforce completely.  speculation: proposes drafts; the default method changes
    no token.
    capabilities: what this engine can decode, for `find_problems`.
    num_tokens: generated tokens of all samples that have ended.

    Raises:
        BatchdecodeError: batch_size is not from 1 to 1,048,576, the model does not exist or reports
            an invalid cache, the settings contradict each other, or another argument is invalid.
    """

    def __init__(
        self,
        model: "Model | ModelNext | LLM | str",
        batch_size: int = 8,
        *,
        settings: SchedulingSettings = DEFAULT_SCHEDULING,
        step_time: StepTime | None = None,
        clock: Clock | None = None,
        is_streaming: bool = False,
        is_measured: bool = False,
        is_checked: bool = False,
        grammar_timeout: float = GRAMMAR_TIMEOUT,
        strict_constraints: bool = False,
        speculation: "SpeculationSettings | Drafter | None" = None,
    ) -> None:
        if type(batch_size) is not int or not 1 <= batch_size <= MAX_BATCH_SIZE:  # excludes bool
            raise BatchdecodeError(
                f"batch size {batch_size!r} is not an integer from 1 to {MAX_BATCH_SIZE}"
            )
        if not isinstance(settings, SchedulingSettings):
            raise BatchdecodeError(
                f"settings must be SchedulingSettings, not a {type(settings).__name__}"
            )
        if step_time is not None:
            check_members("step_time", step_time, StepTime)
        if clock is not None:
            check_members("clock", clock, Clock)
        if not (isinstance(grammar_timeout, int | float) and grammar_timeout > 0):
            raise BatchdecodeError(f"grammar_timeout {grammar_timeout!r} is not a number above 0")
        self._model = model = as_model(model)
        if clock is None:
            clock = ConstantClock() if step_time is None else FormulaClock(step_time)
        self.scheduler: Scheduler[Sequence] = Scheduler(
            batch_size,
            settings,
            self._token_contents,
            clock.estimate,
            cache_windows_of(model),
            kv_block_bytes_of(model, settings.block_size),
            is_paged=speculation is not None,
            recomputes_drafts=bool(getattr(model, "recomputes_drafts", False)),
        )
        super().__init__(settings, clock, self.scheduler.queue, self.scheduler.batch)
        self._runner = ModelRunner(
            model,
            batch_size,
            self.scheduler.kv_cache,
            is_streaming=is_streaming,
            speculates=speculation is not None,
            grammar_timeout=grammar_timeout,
            strict_constraints=strict_constraints,
        )
        self._is_streaming, self._is_checked = is_streaming, is_checked
        self._layout, self._typecode = layout_of(model), typecode_of(model.vocab_size)
        is_measured |= settings != DEFAULT_SCHEDULING or not isinstance(clock, ConstantClock)
        is_measured |= self._layout == "padded"
        self._stats = StepStats(self.scheduler, clock) if is_measured else None
        self._speculator: Speculator | None = None
        if speculation is not None:
            from batcher.engine import speculating  # noqa: PLC0415 - seldom

            self._speculator = speculating.Speculator(
                speculation, model, self._runner, self.scheduler, self._events, clock
            )
        self._tokenizer = tokenizer = model.tokenizer
        self._maker = SequenceMaker(model, context_of(model), self._runner.heal)
        self._sessions = Sessions(model, self._maker, clock, self._queue.add, self._finish)
        self._can_replay = not settings.is_paged and settings.preempt_for is None
        self._candidates: dict[str, list[Result]] = {}  # of best_of, by request id
        self.capabilities = ModelCapabilities(
            vocab_size=model.vocab_size,
            num_slots=batch_size,
            gives_logits=model.gives != "tokens",
            scores_prompts=can_score(model),
            has_eos=bool(eos_token_ids_of(model)),
            check_constraint=self._runner.check_constraint,
            encode=tokenizer.encode if isinstance(tokenizer, CheckedTokenizer) else None,
            chat_template=chat_template_of(model),
            encode_with_special=special_encoder_of(model),
        )

    # -- what a driver does ----------------------------------------------------------------------

    def add(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
    ) -> str:
        """Add `request` and return its id; it joins the waiting queue at its arrival time.

        A request that is added after its arrival time counts as waiting since then.

        input_index: its number in the input, from 0; by default the order of adding.
        replayed: results of an earlier run, by index.  Such a sample holds a slot for as many steps
        as before, but needs no model call and returns no result.  Not with KV blocks or preemption.

        Raises:
            BatchdecodeError: `request` is not a Request, or cannot be replayed here.
            RequestError: the request is invalid for this engine, or its id is in use.
        """
        if not isinstance(request, Request):
            raise BatchdecodeError(f"an Engine takes a Request, not a {type(request).__name__}")
        checked = checked_copy(request, self.capabilities)
        if isinstance(checked, list):
            raise RequestError(self._id_of(request, input_index), checked)
        return self.enqueue(checked, input_index=input_index, reason=reason, replayed=replayed)

    def _id_of(self, request: Request, input_index: int | None) -> str:
        """Return the id of a request; by default its number in the input, from 1."""
        if request.id is not None:
            return request.id
        return str((self._num_requests if input_index is None else input_index) + 1)

    def enqueue(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
        name: str | None = None,
        is_streamed: bool = True,
    ) -> str:
        """Do the same as `add` for a request without problems (see `find_problems`).

        The lists in the request must not change any more.

        name: replaces its id in events and results; draws still depend on the id.
        is_streamed: whether a streaming engine returns its tokens.

        Raises:
            RequestError: its id is in use, or the model's tokenizer fails on its prompt.
            BatchdecodeError: it is replayed where sequences can be preempted or share blocks.
        """
        request_id = name or self._id_of(request, input_index)
        if request_id in self._num_open:
            raise id_in_use(request_id)
        if replayed and not self._can_replay:
            raise BatchdecodeError(
                "results are replayed only without KV blocks and without preemption: "
                "a replayed sequence has no computed KV"
            )
        if input_index is None:
            input_index = self._num_requests
        sequences = self._maker.make(
            request, request_id, input_index, reason, replayed, is_streamed
        )
        self._num_open[request_id] = len(sequences)
        self._num_requests += 1
        if request.best_of is not None and request.best_of > 1:
            self._candidates[request_id] = []
        if request.arrival_time > self._latest_arrival:  # noqa: PLR1730 - max() takes longer
            self._latest_arrival = request.arrival_time
        if request.session is not None:
            turn = Turn(request, request_id, input_index, reason, replayed, is_streamed)
            self._has_sessions = True
            self._sessions.add(request.session, turn)
            return request_id
        for sequence in sequences:
            self._queue.add(sequence)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now; the next `step` returns its results with the tokens so far.

        Raises:
            BatchdecodeError: the engine has no such request.
        """
        if request_id not in self._num_open:
            raise BatchdecodeError(f"no request with id {request_id!r} is in the engine")
        step = self._clock.step
        for first in self._batch.firsts:
            if first.id == request_id:
                self._finish(first, "aborted", step - 1)
        for waiting in self._queue.find(request_id):
            self._queue.remove(waiting)
            self._finish(waiting, "aborted", step)
        self._sessions.abort(request_id)
        self._sessions.start_turns()

    def step(self) -> StepOutcome:
        """Take one step of the whole batch.

        If nothing can run but a request will arrive, the clock first jumps there.  If nothing is
        left to run, no step is counted.
        """
        clock, stats, speculator = self._clock, self._stats, self._speculator
        if self._queue.num_pending:
            self._join_arrivals()
        if stats is not None:
            stats.begin_step()
        num_wanted = NO_DRAFTS if speculator is None else speculator.wanted()
        scheduled = self.scheduler.schedule(clock.step, clock.now, num_wanted)
        if scheduled is not NO_CHANGES:
            self._place(scheduled)
        is_idle = self._batch.num_free == self.batch_size
        if not is_idle:
            decoded = self._execute(scheduled)
            measured = None if stats is None else stats.measure(scheduled)
            if speculator is not None:
                speculator.settle(scheduled, decoded)
            ending = self.scheduler.update(scheduled)
            if ending or decoded is not NOTHING_DECODED:
                self._update(scheduled, decoded, ending)
            clock.advance(measured)
            if stats is not None:
                stats.end_step(clock.now)
            if speculator is not None:
                speculator.end_step(scheduled, measured)
        if self._has_sessions:
            self._sessions.start_turns()
        if self._is_checked:
            self.scheduler.check()
        tokens = self._runner.take_streamed() if self._is_streaming else ()
        if self._events or (stats is not None and stats.is_full):
            results, self._results = self._results, []
            return StepOutcome(self._take_events(), results, tokens)
        if is_idle and self._num_open:
            is_coming = self._queue.num_pending and not self._queue.num_waiting
            if not is_coming:  # so all later steps would be equal
                raise InvariantError(f"step {clock.step}: requests are left, and none can run")
        return StepOutcome((), (), tokens) if tokens else NOTHING_HAPPENED

    # -- schedule, execute, update ---------------------------------------------------------------

    def _take_events(self) -> list[RequestEvent]:
        """Return the events since the last call, with those of the computed steps first."""
        events = self._events.copy()
        self._events.clear()  # others append to this list, too
        if self._stats:
            events.insert(0, self._stats.take())
        return events

    def _join_arrivals(self) -> None:
        """Move arrived requests to the waiting queue; if idle, jump to the next arrival first.

        Requests that need no slot, or that can never run, end at once.
        """
        scheduler, queue, clock = self.scheduler, self._queue, self._clock
        if not queue.num_slots and self._batch.num_free == self.batch_size:
            arrival = queue.next_arrival
            if arrival is not None and arrival > clock.now:
                clock.jump(arrival)
        events, time, step = self._events, -1.0, 0
        for first in queue.take_arrivals(clock.now):
            if first.arrival_time != time:  # many come at one time
                time = first.arrival_time
                step = clock.step_at(time)
            first.arrived_step = step
            for other in first.others:
                other.arrived_step = step
            request, more, dropped, failure = first.request, first.more, NOTHING_DROPPED, None
            needs_slot = first.max_tokens > 0
            if more is not None:
                dropped, failure = more.dropped, more.failure
                if more.replayed is not None and more.replayed.slot is None:
                    needs_slot = False
            events.append(
                ArriveEvent(
                    step,
                    time,
                    first.id,
                    first.index,
                    first.arrive_reason,
                    first.num_prompt_tokens,
                    request.output_limit,
                    request.deadline,
                    dropped.num_turns,
                    dropped.num_tokens,
                    first.has_default_limit,
                )
            )
            if failure is None and not needs_slot:
                # at the current step, not at that of its arrival, to keep results in order
                self._finish(first, "length", clock.step)
                continue
            if failure is None and scheduler.kv_cache is not None:
                failure = scheduler.why_never(first)
                if failure is not None and first.has_default_limit:  # it fails once all are full
                    room = scheduler.room_for_output(first)
                    if room:
                        limited_to_blocks(first, room, failure.code)
                        failure = None
            if failure is None:
                queue.push(first)
            else:
                self._finish(first, "error", clock.step, failure)

    def _place(self, scheduled: SchedulerOutput[Sequence]) -> None:
        """Apply preemptions and admissions to the batch, and write their events."""
        runner, batch, events = self._runner, self._batch, self._events
        step, now, last_used = self._clock.step, self._clock.now, batch.last_used
        for preemption in scheduled.preempted:
            runner.preempt(preemption.first)
            why = preemption.reason, preemption.beneficiary.id, preemption.beneficiary.index
            for row, num_computed_tokens in preemption.num_computed_tokens.items():
                where = step, now, row.id, row.index, row.slot
                num_generated = max(row.num_generated, 0)
                events.append(
                    PreemptEvent(*where, *why, num_computed_tokens, num_generated, row.role)
                )
            preemption.forget_slots()
        for first in scheduled.admitted:
            forced = runner.open(first)
            if forced:
                self.scheduler.lengthen_admitted(scheduled, first, len(forced))
            for row in first.group if first.others else (first,):
                num_generated = num_tokens = 0
                if first.admitted_step != step:  # max: a beam before the first fork is below 0
                    num_generated = max(row.num_generated, 0)
                elif forced or row.role == "negative":
                    num_tokens = row.num_tokens
                num_left = row.num_tokens - row.num_computed_tokens
                if not (row.is_decoding or row.num_tokens) and row in first.computed_group:
                    num_left = 1  # an empty prompt that this step gives no token
                events.append(
                    AdmitEvent(
                        step,
                        now,
                        row.id,
                        row.index,
                        row.slot,
                        "refill" if last_used[row.slot] == step - 1 else "empty",
                        row.role,
                        num_generated,
                        row.num_cached_tokens,
                        num_left,
                        num_tokens,
                        row.cached_from,
                    )
                )
            if forced:
                events.append(JumpEvent(step, now, first.id, first.index, first.slot, len(forced)))
        if scheduled.has_continued:
            self._add_prefill_events(scheduled)
        if (blocked := scheduled.blocked) is not None:
            who = step, now, blocked.first.id, blocked.first.index
            events.append(BlockedEvent(*who, blocked.reason, blocked.num_blocks))
        if self._speculator is not None:
            for first in scheduled.prefill_finished:
                self._speculator.open(first)
        runner.prepare(scheduled, batch.prefilling, batch.decode_step)

    def _add_prefill_events(self, scheduled: SchedulerOutput[Sequence]) -> None:
        """Write a PrefillEvent for each part of a prompt that was admitted in an earlier step.

        Rows that jumped in the last step have none.  An empty prompt counts as one token.
        """
        clock, events = self._clock, self._events
        finished = (row for first in scheduled.prefill_finished for row in first.computed_group)
        without_tokens = dict.fromkeys((row for row in finished if not row.num_tokens), 1)
        for row, num_tokens in (scheduled.num_scheduled_tokens | without_tokens).items():
            first = self._batch.first_of(row)
            has_jumped = first.more is not None and first.more.jumped_step == clock.step - 1
            if (has_jumped and first.is_decoding) or first in scheduled.admitted:
                continue
            num_left = row.num_tokens - row.num_computed_tokens
            where = clock.step, clock.now, row.id, row.index, row.slot
            events.append(PrefillEvent(*where, num_tokens, num_left, row.role))

    def _execute(self, scheduled: SchedulerOutput[Sequence]) -> Decoded:
        """Run the model for one step; return its results beyond one token per row."""
        runner, speculator = self._runner, self._speculator
        if speculator is not None:
            speculator.compute(runner.batch.chunks)
        if not scheduled.is_decode_step:
            return runner.step(self._clock.step, is_decoding=False)
        if runner.num_replayed and runner.num_replayed == self._batch.num_occupied:
            return NOTHING_DECODED
        if speculator is not None:
            return speculator.execute(scheduled)
        return runner.step(self._clock.step)

    def _update(
        self, scheduled: SchedulerOutput[Sequence], decoded: Decoded, ending: Collection[int]
    ) -> None:
        """End rows, fork beams, and return rows that received several tokens to prefill.

        If one row has several reasons to end, an error comes before a stop, a stop before length.

        ending: the slots of rows that reach max_tokens.
        """
        batch, runner, clock = self._batch, self._runner, self._clock
        events = self._events
        slots, failed, step, now = batch.slots, decoded.failed, clock.step, clock.now
        if decoded.uncomputed and scheduled.num_scheduled_tokens and runner.pages is not None:
            failed = self._with_sharers(decoded, scheduled)
        jumps: dict[Sequence, int] = {}  # extra tokens
        for slot, tokens in decoded.jumps.items():
            first = slots[slot]
            if first is not None and slot not in failed:
                jumps[first] = num = len(tokens) - 1
                events.append(JumpEvent(step, now, first.id, first.index, slot, num))
        reasons: dict[int, FinishReason] = dict.fromkeys(ending, "length")
        for slot in decoded.stopped:
            reasons[slot] = "stop"
        for slot in failed:
            reasons[slot] = "error"
        for slot in sorted(reasons) if len(reasons) > 1 else reasons:
            row = slots[slot]
            if row is not None:  # else another row has just ended its group
                self._finish(batch.first_of(row), reasons[slot], step, failed.get(slot))
        for source, target in decoded.forks:
            parent, child = slots[source], slots[target]
            if parent is not None and child is not None:  # else their request has just ended
                self.scheduler.fork(parent, child)
                runner.fork(parent, child)
                where = step, now, child.id, child.index, target
                events.append(ForkEvent(*where, parent.index))
        if jumps:  # rows that have just ended are gone
            self.scheduler.lengthen(jumps)
            for first in jumps:
                runner.record_jump(first, step)

    def _with_sharers(
        self, decoded: Decoded, scheduled: SchedulerOutput[Sequence]
    ) -> dict[int, Failure]:
        """Return all failures: also of rows that share blocks which a failed row lacks."""
        first_of = self._batch.first_of
        uncomputed = {slot: decoded.failed[slot] for slot in decoded.uncomputed}
        for row, num_tokens in scheduled.num_scheduled_tokens.items():
            failure = uncomputed.get(first_of(row).slot)  # in order: sharers are shared
            if failure is not None:
                why = f"it shares its first tokens with request {row.id!r}, which failed"
                for sharer in self.scheduler.sharing(row, num_tokens):
                    other = Failure(failure.code, f"{why}: {failure.message}")
                    uncomputed.setdefault(first_of(sharer).slot, other)
        return uncomputed | decoded.failed

    def _finish(
        self, first: Sequence, reason: FinishReason, step: int, failure: Failure | None = None
    ) -> None:
        """End a group: free its slots, if it has any, and append its results and events.

        step: the last step that used the slots, or the current one.  failure: what failed in it.
        """
        runner, clock, events = self._runner, self._clock, self._events
        request, was_admitted = first.request, first.admitted_step is not None
        move = ABORT if reason == "aborted" else FINISH
        if first.state is State.RUNNING:
            has_failed = failure is not None
            lacks_token = has_failed and first.is_decoding  # read before the release
            self.scheduler.release(first, step, move, has_failed=has_failed)
            outputs = runner.close(first, reason, lacks_token=lacks_token)
            if request.max_tokens == 0:  # a step that only scores its prompt
                why: FinishReason = "length" if outputs[0].reason == "stop" else outputs[0].reason
                outputs = [Generated([], why, None if request.logprobs is None else [])]
        else:
            self.scheduler.finish_waiting(first, move)
            if was_admitted:
                outputs = runner.close_suspended(first, reason)
            else:
                outputs = [Generated([], reason)] * (request.n if first.role == "beam" else 1)
        request_id, results = first.id, self._results
        if self._candidates:
            results = self._candidates.get(request_id, results)
        time = clock.now if step == clock.step else clock.start_of(step)
        rows = first.group if first.others else (first,)
        for row, generated in zip_longest(rows, outputs):
            more, slot = row.more, None if row.slot == NO_SLOT else row.slot
            if generated is None:  # a beam beyond the requested number
                if was_admitted:
                    where = step, time, request_id, row.index, slot
                    events.append(FinishEvent(*where, "unused", None, 0, row.role))
                continue
            if more is not None and more.replayed is not None:
                result = more.replayed
            else:
                result = self._result(row, generated, slot, step, failure)
                results.append(result)
            num_tokens = result.usage.completion_tokens
            self.num_tokens += num_tokens
            events.append(
                FinishEvent(
                    step,
                    time,
                    request_id,
                    row.index,
                    slot,
                    result.finish_reason,
                    result.stop_reason,
                    num_tokens,
                    row.role,
                    result.limit,
                    None,
                    result.error,
                )
            )
            if request.session is not None:
                self._sessions.note_end(row, result)
        num_open = self._num_open.pop(request_id) - 1
        if num_open:
            self._num_open[request_id] = num_open
        elif self._candidates:
            ranked = sorted(self._candidates.pop(request_id, []), key=_rank)
            self._results += ranked[: request.n]
            for lost in ranked[request.n :]:
                events.append(DropEvent(step, time, lost.id, lost.index, lost.finish_reason))

    def _result(
        self,
        sequence: Sequence,
        generated: Generated,
        slot: int | None,
        step: int,
        failure: Failure | None,
    ) -> Result:
        """Return the result of a sequence that ended in `step`.

        failure: the error of that step, if it ended the sequence.
        """
        tokens, reason, more = generated.tokens, generated.reason, sequence.more
        request, automaton, has_stopped = sequence.request, sequence.automaton, reason == "stop"
        if has_stopped and len(tokens) < request.min_tokens:  # stops do not apply yet
            automaton = automaton.until_eos
        num_prompt_tokens, skip = sequence.num_prompt_tokens, 0
        if more is not None:
            num_prompt_tokens, skip = num_prompt_tokens + more.num_healed, len(more.healing)
        output = read_output(
            automaton,
            tokens,
            self._tokenizer,
            has_stopped=has_stopped,
            skip=skip,
            keeps_stop=request.include_stop_str_in_output,
        )
        first_token = sequence.first_token_step if tokens else None
        result = Result(
            id=sequence.id,
            index=sequence.index,
            text=output.text.decode("utf-8", "replace"),
            tokens=tokens,
            finish_reason=reason,
            stop_reason=output.stop_reason,
            usage=Usage(num_prompt_tokens, len(tokens)),
            slot=slot,
            steps=StepTimes(sequence.arrived_step, sequence.admitted_step, first_token, step),
        )
        failure = failure or generated.failure
        if reason == "length" and more is not None:
            failure = failure or more.overflow
        if more is None and failure is None and sequence.limit is None:
            return result
        text, error, limit = output.text, None, sequence.limit if reason == "length" else None
        if request.echo:
            text = self._prompt_bytes(sequence) + text
        if failure is not None:
            error, limit = ErrorInfo(failure.code, f"step {step}: {failure.message}"), None
        scores, segments = None if more is None else more.prompt_logprobs, output.segments
        return replace(
            result,
            text=text.decode("utf-8", "replace"),
            finish_reason=reason if error is None else "error",
            error=error,
            cumulative_logprob=generated.cumulative_logprob,
            logprobs=generated.logprobs,
            prompt_logprobs=scores.told if scores is not None and scores.is_complete else None,
            score=generated.score,
            segments=None
            if segments is None
            else [
                Segment(part.state, part.text.decode("utf-8", "replace"), part.tokens)
                for part in segments
            ],
            constraint=generated.constraint,
            constraint_check=generated.constraint_check,
            constraint_verified=generated.constraint_verified,
            limit=limit,
        )

    def _prompt_bytes(self, sequence: Sequence) -> bytes:
        """Return the text of the request's own prompt, without the earlier turns of its session."""
        prompt, more = sequence.request.prompt, sequence.more
        if isinstance(prompt, str):
            return prompt.encode()
        num_healed = 0 if more is None else more.num_healed
        num_kept = count_tokens(prompt, self._tokenizer) - num_healed
        tokens = sequence.prompt.tokens[sequence.num_prompt_tokens - num_kept :]
        return join_bytes(tokens, self._tokenizer.token_bytes) + sequence.healing

    def _token_contents(self, row: Sequence, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Return the prefix-cache contents of the tokens start..stop of a sequence, by block."""
        num_prompt, output = row.num_prompt_tokens, NO_TOKENS
        if stop > num_prompt:
            begin = start - num_prompt if start > num_prompt else 0
            if row.generated is None:
                output = self._runner.read(row.slot, begin, stop - num_prompt)
            else:
                output = row.generated[begin : stop - num_prompt]
        return block_contents(row.prompt, output, start, stop, size, self._typecode)

    # -- what a driver looks at ------------------------------------------------------------------

    def _start_turns(self) -> None:
        self._sessions.start_turns()

    @property
    def num_coming(self) -> int:
        """The number of known requests that have not arrived, turns of sessions included."""
        return self._queue.num_pending + self._sessions.num_turns

    @property
    def has_work(self) -> bool:
        """Whether `step` still has something to do or to return."""
        return bool(self._num_open or self._events) or (
            self._stats is not None and self._stats.is_full
        )

    @property
    def block_use(self) -> "BlockUse | None":
        """The use of the KV blocks, or None without blocks."""
        kv_cache = self.scheduler.kv_cache
        return None if kv_cache is None else kv_cache.pool.use

    def _texts_of(self, row: Sequence, num_tokens: int, limit: int) -> tuple[str, str]:
        more, token_bytes = row.more, self._tokenizer.token_bytes
        start = max(num_tokens - limit, 0)
        output: Ordered[int]
        if more is not None and more.replayed is not None:
            output = (more.replayed.tokens or NO_TOKENS)[start:num_tokens]
        elif row.is_decoding:
            output = self._runner.read(row.slot, start, num_tokens)
        else:
            output = (row.generated or [])[start:]
        prompt = row.request.prompt
        if not isinstance(prompt, str):
            prompt = join_bytes(row.prompt.tokens[:limit], token_bytes).decode("utf-8", "replace")
        return prompt, join_bytes(output, token_bytes).decode("utf-8", "replace")

    @property
    def constraint_counts(self) -> tuple[int, int]:
        """The numbers of constraints that were compiled and that were found in the cache."""
        grammars = vars(self._runner).get("grammars")  # made for the first constraint
        return (0, 0) if grammars is None else grammars.counts

    @property
    def constraint_times(self) -> "ConstraintTimes | None":
        """Wall times of constraints, or None if there were none."""
        grammars = vars(self._runner).get("grammars")
        return None if grammars is None else grammars.times

    def run_event(self) -> RunEvent:
        """Return the first event of this run's trace."""
        return RunEvent(
            batch=self.batch_size,
            policy=self.settings.policy,
            model=self._model.name,
            settings=self._model.settings,
            scheduling=self.settings.beside_policy,
            step_time=self._clock.settings,
            layout=self._layout,
            speculation={} if self._speculator is None else self._speculator.settings,
            defaults=dict(self.capabilities.defaults),
        )

    def start_at(self, step: int, time: float) -> None:
        """Start with `step` at `time`, after steps of another engine.  Call it before `add`."""
        self._clock.start_at(step, time)
        if self._stats is not None:
            self._stats.start_at(step)

    def take_step_events(self) -> list[RequestEvent]:
        """Return the StepsEvent of steps that no outcome contains yet, if steps are measured."""
        return [self._stats.take()] if self._stats else []

    def take_outcome(self) -> StepOutcome:
        """Return events and results of requests that need no slot, without taking a step."""
        self._join_arrivals()
        results, self._results = self._results, []
        return StepOutcome(self._take_events(), results, ())

    def wake(self) -> None:
        """Interrupt a step that waits; steps of this engine never wait."""

    def close(self) -> None:
        """Release external resources; this engine has none."""


def _rank(result: Result) -> tuple[bool, float, int]:
    is_whole = result.finish_reason in {"stop", "length"}
    return not is_whole, -(result.cumulative_logprob or 0.0), result.index
