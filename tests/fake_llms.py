"""LLMs that misbehave as a test wishes, and a loop that decodes with one without an engine."""

import asyncio
import inspect
import threading
from collections import Counter

import numpy as np

from batcher.models.base import Batch, Chunk
from batcher.models.callables import CallSettings, LLMModel

VOCAB_SIZE, STOP = 7, 5
PROMPTS = [[1], [2, 3], [4, 4, 4]]


def logits_after(prefix):
    state = 1
    for token in prefix:
        state = (state * 31 + token + 1) % 1009
    return [(state * (token + 3) % 101) / 10 for token in range(VOCAB_SIZE)]


class SyncLLM:
    """Calls `trouble(prefix, number of the attempt)` first, and gives what that returns, if any."""

    vocab_size = VOCAB_SIZE

    def __init__(self, trouble=lambda *_: None):
        self.trouble = trouble
        self.calls = []
        self.num_attempts = Counter()
        self.lock = threading.Lock()

    def get_stop_token_id(self):
        return STOP

    def next_token_logits(self, prev_token_ids):
        prefix = prev_token_ids.copy()
        with self.lock:
            self.calls.append(prefix)
            self.num_attempts[tuple(prefix)] += 1
            attempt = self.num_attempts[tuple(prefix)]
        answer = self.trouble(prefix, attempt)
        prev_token_ids.clear()  # it may
        return logits_after(prefix) if answer is None else answer


class AsyncLLM(SyncLLM):
    async def get_stop_token_id(self):
        await asyncio.sleep(0)
        return STOP

    async def next_token_logits(self, prev_token_ids):
        await asyncio.sleep(0)
        answer = super().next_token_logits(prev_token_ids)
        return await answer if inspect.isawaitable(answer) else answer


class HalfAsyncLLM(SyncLLM):
    """A plain method that returns something to be awaited."""

    def next_token_logits(self, prev_token_ids):
        async def answer():
            return super(HalfAsyncLLM, self).next_token_logits(prev_token_ids)

        return answer()


KINDS = [SyncLLM, AsyncLLM, HalfAsyncLLM]


def made(llm, **settings):
    fields = {"timeout": 5, "max_attempts": 3, "backoff": 0.001, **settings}
    return LLMModel(llm, "llm", CallSettings(**fields))


def decoded(model, prompts=PROMPTS, num_steps=4):
    """Greedy tokens of every row, and what failed: those rows end."""
    model.allocate(len(prompts))
    batch, failed = Batch(len(prompts)), {}
    tokens = [[] for _ in prompts]
    for slot, prompt in enumerate(prompts):
        batch.join(Chunk(slot, prompt, 0))
    for _ in range(num_steps):
        batch.logit_slots = batch.slots
        batch.logit_slots.flags.writeable = False  # it is the engine's own
        output = model.forward(batch)
        batch.chunks, batch.tokens = [], output.tokens
        assert output.logits.shape == (len(batch.logit_slots), VOCAB_SIZE)
        assert output.logits.dtype == np.float32
        for slot, logits in zip(batch.logit_slots.tolist(), output.logits, strict=True):
            if slot in output.failed:
                failed[slot] = output.failed[slot].message
                batch.leave(slot)
                model.release(slot)
            else:
                batch.tokens[slot] = logits.argmax()
                tokens[slot].append(int(logits.argmax()))
    return tokens, failed


def expected(prompt, num_steps=4):
    prefix = prompt.copy()
    for _ in range(num_steps):
        prefix.append(int(np.argmax(logits_after(prefix))))
    return prefix[len(prompt) :]


EXPECTED = [expected(prompt) for prompt in PROMPTS]


def raises(error):
    def trouble():
        raise error

    return trouble
