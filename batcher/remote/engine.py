"""The loop over a server: which requests are sent when, what has arrived and what has finished.

Each slot is a request in flight, and a step lasts until something happens: tokens come, an answer
ends or fails, a request arrives or may be sent again.  So rows are not in lockstep, and none waits
for another.  Queue, policies, events and results are those of any run.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec

from batcher.decoding.constraints import MAX_CACHED, ConstraintCompiler
from batcher.decoding.grammars import ConstraintSource
from batcher.decoding.verification import UNDECIDED, Judgement, Look, Verifier
from batcher.engine.engine import NOTHING_REPLAYED, StepOutcome
from batcher.engine.sessions import Session, Turn
from batcher.errors import BatchdecodeError, Failure, LostModelError, id_in_use
from batcher.events import (
    AdmitEvent,
    AdmitReason,
    ArriveEvent,
    ArriveReason,
    BlockedEvent,
    BlockedReason,
    ConcurrencyEvent,
    ConcurrencyReason,
    EndEvent,
    FinishEvent,
    ReceiveEvent,
    RequestEvent,
    RetryEvent,
    RunEvent,
    StepsEvent,
    TokenEvent,
)
from batcher.lifecycle import ADMIT, FINISH
from batcher.models.callables import pause_after
from batcher.models.tokenizers import ByteTokenizer
from batcher.remote.client import KEY_VARIABLE, Client
from batcher.remote.model import REMOTE_SCHEDULING, RemoteModel, ServerSettings
from batcher.remote.protocol import Body, ServerFailure, body_of, is_chat
from batcher.remote.reply import Reply, StreamEvent, reply_to
from batcher.request import MAX_ANSWER, Request
from batcher.result import ErrorInfo, FinishReason, Result, StepTimes, Usage
from batcher.scheduling.clock import WallClock
from batcher.scheduling.queue import LONGEST_PREFIX_MATCH, WaitingQueue, make_queue
from batcher.scheduling.sequence import NO_SLOT, Schedulable
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings

# Requests in flight: each a task of one event loop, which runs only while a step waits.
#
# Rule: tasks only record what arrives; the next step decides what it means for a row. An attempt
# that fails before its first token is retried in the same slot.


class RemoteSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """One sample of a request; of what Schedulable has, that of slots and queues alone is used.

    request: what it is an output of.  arrive_reason: why it arrives when it does.
    context: the text, or the messages, that it goes on from.
    Its attempt sets the others: reply: what has come of its answer; text: what of that is not
    returned yet; num_told: how many ids are.
    """

    request: Request
    arrive_reason: ArriveReason
    context: Any = None
    reply: Reply
    text: str = ""
    num_told: int = 0

    def take_told(self) -> tuple[list[int] | None, str]:
        text, self.text = self.text, ""
        ids = self.reply.token_ids
        start, self.num_told = self.num_told, len(ids or ())
        return None if ids is None else ids[start:], text


# How many requests may be in flight, and how soon after one another they may be sent.
#
# Rule: additive increase, multiplicative decrease (Chiu and Jain, 1989): as many answers as the
# limit is raise it by one, and a refusal halves it; those that were in flight together count as
# one.

DECREASE = 0.5


class Rate:
    """What is in flight, and whether there may be more.

    num_in_flight: how many requests are.  max_rate: how many may be sent in a second; None for any.
    Times are in seconds, of any clock.
    """

    def __init__(self, max_in_flight: int, max_rate: float | None) -> None:
        self.num_in_flight = 0
        self._max_in_flight, self._limit = max_in_flight, float(max_in_flight)
        self._interval = 0.0 if max_rate is None else 1 / max_rate
        self._next_start = 0.0
        self._decreased = -1.0  # when the limit last was

    @property
    def limit(self) -> int:
        return int(self._limit)

    def why_not(self, now: float) -> BlockedReason | None:
        """Return why nothing may be sent now; None if something may."""
        if self.num_in_flight >= self.limit:
            return "concurrency"
        return "rate" if now < self._next_start else None

    def start_of_next(self, now: float) -> float | None:
        """Return when the next request may be sent if nothing ends before; None if it may not."""
        return None if self.num_in_flight >= self.limit else max(now, self._next_start)

    def note_sent(self, now: float) -> None:
        self.num_in_flight += 1
        self._next_start = max(now, self._next_start) + self._interval

    def note_over(self) -> None:
        self.num_in_flight -= 1

    def succeed(self) -> bool:
        """Allow a little more after an answer; return whether the limit is another one."""
        before = self.limit
        self._limit = min(self._limit + 1 / self._limit, float(self._max_in_flight))
        return self.limit != before

    def refuse(self, sent: float, now: float) -> bool:
        """Allow less after a refusal of what was `sent` then; return whether the limit is another.

        What was sent before the limit was last lowered says nothing of the one that holds.
        """
        if sent <= self._decreased:
            return False
        before, self._decreased = self.limit, now
        self._limit = max(self._limit * DECREASE, 1.0)
        return self.limit != before


MAX_BACKOFF = 60.0  # seconds
SHORT_WAIT = 0.005  # seconds; shorter waits are not shown


class Attempt(NamedTuple):
    """An attempt that is over; failure: why, if it has failed.

    num_attempts: how many there were, this one included.  sent: when it was.
    delay: the seconds before the next one; 0 if this was the last.
    """

    row: RemoteSequence
    failure: ServerFailure | None
    num_attempts: int
    sent: float
    delay: float = 0.0


class News:
    """What has arrived since the last `listen`.

    received: how many tokens of each row.  retries: attempts that others follow; ended: the
    last ones.  has_returned: whether a pause is over.
    """

    def __init__(self) -> None:
        self.received: dict[RemoteSequence, int] = {}
        self.ended: list[Attempt] = []
        self.retries: list[Attempt] = []
        self.has_returned = False

    def __bool__(self) -> bool:
        return bool(self.received or self.ended or self.retries or self.has_returned)


class Attempts:
    """Sends bodies, and records what arrives.

    rate: asked before anything is sent.  now: the time, in seconds, as `rate` has it.
    waiting: entered while nothing comes; what breaks it off leaves all requests in flight.
    """

    def __init__(
        self,
        client: Client,
        settings: ServerSettings,
        rate: Rate,
        now: Callable[[], float],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._client, self._settings, self._rate = client, settings, rate
        self._now, self._waiting = now, waiting
        self._loop = asyncio.new_event_loop()
        self._wakeup = asyncio.Event()
        self._news = News()
        self._bug: BaseException | None = None
        self._tasks: dict[RemoteSequence, asyncio.Task[None]] = {}
        self._returning: deque[asyncio.Future[None]] = deque()

    def send(self, row: RemoteSequence, body: Body) -> None:
        self._rate.note_sent(self._now())
        self._tasks[row] = self._loop.create_task(self._ask(row, body))
        self._tasks[row].add_done_callback(self._note_bug)

    def send_again(self) -> None:
        while self._returning and self._rate.why_not(self._now()) is None:
            self._rate.note_sent(self._now())
            self._returning.popleft().set_result(None)

    @property
    def has_returning(self) -> bool:
        return bool(self._returning)

    def listen(self, until: float | None) -> News:
        if not self._news:
            self._wait(SHORT_WAIT if until is None else min(SHORT_WAIT, until - self._now()))
        if not self._news and (until is None or until > self._now()):
            with self._waiting():
                self._wait(None if until is None else until - self._now())
        if self._bug is not None:
            raise self._bug
        news, self._news = self._news, News()
        self._wakeup.clear()
        for attempt in news.ended:
            self._tasks.pop(attempt.row, None)
        return news

    def wake(self) -> None:
        """Make `listen` return now; any thread may call this."""
        with suppress(RuntimeError):  # all is over already
            self._loop.call_soon_threadsafe(self._wakeup.set)

    def close(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with suppress(RuntimeError):  # what broke off a step may have left the loop as if it ran
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.run_until_complete(self._client.close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _wait(self, seconds: float | None) -> None:
        async def until_woken() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wakeup.wait()

        self._loop.run_until_complete(until_woken())

    async def _ask(self, row: RemoteSequence, body: Body) -> None:
        settings, longest = self._settings, min(MAX_BACKOFF, self._settings.max_wait)
        for number in range(1, settings.max_attempts + 1):
            sent = self._now()
            failure = await self._attempt(row, body)
            if failure is None or not failure.is_worth_retry or failure.is_overlong:
                break
            if number == settings.max_attempts or not row.reply.is_blank:
                break
            pause = pause_after(number, failure.retry_after, settings.backoff, longest)
            self._news.retries.append(Attempt(row, failure, number, sent, pause))
            self._wakeup.set()
            await asyncio.sleep(pause)
            turn = self._loop.create_future()  # until the rate allows another attempt
            self._returning.append(turn)
            self._news.has_returned = True
            self._wakeup.set()
            await turn
        row.text += row.reply.flush()
        self._news.ended.append(Attempt(row, failure, number, sent))
        self._wakeup.set()

    async def _attempt(self, row: RemoteSequence, body: Body) -> ServerFailure | None:
        row.reply, row.text = reply_to(row.request, body.fields), ""
        reply, client, failure = row.reply, self._client, None
        try:
            if await client.ask(body, lambda chunk: self._hear(row, chunk)):
                reply.end()
        except ServerFailure as error:
            failure = None if reply.is_over else error
        finally:
            self._rate.note_over()
        if failure is None:
            failure = reply.find_lack(wants_logprobs=row.request.logprobs is not None)
        if failure is None:
            return None
        wait, longest = failure.retry_after or 0.0, self._settings.max_wait
        if failure.is_worth_retry and wait > longest:
            failure.is_overlong = True
            failure.args = (f"{failure}; --max-wait {longest:g} is less than {wait:g} s",)
        return client.without_key(failure)

    def _note_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error
            self._wakeup.set()

    def _hear(self, row: RemoteSequence, chunk: StreamEvent) -> None:
        num_tokens, text = row.reply.take(chunk)
        row.text += text
        if num_tokens:
            received = self._news.received
            received[row] = received.get(row, 0) + num_tokens
            self._wakeup.set()


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
    """Return the text, or the messages, that the next turn of a session goes on from."""
    if not is_chat(request):
        return (said or "") + str(request.prompt) + result.text
    messages = (request.extra_body or {})["messages"]
    answer: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.tool_calls is not None:
        answer["tool_calls"] = result.tool_calls
    if result.function_call is not None:
        answer["function_call"] = result.function_call
    return [*(said or []), *messages, answer]


LONG_WAIT = 10.0  # seconds; shorter waits are not reported
MAX_SHOWN_WAIT = 1e9  # seconds, as dates have an end
MAX_FORBIDDEN = 8  # requests that may be answered 403 before one has had another answer


class RemoteEngine:
    """Sends requests to a server, at most `batch_size` at once, one `step()` at a time.

    settings: the order of requests; the server decides all else of a schedule.
    is_streaming: whether the outcome of a step tells the tokens that have come.
    waiting: entered while nothing comes; what breaks it off ends the step.
    measure: the time on the wall, in seconds.
    capabilities: what it can answer, as `find_problems` wants to know it.

    Raises:
        BatchdecodeError: the settings are for engines of our own, or the key is none.
    """

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
        self.batch_size, self._model, self._settings = batch_size, model, settings
        given = set(msgspec.to_builtins(settings)) - REMOTE_SCHEDULING
        if given:
            option = f"--{min(given).replace('_', '-')}"
            message = f"{option} is for an engine of our own: a server schedules itself"
            raise BatchdecodeError(message)
        if settings.policy == LONGEST_PREFIX_MATCH:
            raise BatchdecodeError(f"--policy {LONGEST_PREFIX_MATCH} asks for a cache of our own")
        self._clock = WallClock(measure, self._sleep)
        self._waiting, self._measure = waiting, measure
        self._queue: WaitingQueue[RemoteSequence] = make_queue(settings, lambda _: 0)
        self._sessions: dict[str, Session] = {}
        self._said: dict[str, Any] = {}  # all that was, by session, once its first turn has ended
        self._latest_arrival = 0.0
        self._rate = Rate(batch_size, model.settings.max_rate)
        client = Client(model.address, model.settings)
        self._attempts = Attempts(client, model.settings, self._rate, measure, waiting)
        self._is_streaming = is_streaming
        self._free = list(range(batch_size))  # a heap
        self._last_used = [-2] * batch_size  # the step, of each slot
        self._running: dict[RemoteSequence, int] = {}  # by admission
        self._num_open: dict[str, int] = {}
        self._events: list[RequestEvent] = []  # in order; since they were last handed out
        self._blocked: tuple[str, int, BlockedReason] | None = None  # by the last such event
        self._results: list[Result] = []
        self._forbidden: list[ServerFailure] | None = []  # None after any other answer
        self._reported_until = -math.inf  # when the last reported wait is over
        self._lost: LostModelError | None = None  # raised by the next step: others have answers
        self._num_requests = self._num_tokens = 0
        self.capabilities = model.capabilities(batch_size)

    # -- what a driver looks at, as of an Engine ------------------------------------------------

    block_use, constraint_times = None, None  # blocks and constraints are the server's business
    constraint_counts = 0, 0

    @property
    def num_steps(self) -> int:
        return self._clock.step

    @property
    def now(self) -> float:
        """When the next step starts; while nothing is in flight, that is now."""
        if not self._running:
            self._clock.catch_up()
        return self._clock.now

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pending(self) -> int:
        return self._queue.num_pending

    @property
    def num_coming(self) -> int:
        return self._queue.num_pending + sum(len(each.turns) for each in self._sessions.values())

    @property
    def last_start(self) -> float:
        return self._clock.start_of(max(self._clock.step - 1, 0))

    @property
    def num_results(self) -> int:
        return len(self._results)

    @property
    def has_work(self) -> bool:
        return bool(self._num_open or self._events or self._results)

    @property
    def wants_request(self) -> bool:
        if not self._num_open:
            return True
        reads_all = self._settings.sees_all or bool(self._sessions)
        if reads_all and self._latest_arrival <= self._clock.now:
            return True
        if self._queue.num_pending:
            self._join_arrivals()
        if self._latest_arrival > self._clock.now:
            return False
        return reads_all or len(self._free) > self._queue.num_slots

    @property
    def first_waiting(self) -> RemoteSequence | None:
        return self._queue.first(self._clock.now)

    def run_event(self) -> RunEvent:
        extra = self._model.settings.extra_body
        return RunEvent(
            batch=self.batch_size,
            policy=self._settings.policy,
            model=self._model.name,
            settings={"extra_body": extra} if extra else {},
            scheduling=self._settings.beside_policy,
            step_time=self._clock.settings,
            layout="remote",
            defaults=dict(self.capabilities.defaults),
        )

    def end_event(self) -> EndEvent:
        clock = self._clock
        return EndEvent(clock.step, clock.now, self._num_tokens, self._num_requests)

    # -- what a driver does ----------------------------------------------------------------------

    def enqueue(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
    ) -> str:
        """Take in a request in which `find_problems` has found none; return its id.

        replayed: what an earlier run found, by index: nobody is asked again.

        Raises:
            RequestError: its id is that of a request that has not ended.
        """
        place = self._num_requests if input_index is None else input_index
        request_id = request.id or str(place + 1)
        if request_id in self._num_open:
            raise id_in_use(request_id)
        self._num_requests += 1
        self._num_open[request_id] = request.n
        self._latest_arrival = max(self._latest_arrival, request.arrival_time)
        turn = Turn(request, request_id, place, reason, replayed, is_streamed=True)
        now = self.now
        if request.session is None:
            for index in range(request.n):
                if index in replayed:
                    self._close_replayed(_sequence(turn, index), replayed[index])
                else:
                    self._queue.add(_sequence(turn, index), now)
        else:
            session = self._sessions.setdefault(request.session, Session())
            if session.active is None:
                self._begin_turn(session, turn, now)
            else:
                session.turns.append(turn)
        return request_id

    def step(self) -> StepOutcome:
        """Send what may be sent, wait until something happens, and return what it was.

        If nothing can be sent but something will be, the clock goes on to then first.

        Raises:
            LostModelError: the server refuses the key, or all requests from the first one on.
        """
        if self._lost is not None:
            raise self._lost
        clock, queue = self._clock, self._queue
        self._join_arrivals()
        self._admit()
        if self._forbidden and not self._running and (self._is_halted or not queue.num_waiting):
            raise LostModelError(
                f"{self._model.address.url}: {self._forbidden[0]}; it forbids every request: does "
                f"the key ({KEY_VARIABLE}) allow this model?"
            )
        while not self._running and queue.num_waiting:  # it is too soon for the rate
            start = self._rate.start_of_next(self._measure())
            if start is not None:
                self._sleep(start - self._measure())
            clock.catch_up()
            self._join_arrivals()
            self._admit()
        if not self._running:
            return self.hand_out()
        num_rows = len(self._running)
        times = []
        arrival = self._queue.next_arrival
        if arrival is not None:
            times.append(self._measure() + max(arrival - self._clock.elapsed(), 0.0))
        has_next = bool(self._free and self._queue.num_waiting and not self._is_halted)
        if self._attempts.has_returning or has_next:
            start = self._rate.start_of_next(self._measure())
            if start is not None:
                times.append(start)
        news = self._attempts.listen(min(times, default=None))
        clock.advance(None)
        tokens = self._take(news)
        ends, none = [clock.now], [0]
        columns = [sum(news.received.values())], none, [num_rows], none, none, none
        self._events.insert(0, StepsEvent(clock.step - 1, ends, *columns))
        return self._outcome(tokens)

    def hand_out(self) -> StepOutcome:
        self._join_arrivals()
        return self._outcome([])

    def wake(self) -> None:
        self._attempts.wake()

    def close(self) -> None:
        self._attempts.close()

    def _outcome(self, tokens: list[TokenEvent]) -> StepOutcome:
        """Return what has happened; results wait until a 403 is known not to be the key's."""
        results: list[Result] = []
        if not self._forbidden:
            results, self._results = self._results, results
        events, self._events = self._events, []
        return StepOutcome(events, results, tokens)

    # -- into the slots --------------------------------------------------------------------------

    @property
    def _is_halted(self) -> bool:
        return self._forbidden is not None and len(self._forbidden) >= MAX_FORBIDDEN

    def _join_arrivals(self) -> None:
        """Let what has arrived wait for a slot; if all is idle, wait for the next arrival."""
        queue, clock = self._queue, self._clock
        if not (queue.num_waiting or self._running):
            arrival = queue.next_arrival
            if arrival is not None and arrival > clock.now:
                clock.jump(arrival)
        for row in queue.take_arrivals(clock.now):
            row.arrived_step = step = clock.step_at(row.arrival_time)
            self._events.append(
                ArriveEvent(
                    step,
                    row.arrival_time,
                    row.id,
                    row.index,
                    row.arrive_reason,
                    row.num_prompt_tokens,
                    row.max_tokens,
                    row.deadline,
                    default_limit=row.has_default_limit,
                )
            )
            if row.max_tokens == 0:
                self._finish(row, "length", None, clock.step)
            else:
                queue.push(row)

    def _admit(self) -> None:
        attempts, queue, clock = self._attempts, self._queue, self._clock
        attempts.send_again()
        while self._free and not self._is_halted and (row := queue.first(clock.now)) is not None:
            why = "concurrency" if attempts.has_returning else self._rate.why_not(self._measure())
            if why is not None:
                blocked = row.id, row.index, why
                if blocked != self._blocked:
                    self._events.append(BlockedEvent(clock.step, clock.now, *blocked))
                self._blocked = blocked
                return
            queue.take(row)
            slot = heappop(self._free)
            row.state = ADMIT[row.state]
            row.slot, row.admitted_step = slot, clock.step
            self._running[row] = slot
            reason: AdmitReason = "refill" if self._last_used[slot] == clock.step - 1 else "empty"
            left = max(row.num_prompt_tokens, 1)
            admitted = clock.step, clock.now, row.id, row.index, slot, reason
            self._events.append(AdmitEvent(*admitted, left=left))
            self._blocked = None
            model, request = self._model, row.request
            extra = model.settings.extra_body
            named = extra.get("model") or (request.extra_body or {}).get("model")
            body = body_of(request, row.index, model.model_for(named), extra, row.context)
            attempts.send(row, body)

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            with self._waiting():
                time.sleep(seconds)

    # -- out of them -----------------------------------------------------------------------------

    def _take(self, news: News) -> list[TokenEvent]:
        step, tokens = self._clock.step - 1, list[TokenEvent]()
        start = self._clock.start_of(step)
        for row, num_tokens in sorted(news.received.items(), key=lambda item: item[0].slot):
            if row.first_token_step is None:
                row.first_token_step = step
            self._events.append(ReceiveEvent(step, start, row.id, row.index, row.slot, num_tokens))
        if self._is_streaming:
            late = (attempt.row for attempt in news.ended if attempt.row.text)
            for row in sorted({*news.received, *late}, key=lambda row: row.slot):
                tokens.append(TokenEvent(step, row.id, row.index, *row.take_told()))
        for retry in news.retries:
            if retry.failure is not None:
                row, reason, delay = retry.row, retry.failure.reason, round(retry.delay, 6)
                told = row.slot, reason, retry.num_attempts, delay
                self._events.append(RetryEvent(step, start, row.id, row.index, *told))
                self._report_wait(retry.failure, retry.delay)
            self._adapt(retry)
        for attempt in sorted(news.ended, key=lambda attempt: attempt.row.slot):
            self._adapt(attempt)
            self._end(attempt, step)
        return tokens

    def _adapt(self, ended: Attempt) -> None:
        failure = ended.failure
        reason: ConcurrencyReason | None = None
        if failure is None:
            reason = "success" if self._rate.succeed() else None
        elif failure.reason == "overload" and self._rate.refuse(ended.sent, self._measure()):
            reason = "overload"
        if reason is not None:
            step = self._clock.step - 1
            limited = step, self._clock.start_of(step), self._rate.limit, reason
            self._events.append(ConcurrencyEvent(*limited))

    def _end(self, attempt: Attempt, step: int) -> None:
        row, failure = attempt.row, attempt.failure
        if failure is None or not failure.is_forbidden:
            self._forbidden = None
        elif self._forbidden is not None:
            self._forbidden.append(failure)
        if failure is None:
            if not row.reply.num_tokens:  # an answer without a token has come, all the same
                start = self._clock.start_of(step)
                self._events.append(ReceiveEvent(step, start, row.id, row.index, row.slot, 0))
            self._finish(row, row.reply.outcome, None, step)
        elif failure.is_final:
            self._lost = LostModelError(f"{self._model.address.url}: {failure}")
        else:
            if failure.is_overlong and failure.retry_after is not None:
                self._model.has_refused_waits = True
                self._report_wait(failure, failure.retry_after)
            num_attempts = attempt.num_attempts
            attempts = f" (attempt {num_attempts})" if num_attempts > 1 else ""
            why = Failure(failure.code, f"{failure}{attempts}", failure.status)
            self._finish(row, "error", why, step)

    def _report_wait(self, failure: ServerFailure, seconds: float) -> None:
        until = self._measure() + seconds
        if seconds < LONG_WAIT or until < self._reported_until + max(LONG_WAIT, seconds / 10):
            return
        self._reported_until, model = until, self._model
        seconds = min(seconds, MAX_SHOWN_WAIT)
        end = datetime.now().astimezone() + timedelta(seconds=seconds)
        when = f"until {end:%Y-%m-%d %H:%M:%S} ({seconds:,.0f} s)"
        if failure.is_overlong:
            model.report(f"not waiting {when} for {model.address.url}: {failure}\n")
        else:
            limit = "--max-wait SECONDS limits such waits"
            model.report(f"waiting {when} for {model.address.url}: {failure}; {limit}\n")

    def _finish(
        self, row: RemoteSequence, reason: FinishReason, failure: Failure | None, step: int
    ) -> None:
        """End a sample; its constraint is checked again."""
        row.state = FINISH[row.state]
        slot = self._running.pop(row, None)
        judged, where = Judgement(), ""
        if slot is not None:
            self._last_used[slot] = step
            heappush(self._free, slot)
            where = f"step {step}: "
            if failure is None:
                judged = _judge(row, reason)
        if judged.failure is not None:
            reason, failure = "error", judged.failure
        reply, num_prompt_tokens, error = row.reply, row.num_prompt_tokens, None
        if reply.prompt_tokens is not None:
            num_prompt_tokens = reply.prompt_tokens
        if failure is not None:
            error = ErrorInfo(failure.code, f"{where}{failure.message}", status=failure.status)
        lacks_logprobs = not reply.logprobs and reply.num_tokens > 0
        result = Result(
            id=row.id,
            index=row.index,
            text=reply.text,
            tokens=[] if slot is None else reply.token_ids,
            finish_reason=reason,
            stop_reason=reply.stop_reason,
            usage=Usage(num_prompt_tokens, reply.num_tokens),
            slot=slot,
            steps=StepTimes(row.arrived_step, row.admitted_step, row.first_token_step, step),
            error=error,
            logprobs=None if row.request.logprobs is None or lacks_logprobs else reply.logprobs,
            constraint=judged.constraint,
            constraint_check=judged.check,
            reasoning=reply.reasoning,
            refusal=reply.refusal,
            tool_calls=reply.tool_calls,
            function_call=reply.function_call,
        )
        self._results.append(result)
        self._close(row, result, step)

    def _close_replayed(self, row: RemoteSequence, result: Result) -> None:
        self._forbidden = None
        row.state = FINISH[row.state]
        self._close(row, result, self._clock.step)

    def _close(self, row: RemoteSequence, result: Result, step: int) -> None:
        clock, usage = self._clock, result.usage
        self._num_tokens += usage.completion_tokens
        self._events.append(
            FinishEvent(
                step,
                clock.now if step == clock.step else clock.start_of(step),
                row.id,
                row.index,
                None if row.slot == NO_SLOT else row.slot,
                result.finish_reason,
                result.stop_reason,
                usage.completion_tokens,
                prompt_tokens=usage.prompt_tokens or None,
                error=result.error,
            )
        )
        self._num_open[row.id] -= 1
        if not self._num_open[row.id]:
            del self._num_open[row.id]
        if row.request.session is not None:
            self._end_turn(self._sessions[row.request.session], row, result)

    # -- turns of sessions -----------------------------------------------------------------------

    def _begin_turn(self, session: Session, turn: Turn, now: float) -> None:
        request, said = turn.request, self._said.get(turn.request.session or "")
        row = _sequence(turn, 0, said)
        if said is not None and isinstance(said, str) == is_chat(request):
            session.failure = "its session goes on from texts, or from messages, not from both"
        if session.failure is not None:
            self._fail_turn(session, row)
            return
        session.active = turn.request_id
        if turn.replayed:
            self._close_replayed(row, turn.replayed[0])
            return
        if session.end is not None:
            arrival = max(request.arrival_time, session.end + request.think_time)
            if arrival > request.arrival_time:
                row.arrival_time, row.arrive_reason = arrival, "turn"
        self._queue.add(row, now)

    def _end_turn(self, session: Session, row: RemoteSequence, result: Result) -> None:
        """Start the turn after one that has ended, or let those that wait end with it."""
        if session.active != row.id:  # it was over without ever going on
            return
        now = session.end = self._clock.now
        session.active, name = None, row.request.session or ""
        if result.finish_reason in {"error", "aborted"}:
            for turn in session.break_off(row.id, result.finish_reason, 0):
                self._fail_turn(session, _sequence(turn, 0))
            return
        self._said[name] = _with_answer(row.request, self._said.get(name), result)
        if session.turns:
            self._begin_turn(session, session.turns.popleft(), now)

    def _fail_turn(self, session: Session, row: RemoteSequence) -> None:
        failure = Failure("session-failed", session.failure or "")
        self._finish(row, "error", failure, self._clock.step)


