"""Calls that may be slow or fail, such as requests over a network: many at once, and repeated.

Rule: whatever the called code does, a call ends, with an answer or a `CallFailure`, and no later
than `call_timeout` after its first attempt has begun.  Nobody waits for the threads here: all of
them are daemons, so a call that hangs keeps neither the caller nor the end of the interpreter; they
end when the object that started them is gone.
"""

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, Generic, TypeVar

from batcher.foreign import child_ends_here
from batcher.models.calls import CallFailure, CallSettings, failure_of, pause_after

T = TypeVar("T")
Function = Callable[..., Any]
Arguments = Sequence[Any]
Job = Callable[[], None]
Waiting = Callable[[], AbstractContextManager[None]]

GRACE = 0.3  # seconds


class Calls:
    """Calls of other people's functions, at most `settings.max_concurrency` at once.

    A plain function is called in a thread, so it has to be safe for that; a coroutine function in
    an event loop, always the same, which it must not block.

    waiting: entered while calls are in flight; what breaks it off cancels them.
    """

    def __init__(self, settings: CallSettings) -> None:
        self.waiting: Waiting = nullcontext
        self.settings = settings
        self.workers = Workers()
        self.permits = asyncio.Semaphore(settings.max_concurrency)
        self._loop = BackgroundLoop()

    def run(
        self, function: Function, arguments: Sequence[Arguments], read: Callable[[Any], T]
    ) -> list[T | CallFailure]:
        """Return what `function` answers to each of `arguments`, or why it does not.

        arguments: every attempt gets copies of them.
        read: what an answer stands for; a ValueError says that it is garbage, and is retried.
        """
        calls = [_Call(self, function, each, read) for each in arguments]
        try:
            return self._loop.run(_gathered(calls), self.waiting)
        except CancelledError:  # nobody here does that: a call did it to all tasks of the loop
            failure = CallFailure("was cancelled from within", is_worth_retry=False)
            return [failure for _ in arguments]


async def _gathered(calls: "Sequence[_Call[T]]") -> list[T | CallFailure]:
    return await asyncio.gather(*[call.answer() for call in calls])


