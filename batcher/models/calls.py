"""Calls that may be slow or fail, such as requests over a network: many at once, and repeated.

Rule: whatever the called code does, a call ends, with an answer or a `CallFailure`, and no later
than `call_timeout` after its first attempt has begun.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError
from batcher.foreign import child_ends_here
from batcher.models.background import BackgroundLoop, Waiting, Workers
from batcher.models.retrying import CallFailure, failure_of, is_worth_retry

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")
Function = Callable[..., Any]
Arguments = Sequence[Any]

MAX_BACKOFF = 30.0  # seconds
_JITTER = Random()  # noqa: S311 - no secret; of our own, as an LLM may have seeded the common one


class CallSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How often, how long and how many at once; all times in seconds."""

    max_concurrency: Annotated[int, Meta(ge=1, le=4096)] = 32
    timeout: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # of each attempt
    call_timeout: Annotated[float, Meta(gt=0, le=86400)] = 120.0  # of all, with the pauses
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 4
    backoff: Annotated[float, Meta(ge=0, le=MAX_BACKOFF)] = 0.5  # before the second attempt


def checked_settings(settings: CallSettings | None) -> CallSettings:
    """Return `settings`, by default the usual ones.

    Raises:
        BatchdecodeError: one is out of its range.
    """
    if settings is None:
        return CallSettings()
    try:  # an object that is one already would not be looked at
        return convert(
            asdict(settings) if isinstance(settings, CallSettings) else settings, CallSettings
        )
    except ValidationError as error:
        raise BatchdecodeError(f"call settings: {error}") from None


class Calls:
    """Calls of other people's functions, at most `settings.max_concurrency` at once.

    A plain function is called in a thread, so it has to be safe for that; a coroutine function in
    an event loop, always the same, which it must not block.

    waiting: entered while calls are in flight; what breaks it off cancels them.
    """

    def __init__(self, settings: CallSettings) -> None:
        import asyncio  # noqa: PLC0415 - only models that need it pay for it

        import tenacity  # noqa: PLC0415 - as above

        self.waiting: Waiting = nullcontext
        self.settings = settings
        self.workers = Workers()
        self.backoff = tenacity.wait_exponential(settings.backoff, max=MAX_BACKOFF)
        self.permits = asyncio.Semaphore(settings.max_concurrency)
        self._loop = BackgroundLoop()

    def run(
        self, function: Function, arguments: Sequence[Arguments], read: Callable[[Any], T]
    ) -> list[T | CallFailure]:
        """Return what `function` answers to each of `arguments`, or why it does not.

        arguments: every attempt gets copies of them.
        read: what an answer stands for; a ValueError says that it is garbage, and is retried.
        """
        from concurrent.futures import CancelledError  # noqa: PLC0415 - as above

        calls = [_Call(self, function, each, read) for each in arguments]
        try:
            return self._loop.run(_answers(calls), self.waiting)
        except CancelledError:  # nobody here does that: a call did it to all tasks of the loop
            failure = CallFailure("was cancelled from within", is_worth_retry=False)
            return [failure for _ in arguments]


async def _answers(calls: "Sequence[_Call[T]]") -> list[T | CallFailure]:
    import asyncio  # noqa: PLC0415 - as above

    return await asyncio.gather(*[call.answer() for call in calls])


class _Call(Generic[T]):
    """One call, with its attempts, which share the time that it may take.

    A failed attempt is repeated after `backoff` seconds, the next after twice as many and so on, or
    after as many as the server asks for, and up to `backoff` more, by chance: calls that failed
    together do not come again together.  A plain function that blocks is left to itself.
    """

    def __init__(
        self, calls: Calls, function: Function, arguments: Arguments, read: Callable[[Any], T]
    ) -> None:
        self._calls, self._settings = calls, calls.settings
        self._function, self._arguments, self._read = function, arguments, read
        self._deadline: float | None = None  # from the first attempt on, which may have to wait

    async def answer(self) -> T | CallFailure:
        """Return the answer of the first attempt that has one, else why the last has none."""
        import asyncio  # noqa: PLC0415 - as above

        import tenacity  # noqa: PLC0415 - as above

        retrying = tenacity.AsyncRetrying(
            sleep=asyncio.sleep,
            stop=self._is_over,
            wait=self._pause,
            retry=tenacity.retry_if_exception(is_worth_retry),
            reraise=True,
        )
        try:
            return await retrying(self._attempt)
        except CallFailure as failure:
            return self._last(failure, retrying.statistics["attempt_number"])

    def _pause(self, state: "tenacity.RetryCallState") -> float:
        """Return the seconds before the next attempt."""
        failure = state.outcome.exception() if state.outcome is not None else None
        asked = failure.retry_after if isinstance(failure, CallFailure) else None
        shortest = self._calls.backoff(state) if asked is None else asked
        return shortest + _JITTER.uniform(0, self._settings.backoff)

    def _is_over(self, state: "tenacity.RetryCallState") -> bool:
        """Return whether there is no other attempt, or no time for one."""
        is_last = state.attempt_number >= self._settings.max_attempts
        return is_last or state.upcoming_sleep >= self._time_left()

    def _time_left(self) -> float:
        """Return the seconds until the call has to end; the first time, let them begin."""
        import asyncio  # noqa: PLC0415 - as above

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
        import asyncio  # noqa: PLC0415 - as above

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
        import asyncio  # noqa: PLC0415 - as above
        from inspect import isawaitable, iscoroutinefunction  # noqa: PLC0415 - as above

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
