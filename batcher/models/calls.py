"""Calls that may be slow or fail, such as requests over a network: many at once, and repeated.

Rule: whatever the called code does, a call ends, with an answer or a `CallFailure`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError, describe
from batcher.models.background import BackgroundLoop, Workers

T = TypeVar("T")
Function = Callable[..., Any]
Arguments = Sequence[Any]

MAX_BACKOFF = 30.0  # seconds
PROGRAMMING_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    NameError,
    NotImplementedError,
    SyntaxError,
    SystemExit,
    TypeError,
)
REFUSALS = {*range(400, 500)} - {408, 425, 429}  # HTTP statuses that stay when asked again


class CallSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How often, how long and how many at once; all times in seconds."""

    max_concurrency: Annotated[int, Meta(ge=1, le=4096)] = 32
    timeout: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # of each attempt
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


class CallFailure(Exception):  # noqa: N818 - it is handed out more often than raised
    """Why a call has no answer."""

    def __init__(self, message: str, *, is_worth_retry: bool) -> None:
        super().__init__(message)
        self.is_worth_retry = is_worth_retry


class Calls:
    """Calls of other people's functions, at most `settings.max_concurrency` at once.

    A plain function is called in a thread, so it has to be safe for that; a coroutine function in
    an event loop, always the same, which it must not block.  A failed attempt is repeated after
    `backoff` seconds, then after twice as many, and so on, unless it raised one of
    PROGRAMMING_ERRORS or has an HTTP status of REFUSALS.  A call that blocks beyond its time-out is
    left to itself.
    """

    def __init__(self, settings: CallSettings) -> None:
        import asyncio  # noqa: PLC0415 - only models that need it pay for it

        self._settings = settings
        self._loop, self._workers = BackgroundLoop(), Workers()
        self._permits = asyncio.Semaphore(settings.max_concurrency)

    def run(
        self, function: Function, arguments: Sequence[Arguments], read: Callable[[Any], T]
    ) -> list[T | CallFailure]:
        """Return what `function` answers to each of `arguments`, or why it does not.

        arguments: every attempt gets copies of them.
        read: what an answer stands for; a ValueError says that it is garbage, and is retried.
        """
        from concurrent.futures import CancelledError  # noqa: PLC0415 - as above

        try:
            return self._loop.run(self._run_all(function, arguments, read))
        except CancelledError:  # nobody here does that: a call did it to all tasks of the loop
            failure = CallFailure("was cancelled from within", is_worth_retry=False)
            return [failure for _ in arguments]

    async def _run_all(
        self, function: Function, arguments: Sequence[Arguments], read: Callable[[Any], T]
    ) -> list[T | CallFailure]:
        import asyncio  # noqa: PLC0415 - as above

        return await asyncio.gather(*[self._run_one(function, each, read) for each in arguments])

    async def _run_one(
        self, function: Function, arguments: Arguments, read: Callable[[Any], T]
    ) -> T | CallFailure:
        """Return the answer of the first attempt that has one, else why the last has none."""
        import asyncio  # noqa: PLC0415 - as above

        import tenacity  # noqa: PLC0415 - as above

        retrying = tenacity.AsyncRetrying(
            sleep=asyncio.sleep,
            stop=tenacity.stop_after_attempt(self._settings.max_attempts),
            wait=tenacity.wait_exponential(self._settings.backoff, max=MAX_BACKOFF),
            retry=tenacity.retry_if_exception(_is_worth_retry),
            reraise=True,
        )
        try:
            return await retrying(self._attempt, function, arguments, read)
        except CallFailure as failure:
            num_attempts = retrying.statistics["attempt_number"]
            if num_attempts == 1:
                return failure
            return CallFailure(f"{failure} (attempt {num_attempts})", is_worth_retry=False)

    async def _attempt(
        self, function: Function, arguments: Arguments, read: Callable[[Any], T]
    ) -> T:
        import asyncio  # noqa: PLC0415 - as above

        timeout = self._settings.timeout
        async with self._permits:
            task = asyncio.ensure_future(self._call(function, arguments))
            try:  # wait_for would wait for a task that does not let itself be cancelled
                is_done = bool((await asyncio.wait([task], timeout=timeout))[0])
            finally:
                task.cancel()
        if not is_done:
            raise CallFailure(f"timed out after {timeout:g} s", is_worth_retry=True)
        answer = task.result()
        if isinstance(answer, CallFailure):
            raise answer
        try:
            return read(answer)
        except ValueError as error:
            raise CallFailure(f"returned {error}", is_worth_retry=True) from None
        except BaseException as error:  # noqa: BLE001 - an answer may hold code of its own
            raise _failure(error) from None

    async def _call(self, function: Function, arguments: Arguments) -> Any:
        """Return the answer of one call; a CallFailure, not raised, if it raised something."""
        import asyncio  # noqa: PLC0415 - as above
        from inspect import isawaitable, iscoroutinefunction  # noqa: PLC0415 - as above

        arguments = [copy(argument) for argument in arguments]
        try:
            if iscoroutinefunction(function):
                return await function(*arguments)
            future = self._workers.submit(lambda: _outcome(function, arguments))
            answer = await asyncio.wrap_future(future)
            return await answer if isawaitable(answer) else answer
        except BaseException as error:  # noqa: BLE001 - it must not end the loop
            return _failure(error)


def _outcome(function: Function, arguments: Arguments) -> Any:
    """Return the answer, or a CallFailure: a future does not take every exception."""
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it raises is its failure
        return _failure(error)


def _failure(error: BaseException) -> CallFailure:
    is_worth_retry = not isinstance(error, PROGRAMMING_ERRORS) and not _is_refusal(error)
    return CallFailure(f"raised {describe(error)}", is_worth_retry=is_worth_retry)


def _is_refusal(error: BaseException) -> bool:
    """Return whether it carries an HTTP status that says that the request itself is wrong."""
    names = ("status_code", "status", "code")  # of requests and httpx; of aiohttp; of urllib
    try:
        carriers = (error, getattr(error, "response", None))
        found = [getattr(carrier, name, None) for carrier in carriers for name in names]
    except Exception:  # noqa: BLE001 - even these are somebody else's code
        return False
    return any(isinstance(status, int) and status in REFUSALS for status in found)


def _is_worth_retry(error: BaseException) -> bool:
    return isinstance(error, CallFailure) and error.is_worth_retry
