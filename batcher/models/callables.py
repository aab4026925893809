"""Adapters for callables and LLMs: whole prefixes in, tokens or logits out.

Calls of an LLM may be slow or fail, so they run in parallel and are retried. A call always ends,
with an answer or a `CallFailure`, at most `call_timeout` after its first attempt began. All threads
are daemons, so that a hanging call blocks neither the caller nor the exit of the interpreter; they
end with the object that started them.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from itertools import count, islice
from math import isfinite
from queue import SimpleQueue
from random import Random
from threading import Event, Semaphore, Thread
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError, Failure, ModelError, describe
from batcher.foreign import Raised, RaisedError, attribute_of, child_ends_here, note_raised, raised
from batcher.models.base import (
    Batch,
    FloatArray,
    ModelOutput,
    OutputKind,
    Prefixes,
    Tokenizer,
    extend_prefixes,
)
from batcher.models.tokenizers import ByteTokenizer, read_logits, read_token_id, shown

MAX_BACKOFF = 30.0  # seconds
_JITTER = Random()  # noqa: S311 - not secret; an LLM may have seeded the global one
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
REFUSALS = {*range(400, 500)} - {408, 425, 429}  # HTTP statuses that do not change on a retry
SECONDS_OF = {"retry-after-ms": 0.001, "retry-after": 1.0}  # by precedence


class CallSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Retries, timeouts (in seconds) and concurrency of calls."""

    max_concurrency: Annotated[int, Meta(ge=1, le=4096)] = 32
    timeout: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # of each attempt
    call_timeout: Annotated[float, Meta(gt=0, le=86400)] = 120.0  # of all attempts and pauses
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 4
    backoff: Annotated[float, Meta(ge=0, le=MAX_BACKOFF)] = 0.5  # before the second attempt


def checked_settings(settings: CallSettings | None) -> CallSettings:
    """Return validated `settings`, or the defaults."""
    if settings is None:
        return CallSettings()
    try:  # convert does not validate an existing instance
        return convert(
            asdict(settings) if isinstance(settings, CallSettings) else settings, CallSettings
        )
    except ValidationError as error:
        raise BatchdecodeError(f"call settings: {error}") from None


