"""The loop over a server: sends requests, waits, and settles what has finished.

Each slot is a request in flight.  A step lasts until something happens: tokens come, an answer ends
or fails, a request arrives or may be sent again.  So rows are not in lockstep.  Queue, policies,
events and results are those of any run.

The requests in flight are tasks of one event loop, which runs only while a step waits.  Rule: tasks
only record what arrives; the next step decides what it means for a row.  An attempt that fails
before its first token is repeated in the same slot.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import cache, lru_cache
from typing import Any

from batcher.decoding.constraints import MAX_CACHED, ConstraintCompiler, need_grammar_packages
from batcher.decoding.verification import UNDECIDED, Judgement, Look, Verifier
from batcher.engine.base import DrivenEngine
from batcher.engine.engine import NOTHING_REPLAYED, StepOutcome
from batcher.engine.sessions import Session
from batcher.errors import BatchdecodeError, Failure, LostModelError, id_in_use
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    ArriveReason,
    BlockedEvent,
    BlockedReason,
    ConcurrencyEvent,
    ConcurrencyReason,
    FinishEvent,
    ReceiveEvent,
    RetryEvent,
    RunEvent,
    StepsEvent,
    TokenEvent,
)
from batcher.lifecycle import FINISH
from batcher.models.callables import pause_after
from batcher.models.tokenizers import ByteTokenizer
from batcher.remote.client import KEY_VARIABLE, Client
from batcher.remote.model import RemoteModel
from batcher.remote.protocol import (
    FORBIDDEN,
    SERVED,
    Reply,
    ServerFailure,
    StreamEvent,
    body_of,
    is_chat,
)
from batcher.request import MAX_ANSWER, Request
from batcher.requests.result_rows import SAID
from batcher.requests.validation import ModelCapabilities
from batcher.result import ErrorInfo, FinishReason, Result, StepTimes, Usage
from batcher.scheduling.clock import WallClock
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.queue import LONGEST_PREFIX_MATCH, WaitingQueue, make_queue
from batcher.scheduling.sequence import NO_SLOT, Schedulable
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings

MAX_BACKOFF = 60.0  # seconds
SHORT_WAIT = 0.005  # seconds; shorter waits are not shown
LONG_WAIT = 10.0  # seconds; shorter waits are not reported
MAX_SHOWN_WAIT = 1e9  # seconds, as dates have an end
MAX_FORBIDDEN = 8  # requests that may be answered 403 before one has had another answer


class RemoteSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """One output of a request.

    replayed: the result of an earlier run, which replaces an answer.
    reply: the answer so far.
    num_attempts: how often it was sent; sent: when it last was.
    """

    request: Request
    arrive_reason: ArriveReason
    replayed: Result | None = None
    reply: Reply
    num_attempts: int = 0
    sent: float = 0.0


class Conversation(Session[RemoteSequence]):
    """A session; transcript: the text or messages of the finished turns."""

    transcript: Any = None


class RemoteEngine(DrivenEngine):
    """Sends requests to a server, at most `batch_size` at once, one `step()` at a time.

    settings: the policy and the aging limit; the server decides the rest of a schedule.
    is_streaming: whether steps return the new tokens.
    waiting: entered while nothing comes; if it raises, the step ends and all requests stay in
    flight.  measure: the wall clock, in seconds.

    Raises:
        BatchdecodeError: the policy needs a local model, or the key is not valid in a header.
    """

    block_use, constraint_times = None, None  # the server has blocks and constraints
    constraint_counts = 0, 0
    _clock: WallClock

    def __init__(
        self,
        model: RemoteModel,
        batch_size: int = 8,
        *,
        settings: SchedulingSettings = DEFAULT_SCHEDULING,
        is_streaming: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        measure: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.policy == LONGEST_PREFIX_MATCH:
            raise BatchdecodeError(f"--policy {LONGEST_PREFIX_MATCH} needs a local model")
        is_one_model = model.served_model or "model" in model.settings.extra_body
        self.capabilities = ModelCapabilities(
            num_slots=batch_size,
            served=SERVED,
            models=() if is_one_model else tuple(model.listed),
            check_constraint=lambda *_: need_grammar_packages(),  # the server checks the rest
        )
        queue: WaitingQueue[RemoteSequence] = make_queue(settings, lambda _: 0)
        batch = RunningBatch[RemoteSequence](batch_size, 0)
        super().__init__(settings, WallClock(measure, self._sleep), queue, batch)
        self._model, self._is_streaming = model, is_streaming
        self._waiting, self._measure = waiting, measure
        self._limit = float(batch_size)  # requests in flight
        self._decreased = -1.0  # when the limit was last lowered
        self._next_start = 0.0  # when the next request may be sent, at max_rate
        self._sessions: dict[str, Conversation] = {}
        self._blocked: tuple[str, int, BlockedReason] | None = None  # as last reported
        self._forbidden: list[ServerFailure] | None = []  # None after any other answer
        self._reported_until = -math.inf  # when the last reported wait is over
        self._lost: LostModelError | None = None  # raised by the next step, after results
        # The tasks, and what they have recorded since the last step.
        self._client = Client(model.url, model.settings)
        self._loop, self._has_news = asyncio.new_event_loop(), asyncio.Event()
        self._tasks: dict[RemoteSequence, asyncio.Task[None]] = {}
        self._returning: deque[RemoteSequence] = deque()  # to be sent again
        self._received: dict[RemoteSequence, int] = {}  # how many tokens
        self._ended: dict[RemoteSequence, ServerFailure | None] = {}  # why it failed

    @property
    def now(self) -> float:
        if not self.num_running:
            self._clock.catch_up()
        return self._clock.now

    @property
    def num_coming(self) -> int:
        num_turns = sum(len(session.turns) for session in self._sessions.values())
        return self._queue.num_pending + num_turns

    def run_event(self) -> RunEvent:
        extra = self._model.settings.extra_body
        return RunEvent(
            batch=self.batch_size,
            policy=self.settings.policy,
            model=self._model.name,
            settings={"extra_body": extra} if extra else {},
            scheduling=self.settings.beside_policy,
            step_time=self._clock.settings,
            layout="remote",
            defaults=dict(self.capabilities.defaults),
        )

    def enqueue(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
    ) -> str:
        """Queue a valid request; return its id.

        replayed: results of an earlier run, by index; the server does not repeat them.

        Raises:
            RequestError: a request with this id has not ended.
        """
        if not self.num_running:
            self._clock.catch_up()
        place = self._num_requests if input_index is None else input_index
        request_id = request.id or str(place + 1)
        if request_id in self._num_open:
            raise id_in_use(request_id)
        self._num_requests += 1
        self._num_open[request_id] = request.n
        self._latest_arrival = max(self._latest_arrival, request.arrival_time)
        is_text = isinstance(request.prompt, str)  # only the server knows its tokens
        for index in range(request.n):
            row = RemoteSequence(
                id=request_id,
                index=index,
                input_index=place,
                arrival_time=request.arrival_time,
                num_prompt_tokens=0 if is_text else len(request.prompt),
                max_tokens=MAX_ANSWER if request.max_tokens is None else request.max_tokens,
                has_default_limit=request.max_tokens is None,
                priority=request.priority,
                deadline=request.deadline,
                request=request,
                arrive_reason=reason,
                replayed=replayed.get(index),
                reply=Reply(request, {}),
            )
            if request.session is None:
                self._begin(row)
            else:
                session = self._sessions.setdefault(request.session, Conversation())
                session.turns.append(row)
                self._has_sessions = True
                self._begin_turns(session)
        return request_id

    def step(self) -> StepOutcome:
        """Send requests, wait until something happens, and return what it was.

        If nothing can be sent now but later, the clock advances first.

        Raises:
            LostModelError: the server refuses the key, or all requests from the first one on.
        """
        if self._lost is not None:
            raise self._lost
        clock, queue, batch = self._clock, self._queue, self._batch
        while True:
            self._join_arrivals()
            self._admit()
            if batch.num_occupied or self._is_halted or not queue.num_waiting:
                break
            self._sleep(self._next_start - self._measure())  # for --max-rate
            clock.catch_up()
        if self._forbidden and not batch.num_occupied:
            raise LostModelError(
                f"{self._model.url}: {self._forbidden[0]}; it forbids every request: does "
                f"the key ({KEY_VARIABLE}) allow this model?"
            )
        if not batch.num_occupied:
            return self.take_outcome()
        num_rows = batch.num_occupied
        self._wait()
        step = clock.step
        clock.advance(None)
        received, self._received = self._received, {}
        ended, self._ended = self._ended, {}
        counts = [sum(received.values())], [0], [num_rows], [0], [0], [0]
        self._events.insert(0, StepsEvent(step, [clock.now], *counts))
        for row in sorted(received, key=lambda row: row.slot):
            if row.first_token_step is None:
                row.first_token_step = step
            self._tell(ReceiveEvent, step, row, received[row])
        tokens = list[TokenEvent]()
        rows = {*received, *ended} if self._is_streaming else ()
        for row in sorted(rows, key=lambda row: row.slot):
            token_ids, text = row.reply.take_new()
            if row in received or text:
                tokens.append(TokenEvent(step, row.id, row.index, token_ids, text))
        for row in sorted(ended, key=lambda row: row.slot):
            self._settle(row, ended[row], step)
        return self._outcome(tokens)

    def take_outcome(self) -> StepOutcome:
        self._join_arrivals()
        return self._outcome([])

    def _texts_of(self, row: RemoteSequence, num_tokens: int, limit: int) -> tuple[str, str]:  # noqa: ARG002 - as the engine has it
        return str(row.request.prompt), row.reply.text

    def wake(self) -> None:
        """End the wait of a step; any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._has_news.set)

    def close(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with suppress(RuntimeError):  # an interrupted step may leave the loop running
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.run_until_complete(self._client.close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _outcome(self, tokens: list[TokenEvent]) -> StepOutcome:
        """Return what happened; results wait until a 403 is known not to concern the key."""
        results: list[Result] = []
        if not self._forbidden:
            results, self._results = self._results, results
        events, self._events = self._events, []
        return StepOutcome(events, results, tokens)

    def _tell(self, kind: type[Any], step: int, row: RemoteSequence, *more: Any) -> None:
        slot = None if row.slot == NO_SLOT else row.slot
        self._events.append(kind(step, self._clock.start_of(step), row.id, row.index, slot, *more))

    @property
    def _is_halted(self) -> bool:
        return self._forbidden is not None and len(self._forbidden) >= MAX_FORBIDDEN

    def _begin(self, row: RemoteSequence) -> None:
        if row.replayed is None:
            self._queue.add(row)
        else:
            self._forbidden = None
            self._finish(row, row.replayed.finish_reason)

    def _begin_turns(self, session: Conversation) -> None:
        """Begin or fail the turns of a session, up to one that has to wait for its answer."""
        while session.turns and session.active is None:
            row = session.turns.popleft()
            request, history = row.request, session.transcript
            if history is not None and isinstance(history, str) == is_chat(request):
                session.failure = "its session mixes texts and messages"
            if session.failure is not None:
                self._finish(row, "error", Failure("session-failed", session.failure))
                continue
            session.active = row.id
            arrival = session.arrival_of(request)
            if row.replayed is None and arrival > request.arrival_time:
                row.arrival_time, row.arrive_reason = arrival, "turn"
            self._begin(row)

    def _join_arrivals(self) -> None:
        queue, clock = self._queue, self._clock
        if not (queue.num_waiting or self.num_running):
            arrival = queue.next_arrival
            if arrival is not None and arrival > clock.now:
                clock.jump(arrival)
        for row in queue.take_arrivals(clock.now):
            row.arrived_step = step = clock.step_at(row.arrival_time)
            who = step, row.arrival_time, row.id, row.index, row.arrive_reason
            limits = row.num_prompt_tokens, row.max_tokens, row.deadline
            arrived = ArriveEvent(*who, *limits, default_limit=row.has_default_limit)
            self._events.append(arrived)
            if row.max_tokens == 0:
                self._finish(row, "length")
            else:
                queue.push(row)

    def _admit(self) -> None:
        """Send requests: first those to repeat, then those that wait for a slot."""
        queue, clock, batch = self._queue, self._clock, self._batch
        while self._returning and self._why_not() is None:
            self._send(self._returning.popleft())
        while batch.num_free and not self._is_halted and (row := queue.head(clock.now)) is not None:
            why = "concurrency" if self._returning else self._why_not()
            blocked = None if why is None else (row.id, row.index, why)
            if blocked is not None and blocked != self._blocked:
                self._events.append(BlockedEvent(clock.step, clock.now, *blocked))
            self._blocked = blocked
            if blocked is not None:
                return
            queue.take(row)
            batch.admit(row)
            row.admitted_step = clock.step
            reason = "refill" if batch.last_used[row.slot] == clock.step - 1 else "empty"
            left = max(row.num_prompt_tokens, 1)
            self._tell(AdmitEvent, clock.step, row, reason, "sample", 0, 0, left)
            self._send(row)

    def _why_not(self) -> BlockedReason | None:
        if len(self._tasks) >= int(self._limit):
            return "concurrency"
        return "rate" if self._measure() < self._next_start else None

    def _send(self, row: RemoteSequence) -> None:
        extra, row.sent = self._model.settings.extra_body, self._measure()
        named = extra.get("model") or (row.request.extra_body or {}).get("model")
        session = row.request.session
        history = None if session is None else self._sessions[session].transcript
        body = body_of(row.request, row.index, self._model.model_for(named), extra, history)
        row.reply, row.num_attempts = Reply(row.request, body), row.num_attempts + 1
        interval = 1 / (self._model.settings.max_rate or math.inf)
        self._next_start = max(row.sent, self._next_start) + interval
        self._tasks[row] = self._loop.create_task(self._ask(row, body))

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            with self._waiting():
                time.sleep(seconds)

    async def _ask(self, row: RemoteSequence, body: dict[str, Any]) -> None:
        reply, failure, is_whole = row.reply, None, False

        def hear(chunk: StreamEvent) -> None:
            if num_tokens := reply.take(chunk):
                self._received[row] = self._received.get(row, 0) + num_tokens
                self._has_news.set()

        try:
            is_whole = await self._client.ask(body, hear)
        except ServerFailure as error:
            failure = None if reply.is_over else error
        finally:
            reply.end(is_whole=is_whole)
            self._ended[row] = failure
            self._has_news.set()

    def _return(self, row: RemoteSequence) -> None:
        self._returning.append(row)
        self._has_news.set()

    def _wait(self) -> None:
        """Run the tasks until one has news, or a request arrives or may be sent."""
        queue, measure = self._queue, self._measure
        until, arrival = math.inf, queue.next_arrival
        if arrival is not None:
            until = measure() + max(arrival - self._clock.elapsed(), 0.0)
        may_send = self._batch.num_free and queue.num_waiting and not self._is_halted
        if (self._returning or may_send) and self._why_not() != "concurrency":
            until = min(until, max(measure(), self._next_start))

        async def wait(seconds: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._has_news.wait()

        if not (self._received or self._ended):
            self._loop.run_until_complete(wait(min(SHORT_WAIT, until - measure())))
        if not self._has_news.is_set() and until > measure():
            with self._waiting():
                self._loop.run_until_complete(wait(until - measure()))
        self._has_news.clear()

    def _settle(self, row: RemoteSequence, failure: ServerFailure | None, step: int) -> None:
        """Repeat or finish a row after an attempt.

        The limit of requests in flight follows additive increase, multiplicative decrease (Chiu and
        Jain, 1989): a full round of answers raises it by one, a refusal halves it.  A refusal of a
        request that was sent before the last decrease does not count.
        """
        settings, limit = self._model.settings, int(self._limit)
        wait, is_overlong, pause = 0.0, False, None
        self._tasks.pop(row).result()  # raises our own bugs
        if failure is None:
            failure = row.reply.find_lack()
        if failure is not None:
            wait = failure.retry_after or 0.0
            is_overlong = failure.is_worth_retry and wait > settings.max_wait
            if is_overlong:
                failure.note(f"; --max-wait {settings.max_wait:g} is less than {wait:g} s")
            self._client.without_key(failure)
            is_last = is_overlong or row.num_attempts >= settings.max_attempts
            if failure.is_worth_retry and row.reply.is_blank and not is_last:
                longest = min(MAX_BACKOFF, settings.max_wait)
                number = row.num_attempts
                pause = pause_after(number, failure.retry_after, settings.backoff, longest)
                self._tell(RetryEvent, step, row, failure.reason, number, round(pause, 6))
                self._report_wait(failure, pause)
                self._loop.call_later(pause, self._return, row)
        if failure is None:
            self._limit = min(self._limit + 1 / self._limit, float(self.batch_size))
        elif failure.reason == "overload" and row.sent > self._decreased:
            self._limit, self._decreased = max(self._limit / 2, 1.0), self._measure()
        if int(self._limit) != limit:
            why: ConcurrencyReason = "success" if failure is None else "overload"
            time = self._clock.start_of(step)
            self._events.append(ConcurrencyEvent(step, time, int(self._limit), why))
        if pause is not None:
            return
        if failure is None or failure.status != FORBIDDEN or failure.code != "server-error":
            self._forbidden = None
        elif self._forbidden is not None:
            self._forbidden.append(failure)
        if failure is None:
            if not row.reply.num_tokens:  # an answer without tokens
                self._tell(ReceiveEvent, step, row, 0)
            self._finish(row, row.reply.outcome)
        elif failure.is_final:
            self._lost = LostModelError(f"{self._model.url}: {failure}")
        else:
            if is_overlong:
                self._model.has_refused_waits = True
                self._report_wait(failure, wait, is_overlong=True)
            attempts_made = f" (attempt {row.num_attempts})" if row.num_attempts > 1 else ""
            why_not = Failure(failure.code, f"{failure}{attempts_made}", failure.status)
            self._finish(row, "error", why_not)

    def _report_wait(
        self, failure: ServerFailure, seconds: float, *, is_overlong: bool = False
    ) -> None:
        until = self._measure() + seconds
        if seconds < LONG_WAIT or until < self._reported_until + max(LONG_WAIT, seconds / 10):
            return
        self._reported_until, url = until, self._model.url
        seconds = min(seconds, MAX_SHOWN_WAIT)
        end = datetime.now().astimezone() + timedelta(seconds=seconds)
        when = f"until {end:%Y-%m-%d %H:%M:%S} ({seconds:,.0f} s) for {url}: {failure}"
        if is_overlong:
            self._model.report(f"not waiting {when}\n")
        else:
            self._model.report(f"waiting {when}; --max-wait SECONDS limits such waits\n")

    def _finish(
        self, row: RemoteSequence, reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """Finish a row and its turn; a replayed row has its result already."""
        step, request, result = self._clock.step, row.request, row.replayed
        if row.slot == NO_SLOT:
            row.state = FINISH[row.state]
        else:
            step -= 1
            self._batch.release(row, step, FINISH)
        if result is None:
            result = _result_of(row, reason, failure, step)
            self._results.append(result)
        reason, num_tokens = result.finish_reason, result.usage.completion_tokens
        self.num_tokens += num_tokens
        counts = num_tokens, "sample", None, result.usage.prompt_tokens or None
        self._tell(FinishEvent, step, row, reason, result.stop_reason, *counts, result.error)
        self._num_open[row.id] -= 1
        if not self._num_open[row.id]:
            del self._num_open[row.id]
        session = None if request.session is None else self._sessions[request.session]
        if session is None or session.active != row.id:  # else it never began
            return
        session.active, session.end = None, self._clock.now
        if reason in {"error", "aborted"}:
            session.fail(row.id, reason)
        elif is_chat(request):
            calls = {"tool_calls": result.tool_calls, "function_call": result.function_call}
            answer: dict[str, Any] = {"role": "assistant", "content": result.text}
            answer |= {name: call for name, call in calls.items() if call is not None}
            messages = (request.extra_body or {})["messages"]
            session.transcript = [*(session.transcript or []), *messages, answer]
        else:
            session.transcript = (session.transcript or "") + str(request.prompt) + result.text
        self._begin_turns(session)


def _result_of(
    row: RemoteSequence, reason: FinishReason, failure: Failure | None, step: int
) -> Result:
    slot, reply = None if row.slot == NO_SLOT else row.slot, row.reply
    judged = Judgement() if slot is None or failure is not None else _judge(reply, reason)
    failure, error = failure or judged.failure, None
    if failure is not None:
        where = "" if slot is None else f"step {step}: "
        error = ErrorInfo(failure.code, f"{where}{failure.message}", status=failure.status)
    num_prompt_tokens = reply.prompt_tokens
    if num_prompt_tokens is None:
        num_prompt_tokens = row.num_prompt_tokens
    lacks_logprobs = not reply.logprobs and reply.num_tokens > 0
    return Result(
        id=row.id,
        index=row.index,
        text=reply.text,
        tokens=reply.token_ids,
        finish_reason=reason if error is None else "error",
        stop_reason=reply.stop_reason,
        usage=Usage(num_prompt_tokens, reply.num_tokens),
        slot=slot,
        steps=StepTimes(row.arrived_step, row.admitted_step, row.first_token_step, step),
        error=error,
        logprobs=None if row.request.logprobs is None or lacks_logprobs else reply.logprobs,
        constraint=judged.constraint,
        constraint_check=judged.check,
        **{name: getattr(reply, name) for name in SAID},
    )


_verifier_of = lru_cache(MAX_CACHED)(Verifier)


@cache
def _grammars() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), 257, (256,))


def _judge(reply: Reply, reason: FinishReason) -> Judgement:
    """Check an answer against its constraint, which many servers ignore.

    llguidance decides where our own check has no opinion: it had no part in this output.
    """
    source = reply.constraint
    if source is None or reply.tool_calls or reply.function_call:  # a tool call is not text
        return Judgement()
    verifier, look = _verifier_of(source), UNDECIDED
    stop = reply.stop_reason if isinstance(reply.stop_reason, str) else ""
    output = (reply.text.removesuffix(stop) + stop).encode(errors="replace")
    with suppress(BatchdecodeError, ImportError):  # another dialect
        look = verifier.look(output)
        if (
            not look.is_decided and source.kind != "json_schema"
        ):  # its matcher accepts only one layout
            matcher = _grammars().compile(source).matcher.deep_copy()
            is_kept = matcher.try_consume_tokens([*output]) == len(output)
            is_kept = is_kept and matcher.is_accepting()
            if not matcher.is_error():  # a limit of llguidance
                look = Look(None if is_kept else "the grammar does not accept it")
    is_ended = reason == "stop" and reply.stop_reason is None
    return verifier.judge(output, look, is_ended=is_ended, accepts=lambda: False)
