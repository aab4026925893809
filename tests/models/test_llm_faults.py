"""A call that fails is repeated, and then fails its row, alone and with its cause."""

import array
import asyncio
import signal
import threading
import time
import urllib.error
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from examples import mostly_heavy
from fake_llms import (
    EXPECTED,
    KINDS,
    AsyncLLM,
    SyncLLM,
    decoded,
    logits_after,
    made,
    raises,
)

from batcher.models.base import Batch, Chunk


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://h", status, "so it is", {}, None)


class ForeignError(Exception):
    """As requests, httpx (response), aiohttp and openai raise them."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class OwnError(BaseException):
    """Not an Exception."""


class Unreadable:
    def __array__(self, *_: object, **__: object) -> Any:
        raise OwnError("mine")


PASSING = [  # what may be better the next time
    (raises(TimeoutError("slow")), "raised TimeoutError: slow"),
    (raises(http_error(503)), "raised HTTPError: HTTP Error 503: so it is"),
    (raises(http_error(429)), "raised HTTPError: HTTP Error 429"),
    (raises(RuntimeError("odd")), "raised RuntimeError: odd"),
    (raises(StopIteration()), "raised "),
    (raises(asyncio.CancelledError()), "raised CancelledError"),
    (raises(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    (raises(OwnError("mine")), "raised OwnError: mine"),
    (Unreadable, "raised OwnError: mine"),
    (lambda: [0.0] * 6, "returned 6 logits, not 7"),
    (list, "returned no logits"),
    (lambda: 5, "returned 5, which is no list of logits"),
    (lambda: "abcdefg", "returned 'abcdefg', which is no list of logits"),
    (lambda: [True] * 7, "returned [True, True, True, True, True, True, ...], which is no list"),
    (lambda: [0.5] * 6 + [False], "which is no list of logits"),
    (lambda: [[0.0], [0.0, 1.0]], "which is no list of logits"),
    (lambda: dict.fromkeys(range(7), 0.0), "which is no list of logits"),
    (lambda: [10**400] * 7, "which is no list of logits"),
    (lambda: np.zeros(7, np.bool_), "which is no list of logits"),
    (lambda: (0.0 for _ in range(7)), "which is no list of logits"),
]
TROUBLES = [trouble for trouble, _ in PASSING]
LASTING = [  # what will not
    (raises(http_error(404)), "raised HTTPError: HTTP Error 404: so it is"),
    (raises(ForeignError(status_code=422)), "raised ForeignError"),
    (raises(ForeignError(response=SimpleNamespace(status_code=400))), "raised ForeignError"),
    (raises(TypeError("three arguments")), "raised TypeError: three arguments"),
    (raises(SystemExit(3)), "raised SystemExit: 3"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("trouble", "message"), PASSING)
def test_what_keeps_failing_is_tried_again_and_then_fails_its_row_alone(
    kind: type[SyncLLM], trouble: Callable[[], Any], message: str
) -> None:
    def fail(prefix: list[int], _: int) -> Any:
        return trouble() if prefix[:3] == [2, 3, EXPECTED[1][0]] else None

    tokens, failed = decoded(made(llm := kind(fail)))
    assert tokens == [EXPECTED[0], EXPECTED[1][:1], EXPECTED[2]]
    assert failed.keys() == {1}
    assert failed[1].startswith(("llm raised ", "llm returned "))
    assert message in failed[1]
    assert failed[1].endswith(" (attempt 3)")
    assert llm.num_attempts[(2, 3, EXPECTED[1][0])] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", mostly_heavy(TROUBLES, *TROUBLES[::6]))
def test_what_passes_is_not_noticed(kind: type[SyncLLM], trouble: Callable[[], Any]) -> None:
    llm = kind(lambda _, attempt: trouble() if attempt < 3 else None)
    assert decoded(made(llm)) == (EXPECTED, {})
    assert set(llm.num_attempts.values()) == {3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("trouble", "message"), LASTING)
def test_what_cannot_get_better_is_not_tried_again(
    kind: type[SyncLLM], trouble: Callable[[], Any], message: str
) -> None:
    llm = kind(lambda prefix, _: trouble() if prefix == [1] else None)
    tokens, failed = decoded(made(llm))
    assert tokens == [[], *EXPECTED[1:]]
    assert failed.keys() == {0}
    assert failed[0].startswith(f"llm {message}")
    assert "attempt" not in failed[0]
    assert llm.num_attempts[(1,)] == 1


def hang(kind: type[SyncLLM], seconds: float) -> Any:
    return time.sleep(seconds) if kind is SyncLLM else asyncio.sleep(seconds)


@pytest.mark.parametrize("kind", [SyncLLM, AsyncLLM])
def test_a_call_that_hangs_is_given_up_and_its_row_fails(kind: type[SyncLLM]) -> None:
    llm = kind(lambda prefix, _: hang(kind, 3) if prefix == [1] else None)
    started = time.monotonic()
    tokens, failed = decoded(made(llm, timeout=0.1, max_attempts=2))
    assert time.monotonic() - started < 2
    assert tokens == [[], *EXPECTED[1:]]
    assert failed == {0: "llm timed out after 0.1 s (attempt 2)"}


class Cancellable(AsyncLLM):
    """Never answers, but notes when it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def next_token_logits(self, prev_token_ids: list[int]) -> Any:
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def exit_later() -> None:
    asyncio.get_running_loop().call_soon(raises(SystemExit(3)))


