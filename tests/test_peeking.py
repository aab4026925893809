"""A look at the prompt and the text so far of requests that have not ended."""

import pytest

from batcher.engine import Engine
from batcher.engine.base import PEEKED
from batcher.models.base import join_bytes
from batcher.request import Request
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.trace.run import RequestFold

PROMPT = "Once upon a time"
IDS = [79, 110, 99, 101]
REQUESTS = [
    Request(prompt=PROMPT, id="greedy", max_tokens=20),
    Request(prompt=PROMPT, id="sampled", max_tokens=15, temperature=1.0, n=2),
    Request(prompt=IDS, id="ids", max_tokens=25),
]
RUNS = {
    "usual": {},
    "chunks": {"settings": SchedulingSettings(max_batch_tokens=7)},
    "preemptions": {"settings": SchedulingSettings(kv_blocks=5, capacity="on-demand")},
    "drafts": {"speculation": SpeculationSettings(draft="simulated:0.7")},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_text_so_far_is_the_beginning_of_the_result(name):
    engine, fold = Engine("simulated", 3, **RUNS[name]), RequestFold()
    for request in REQUESTS:
        engine.add(request)
    token_bytes = engine._tokenizer.token_bytes
    prompts = {"ids": join_bytes(IDS, token_bytes).decode()}
    seen, results, num_preempted = [], {}, 0
    while engine.has_work:
        outcome = engine.step()
        for event in outcome.events:
            fold.take(event)
        results |= {(result.id, result.index): result for result in outcome.results}
        for found in fold.open:
            num_tokens = found.tokens_after(engine.num_steps - 1)
            prompt, text = engine.peek(found.id, found.index, num_tokens)
            assert prompt == prompts.get(found.id, PROMPT)
            seen.append((found.id, found.index, num_tokens, text))
            num_preempted += num_tokens > 0 and found.admission is None
    assert sum(num_tokens for *_, num_tokens, _ in seen)
    assert num_preempted > 0 or name != "preemptions"
    for request_id, index, num_tokens, text in seen:
        tokens = results[request_id, index].tokens[:num_tokens]
        assert text == join_bytes(tokens, token_bytes).decode("utf-8", "replace")
    assert engine.peek("greedy", 0, 20) is None


def test_a_long_prompt_and_text_are_cut():
    engine = Engine("simulated", 1)
    engine.add(Request(prompt="x" * 9000, id="long", max_tokens=3000, ignore_eos=True))
    for _ in range(2500):
        engine.step()
    prompt, text = engine.peek("long", 0, 2500)
    assert prompt == "x" * PEEKED
    assert len(text) == PEEKED
