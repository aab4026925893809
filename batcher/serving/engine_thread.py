"""The thread that steps the engine, and its exchange of messages with the event loop.

Rule: only this thread touches the engine; only the event loop touches exchanges.  Requests and
aborts go to the thread through one queue, the outcomes of steps come back through another.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, Semaphore, Thread
from typing import Protocol

from msgspec.structs import force_setattr

from batcher.engine import Engine, StepOutcome
from batcher.errors import BatchdecodeError, InvariantError, RequestError, describe
from batcher.events import TokenEvent
from batcher.request import Request
from batcher.result import Result
from batcher.scheduling.clock import PacedClock, WallClock
from batcher.serving.http import (
    BAD_REQUEST,
    RETRY_AFTER,
    TOO_MANY,
    UNAVAILABLE,
    ApiError,
    engine_failed,
)

MAX_UNHEARD = 64  # outcomes that the event loop has not handled; then the next step waits

MAX_UNREAD = 4096  # steps with tokens that a client has not read; then its request is aborted

News = TokenEvent | Result


class Exchange:
    """The news of the requests of one client, for the event loop alone.

    names: of the requests in the engine.  wants_tokens: whether to report tokens.
    num_left: results to come.  failure: why none will come.
    """

    def __init__(
        self, requests: Sequence[Request], names: Sequence[str], *, wants_tokens: bool
    ) -> None:
        self.names, self.wants_tokens = names, wants_tokens
        # Places in the answer: the first of each request, and how many ranked results it has.
        self._places = {name: place * requests[0].n for place, name in enumerate(names)}
        self._ranks = None if requests[0].best_of is None else dict.fromkeys(names, 0)
        self.num_left = sum(request.n for request in requests)
        self.failure: Exception | None = None
        self._news: list[News] = []
        self._has_news = asyncio.Event()

    def tell(self, news: News) -> bool:
        """Add news; return whether the client has left too much unread."""
        self.num_left -= isinstance(news, Result)
        if self.wants_tokens or isinstance(news, Result):
            self._news.append(news)
            if self.wants_tokens or not self.num_left:
                self._has_news.set()
        return len(self._news) > MAX_UNREAD

    def place_of(self, news: News) -> int:
        """Return the place of a choice; the results of best_of come in the order of their rank."""
        rank = news.index
        if self._ranks is not None and isinstance(news, Result):
            rank = self._ranks[news.id]
            self._ranks[news.id] += 1
        return self._places[news.id] + rank

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self._has_news.set()

    async def take(self) -> list[News]:
        """Wait for news and return them; without tokens, wait for all results.

        Raises:
            ApiError, ClientGoneError: nothing more will come.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self.failure is not None:
            raise self.failure
        news, self._news = self._news, []
        return news


ServerClock = PacedClock | WallClock


class Watcher(Protocol):
    """Observes the engine in its thread: metrics, a trace, a live view."""

    def after_step(self, outcome: StepOutcome) -> None:
        """Called after each step."""

    def while_idle(self) -> float | None:
        """Called while nothing runs; return the seconds until the next call, or None."""


