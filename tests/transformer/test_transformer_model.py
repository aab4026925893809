"""A row's tokens and log-probabilities are its own to the bit, whatever is done around it."""

import random

import pytest
from msgspec.structs import replace
from tiny import tiny_model

from batcher import Engine, Request, Result
from batcher.events import PreemptEvent
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


def run(model: object, batch_size: int, **settings: object) -> tuple[dict, int]:
    """Return what each sample came to, but for when, and how often one was preempted."""
    engine = Engine(model, batch_size, settings=SchedulingSettings(**settings), is_checked=True)
    for request in REQUESTS:
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
