"""An LLM is called for all rows of a step at once, and leaves nothing behind."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from fake_llms import (
    EXPECTED,
    KINDS,
    PROMPTS,
    STOP,
    VOCAB_SIZE,
    AsyncLLM,
    HalfAsyncLLM,
    SyncLLM,
    decoded,
    logits_after,
    made,
    raises,
)

from batcher.errors import BatchdecodeError
from batcher.models.base import Batch, Chunk
from batcher.models.callables import CallSettings, LLMModel
from batcher.models.loading import as_model, load_model


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_goes_on_from_its_own_prefix(kind):
    llm = kind()
    assert decoded(made(llm)) == (EXPECTED, {})
    assert len(set(map(tuple, EXPECTED))) == 3  # the rows can be told apart
    wanted = [
        prompt + tokens[:step]
        for prompt, tokens in zip(PROMPTS, EXPECTED, strict=True)
        for step in range(4)
    ]
    assert sorted(llm.calls) == sorted(wanted)


def test_only_the_rows_whose_logits_are_wanted_are_asked_for():
    model = made(llm := SyncLLM())
    model.allocate(3)
    batch = Batch(3)
    for slot, prompt in enumerate(PROMPTS):
        batch.join(Chunk(slot, prompt, 0))
    batch.logit_slots = np.array([0, 2])
    logits = model.forward(batch).logits
    assert sorted(llm.calls) == [PROMPTS[0], PROMPTS[2]]
    assert logits.tolist() == [
        np.float32(logits_after(PROMPTS[0])).tolist(),
        np.float32(logits_after(PROMPTS[2])).tolist(),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_calls_as_the_limit_allows_are_in_flight_at_once(kind):
    now, most, limit = 0, 0, 3
    lock = threading.Lock()

    def enter():
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)

    def leave(_=None):
        nonlocal now
        with lock:
            now -= 1

    def wait(*_):
        enter()
        if kind is not SyncLLM:
            return wait_in_loop()
        time.sleep(0.03)
        return leave()

    async def wait_in_loop():
        await asyncio.sleep(0.03)
        leave()
        return [0.0] * VOCAB_SIZE

    llm = kind(wait)
    if kind is HalfAsyncLLM:
        llm.next_token_logits = wait
    decoded(made(llm, max_concurrency=limit), [[slot] for slot in range(8)], 1)
    assert most == limit


def test_async_calls_all_run_in_one_loop():
    loops = set()

    class Llm(AsyncLLM):
        async def get_stop_token_id(self):
            loops.add(asyncio.get_running_loop())
            return STOP

        async def next_token_logits(self, prev_token_ids):
            loops.add(asyncio.get_running_loop())
            return logits_after(prev_token_ids)

    decoded(made(Llm()))
    assert len(loops) == 1


class Sizeless(SyncLLM):
    vocab_size = None


def test_the_size_of_the_vocabulary_is_counted_once_if_nobody_says_it():
    model = made(llm := Sizeless())
    assert model.vocab_size == VOCAB_SIZE
    assert llm.calls == [[STOP]]
    assert decoded(model) == (EXPECTED, {})
    wrong = made(Sizeless(lambda prefix, _: [0.0] * 9 if prefix == [1] else None))
    assert decoded(wrong)[1] == {0: "llm returned 9 logits, not 7 (attempt 3)"}
    llm = Sizeless()
    model = LLMModel(llm, "llm", CallSettings(max_attempts=1), probe=PROMPTS[1])
    assert llm.calls == [PROMPTS[1]]
    assert decoded(model) == (EXPECTED, {})
    assert llm.calls.count(PROMPTS[1]) == 1
    assert decoded(model) == (EXPECTED, {})
    assert llm.calls.count(PROMPTS[1]) == 2  # for the first step alone


def test_an_llm_describes_the_model():
    llm = SyncLLM()
    model = load_as_llm(llm)
    assert (model.name, model.gives, model.vocab_size) == ("mine:llm", "logits", VOCAB_SIZE)
    assert model.eos_token_id == STOP
    assert model.settings == {}  # how it is called decides no token
    assert model.tokenizer.encode("\6") == [6]
    llm.settings, llm.tokenizer = {"a": 1}, model.tokenizer
    assert load_as_llm(llm).settings == {"a": 1}
    assert load_as_llm(llm).tokenizer is model.tokenizer

    class Callable(SyncLLM):
        def __call__(self, prefixes):
            return [0 for _ in prefixes]

    assert isinstance(as_model(SyncLLM), LLMModel)
    assert isinstance(as_model(Callable()), LLMModel)
    llm = SyncLLM()
    llm.get_stop_token_id = lambda: np.int32(4)
    assert made(llm).eos_token_id == 4


def load_as_llm(llm):
    model = as_model(llm, "mine:llm", CallSettings(max_concurrency=3))
    assert isinstance(model, LLMModel)
    return model


@pytest.mark.parametrize(
    ("stop_token", "message"),
    [
        (lambda: None, "llm: get_stop_token_id returned None, which is not a token id"),
        (lambda: True, "returned True, which is not a token id"),
        (lambda: 2**31, "returned a huge integer, which is not a token id"),
        (raises(ConnectionRefusedError("down")), r"ConnectionRefusedError: down \(attempt 3\)"),
    ],
)
def test_an_llm_without_a_stop_token_is_refused(stop_token, message):
    llm = SyncLLM()
    llm.get_stop_token_id = stop_token
    with pytest.raises(BatchdecodeError, match=message):
        made(llm)


def test_an_llm_whose_vocabulary_cannot_be_counted_is_refused():
    with pytest.raises(BatchdecodeError, match="llm: next_token_logits returned 5, not a list"):
        made(Sizeless(lambda *_: 5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_concurrency": 0}, r"llm: .*max_concurrency.*settings: max_concurrency, timeout"),
        ({"timeout": 0}, "timeout"),
        ({"backoff": -1}, "backoff"),
        ({"retries": 1}, "retries"),
    ],
)
def test_settings_that_are_none(settings, message):
    with pytest.raises(BatchdecodeError, match=message):
        load_model("my_models:x", settings)


@pytest.fixture
def threads_before():
    gc.collect()
    return set(threading.enumerate())


@pytest.mark.parametrize("kind", KINDS)
def test_the_threads_of_a_model_end_with_it(kind, threads_before):
    model = made(kind())
    decoded(model)
    ours = set(threading.enumerate()) - threads_before
    assert ours
    assert all(thread.daemon for thread in ours)
    del model
    gc.collect()
    for thread in ours:
        thread.join(5)
    assert not any(thread.is_alive() for thread in ours)


def test_a_call_that_hangs_does_not_keep_the_interpreter():
    program = """
import time
from batcher.models.base import Batch, Chunk
from batcher.models.callables import CallSettings
from batcher.models.callables import LLMModel

class Hanging:
    vocab_size = 5
    def next_token_logits(self, prev_token_ids):
        time.sleep(100)
    def get_stop_token_id(self):
        return 0

model = LLMModel(Hanging(), call_settings=CallSettings(timeout=0.05, max_attempts=1))
model.allocate(1)
batch = Batch(1)
batch.join(Chunk(0, [1], 0))
batch.logit_slots = batch.slots
print(model.forward(batch).failed[0].message)
"""
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "Hanging timed out after 0.05 s\n"
    assert done.stderr == ""
