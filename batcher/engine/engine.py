"""The decode loop: plan (who gets a slot), compute (one model call), commit (who is done).

A step is exactly the one of docs/architecture.md.  The engine touches no file and no terminal, and
time only as its clock tells it; its events and results are its only output.  What is known ahead is
the scheduler's business, what depends on data the decoder's, and both tell only which rows change:
nothing is done per step for a row that is only decoded, sampled, stopped and cut.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import msgspec

from batcher.engine.boarding import Boarding
from batcher.engine.contents import block_contents
from batcher.engine.decoded import NOTHING_DECODED, Decoded
from batcher.engine.endings import Endings
from batcher.engine.entrance import Entrance
from batcher.engine.journal import Journal
from batcher.engine.outcome import StepOutcome
from batcher.engine.roster import Roster
from batcher.engine.step_log import StepLog
from batcher.errors import BatchdecodeError, Failure, FieldProblem, RequestError
from batcher.events import ArriveReason, EndEvent, RunEvent
from batcher.models.base import Model, can_score
from batcher.models.chat import chat_template_of
from batcher.models.checked_tokenizer import CheckedTokenizer
from batcher.models.loading import as_model
from batcher.request import Request
from batcher.result import FinishReason, Result
from batcher.rows.runner import ModelRunner
from batcher.scheduling.clock import Clock, ConstantClock, FormulaClock
from batcher.scheduling.making import make_scheduler
from batcher.scheduling.plan import NOTHING_NEW, StepPlan
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import ScheduledSequence
from batcher.sequence import Sequence
from batcher.settings import DEFAULT_SCHEDULING, GRAMMAR_TIMEOUT, SchedulingSettings
from batcher.timing.step_time import StepTime
from batcher.tokens import Tokens
from batcher.validation import ModelCapabilities, find_problems, plain_copy

if TYPE_CHECKING:
    from batcher.models.callable import ModelNext
    from batcher.models.llm import LLM

MAX_BATCH_SIZE = 2**20
NOTHING_KNOWN: Mapping[int, Result] = {}


class Engine:
    """Decodes requests in `batch_size` slots, one `step()` at a time.

    Requests may be added and aborted at any time between steps.  After an exception of `step` that
    is not a ModelError (which it turns into error results) the engine is not to be used any more.

    settings: how requests are scheduled.  step_time: how long a step takes; clock: what tells the
    time instead.  is_streaming: whether the outcome of a step tells the tokens it gave.
    is_measured: whether events tell what each step computed; always where time or memory is
    modelled.  is_checked: whether the blocks are counted after every step.
    grammar_timeout: how many seconds of processor time a constraint may take to compile.
    capabilities: what this engine can decode, as `find_problems` wants to know it.

    Raises:
        BatchdecodeError: batch_size is not from 1 to 1,048,576, there is no such model, or the
            settings make no sense.
    """

    def __init__(
        self,
        model: "Model | ModelNext | LLM",
        batch_size: int = 8,
        *,
        settings: SchedulingSettings = DEFAULT_SCHEDULING,
        step_time: StepTime | None = None,
        clock: Clock | None = None,
        is_streaming: bool = False,
        is_measured: bool = False,
        is_checked: bool = False,
        grammar_timeout: float = GRAMMAR_TIMEOUT,
    ) -> None:
        if not isinstance(batch_size, int) or not 1 <= batch_size <= MAX_BATCH_SIZE:
            message = f"batch size {batch_size!r} is not an integer from 1 to {MAX_BATCH_SIZE}"
            raise BatchdecodeError(message)
        self.batch_size, self.settings = batch_size, settings
        self._model = as_model(model)
        if clock is None:
            clock = ConstantClock() if step_time is None else FormulaClock(step_time)
        self._clock = clock
        self._scheduler = make_scheduler(batch_size, settings, self._contents, clock.estimate)
        self._queue, self._slots = self._scheduler.queue, self._scheduler.slots
        kv_cache = self._scheduler.kv_cache
        self._runner = ModelRunner(self._model, batch_size, kv_cache, is_streaming=is_streaming)
        self._runner.decoder.grammar_timeout = grammar_timeout
        self._is_streaming, self._is_checked = is_streaming, is_checked
        is_plain = settings == DEFAULT_SCHEDULING and isinstance(clock, ConstantClock)
        self._steps = StepLog(self._scheduler) if is_measured or not is_plain else None
        self._journal = Journal(clock, self._steps)
        self._roster = Roster()
        self._endings = Endings(
            self._scheduler, self._runner, self._roster, self._journal, self._model.tokenizer
        )
        self._boarding = Boarding(
            self._scheduler, self._runner, self._endings, self._journal, clock
        )
        self._entrance = Entrance(
            self._scheduler,
            self._roster,
            self._endings,
            self._journal,
            clock,
            self._model,
            self._runner.decoder.heal,
        )
        self._reads_all = settings.sees_all
        tokenizer = self._model.tokenizer
        self.capabilities = ModelCapabilities(
            vocab_size=self._model.vocab_size,
            num_slots=batch_size,
            gives_logits=self._model.gives != "tokens",
            scores_prompts=can_score(self._model),
            has_eos=self._model.eos_token_id is not None,
            check_constraint=self._runner.decoder.check_constraint,
            encode=tokenizer.encode if isinstance(tokenizer, CheckedTokenizer) else None,
            chat_template=chat_template_of(self._model),
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
        return self._slots.num_occupied

    @property
    def num_pending(self) -> int:
        """How many are known that have not joined the waiting queue yet."""
        return self._queue.num_pending

    @property
    def scheduler(self) -> Scheduler:
        """What plans the steps, to be looked at: its queue, its slots and its blocks."""
        return self._scheduler

    @property
    def has_work(self) -> bool:
        """Whether `step` still has something to do or to hand out."""
        return bool(self._roster or self._journal)

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated by samples that have ended."""
        return self._endings.num_tokens

    @property
    def wants_request(self) -> bool:
        """Whether the next step could make use of one more request.

        A driver that reads requests in order of arrival needs no more of them while this is False:
        the next request it knows lies in the future or, first come being first served, the slots
        are taken.  If the engine is idle, the clock has jumped to that request when this returns.
        """
        if not self._roster:  # and so nothing lies in the future: what was to come may have failed
            return True
        entrance, clock = self._entrance, self._clock
        reads_all = self._reads_all or entrance.has_turns  # which arrive later than they are read
        if reads_all and entrance.latest_arrival <= clock.now:
            return True
        if self._queue.num_pending:
            entrance.join_arrivals()
        if entrance.latest_arrival > clock.now:
            return False
        return reads_all or self._slots.num_free > self._queue.num_slots

    @property
    def constraint_counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and for how many rows one was there already."""
        return self._runner.decoder.constraint_counts

    def run_event(self) -> RunEvent:
        """Return the first line of this run's trace."""
        scheduling: dict[str, Any] = msgspec.to_builtins(self.settings)
        scheduling.pop("policy", None)
        return RunEvent(
            batch=self.batch_size,
            policy=self.settings.policy,
            model=self._model.name,
            settings=self._model.settings,
            scheduling=scheduling,
            step_time=self._clock.settings,
        )

    def end_event(self) -> EndEvent:
        """Return the last line of this run's trace."""
        return EndEvent(self.num_steps, self.now, self.num_tokens, self._roster.num_requests)

    # -- what a driver does ----------------------------------------------------------------------

    def add(
        self,
        request: Request,
        *,
        place: int | None = None,
        reason: ArriveReason = "input",
        known: Mapping[int, Result] = NOTHING_KNOWN,
    ) -> str:
        """Take in `request`, which joins the waiting queue once its arrival time has come.

        Returns its id.  One that is added after its arrival time has waited since then.

        place: its place in the input, by default the order of adding.
        known: what an earlier run found, by index; the sample then holds a slot for as many steps
        as it did there, but costs no model call and gives no result.

        Raises:
            BatchdecodeError: it is no Request.
            RequestError: it is not valid for this engine, or its id is that of one not ended.
        """
        if not isinstance(request, Request):
            raise BatchdecodeError(f"an Engine takes a Request, not a {type(request).__name__}")
        checked = plain_copy(request, self.capabilities)
        if checked is None:
            problems = find_problems(request, self.capabilities)
            if problems:
                raise RequestError(self._id_of(request, place), problems)
            checked = deepcopy(request)
        return self.enqueue(checked, place=place, reason=reason, known=known)

    def enqueue(
        self,
        request: Request,
        *,
        place: int | None = None,
        reason: ArriveReason = "input",
        known: Mapping[int, Result] = NOTHING_KNOWN,
    ) -> str:
        """Do what `add` does with a request in which `find_problems` has found none.

        Its lists must not be changed any more.

        Raises:
            RequestError: its id is that of a request that has not ended.
        """
        request_id = self._id_of(request, place)
        if request_id in self._roster:
            message = f"a request with id {request_id!r} has not ended yet"
            raise RequestError(request_id, [FieldProblem("duplicate-id", ("id",), message)])
        if place is None:
            place = self._roster.num_requests
        self._entrance.enter(request, request_id, place, reason, known)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now; the next `step` hands out its results, with what it had generated.

        Raises:
            BatchdecodeError: no such request is in the engine.
        """
        if request_id not in self._roster:
            raise BatchdecodeError(f"no request with id {request_id!r} is in the engine")
        last_step = self._clock.step - 1
        for leader in cast(list[Sequence], self._slots.find(request_id)):
            if leader.is_leader:
                self._endings.end_running(leader, last_step, "aborted", None)
        self._entrance.abort(request_id)
        self._entrance.go_on_with_turns()

    def step(self) -> StepOutcome:
        """Take one step of the whole batch; return what happened.

        If nothing can run but something will arrive, the clock jumps there first.  If nothing is
        left to run, no step is counted.
        """
        if self._queue.num_pending:
            self._entrance.join_arrivals()
        if self._steps is not None:
            self._steps.begin_step()
        plan = self._scheduler.plan(self._clock.step, self._clock.now)
        if plan is not NOTHING_NEW:
            self._boarding.carry_out(plan)
        is_idle = not self._slots.num_occupied
        if not is_idle:
            self._compute(plan)
        if self._entrance.has_turns:
            self._entrance.go_on_with_turns()
        if self._is_checked:
            self._scheduler.check()
        tokens = self._runner.decoder.take_streamed() if self._is_streaming else []
        if not self._journal:
            if is_idle and self._roster:
                self._entrance.check_progress()
            return StepOutcome([], [], tokens)
        return StepOutcome(self._journal.take(), self._roster.take_results(), tokens)

    def hand_out(self) -> StepOutcome:
        """Return what has come of requests that need no slot, without taking a step."""
        self._entrance.join_arrivals()
        return StepOutcome(self._journal.take(), self._roster.take_results(), [])

    def _id_of(self, request: Request, place: int | None) -> str:
        if request.id is not None:
            return request.id
        return str((self._roster.num_requests if place is None else place) + 1)

    # -- compute and commit ----------------------------------------------------------------------

    def _compute(self, plan: StepPlan) -> None:
        """Let the model compute the step, and end the rows that are done."""
        clock, slots, scheduler = self._clock, self._slots, self._scheduler
        step, load = clock.step, None
        if self._steps is not None:
            load = self._steps.measure(plan)
        decoded = NOTHING_DECODED
        if not plan.decodes:
            decoded = self._runner.compute_prompts()
        elif slots.num_occupied > self._endings.num_known:
            decoded = self._runner.step(step)
        scheduler.end_step(plan)
        if decoded.failed and plan.chunks and self._runner.has_pages:
            decoded = self._with_sharers(decoded, plan)
        if decoded is not NOTHING_DECODED or scheduler.decode_step - 1 in slots.due:
            self._commit(step, decoded, is_decode_step=plan.decodes)
        clock.advance(load)
        if self._steps is not None:
            self._steps.end_step(clock.now)

    def _with_sharers(self, decoded: Decoded, plan: StepPlan) -> Decoded:
        """Let rows fail, too, that were to go on from what a failed one has not computed."""
        failed, leader_of = dict(decoded.failed), self._scheduler.leader_of
        for chunk in plan.chunks:  # in order: who shares with one may be shared with
            failure = failed.get(leader_of(chunk.sequence).slot)
            if failure is not None:
                why = f"its first tokens are those of request {chunk.sequence.id!r}, which failed"
                for row in self._scheduler.sharing(chunk):
                    other = Failure(failure.code, f"{why}: {failure.message}")
                    failed.setdefault(leader_of(row).slot, other)
        jumps = {slot: tokens for slot, tokens in decoded.jumps.items() if slot not in failed}
        return decoded._replace(failed=failed, jumps=jumps)

    def _commit(self, step: int, decoded: Decoded, *, is_decode_step: bool) -> None:
        """End the rows that failed, completed a stop or reached max_tokens; that is their order."""
        sequences, scheduler = self._slots.sequences, self._scheduler
        due = self._slots.due.get(scheduler.decode_step - 1, ()) if is_decode_step else ()
        for slot, tokens in decoded.jumps.items():
            self._journal.jumped(cast(Sequence, sequences[slot]), len(tokens) - 1)
        reasons: dict[int, FinishReason] = dict.fromkeys(due, "length")
        reasons.update(dict.fromkeys(decoded.stopped, "stop"))
        reasons.update(dict.fromkeys(decoded.failed, "error"))
        end_running, failed = self._endings.end_running, decoded.failed
        for slot in sorted(reasons):
            row = sequences[slot]
            if row is not None:
                leader = scheduler.leader_of(row)
                end_running(leader, step, reasons[slot], failed.get(slot))  # type: ignore[arg-type]  # the engine has no others
        for source, target in decoded.forks:
            parent, child = sequences[source], sequences[target]
            if parent is not None and child is not None:  # their request has not ended just now
                self._fork(cast(Sequence, parent), cast(Sequence, child))
        for slot, tokens in decoded.jumps.items():
            leader = cast(Sequence, sequences[slot])  # a row that jumps goes on: see Decoder
            scheduler.lengthen(leader, len(tokens) - 1)
            self._boarding.note_jump(leader)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        self._scheduler.fork(parent, child)
        self._runner.fork(parent, child)
        self._journal.forked(child, parent)

    def _contents(
        self, sequence: ScheduledSequence, start: int, stop: int, size: int
    ) -> Iterator[bytes]:
        """Return what stands for the tokens start..stop of a sequence, by blocks."""
        row, vocab_size = cast(Sequence, sequence), self._model.vocab_size
        output: Tokens = []
        num_prompt = row.num_prompt_tokens
        if stop > num_prompt:
            begin, end = max(start - num_prompt, 0), stop - num_prompt
            if row.generated is None:
                output = self._runner.decoder.read(row.slot, begin, end)
            else:
                output = row.generated[begin:end]
        return block_contents(row.prompt, output, start, stop, size, vocab_size)