class EngineThread:
    """Runs an engine for an event loop.

    max_queue: outputs that may wait for a slot.  prefix: of request names, one for each worker.
    exchanges: the requests in the engine, by their names there.
    num_open: outputs to come; most_open: its limit.
    is_draining: set from outside to refuse new requests.
    has_failed: whether the engine raised; failure: why it makes no more steps.
    on_end: called in the event loop then.
    """

    def __init__(
        self, engine: Engine, clock: ServerClock, watcher: Watcher, max_queue: int, prefix: str = ""
    ) -> None:
        self.engine, self.clock = engine, clock
        self.exchanges: dict[str, Exchange] = {}
        self.num_open, self.most_open = 0, engine.batch_size + max_queue
        self.is_draining = self.has_failed = self._is_over = False
        self.failure: str | None = None
        self.on_end: Callable[[], object] = lambda: None
        self._watcher, self._prefix, self._num_requests = watcher, prefix, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[partial[None]] = deque()  # calls for the thread
        self._has_mail, self._room = Event(), Semaphore(MAX_UNHEARD)
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # -- in the event loop -----------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.clock.elapsed()  # starts the clock
        self._thread.start()

    def name_for(self, given: str | None) -> str:
        """Return a new name in the engine; given: the client's name of the request."""
        self._num_requests += 1
        number = f"{self._prefix}{self._num_requests}"
        return number if given is None else f"{given}.{number}"

    def check_room(self, num_outputs: int) -> None:
        """Raise an ApiError if the server is full, draining or has failed."""
        if self.failure is not None:
            raise engine_failed()
        retry = {"retry-after": RETRY_AFTER}
        if self.is_draining:
            message = "the server is shutting down and accepts no more requests"
            raise ApiError(UNAVAILABLE, "draining", message, headers=retry)
        if self.num_open and self.num_open + num_outputs > self.most_open:
            message = (
                f"{self.num_open} of at most {self.most_open} outputs are running or waiting; "
                "try again later"
            )
            raise ApiError(TOO_MANY, "queue-full", message, headers=retry)

    def submit(
        self,
        requests: Sequence[Request],
        names: Sequence[str],
        arrived: float,
        *,
        wants_tokens: bool,
    ) -> Exchange:
        """Send valid requests to the engine; arrived: when they came, by time.monotonic().

        Raises:
            ApiError: see check_room.
        """
        self.check_room(len(requests) * requests[0].n)
        arrival_time = max(0.0, self.clock.elapsed() - (time.monotonic() - arrived))
        exchange = Exchange(requests, names, wants_tokens=wants_tokens)
        self.num_open += exchange.num_left
        for request, name in zip(requests, names, strict=True):
            force_setattr(request, "arrival_time", arrival_time)
            self.exchanges[name] = exchange
            self._post(self._enqueue, request, name, wants_tokens)
        return exchange

    def release(self, exchange: Exchange) -> None:
        if self._forget(exchange):
            for name in exchange.names:
                self._post(self._abort, name)

    def stop(self) -> None:
        self._post(self._end)
        self._fail_all(ApiError(UNAVAILABLE, "server-ended", "the server has stopped"))

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _post(self, do: Callable[..., None], *arguments: object) -> None:
        self._inbox.append(partial(do, *arguments))
        self._has_mail.set()

    def _forget(self, exchange: Exchange) -> bool:
        if exchange.names[0] not in self.exchanges:
            return False
        for name in exchange.names:
            del self.exchanges[name]
        self.num_open -= exchange.num_left
        return True

    def _hear(self, tokens: Sequence[TokenEvent], results: Sequence[Result]) -> None:
        self._room.release()
        exchanges = self.exchanges
        for event in tokens:
            exchange = exchanges.get(event.id)
            if exchange is not None and exchange.tell(event):  # the client may be gone
                error = ApiError(UNAVAILABLE, "unread", "the client does not read the answer")
                self._fail(event.id, error)
        for result in results:
            exchange = exchanges.get(result.id)
            if exchange is not None:
                exchange.tell(result)
                self.num_open -= 1
                if not exchange.num_left:
                    self._forget(exchange)

    def _fail(self, name: str, error: ApiError) -> None:
        if (exchange := self.exchanges.get(name)) is not None:
            self.release(exchange)
            exchange.fail(error)

    def _hear_end(self, failure: str | None) -> None:
        self.has_failed = failure is not None
        self.failure = failure or "the server has stopped"
        self._fail_all(engine_failed())
        self.on_end()

    def _fail_all(self, error: ApiError) -> None:
        for exchange in [*self.exchanges.values()]:
            self._forget(exchange)
            exchange.fail(error)

    # -- in the thread ---------------------------------------------------------------------------

    def _tell(self, hear: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(hear, *arguments)

    def _run(self) -> None:
        failure = None
        try:
            while not self._is_over:
                if self._inbox:
                    self._inbox.popleft()()
                elif self.engine.has_work:
                    outcome = self.engine.step()
                    self._watcher.after_step(outcome)
                    if outcome.tokens or outcome.results:
                        self._room.acquire()
                        self._tell(self._hear, outcome.tokens, outcome.results)
                    if isinstance(self.clock, PacedClock):
                        self.clock.linger()
                else:
                    while not self._has_mail.wait(self._watcher.while_idle()):
                        pass  # without spinning
                    self._has_mail.clear()
        except BaseException as error:  # noqa: BLE001 - a model may raise anything
            is_ours = isinstance(error, BatchdecodeError | InvariantError)
            failure = describe(error) if is_ours else type(error).__name__  # no text of a request
        self._tell(self._hear_end, failure)

    def _enqueue(self, request: Request, name: str, is_streamed: bool) -> None:  # noqa: FBT001 - as it is posted
        try:
            self.engine.enqueue(request, reason="follow", name=name, is_streamed=is_streamed)
        except RequestError as error:
            first = error.problems[0]
            refusal = ApiError(BAD_REQUEST, first.code, first.message, first.field)
            self._tell(self._fail, name, refusal)

    def _abort(self, name: str) -> None:
        with suppress(BatchdecodeError):  # it has ended
            self.engine.abort(name)

    def _end(self) -> None:
        self._is_over = True