def stop_loop() -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize("meddle", [stop_loop, exit_later])
def test_a_loop_that_an_llm_stops_goes_on(meddle: Callable[[], None]) -> None:
    llm = AsyncLLM(lambda prefix, _: meddle() if prefix == [1] else None)
    assert decoded(made(llm)) == (EXPECTED, {})


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def test_an_llm_that_cancels_every_task_fails_the_calls_of_that_step_alone() -> None:
    llm = AsyncLLM(lambda prefix, _: cancel_all() if prefix == [1] and llm.is_bad else None)
    llm.is_bad = True
    model = made(llm)
    assert decoded(model)[1] == dict.fromkeys(range(3), "llm was cancelled from within")
    llm.is_bad = False
    assert decoded(model) == (EXPECTED, {})


def test_an_interrupted_step_cancels_its_calls() -> None:
    model = made(llm := Cancellable(), timeout=60)

    def interrupt() -> None:
        llm.started.wait(5)
        time.sleep(0.2)  # until the main thread waits for the call
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            decoded(model)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.cancelled.wait(5)


def test_a_coroutine_that_does_not_let_itself_be_cancelled_is_left_to_itself() -> None:
    class Stubborn(AsyncLLM):
        async def next_token_logits(self, prev_token_ids: list[int]) -> Any:
            for _ in range(20):
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
            return logits_after(prev_token_ids)

    _, failed = decoded(made(Stubborn(), timeout=0.1, max_attempts=1), num_steps=1)
    assert set(failed.values()) == {"llm timed out after 0.1 s"}


@pytest.mark.parametrize(
    "answer",
    [
        tuple,
        np.array,
        np.float32,
        lambda logits: array.array("d", logits),
        lambda logits: [np.float64(value) for value in logits],
    ],
)
def test_any_sequence_of_numbers_is_an_answer(answer: Callable[[list[float]], Any]) -> None:
    llm = SyncLLM(lambda prefix, _: answer(logits_after(prefix)))
    assert decoded(made(llm)) == (EXPECTED, {})


def test_numbers_that_are_not_finite_are_left_to_the_sampler() -> None:
    model = made(SyncLLM(lambda *_: [float("nan"), -float("inf"), 1e300, -1e300, 0, 1, 2]))
    model.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, [1], 0))
    batch.logit_slots = batch.slots
    output = model.forward(batch)
    inf = np.inf
    np.testing.assert_array_equal(output.logits, np.float32([[np.nan, -inf, inf, -inf, 0, 1, 2]]))
    assert output.failed == {}
