"""The decode loop: schedule (who gets a slot), execute (one model call), update (who is done).

A step is exactly the one of docs/architecture.md.  The engine touches no file and no terminal, and
time only as its clock tells it; its events and results are its only output.  What is known ahead is
the scheduler's business, what depends on data the decoder's, and both tell only which rows change:
nothing is done per step for a row that is only decoded, sampled, stopped and cut.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from batcher.engine.decoded import NOTHING_DECODED, Decoded
from batcher.engine.driven import NOTHING_HAPPENED, NOTHING_REPLAYED, StepOutcome
from batcher.engine.inputs import Inputs
from batcher.engine.model_runner import ModelRunner
from batcher.engine.outputs import Outputs
from batcher.engine.recorder import Recorder, StepStats
from batcher.engine.sequence import Sequence
from batcher.errors import BatchdecodeError, InvariantError, RequestError
from batcher.events import ArriveReason, EndEvent, RequestEvent, RunEvent
from batcher.foreign import check_members
from batcher.lifecycle import ABORT
from batcher.models.base import (
    Model,
    can_score,
    chat_template_of,
    eos_token_ids_of,
    kv_block_bytes_of,
    layout_of,
    special_encoder_of,
)
from batcher.models.loading import as_model, cache_windows_of
from batcher.models.tokenizers import CheckedTokenizer
from batcher.prompts import BlockContents
from batcher.request import Request
from batcher.requests.quick import checked_copy
from batcher.requests.values import ModelCapabilities
from batcher.result import Result
from batcher.scheduling.clock import Clock, ConstantClock, FormulaClock
from batcher.scheduling.output import NO_DRAFTS, SchedulerOutput
from batcher.scheduling.scheduler import NO_CHANGES, Scheduler
from batcher.settings import DEFAULT_SCHEDULING, GRAMMAR_TIMEOUT, SchedulingSettings
from batcher.timing.step_time import StepTime
from batcher.tokens import NO_TOKENS, typecode_of

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes
    from batcher.engine.speculating import Speculator
    from batcher.models.callable import ModelNext
    from batcher.models.llm import LLM
    from batcher.scheduling.blocks import BlockUse
    from batcher.speculation.proposal import Drafter
    from batcher.speculation.settings import SpeculationSettings

MAX_BATCH_SIZE = 2**20


class Engine:
    """Decodes requests in `batch_size` slots, one `step()` at a time.

    Requests may be added and aborted at any time between steps.  After an exception of `step` that
    is not a ModelError (which it turns into error results) the engine is not to be used any more.

    settings: how requests are scheduled.  step_time: how long a step takes; clock: what tells the
    time instead.  is_streaming: whether the outcome of a step tells the tokens it gave.
    is_measured: whether events tell what each step computed; always where time or memory is
    modelled, or padding computed.  is_checked: whether the blocks are counted after every step.
    grammar_timeout: how many seconds of processor time a constraint may take to compile.
    strict_constraints: whether a schema is refused of which a part could only be checked later.
    speculation: what proposes drafts, if there are any; by default it changes no token.
    capabilities: what this engine can decode, as `find_problems` wants to know it.

    Raises:
        BatchdecodeError: batch_size is not from 1 to 1,048,576, there is no such model, it tells
            nonsense of its cache, the settings make no sense, or another argument is not what it
            has to be.
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
        _check_arguments(batch_size, settings, step_time, clock, grammar_timeout)
        self.batch_size, self.settings = batch_size, settings
        self._model = as_model(model)
        if clock is None:
            clock = ConstantClock() if step_time is None else FormulaClock(step_time)
        self._clock = clock
        self.scheduler: Scheduler[Sequence] = Scheduler(
            batch_size,
            settings,
            self._token_contents,
            clock.estimate,
            cache_windows_of(self._model),
            kv_block_bytes_of(self._model, settings.block_size),
            is_paged=speculation is not None,
            recomputes_drafts=bool(getattr(self._model, "recomputes_drafts", False)),
        )
        self._queue, self._batch = self.scheduler.queue, self.scheduler.batch
        self._runner = ModelRunner(
            self._model,
            batch_size,
            self.scheduler.kv_cache,
            is_streaming=is_streaming,
            speculates=speculation is not None,
            grammar_timeout=grammar_timeout,
            strict_constraints=strict_constraints,
        )
        decoder = self._runner.decoder
        self._is_streaming, self._is_checked = is_streaming, is_checked
        self._layout, self._typecode = layout_of(self._model), typecode_of(self._model.vocab_size)
        is_measured |= settings != DEFAULT_SCHEDULING or not isinstance(clock, ConstantClock)
        is_measured |= self._layout == "padded"
        self._stats = StepStats(self.scheduler, clock) if is_measured else None
        self._recorder = Recorder(clock, self._stats)
        self._speculator: Speculator | None = None
        if speculation is not None:
            from batcher.engine.speculating import make_speculator  # noqa: PLC0415 - seldom

            self._speculator = make_speculator(
                speculation, self._model, self._runner, self.scheduler, self._recorder, clock
            )
        self._outputs = Outputs(self.scheduler, self._runner, self._recorder, self._model.tokenizer)
        self._inputs = Inputs(
            self.scheduler, self._outputs, self._recorder, clock, self._model, decoder.heal
        )
        self._reads_all = settings.sees_all
        tokenizer = self._model.tokenizer
        self.capabilities = ModelCapabilities(
            vocab_size=self._model.vocab_size,
            num_slots=batch_size,
            gives_logits=self._model.gives != "tokens",
            scores_prompts=can_score(self._model),
            has_eos=bool(eos_token_ids_of(self._model)),
            check_constraint=decoder.check_constraint,
            encode=tokenizer.encode if isinstance(tokenizer, CheckedTokenizer) else None,
            chat_template=chat_template_of(self._model),
            encode_with_special=special_encoder_of(self._model),
        )

    # -- what a driver looks at ------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """How many steps were taken; the index of the next one."""
        return self._clock.step

    @property
    def now(self) -> float:
        """When the next step starts, in seconds of the engine's clock."""
        return self._clock.now

    @property
    def num_waiting(self) -> int:
        """How many samples, or requests for beams, are in the waiting queue."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """How many slots are held."""
        return self._batch.num_occupied

    @property
    def num_pending(self) -> int:
        """How many are known that have not joined the waiting queue yet."""
        return self._queue.num_pending

    @property
    def num_coming(self) -> int:
        """How many are known that have not arrived: too early, or turns that wait for others."""
        return self._queue.num_pending + self._inputs.num_turns

    @property
    def last_start(self) -> float:
        """When the last step started, or the first one will, in seconds of the engine's clock."""
        return self._clock.start_of(max(self._clock.step - 1, 0))

    @property
    def has_work(self) -> bool:
        """Whether `step` still has something to do or to hand out."""
        return bool(self._outputs.num_open or self._recorder)

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated by samples that have ended."""
        return self._outputs.num_tokens

    @property
    def num_results(self) -> int:
        """How many results are there that no step has handed out."""
        return self._outputs.num_results

    @property
    def wants_request(self) -> bool:
        """Whether the next step could make use of one more request.

        A driver that reads requests in order of arrival needs no more of them while this is False:
        the next request it knows lies in the future or, first come being first served, the slots
        are taken.  If the engine is idle, the clock has jumped to that request when this returns.
        """
        if not self._outputs.num_open:  # what was to come in the future may have failed
            return True
        inputs, clock = self._inputs, self._clock
        reads_all = self._reads_all or inputs.has_sessions  # turns arrive later than they are read
        if reads_all and inputs.latest_arrival <= clock.now:
            return True
        queue, batch = self._queue, self._batch
        if queue.num_pending:
            inputs.join_arrivals()
        while queue.num_pending and not (queue.num_waiting or batch.num_occupied):
            inputs.continue_sessions()  # all that had arrived has ended without a slot
            inputs.join_arrivals()
        if inputs.latest_arrival > clock.now:
            return False
        return reads_all or batch.num_free > queue.num_slots

    @property
    def first_waiting(self) -> Sequence | None:
        """The sequence that is to be admitted first; None if none waits."""
        return self._queue.peek(self._clock.now)

    @property
    def block_use(self) -> "BlockUse | None":
        """What the KV blocks are used for; None if there are none."""
        kv_cache = self.scheduler.kv_cache
        return None if kv_cache is None else kv_cache.pool.use

    @property
    def constraint_counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and for how many rows one was there already."""
        return self._runner.decoder.constraint_counts

    @property
    def constraint_times(self) -> "ConstraintTimes | None":
        """What constraints have taken on the wall; None if none was asked for."""
        return self._runner.decoder.constraint_times

    def run_event(self) -> RunEvent:
        """Return the first line of this run's trace."""
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

    def end_event(self) -> EndEvent:
        """Return the last line of this run's trace."""
        return EndEvent(self.num_steps, self.now, self.num_tokens, self._outputs.num_requests)

    # -- what a driver does ----------------------------------------------------------------------

    def go_on_from(self, step: int, time: float) -> None:
        """Let the first step be `step`, which starts at `time`: another engine made those before.

        To be called before anything is added.
        """
        self._clock.go_on_from(step, time)
        if self._stats is not None:
            self._stats.go_on_from(step)

    def tell_steps(self) -> list[RequestEvent]:
        """Return what steps have computed that no outcome has told of yet, if that is told."""
        return [self._stats.take()] if self._stats else []

    def add(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
    ) -> str:
        """Take in `request`, which joins the waiting queue once its arrival time has come.

        Returns its id.  One that is added after its arrival time has waited since then.

        input_index: its number in the input, from 0; by default the order of adding.
        replayed: what an earlier run found, by index; the sample then holds a slot for as many
        steps as it did there, but costs no model call and gives no result.  Not with KV blocks or
        preemption.

        Raises:
            BatchdecodeError: it is no Request, or it is replayed where it cannot be.
            RequestError: it is not valid for this engine, or its id is that of one not ended.
        """
        if not isinstance(request, Request):
            raise BatchdecodeError(f"an Engine takes a Request, not a {type(request).__name__}")
        checked = checked_copy(request, self.capabilities)
        if isinstance(checked, list):
            raise RequestError(self._inputs.id_of(request, input_index), checked)
        return self._inputs.add(checked, input_index, reason, replayed)

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
        """Do what `add` does with a request in which `find_problems` has found none.

        Its lists must not be changed any more.

        name: what it is called here instead of by its id, for requests that do not know of each
        other; its draws are those of its id all the same.  is_streamed: whether an engine that
        streams tells its tokens, too.

        Raises:
            RequestError: its id is that of a request that has not ended.
            BatchdecodeError: it is replayed where sequences may be preempted or share blocks.
        """
        return self._inputs.add(
            request, input_index, reason, replayed, name, is_streamed=is_streamed
        )

    def abort(self, request_id: str) -> None:
        """End a request now; the next `step` hands out its results, with what it had generated.

        Raises:
            BatchdecodeError: no such request is in the engine.
        """
        if request_id not in self._outputs.num_open:
            raise BatchdecodeError(f"no request with id {request_id!r} is in the engine")
        for first in self._batch.firsts:
            if first.id == request_id:
                self._outputs.finish_running(first, "aborted", self._clock.step - 1, ABORT)
        self._inputs.abort(request_id)
        self._inputs.continue_sessions()

    def step(self) -> StepOutcome:
        """Take one step of the whole batch; return what happened.

        If nothing can run but something will arrive, the clock jumps there first.  If nothing is
        left to run, no step is counted.
        """
        clock, inputs, stats, speculator = self._clock, self._inputs, self._stats, self._speculator
        if self._queue.num_pending:
            inputs.join_arrivals()
        if stats is not None:
            stats.begin_step()
        num_wanted = NO_DRAFTS if speculator is None else speculator.wanted()
        scheduled = self.scheduler.schedule(clock.step, clock.now, num_wanted)
        if scheduled is not NO_CHANGES:
            self._prepare(scheduled)
        is_idle = self._batch.num_free == self.batch_size
        if not is_idle:
            self._update(scheduled, self._execute(scheduled))
        if inputs.has_sessions:
            inputs.continue_sessions()
        if self._is_checked:
            self.scheduler.check()
        tokens = self._runner.decoder.take_streamed() if self._is_streaming else ()
        if self._recorder.events or (stats is not None and stats.is_full):
            return StepOutcome(self._recorder.take(), self._outputs.take_results(), tokens)
        if is_idle:
            self._check_progress()
        return StepOutcome((), (), tokens) if tokens else NOTHING_HAPPENED

    def hand_out(self) -> StepOutcome:
        """Return what has come of requests that need no slot, without taking a step."""
        self._inputs.join_arrivals()
        return StepOutcome(self._recorder.take(), self._outputs.take_results(), ())

    def wake(self) -> None:
        """Let a step that waits come back: none does."""

    def close(self) -> None:
        """Let go of all that is not memory: there is nothing."""

    def _check_progress(self) -> None:
        """Make sure that a step in which nothing has happened was one before an arrival.

        Raises:
            InvariantError: it was not, so all that follow would be the same.
        """
        is_coming = self._queue.num_pending and not self._queue.num_waiting
        if self._outputs.num_open and not is_coming:
            step = self._clock.step
            raise InvariantError(f"step {step}: requests are left, and none can run")

    # -- schedule, execute, update ---------------------------------------------------------------

    def _prepare(self, scheduled: SchedulerOutput[Sequence]) -> None:
        """Bring rows out of the batch and into it, and tell of that."""
        recorder, runner = self._recorder, self._runner
        for preemption in scheduled.preempted:
            runner.preempt(preemption.first)
            recorder.preempted(preemption)
            preemption.forget_slots()
        if scheduled.admitted:
            num_forced = runner.open(scheduled.admitted)
            for first, num_tokens in num_forced.items():
                self.scheduler.lengthen_admitted(scheduled, first, num_tokens)
            recorder.admitted(scheduled.admitted, self._batch.last_used, num_forced)
        if scheduled.has_continued:
            recorder.prefilled(scheduled, self._batch)
        if scheduled.blocked is not None:
            recorder.blocked(scheduled.blocked)
        if self._speculator is not None:
            for first in scheduled.prefill_finished:
                self._speculator.open(first)
        runner.prepare(scheduled, self._batch.prefilling, self._batch.decode_step)

    def _execute(self, scheduled: SchedulerOutput[Sequence]) -> Decoded:
        """Let the model compute the step; return what rows were given beside one token each."""
        runner, speculator = self._runner, self._speculator
        if speculator is not None:
            speculator.compute(runner.chunks)
        if not scheduled.is_decode_step:
            return runner.compute_prompts()
        if runner.num_replayed and runner.num_replayed == self._batch.num_occupied:
            return NOTHING_DECODED
        if speculator is not None:
            return speculator.execute(scheduled)
        return runner.step(self._clock.step)

    def _update(self, scheduled: SchedulerOutput[Sequence], decoded: Decoded) -> None:
        """Take in what the step has computed, and end it."""
        clock, stats, speculator = self._clock, self._stats, self._speculator
        measured = None if stats is None else stats.measure(scheduled)
        if speculator is not None:
            speculator.settle(scheduled, decoded)
        ending = self.scheduler.update(scheduled)
        if ending or decoded is not NOTHING_DECODED:
            self._outputs.process(clock.step, scheduled, decoded, ending)
        clock.advance(measured)
        if stats is not None:
            stats.end_step(clock.now)
        if speculator is not None:
            speculator.end_step(scheduled, measured)

    def _token_contents(self, row: Sequence, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Return what stands for the tokens start..stop of a sequence, by blocks."""
        num_prompt, output = row.num_prompt_tokens, NO_TOKENS
        if stop > num_prompt:
            begin = start - num_prompt if start > num_prompt else 0
            if row.generated is None:
                output = self._runner.decoder.read(row.slot, begin, stop - num_prompt)
            else:
                output = row.generated[begin : stop - num_prompt]
        return BlockContents(row.prompt, output, start, stop, size, self._typecode)


def _check_arguments(
    batch_size: object,
    settings: object,
    step_time: object,
    clock: object,
    grammar_timeout: float,
) -> None:
    """Make sure that arguments of an Engine are what they have to be, but for model and drafts.

    Raises:
        BatchdecodeError: one is not.
    """
    if type(batch_size) is not int or not 1 <= batch_size <= MAX_BATCH_SIZE:  # no bool
        message = f"batch size {batch_size!r} is not an integer from 1 to {MAX_BATCH_SIZE}"
        raise BatchdecodeError(message)
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