class CallFailure(Exception):  # noqa: N818 - it is handed out more often than raised
    """The reason why a call has no answer.

    code: one of RUN_ERROR_CODES. retry_after: the pause in seconds that a server requests.
    raised: the exception of the called code, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        is_worth_retry: bool,
        code: str = "model-error",
        retry_after: float | None = None,
        raised: Raised | None = None,
    ) -> None:
        super().__init__(message)
        self.is_worth_retry, self.code = is_worth_retry, code
        self.retry_after, self.raised = retry_after, raised

    def fatal(self, what: str) -> BatchdecodeError:
        """Return a BatchdecodeError of this failure; `what` was called."""
        if self.raised is None:
            return BatchdecodeError(f"{what} {self}")
        place = "" if self.raised.place is None else f" ({self.raised.place})"
        return RaisedError(f"{what} {self}{place}", self.raised)


def pause_after(
    num_attempts: int, asked: float | None, backoff: float, longest: float = MAX_BACKOFF
) -> float:
    """Return the seconds before the next attempt.

    They are `asked` for by the server, or `backoff`, doubled each time, at most `longest`. Up to
    `backoff` more are added at random, so that simultaneous failures do not retry together.
    """
    if asked is None:
        asked = min(backoff * 2 ** (num_attempts - 1), longest)
    return asked + _JITTER.uniform(0, backoff)


def failure_of(error: BaseException) -> CallFailure:
    is_hopeless, retry_after = isinstance(error, PROGRAMMING_ERRORS), None
    # An HTTP status and headers are on the error itself in urllib and aiohttp, and on its
    # `response` in requests, httpx and openai.
    with suppress(BaseException):  # attributes may be foreign code, too
        for carrier in (error, getattr(error, "response", None)):
            for name in ("status_code", "status", "code"):
                status = getattr(carrier, name, None)
                is_hopeless |= isinstance(status, int) and status in REFUSALS
            headers = getattr(carrier, "headers", None)
            if retry_after is None and headers is not None:
                retry_after = retry_after_of(headers)
    return CallFailure(
        f"raised {describe(error)}",
        is_worth_retry=not is_hopeless,
        retry_after=retry_after,
        raised=raised(error),
    )


def retry_after_of(headers: Any) -> float | None:
    """Return the pause in seconds that response headers request, or None."""
    given = {str(name).lower(): value for name, value in headers.items()}
    for name, unit in SECONDS_OF.items():
        if name not in given:
            continue
        value = given[name]
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        try:
            seconds = float(text) * unit
        except ValueError:
            try:
                date = parsedate_to_datetime(text)
            except ValueError:
                continue
            date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
            seconds = (date - datetime.now(UTC)).total_seconds()
        if isfinite(seconds):
            return max(seconds, 0.0)
    return None


class PrefixModel:
    """A Model without a cache, around a user's object.

    Its attributes `settings`, `tokenizer`, `max_context` and `session_overflow` are used if
    present; without a tokenizer, text is bytes.
    """

    gives: OutputKind
    vocab_size: int | None
    eos_token_id: int | None

    def __init__(self, asked: Any, name: str) -> None:
        self.name = name
        self.settings: dict[str, Any] = attribute_of(asked, "settings", {})
        tokenizer = attribute_of(asked, "tokenizer", None)
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.max_context: int | None = attribute_of(asked, "max_context", None)
        self.session_overflow: Any = attribute_of(asked, "session_overflow", None)
        self._prefixes: Prefixes = {}
        self._num_slots = 0

    def forward(self, batch: Batch) -> ModelOutput:
        """Request the next token, or the logits, of every row that yields."""
        extend_prefixes(self._prefixes, batch)
        has_logits = self.gives == "logits"
        slots = (batch.logit_slots if has_logits else batch.slots).tolist()
        answers = self._ask([self._prefixes[slot].copy() for slot in slots]) if slots else []
        tokens = np.zeros(self._num_slots, np.int64)
        logits = np.zeros((len(slots), self.vocab_size or 0), np.float32) if has_logits else None
        failed: dict[int, str | Failure] = {}
        for row, (slot, answer) in enumerate(zip(slots, answers, strict=True)):
            if isinstance(answer, str | Failure):
                failed[slot] = answer
            elif logits is None:
                tokens[slot] = answer
            else:
                logits[row] = answer
        return ModelOutput(tokens, failed, logits)

    def _ask(self, prefixes: list[list[int]]) -> Sequence[int | FloatArray | str | Failure]:
        """Return the token or the logits after each of `prefixes`, or an error."""
        raise NotImplementedError

    def allocate(self, num_slots: int) -> None:
        self._prefixes.clear()
        self._num_slots = num_slots

    def fork(self, source: int, target: int) -> None:
        self._prefixes[target] = self._prefixes[source].copy()

    def release(self, slot: int) -> None:
        self._prefixes.pop(slot, None)


ModelNext = Callable[[list[list[int]]], Iterable[Any]]


class CallableModel(PrefixModel):
    """A Model that calls `model_next` once per step with the whole prefix of every row.

    model_next: takes a list of token-id lists, prompt and output so far, in slot order, which it
    may keep or change; returns one token id for each or, if its attribute `gives` is "logits", the
    logits [vocab] of each. Attributes `vocab_size` (required with logits), `eos_token_id`,
    `tokenizer` and `settings` are used if present. By default any id is valid, nothing is EOS, and
    text is bytes.
    """

    KINDS = ("tokens", "logits")  # allowed values of `gives`

    def __init__(self, model_next: ModelNext, name: str | None = None) -> None:
        own_name = getattr(model_next, "__qualname__", type(model_next).__qualname__)
        super().__init__(model_next, name or str(own_name))
        self.gives = attribute_of(model_next, "gives", "tokens")
        self.vocab_size = attribute_of(model_next, "vocab_size", None)
        self.eos_token_id = attribute_of(model_next, "eos_token_id", None)
        self._model_next = model_next

    def _ask(self, prefixes: list[list[int]]) -> Sequence[int | FloatArray | str | Failure]:
        num_rows = len(prefixes)  # the callable may change the list
        answers = None
        try:
            with child_ends_here():
                answer: Any = self._model_next(prefixes)
                if isinstance(answer, Iterable):
                    answers = list(islice(answer, num_rows + 1))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything
            note_raised(raised(error))
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if answers is None:
            instead = f"{shown(answer)}, not a token for each of {num_rows} sequences"
            raise ModelError(f"{self.name} returned {instead}")
        if len(answers) != num_rows:
            number = len(answers) if len(answers) < num_rows else f"more than {num_rows}"
            raise ModelError(f"{self.name} returned {number} tokens for {num_rows} sequences")
        found: list[int | FloatArray | str | Failure] = []
        for answer in answers:
            try:
                if self.gives == "logits":
                    found.append(read_logits(self.vocab_size, answer))
                else:
                    found.append(read_token_id(self.vocab_size, answer))
            except ValueError as error:
                found.append(f"{self.name} returned {error}")
        return found


T = TypeVar("T")
Function = Callable[..., Any]
Arguments = Sequence[Any]

GRACE = 0.3  # seconds


class Calls:
    """Calls of user functions, at most `settings.max_concurrency` at once.

    A plain function runs in a thread pool, so it has to be thread-safe. A coroutine function runs
    in an event loop in one thread, which it must not block.

    waiting: context manager around the wait; an exception in it cancels the calls.
    """

    def __init__(self, settings: CallSettings) -> None:
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.settings = settings
        self.permits = asyncio.Semaphore(settings.max_concurrency)
        self._jobs: SimpleQueue[tuple[Future[Any], Function, Arguments] | None] = SimpleQueue()
        self._num_idle = Semaphore(0)  # idle threads
        self._loop = loop = asyncio.new_event_loop()
        is_over = Event()
        work = (loop, is_over)
        Thread(target=_run_until_over, args=work, name="batcher-loop", daemon=True).start()

        def end() -> None:
            is_over.set()
            loop.stop()

        for finish in (partial(loop.call_soon_threadsafe, end), partial(self._jobs.put, None)):
            weakref.finalize(self, finish).atexit = False  # all threads are daemons

    def run(
        self, function: Function, arguments: Sequence[Arguments], read: Callable[[Any], T]
    ) -> list[T | CallFailure]:
        """Return the answer of `function` to each of `arguments`, or a CallFailure.

        arguments: every attempt gets copies.
        read: converts an answer; a ValueError means that it is invalid, and is retried.
        """

        async def answers() -> list[T | CallFailure]:
            return await asyncio.gather(*[self._answer(function, each, read) for each in arguments])

        future = asyncio.run_coroutine_threadsafe(answers(), self._loop)

        async def others_end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=GRACE)

        try:
            with self.waiting():
                return future.result()
        except BaseException as error:
            if future.cancel():  # after an interrupt
                with suppress(TimeoutError):  # time for cleanup
                    asyncio.run_coroutine_threadsafe(others_end(), self._loop).result(2 * GRACE)
            if not isinstance(error, CancelledError):
                raise
            # a call cancelled all tasks of the loop
            failure = CallFailure("was cancelled from within", is_worth_retry=False)
            return [failure for _ in arguments]

    async def _answer(
        self, function: Function, arguments: Arguments, read: Callable[[Any], T]
    ) -> T | CallFailure:
        """Return the answer of the first successful attempt, or the last failure."""
        settings, now = self.settings, asyncio.get_running_loop().time
        deadline: float | None = None  # from the start of the first attempt
        for number in count(1):
            async with self.permits:
                deadline = now() + settings.call_timeout if deadline is None else deadline
                left = deadline - now()
                task = asyncio.ensure_future(self._attempt(function, arguments))
                try:  # wait_for would wait for a task that ignores cancellation
                    done, _ = await asyncio.wait([task], timeout=min(settings.timeout, left))
                finally:
                    task.cancel()
            answer = task.result() if done else None
            if isinstance(answer, CallFailure):
                failure = answer
            elif done:
                try:
                    return read(answer)
                except ValueError as error:
                    failure = CallFailure(f"returned {error}", is_worth_retry=True)
                except BaseException as error:  # noqa: BLE001 - an answer may hold code of its own
                    failure = failure_of(error)
            else:
                is_over = left <= settings.timeout
                seconds = settings.call_timeout if is_over else settings.timeout
                message = f"timed out after {seconds:g} s"
                failure = CallFailure(message, is_worth_retry=not is_over, code="call-timeout")
            pause = pause_after(number, failure.retry_after, settings.backoff)
            can_retry = failure.is_worth_retry and number < settings.max_attempts
            if not can_retry or pause >= deadline - now():
                break
            await asyncio.sleep(pause)
        remarks = [f"attempt {number}"] if number > 1 else []
        if can_retry:
            failure.code = "call-timeout"
            remarks.append(f"no time for another attempt within {settings.call_timeout:g} s")
        message = f"{failure} ({'; '.join(remarks)})" if remarks else str(failure)
        return CallFailure(message, is_worth_retry=False, code=failure.code, raised=failure.raised)

    async def _attempt(self, function: Function, arguments: Arguments) -> Any:
        try:
            copies = [copy(argument) for argument in arguments]
            if iscoroutinefunction(function):
                with child_ends_here():
                    return await function(*copies)
            future: Future[Any] = Future()
            if not self._num_idle.acquire(blocking=False):
                work = (self._jobs, self._num_idle)
                Thread(target=_work, args=work, name="batcher-worker", daemon=True).start()
            self._jobs.put((future, function, copies))
            answer = await asyncio.wrap_future(future)
            return await answer if isawaitable(answer) else answer
        except BaseException as error:  # noqa: BLE001 - it must not end the loop
            return failure_of(error)


def _run_until_over(loop: asyncio.AbstractEventLoop, is_over: Event) -> None:
    """Run `loop` until `is_over` is set, then cancel its tasks and close it.

    User code in it may stop the loop or cancel any task.
    """
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        while not is_over.is_set():
            with suppress(BaseException):  # SystemExit passes through a loop
                runner.get_loop().run_forever()


def _work(jobs: SimpleQueue[Any], num_idle: Semaphore) -> None:
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        if future.set_running_or_notify_cancel():
            try:
                with child_ends_here():
                    answer = function(*arguments)
            except BaseException as error:  # noqa: BLE001 - a future does not take every exception
                answer = failure_of(error)
            future.set_result(answer)
        del job, future, function, arguments  # an idle thread holds no references
        answer = None
        num_idle.release()
    jobs.put(None)  # for the next worker


class LLM(Protocol):
    """A user's LLM; methods may be `async`, and must be thread-safe.

    Attributes `vocab_size`, `tokenizer` and `settings` are used if present.
    """

    def next_token_logits(
        self, prev_token_ids: list[int]
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return the logits [vocab] of the token after `prev_token_ids`, a copy."""

    def get_stop_token_id(self) -> int | Awaitable[int]:
        """Return the token that ends a text."""


