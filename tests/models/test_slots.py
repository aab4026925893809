"""A Model that computes row by row, in caches of its own, gives what each row gives alone."""

import numpy as np
import pytest
from engine_runs import drained

from batcher import ByteTokenizer, Engine, Request
from batcher.models.loading import as_model
from batcher.models.transformer import SlotModel
from batcher.settings import SchedulingSettings

VOCAB = 31


class Sizes:
    vocab_size, max_position_embeddings, eos_token_ids = VOCAB, 60, (7, 9)


class Sums:
    """The logits after a prefix follow from all of its tokens, in their order."""

    config = Sizes()

    def forward(self, token_ids, cache, *, is_scored=False):
        rows = []
        for token in token_ids:
            cache = (3 * (cache or 0) + token + 1) % 9973
            rows.append(np.random.default_rng(cache).random(VOCAB, np.float32))
        return np.array(rows if is_scored else rows[-1:]), cache

    def copy(self, cache):
        return cache


def alone(prompt, max_tokens):
    tokens = [*prompt]
    for _ in range(max_tokens):
        logits, _ = Sums().forward(tokens, None)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def results_of(requests, **settings):
    model = as_model(SlotModel(Sums(), ByteTokenizer(), "sums", {}))
    engine = Engine(model, 4, settings=SchedulingSettings(**settings))
    return {(result.id, result.index): result for result in drained(engine, requests).results}


SCHEDULES = [
    {},
    {"max_batch_tokens": 5},
    {"kv_blocks": 9, "block_size": 4},
    {"prefix_cache": True, "block_size": 2, "long_prefill_threshold": 3},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_row_is_what_it_is_alone(schedule):
    prompts = [[*range(1, length)] for length in (2, 9, 5, 14, 9, 3)]
    requests = [
        Request(id=str(number), prompt=prompt, max_tokens=12, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    results = results_of(requests, **schedule)
    for number, prompt in enumerate(prompts):
        assert results[str(number), 0].tokens == alone(prompt, 12)


def test_beams_fork_rows_prompts_are_scored_and_twins_share_weights():
    beams = Request(id="beams", prompt=[1, 2], max_tokens=6, num_beams=3, ignore_eos=True)
    one, many = results_of([beams]), results_of([beams], max_batch_tokens=4)
    assert one["beams", 0].tokens == many["beams", 0].tokens
    model = SlotModel(Sums(), ByteTokenizer(), "sums", {})
    assert (model.eos_token_id, model.eos_token_ids, model.max_context) == (7, (7, 9), 60)
    scored = Request(id="s", prompt=[1, 2, 3], max_tokens=1, prompt_logprobs=0, logprobs=0)
    result = results_of([scored])["s", 0]
    logits, _ = Sums().forward([1, 2], None)
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert result.prompt_logprobs[2].logprob == pytest.approx(expected[3], abs=1e-5)
    long = Request(id="l", prompt=[1] * 50, max_tokens=40, ignore_eos=True)
    assert len(results_of([long])["l", 0].tokens) == 10
    model = SlotModel(Sums(), ByteTokenizer(), "sums", {"session_overflow": "drop-oldest"}, 40)
    twin = model.twin()
    assert (twin.max_context, twin.session_overflow) == (40, "drop-oldest")
    assert twin.name == model.name