class _Call(Generic[T]):
    """One call, with its attempts, which share the time that it may take.

    See `pause_after` for the pauses between them.  A plain function that blocks is left to itself.
    """

    def __init__(
        self, calls: Calls, function: Function, arguments: Arguments, read: Callable[[Any], T]
    ) -> None:
        self._calls, self._settings = calls, calls.settings
        self._function, self._arguments, self._read = function, arguments, read
        self._deadline: float | None = None  # from the first attempt on, which may have to wait

    async def answer(self) -> T | CallFailure:
        """Return the answer of the first attempt that has one, else why the last has none."""
        settings, number = self._settings, 1
        while True:
            try:
                return await self._attempt()
            except CallFailure as error:
                failure = error
            pause = pause_after(number, failure.retry_after, settings.backoff)
            is_last = not failure.is_worth_retry or number >= settings.max_attempts
            if is_last or pause >= self._time_left():
                return self._last(failure, number)
            await asyncio.sleep(pause)
            number += 1

    def _time_left(self) -> float:
        """Return the seconds until the call has to end; the first time, let them begin."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._settings.call_timeout
        return self._deadline - now

    def _last(self, failure: CallFailure, num_attempts: int) -> CallFailure:
        """Return the failure of the last attempt as that of the call."""
        code, remarks = failure.code, []
        if num_attempts > 1:
            remarks.append(f"attempt {num_attempts}")
        if failure.is_worth_retry and num_attempts < self._settings.max_attempts:
            code = "call-timeout"
            seconds = self._settings.call_timeout
            remarks.append(f"no time for another attempt within {seconds:g} s")
        message = f"{failure} ({'; '.join(remarks)})" if remarks else str(failure)
        return CallFailure(message, is_worth_retry=False, code=code, raised=failure.raised)

    async def _attempt(self) -> T:
        timeout = self._settings.timeout
        async with self._calls.permits:
            left = self._time_left()
            task = asyncio.ensure_future(self._once())
            try:  # wait_for would wait for a task that does not let itself be cancelled
                is_done = bool((await asyncio.wait([task], timeout=min(timeout, left)))[0])
            finally:
                task.cancel()
        if not is_done:
            is_over = left <= timeout
            seconds = self._settings.call_timeout if is_over else timeout
            message = f"timed out after {seconds:g} s"
            raise CallFailure(message, is_worth_retry=not is_over, code="call-timeout")
        answer = task.result()
        if isinstance(answer, CallFailure):
            raise answer
        try:
            return self._read(answer)
        except ValueError as error:
            raise CallFailure(f"returned {error}", is_worth_retry=True) from None
        except BaseException as error:  # noqa: BLE001 - an answer may hold code of its own
            raise failure_of(error) from None

    async def _once(self) -> Any:
        """Return the answer of one attempt; a CallFailure, not raised, if it raised something."""
        function = self._function
        try:
            arguments = [copy(argument) for argument in self._arguments]
            if iscoroutinefunction(function):
                with child_ends_here():
                    return await function(*arguments)
            future = self._calls.workers.submit(lambda: _outcome(function, arguments))
            answer = await asyncio.wrap_future(future)
            return await answer if isawaitable(answer) else answer
        except BaseException as error:  # noqa: BLE001 - it must not end the loop
            return failure_of(error)


def _outcome(function: Function, arguments: Arguments) -> Any:
    """Return the answer, or a CallFailure: a future does not take every exception."""
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it raises is its failure
        return failure_of(error)


class BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop, is_over = asyncio.new_event_loop(), Event()
        work = (self._loop, is_over)
        Thread(target=_run_until_over, args=work, name="batcher-loop", daemon=True).start()
        stop = weakref.finalize(self, self._loop.call_soon_threadsafe, partial(_end, *work))
        stop.atexit = False  # the thread is a daemon

    def run(self, coroutine: Coroutine[Any, Any, T], waiting: Waiting = nullcontext) -> T:
        """Return what `coroutine` returns; if this is interrupted, it is cancelled.

        waiting: entered meanwhile.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            with waiting():
                return future.result()
        except BaseException:
            if future.cancel():
                with suppress(TimeoutError):  # a moment for it to put its things in order
                    asyncio.run_coroutine_threadsafe(_others_end(), self._loop).result(2 * GRACE)
            raise


class Workers:
    """Runs each call in a thread that no other call holds; threads are used again."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._num_idle = Semaphore(0)
        stop = weakref.finalize(self, self._jobs.put, None)
        stop.atexit = False  # the threads are daemons

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Start a call of `function` and return the future that it completes."""
        future: Future[T] = Future()
        if not self._num_idle.acquire(blocking=False):
            work = (self._jobs, self._num_idle)
            Thread(target=_work, args=work, name="batcher-worker", daemon=True).start()
        self._jobs.put(lambda: _complete(future, function))
        return future


async def _others_end() -> None:
    current = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not current]
    if others:
        await asyncio.wait(others, timeout=GRACE)


def _run_until_over(loop: asyncio.AbstractEventLoop, is_over: Event) -> None:
    """Run `loop` until that is set, then cancel what is left in it and close it.

    What runs in it is others' code: that can stop it, and no task is safe from being cancelled.
    """
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        while not is_over.is_set():
            with suppress(BaseException):  # SystemExit passes through a loop
                runner.get_loop().run_forever()


def _end(loop: asyncio.AbstractEventLoop, is_over: Event) -> None:
    is_over.set()
    loop.stop()


def _work(jobs: SimpleQueue[Job | None], num_idle: Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        num_idle.release()
    jobs.put(None)  # for the next worker


def _complete(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        with child_ends_here():
            answer = function()
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        future.set_exception(error)
    else:
        future.set_result(answer)
