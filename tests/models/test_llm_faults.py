"""A call that fails is repeated, as long as there is time, and then fails its row alone."""

import array
import asyncio
import random
import signal
import threading
import time
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from types import SimpleNamespace

import numpy as np
import pytest
from examples import mostly_heavy
from fake_llms import EXPECTED, KINDS, AsyncLLM, SyncLLM, decoded, logits_after, made, raises

from batcher import CallSettings, decode
from batcher.models.base import Batch, Chunk
from batcher.models.callables import LLMModel, failure_of, pause_after


def http_error(status):
    return urllib.error.HTTPError("http://h", status, "so it is", {}, None)


class ForeignError(Exception):
    """As requests, httpx (response), aiohttp and openai raise them."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class OwnError(BaseException):
    """Not an Exception."""


class Unreadable:
    def __array__(self, *_, **__):
        raise OwnError("mine")


PASSING = [  # what may be better the next time
    (raises(TimeoutError("slow")), "raised TimeoutError: slow"),
    (raises(http_error(503)), "raised HTTPError: HTTP Error 503: so it is"),
    (raises(RuntimeError("odd")), "raised RuntimeError: odd"),
    (raises(StopIteration()), "raised "),
    (raises(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    (raises(OwnError("mine")), "raised OwnError: mine"),
    (Unreadable, "raised OwnError: mine"),
    (lambda: [0.0] * 6, "returned 6 logits, not 7"),
    (list, "returned no logits"),
    (lambda: 5, "returned 5, not a list of logits"),
    (lambda: "abcdefg", "returned 'abcdefg', not a list of logits"),
    (lambda: [True] * 7, "returned [True, True, True, True, True, True, ...], not a list"),
    (lambda: [[0.0], [0.0, 1.0]], "not a list of logits"),
    (lambda: dict.fromkeys(range(7), 0.0), "not a list of logits"),
    (lambda: [10**400] * 7, "not a list of logits"),
    (lambda: (0.0 for _ in range(7)), "not a list of logits"),
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
def test_what_keeps_failing_is_tried_again_and_then_fails_its_row_alone(kind, trouble, message):
    def fail(prefix, _):
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
def test_what_passes_is_not_noticed(kind, trouble):
    llm = kind(lambda _, attempt: trouble() if attempt < 3 else None)
    assert decoded(made(llm)) == (EXPECTED, {})
    assert set(llm.num_attempts.values()) == {3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("trouble", "message"), LASTING)
def test_what_cannot_get_better_is_not_tried_again(kind, trouble, message):
    llm = kind(lambda prefix, _: trouble() if prefix == [1] else None)
    tokens, failed = decoded(made(llm))
    assert tokens == [[], *EXPECTED[1:]]
    assert failed.keys() == {0}
    assert failed[0].startswith(f"llm {message}")
    assert "attempt" not in failed[0]
    assert llm.num_attempts[(1,)] == 1


def hang(kind, seconds):
    return time.sleep(seconds) if kind is SyncLLM else asyncio.sleep(seconds)


@pytest.mark.parametrize("kind", [SyncLLM, AsyncLLM])
def test_a_call_that_hangs_is_given_up_and_its_row_fails(kind):
    llm = kind(lambda prefix, _: hang(kind, 3) if prefix == [1] else None)
    started = time.monotonic()
    tokens, failed = decoded(made(llm, timeout=0.1, max_attempts=2))
    assert time.monotonic() - started < 2
    assert tokens == [[], *EXPECTED[1:]]
    assert failed == {0: "llm timed out after 0.1 s (attempt 2)"}


class Cancellable(AsyncLLM):
    """Never answers, but notes when it is told not to."""

    def __init__(self):
        super().__init__()
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def next_token_logits(self, prev_token_ids):
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def exit_later():
    asyncio.get_running_loop().call_soon(raises(SystemExit(3)))


def stop_loop():
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize("meddle", [stop_loop, exit_later])
def test_a_loop_that_an_llm_stops_goes_on(meddle):
    llm = AsyncLLM(lambda prefix, _: meddle() if prefix == [1] else None)
    assert decoded(made(llm)) == (EXPECTED, {})


def cancel_all():
    for task in asyncio.all_tasks():
        task.cancel()


def test_an_llm_that_cancels_every_task_fails_the_calls_of_that_step_alone():
    llm = AsyncLLM(lambda prefix, _: cancel_all() if prefix == [1] and llm.is_bad else None)
    llm.is_bad = True
    model = made(llm)
    assert decoded(model)[1] == dict.fromkeys(range(3), "llm was cancelled from within")
    llm.is_bad = False
    assert decoded(model) == (EXPECTED, {})


def test_an_interrupted_step_cancels_its_calls():
    model = made(llm := Cancellable(), timeout=60)

    def interrupt():
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


def test_a_coroutine_that_does_not_let_itself_be_cancelled_is_left_to_itself():
    class Stubborn(AsyncLLM):
        async def next_token_logits(self, prev_token_ids):
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
def test_any_sequence_of_numbers_is_an_answer(answer):
    llm = SyncLLM(lambda prefix, _: answer(logits_after(prefix)))
    assert decoded(made(llm)) == (EXPECTED, {})


def test_numbers_that_are_not_finite_are_left_to_the_sampler():
    model = made(SyncLLM(lambda *_: [float("nan"), -float("inf"), 1e300, -1e300, 0, 1, 2]))
    model.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, [1], 0))
    batch.logit_slots = batch.slots
    output = model.forward(batch)
    inf = np.inf
    np.testing.assert_array_equal(output.logits, np.float32([[np.nan, -inf, inf, -inf, 0, 1, 2]]))
    assert output.failed == {}


class HTTPStatusError(Exception):
    """As requests, httpx and openai raise it: with the response."""

    def __init__(self, status=429, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = SimpleNamespace(status_code=status, headers=named)


def urllib_error(**headers):
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://h", 429, "slow down", message, None)


def aiohttp_error(headers):
    error = Exception("slow down")
    error.status, error.headers = 503, headers
    return error


class Odd:
    def __getattr__(self, name):
        raise SystemExit(name)


def in_seconds(seconds):
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (HTTPStatusError(Retry_After="3"), 3),
        (HTTPStatusError(RETRY_AFTER="2.5"), 2.5),
        (HTTPStatusError(retry_after=b"4"), 4),
        (HTTPStatusError(retry_after="9", retry_after_ms="1500"), 1.5),
        (HTTPStatusError(retry_after="9", retry_after_ms="soon"), 9),
        (HTTPStatusError(Retry_After="0"), 0),
        (urllib_error(Retry_After="6"), 6),
        (urllib_error(Retry_After=in_seconds(9000)), 9000),
        (urllib_error(Retry_After=in_seconds(-9000)), 0),
        (aiohttp_error({"Retry-After": "8"}), 8),
        (aiohttp_error(None), None),
        (HTTPStatusError(Retry_After="inf"), None),
        (HTTPStatusError(Retry_After="Fri, 99 Foo 2026 07:28:00 GMT"), None),
        (HTTPStatusError(), None),
        (aiohttp_error(Odd()), None),
        (ConnectionResetError(), None),
    ],
)
def test_what_a_server_asks_for_is_read_from_any_error(error, seconds):
    expected = None if seconds is None else pytest.approx(seconds, abs=3600 if seconds > 50 else 0)
    assert failure_of(error).retry_after == expected


def test_retries_come_when_a_server_wants_them_and_not_together():
    times = []

    def fail(*_):
        times.append(time.monotonic())
        if len(times) < 3:
            raise HTTPStatusError(Retry_After="0.1")

    _, failed = decoded(made(SyncLLM(fail), backoff=0.02), [[1]], 1)
    waits = np.diff(times)
    assert not failed
    assert len(waits) == 2
    assert min(waits) > 0.09  # without the header 0.06 at most
    pauses = [pause_after(1, 0.05, 0.4) for _ in range(24)]
    assert min(pauses) >= 0.05
    assert max(pauses) - min(pauses) > 0.2  # by chance below, once in 10^6 times


@pytest.mark.parametrize(("attempt", "least"), [(1, 0.05), (2, 0.1), (3, 0.2), (9, 0.3)])
def test_attempts_are_further_and_further_apart(attempt, least):
    assert least <= pause_after(attempt, None, 0.05, 0.3) <= least + 0.05


def test_chance_in_pauses_is_not_taken_from_what_an_llm_has_seeded():
    def outputs(*, fails):
        random.seed(7)

        def fail(_, attempt):
            if fails and attempt < 3:
                raise ConnectionResetError

        tokens, _ = decoded(made(SyncLLM(fail)))
        return [*tokens, [random.getrandbits(30)]]

    assert outputs(fails=True) == outputs(fails=False)


@pytest.mark.parametrize("kind", [SyncLLM, AsyncLLM])
def test_the_attempts_of_a_call_share_its_time(kind):
    def hang(prefix, _):
        if prefix != [1]:
            return None
        return time.sleep(9) if kind is SyncLLM else asyncio.sleep(9)

    settings = {"timeout": 0.1, "call_timeout": 0.25, "max_attempts": 50}
    tokens, failed = decoded(made(llm := kind(hang), **settings))
    assert tokens == [[], *EXPECTED[1:]]
    assert failed == {0: "llm timed out after 0.25 s (attempt 3)"}
    assert llm.num_attempts[(1,)] == 3


@pytest.mark.parametrize("error", [HTTPStatusError(Retry_After="3600"), ConnectionResetError()])
def test_a_pause_that_would_take_all_the_time_is_not_made(error):
    model = made(SyncLLM(lambda *_: raises(error)()), call_timeout=1, backoff=2, max_attempts=9)
    _, failed = decoded(model, [[1]], 1)
    assert failed[0].endswith("(no time for another attempt within 1 s)")


def test_a_row_that_took_too_long_fails_alone_and_its_time_begins_with_its_call():
    llm = AsyncLLM(lambda prefix, _: asyncio.sleep(9) if prefix[0] == 1 else None)
    model = LLMModel(llm, "llm", CallSettings(call_timeout=0.2))
    requests = [{"prompt": [token], "max_tokens": 4} for token in (1, 2, 3)]
    slow, *others = decode(requests, model=model)
    assert slow.error is not None
    assert slow.error.code == "call-timeout"
    assert slow.error.message == "step 0: llm timed out after 0.2 s"
    for token, result in zip((2, 3), others, strict=True):
        prefix = [token]
        for _ in range(len(result.tokens)):
            prefix.append(int(np.argmax(logits_after(prefix))))
        assert result.tokens == prefix[1:]
        assert result.error is None
    llm = SyncLLM(lambda *_: time.sleep(0.04))
    model = made(llm, timeout=0.16, call_timeout=0.16, max_concurrency=1)
    _, failed = decoded(model, [[slot] for slot in range(5)], 1)
    assert not failed
