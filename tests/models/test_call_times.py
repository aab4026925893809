"""How long a call is waited for: its attempts share a limit, and pauses suit the server."""

import asyncio
import random
import time
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_llms import EXPECTED, AsyncLLM, SyncLLM, decoded, logits_after, made, raises

from batcher import CallSettings, decode
from batcher.models.callables import LLMModel, failure_of, pause_after


class HTTPStatusError(Exception):
    """As requests, httpx and openai raise it: with the response."""

    def __init__(self, status: int = 429, **headers: Any) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = SimpleNamespace(status_code=status, headers=named)


def urllib_error(**headers: str) -> urllib.error.HTTPError:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://h", 429, "slow down", message, None)


def aiohttp_error(headers: Any) -> Exception:
    error = Exception("slow down")
    error.status, error.headers = 503, headers
    return error


class Odd:
    def __getattr__(self, name: str) -> Any:
        raise SystemExit(name)


def in_seconds(seconds: float) -> str:
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
        (HTTPStatusError(Retry_After="-4"), 0),
        (urllib_error(Retry_After="6"), 6),
        (urllib_error(Retry_After=in_seconds(9000)), 9000),
        (urllib_error(Retry_After=in_seconds(-9000)), 0),
        (aiohttp_error({"Retry-After": "8"}), 8),
        (aiohttp_error(None), None),
        (HTTPStatusError(Retry_After="inf"), None),
        (HTTPStatusError(Retry_After="tomorrow"), None),
        (HTTPStatusError(Retry_After="Fri, 99 Foo 2026 07:28:00 GMT"), None),
        (HTTPStatusError(), None),
        (aiohttp_error(Odd()), None),
        (ConnectionResetError(), None),
    ],
)
def test_what_a_server_asks_for_is_read_from_any_error(
    error: Exception, seconds: float | None
) -> None:
    expected = None if seconds is None else pytest.approx(seconds, abs=3600 if seconds > 50 else 0)
    assert failure_of(error).retry_after == expected


def test_a_server_is_asked_again_when_it_wants_to_be() -> None:
    times: list[float] = []

    def fail(*_: object) -> Any:
        times.append(time.monotonic())
        if len(times) < 3:
            raise HTTPStatusError(Retry_After="0.1")

    _, failed = decoded(made(SyncLLM(fail), backoff=0.02), [[1]], 1)
    waits = np.diff(times)
    assert not failed
    assert len(waits) == 2
    assert min(waits) > 0.09  # without the header 0.06 at most


def test_calls_that_failed_together_do_not_come_again_together() -> None:
    pauses = [pause_after(1, 0.05, 0.4) for _ in range(24)]
    assert min(pauses) >= 0.05
    assert max(pauses) - min(pauses) > 0.2  # by chance below, once in 10^6 times


@pytest.mark.parametrize(("attempt", "least"), [(1, 0.05), (2, 0.1), (3, 0.2), (9, 0.3)])
def test_attempts_are_further_and_further_apart(attempt: int, least: float) -> None:
    assert least <= pause_after(attempt, None, 0.05, 0.3) <= least + 0.05


def test_chance_in_pauses_is_not_taken_from_what_an_llm_has_seeded() -> None:
    def outputs(*, fails: bool) -> list[list[int]]:
        random.seed(7)

        def fail(_: list[int], attempt: int) -> None:
            if fails and attempt < 3:
                raise ConnectionResetError

        tokens, _ = decoded(made(SyncLLM(fail)))
        return [*tokens, [random.getrandbits(30)]]

    assert outputs(fails=True) == outputs(fails=False)


@pytest.mark.parametrize("kind", [SyncLLM, AsyncLLM])
def test_the_attempts_of_a_call_share_its_time(kind: type[SyncLLM]) -> None:
    def hang(prefix: list[int], _: int) -> Any:
        if prefix != [1]:
            return None
        return time.sleep(9) if kind is SyncLLM else asyncio.sleep(9)

    settings = {"timeout": 0.1, "call_timeout": 0.25, "max_attempts": 50}
    tokens, failed = decoded(made(llm := kind(hang), **settings))
    assert tokens == [[], *EXPECTED[1:]]
    assert failed == {0: "llm timed out after 0.25 s (attempt 3)"}
    assert llm.num_attempts[(1,)] == 3


@pytest.mark.parametrize("error", [HTTPStatusError(Retry_After="3600"), ConnectionResetError()])
def test_a_pause_that_would_take_all_the_time_is_not_made(error: Exception) -> None:
    model = made(SyncLLM(lambda *_: raises(error)()), call_timeout=1, backoff=2, max_attempts=9)
    _, failed = decoded(model, [[1]], 1)
    assert failed[0].endswith("(no time for another attempt within 1 s)")


def test_a_row_that_took_too_long_fails_with_a_code_of_its_own_and_the_others_go_on() -> None:
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


def test_the_time_of_a_call_does_not_begin_while_it_waits_for_others() -> None:
    llm = SyncLLM(lambda *_: time.sleep(0.04))
    model = made(llm, timeout=0.16, call_timeout=0.16, max_concurrency=1)
    _, failed = decoded(model, [[slot] for slot in range(5)], 1)
    assert not failed


# -- the size of the vocabulary, when the first answer is not all of it ---------------------------


class Sizeless(SyncLLM):
    vocab_size = None


def test_a_first_answer_of_another_length_does_not_matter() -> None:
    llm = Sizeless(lambda *_: [0.5] * 3 if len(llm.calls) == 1 else None)
    assert decoded(made(llm, max_attempts=2)) == (EXPECTED, {})


def test_answers_that_never_agree_are_an_error() -> None:
    llm = Sizeless(lambda *_: [0.5] * (6 + len(llm.calls)))
    with pytest.raises(Exception, match=r"returned another number of logits each time: \d+, \d+"):
        made(llm, max_attempts=2)
