"""Requests in flight: each a task of one event loop, which runs only while a step waits.

Rule: tasks only record what arrives; the next step decides what it means for a row.  An attempt
that fails before its first token is retried in the same slot.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from batcher.models.calls import pause_after
from batcher.remote.client import Client
from batcher.remote.failures import ServerFailure
from batcher.remote.inputs import RemoteSequence
from batcher.remote.protocol import Body
from batcher.remote.rate import Rate
from batcher.remote.reply import StreamEvent, reply_to
from batcher.remote.settings import ServerSettings

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
        """Ask for a row; the rate has allowed it."""
        self._rate.note_sent(self._now())
        self._tasks[row] = self._loop.create_task(self._ask(row, body))
        self._tasks[row].add_done_callback(self._note_bug)

    def send_again(self) -> None:
        """Send paused requests again, as far as the rate allows."""
        while self._returning:
            if self._rate.why_not(self._now()) is not None:
                return
            self._rate.note_sent(self._now())
            self._returning.popleft().set_result(None)

    @property
    def has_returning(self) -> bool:
        """Whether paused requests wait for the rate to allow another attempt."""
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
        """Cancel all that is in flight, and close all connections."""
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
        self._loop.run_until_complete(self._until_woken(seconds))

    async def _until_woken(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wakeup.wait()

    async def _ask(self, row: RemoteSequence, body: Body) -> None:
        """Ask until there is an answer, or no attempt is left."""
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
            await self._return(pause)
        row.text += row.reply.flush()
        self._news.ended.append(Attempt(row, failure, number, sent))
        self._wakeup.set()

    async def _attempt(self, row: RemoteSequence, body: Body) -> ServerFailure | None:
        """Ask once; return why there is no answer, or not all of it."""
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
        """Record what a chunk brings."""
        num_tokens, text = row.reply.take(chunk)
        row.text += text
        if num_tokens:
            received = self._news.received
            received[row] = received.get(row, 0) + num_tokens
            self._wakeup.set()

    async def _return(self, delay: float) -> None:
        """Return after a pause, when the rate allows another attempt."""
        await asyncio.sleep(delay)
        turn = self._loop.create_future()
        self._returning.append(turn)
        self._news.has_returned = True
        self._wakeup.set()
        await turn
