"""Requests in flight: each a task of one event loop, which runs only while a step waits.

Rule: tasks only record what arrives; the next step decides what it means for a row.  An attempt
that fails before its first token is retried in the same slot.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from batcher.events import ArriveReason, BlockedReason
from batcher.models.calls import pause_after
from batcher.remote.client import Client
from batcher.remote.protocol import Body, ServerFailure
from batcher.remote.reply import Reply, StreamEvent, reply_to
from batcher.remote.settings import ServerSettings
from batcher.request import Request
from batcher.scheduling.sequence import Schedulable


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
        """Return the ids since the last call, None if they are not known, and the text."""
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
        while self._returning:
            if self._rate.why_not(self._now()) is not None:
                return
            self._rate.note_sent(self._now())
            self._returning.popleft().set_result(None)

    @property
    def has_returning(self) -> bool:
        return bool(self._returning)

    def listen(self, until: float | None) -> News:
        """Wait until something arrives, or until `until`; return what has arrived."""
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
        """Let `listen` raise what a task has raised, as nothing else would end its row."""
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