def _judge(row: RemoteSequence, reason: FinishReason) -> Judgement:
    """Check an answer against its constraint, which many servers ignore.

    Calls of tools are not texts, and keep none.
    """
    reply, source = row.reply, row.reply.constraint
    if source is None or reply.tool_calls or reply.function_call:
        return Judgement()
    stop = reply.stop_reason if isinstance(reply.stop_reason, str) else ""
    output = (reply.text.removesuffix(stop) + stop).encode(errors="replace")
    is_ended = reason == "stop" and reply.stop_reason is None
    look = _look_at(source, output)
    verifier = _verifier_of(source)
    return verifier.judge(output, look, is_ended=is_ended, accepts=lambda: False)


_verifier_of = lru_cache(MAX_CACHED)(Verifier)


@cache
def _grammars() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), 257, (256,))


def _look_at(source: ConstraintSource, output: bytes) -> Look:
    """Return what is wrong with an output.

    The second check of our own outputs judges, and llguidance where that has no opinion, as it had
    no part in making this output.
    """
    try:
        look = _verifier_of(source).look(output)
        if look.is_decided or source.kind == "json_schema":  # whose grammar has one way to write
            return look
        matcher = _grammars().compile(source).matcher.deep_copy()
    except (BatchdecodeError, ImportError):  # the server may know other dialects
        return UNDECIDED
    is_kept = matcher.try_consume_tokens([*output]) == len(output) and matcher.is_accepting()
    if matcher.is_error():  # a limit of llguidance
        return UNDECIDED
    return Look(None if is_kept else "the grammar does not accept it")
