"""A row's tokens and log-probabilities are its own to the bit, whatever is done around it."""

import random

import pytest
from control_requests import SCHEMA
from msgspec.structs import replace
from tiny import tiny_model

from batcher import Engine, Request, Result
from batcher.errors import InvariantError
from batcher.events import PreemptEvent
from batcher.models.base import Batch, Chunk
from batcher.settings import SchedulingSettings
from batcher.transformer.config import DeltaNetSettings, ExpertSettings, RopeSettings

QWEN3_NEXT = {
    "architecture": "qwen3_next",
    "num_layers": 3,
    "head_dim": 16,
    "rope": RopeSettings(partial_rotary_factor=0.25),
    "has_qk_norm": True,
    "has_offset_norms": True,
    "has_output_gate": True,
    "experts": ExpertSettings(
        layers=(0, 1),
        num_experts=4,
        num_chosen=2,
        intermediate_size=32,
        normalises=True,
        shared_intermediate_size=20,
    ),
    "delta_net": DeltaNetSettings(
        layers=(0, 2),
        num_key_heads=2,
        num_value_heads=6,
        key_head_dim=12,
        value_head_dim=8,
        kernel_size=4,
    ),
}
KINDS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True, "ties_embeddings": False},
    "gemma3": {
        "architecture": "gemma3",
        "sliding_window": 20,
        "full_layers": (1,),
        "local_rope": RopeSettings(theta=100.0),
        "activation": "gelu_tanh",
        "attention_softcap": 5.0,
        "logit_softcap": 10.0,
        "embedding_scale": 48**0.5,
        "has_qk_norm": True,
        "has_offset_norms": True,
        "has_post_norms": True,
    },
    "experts": {
        "architecture": "mixtral",
        "experts": ExpertSettings(
            layers=(1,), num_experts=4, num_chosen=2, intermediate_size=32, normalises=True
        ),
    },
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next int8": {**QWEN3_NEXT, "weights": "int8-channel"},
    "int8": {"weights": "int8"},
    "int8-channel": {"weights": "int8-channel"},
}


def requests() -> list[Request]:
    draw = random.Random(1)
    asked = []
    for number in range(9):
        request = Request(
            prompt=[draw.randrange(256) for _ in range(draw.randint(1, 150))],
            max_tokens=draw.randint(1, 16),
            logprobs=2,
            prompt_logprobs=1 if number % 5 == 0 else None,
        )
        if number % 3 == 0:
            request = replace(request, temperature=1.0, seed=number, top_k=20)
        asked.append(replace(request, n=2) if number % 6 == 0 else request)
    beams = Request(prompt=[*asked[0].prompt[:40], 7], max_tokens=10, num_beams=3)
    return [*asked, beams]


REQUESTS = requests()


def run(
    model: object, batch_size: int, requests: list[Request] = REQUESTS, **settings: object
) -> tuple[dict, int]:
    """Return what each sample came to, but for when, and how often one was preempted."""
    engine = Engine(model, batch_size, settings=SchedulingSettings(**settings), is_checked=True)
    for request in requests:
        engine.add(request)
    found: dict[tuple[str, int], Result] = {}
    num_preempted = 0
    while engine.has_work:
        outcome = engine.step()
        num_preempted += sum(isinstance(event, PreemptEvent) for event in outcome.events)
        for result in outcome.results:
            assert result.error is None
            found[result.id, result.index] = replace(result, slot=None, steps=None)
    return found, num_preempted


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_equal_to_the_bit_under_every_schedule(kind: str) -> None:
    alone, _ = run(tiny_model(**KINDS[kind]), 3)
    assert len(alone) == sum(request.n for request in REQUESTS)
    for batch_size, settings in (
        (20, {}),
        (8, {"max_batch_tokens": 40}),
        (8, {"kv_blocks": 50, "block_size": 4}),
        (12, {"kv_blocks": 48, "block_size": 4, "max_batch_tokens": 30}),
        (9, {"kv_blocks": 90, "block_size": 4, "prefill_order": "prefill-first"}),
    ):
        found, num_preempted = run(tiny_model(**KINDS[kind]), batch_size, **settings)
        assert found == alone, settings
        assert num_preempted or settings.get("kv_blocks", 99) > 50


def test_whatever_rows_ask_for_recurrent_states_are_those_of_their_tokens() -> None:
    asked = [
        Request(prompt="tell", json_schema=SCHEMA, max_tokens=60),
        Request(prompt="tell", json_schema=SCHEMA, cfg_scale=1.5, negative_prompt="No no"),
        Request(prompt="x", choice=["yes indeed", "no"], cfg_scale=0.0, negative_prompt="q"),
        Request(prompt="Count the bo", heal=True, max_tokens=9),
        Request(prompt="abc", num_beams=3, n=2, max_tokens=12),
        Request(prompt="a long prompt" * 3, temperature=1.0, best_of=4, n=2, max_tokens=9),
        Request(prompt="a long prompt" * 3, temperature=1.0, n=3, prompt_logprobs=1, max_tokens=9),
        Request(prompt="plain" * 9, max_tokens=20, logprobs=2),
    ]
    kind = {**QWEN3_NEXT, "eos_token_ids": (0,)}
    alone, _ = run(tiny_model(**kind), 4, asked)
    for batch_size, settings in (
        (12, {}),
        (8, {"max_batch_tokens": 20}),
        (8, {"kv_blocks": 40, "block_size": 4}),
    ):
        found, num_preempted = run(tiny_model(**kind), batch_size, asked, **settings)
        assert found == alone, settings
        assert num_preempted or "kv_blocks" not in settings


def test_recurrent_states_are_not_turned_back() -> None:
    model = tiny_model(**QWEN3_NEXT)
    model.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, [1, 2, 3], 0))
    model.forward(batch)
    batch.chunks = [Chunk(0, [3], 2)]
    with pytest.raises(InvariantError, match="position 2, and states after 3 tokens"):
        model.forward(batch)


def test_an_output_ends_at_the_context_of_its_model() -> None:
    model = tiny_model(max_position_embeddings=40)
    engine = Engine(model, 2)
    engine.add(Request(id="long", prompt=[1] * 30, max_tokens=20))
    engine.add(Request(id="short", prompt=[1] * 30, max_tokens=9))
    engine.add(Request(id="never", prompt=[1] * 41, max_tokens=1))
    results = {}
    while engine.has_work:
        results |= {result.id: result for result in engine.step().results}
    long, short = results["long"], results["short"]
    assert (long.finish_reason, long.limit) == ("length", "max_context")
    assert (short.finish_reason, short.limit) == ("length", None)
    assert long.tokens[:9] == short.tokens
    assert results["never"].error.code == "prompt-too-long"


def test_an_empty_prompt_is_an_error_of_its_row() -> None:
    engine = Engine(tiny_model(), 2)
    engine.add(Request(prompt=[], max_tokens=3))
    engine.add(Request(prompt=[1], max_tokens=1))
    results = []
    while engine.has_work:
        results += engine.step().results
    assert [result.finish_reason for result in results] == ["error", "length"]
    assert "needs a token to begin with" in results[0].error.message
