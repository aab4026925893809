"""Threads that nobody waits for: an event loop of our own, and workers for calls that block.

All of them are daemons, so a call that hangs keeps neither the caller nor the end of the
interpreter; they end when the object that started them is gone.
"""

import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from batcher.foreign import child_ends_here

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

T = TypeVar("T")
Job = Callable[[], None]
Waiting = Callable[[], AbstractContextManager[None]]

GRACE = 0.3  # seconds


class BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        import asyncio  # noqa: PLC0415 - only models that need it pay for it

        self._loop, is_over = asyncio.new_event_loop(), Event()
        work = (self._loop, is_over)
        Thread(target=_run_until_over, args=work, name="batcher-loop", daemon=True).start()
        stop = weakref.finalize(self, self._loop.call_soon_threadsafe, partial(_end, *work))
        stop.atexit = False  # the thread is a daemon

    def run(self, coroutine: Coroutine[Any, Any, T], waiting: Waiting = nullcontext) -> T:
        """Return what `coroutine` returns; if this is interrupted, it is cancelled.

        waiting: entered meanwhile.
        """
        import asyncio  # noqa: PLC0415 - as above

        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            with waiting():
                return future.result()
        except BaseException:
            if future.cancel():
                self._let_end()
            raise

    def _let_end(self) -> None:
        """Give what was cancelled a moment to put its things in order."""
        import asyncio  # noqa: PLC0415 - as above

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_others_end(), self._loop).result(2 * GRACE)


class Workers:
    """Runs each call in a thread that no other call holds; threads are used again."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._num_idle = Semaphore(0)
        stop = weakref.finalize(self, self._jobs.put, None)
        stop.atexit = False  # the threads are daemons

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Start a call of `function` and return the future that it completes."""
        from concurrent.futures import Future  # noqa: PLC0415 - as above

        future: Future[T] = Future()
        if not self._num_idle.acquire(blocking=False):
            work = (self._jobs, self._num_idle)
            Thread(target=_work, args=work, name="batcher-worker", daemon=True).start()
        self._jobs.put(lambda: _complete(future, function))
        return future


async def _others_end() -> None:
    import asyncio  # noqa: PLC0415 - as above

    current = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not current]
    if others:
        await asyncio.wait(others, timeout=GRACE)


def _run_until_over(loop: "asyncio.AbstractEventLoop", is_over: Event) -> None:
    """Run `loop` until that is set, then cancel what is left in it and close it.

    What runs in it is others' code: that can stop it, and no task is safe from being cancelled.
    """
    import asyncio  # noqa: PLC0415 - as above

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        while not is_over.is_set():
            with suppress(BaseException):  # SystemExit passes through a loop
                runner.get_loop().run_forever()


def _end(loop: "asyncio.AbstractEventLoop", is_over: Event) -> None:
    is_over.set()
    loop.stop()


def _work(jobs: "SimpleQueue[Job | None]", num_idle: Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        num_idle.release()
    jobs.put(None)  # for the next worker


def _complete(future: "Future[T]", function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        with child_ends_here():
            answer = function()
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        future.set_exception(error)
    else:
        future.set_result(answer)