class LLMModel(PrefixModel):
    """A Model that calls `llm` for the logits of every row, all rows of a step at once.

    A row whose call finally fails, fails alone.  The stop token, EOS, is requested here, and, if
    `llm` has no `vocab_size`, the logits after `probe` or the stop token, to count them.  The first
    step reuses these logits.

    calls: runs the calls.

    Raises:
        BatchdecodeError: these calls failed, or a setting is out of range.
    """

    gives: Literal["logits"] = "logits"
    eos_token_id: int

    def __init__(
        self,
        llm: LLM,
        name: str | None = None,
        call_settings: CallSettings | None = None,
        probe: Sequence[int] | None = None,
    ) -> None:
        call_settings = checked_settings(call_settings)
        super().__init__(llm, name or type(llm).__qualname__)
        self._llm, self.calls = llm, Calls(call_settings)
        read_eos = partial(read_token_id, None)
        self.eos_token_id = self._ask_once("get_stop_token_id", [], read_eos)
        self.vocab_size = attribute_of(llm, "vocab_size", None)
        # a prefix whose logits are known, and these logits
        self._probed: tuple[list[int] | None, Any] = None, None
        if self.vocab_size is None:
            prefix = [self.eos_token_id] if probe is None else [*probe]
            logits = self._ask_once("next_token_logits", [prefix], self._read_first)
            self.vocab_size, self._probed = logits.size, (prefix, logits)

    def _read_first(self, answer: Any) -> FloatArray:
        logits, eos = read_logits(None, answer), self.eos_token_id
        if logits.size <= eos:
            raise ValueError(f"{logits.size} logits, too few for its stop token {eos}")
        return logits

    def _ask(self, prefixes: list[list[int]]) -> Sequence[int | FloatArray | str | Failure]:
        (known, logits), self._probed = self._probed, (None, None)
        asked = [[prefix] for prefix in prefixes if prefix != known]
        read = partial(read_logits, self.vocab_size)
        answers = iter(self.calls.run(self._llm.next_token_logits, asked, read))
        found: list[FloatArray | Failure] = []
        for prefix in prefixes:
            answer = logits if prefix == known else next(answers)
            if isinstance(answer, CallFailure):
                if answer.raised is not None:
                    note_raised(answer.raised)
                answer = Failure(answer.code, f"{self.name} {answer}")
            found.append(answer)
        return found

    def _ask_once(self, method: str, arguments: Arguments, read: Callable[[Any], T]) -> T:
        [answer] = self.calls.run(getattr(self._llm, method), [arguments], read)
        if isinstance(answer, CallFailure):
            raise answer.fatal(f"{self.name}: {method}")
        return answer
