"""A row's tokens and log-probabilities are its own to the bit, whatever is done around it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from control_requests import SCHEMA
from drafters import Oracle
from engine_runs import drained
from examples import mostly_heavy
from msgspec.structs import replace
from numpy.testing import assert_allclose
from one_forward import logits_after_each
from tiny import KINDS, QWEN3_NEXT, tiny_config, tiny_model
from tiny_checkpoints import CLASSES, GOLDEN_PROMPT, write_named

from batcher import ByteTokenizer, Engine, Request
from batcher.errors import InvariantError
from batcher.events import PreemptEvent
from batcher.models.base import Batch, Chunk
from batcher.models.checkpoints import open_checkpoint
from batcher.models.transformer import TransformerModel
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.transformer.config import DeltaNetSettings
from batcher.transformer.graph import _Session
from batcher.transformer.step import OWN_BLOCK_SIZE, cache_groups
from batcher.transformer.transformer import Transformer
from batcher.transformer.weights import Weights


def requests():
    draw = random.Random(1)
    asked = []
    for number in range(9):
        request = Request(
            prompt=[draw.randrange(256) for _ in range(draw.randint(1, 90))],
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
DRAFT = tiny_model(**KINDS["plain"])
each_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in {"gemma3", "qwen3-next"} else pytest.mark.heavy)
        for kind in KINDS
    ],
)


def plant_nans(engine, model):
    """Let every block that holds nothing hold what no sum gets rid of, but what is to be moved."""
    kv_cache = engine.scheduler.kv_cache
    size, num_there = (
        kv_cache.block_size,
        (len(model._cache.store.keys[0]) - 2) // kv_cache.block_size,
    )
    blank = np.array([block for block in kv_cache.pool._blank if block < num_there], np.int64)
    moves = engine._runner.pages.moves
    moved = model._cache.store.cells([source for source, _ in moves], 1, len(moves))
    cells = np.setdiff1d(model._cache.store.cells(blank.tolist(), size, size * len(blank)), moved)
    for layer in (*model._cache.store.keys, *model._cache.store.values):
        layer[cells] = np.nan
    states = model._cache.states
    for layer in () if states is None else (*states.delta, *states.convolution):
        layer[1 + blank] = np.nan


def run(model, batch_size, requests=REQUESTS, *, scarcity=None, speculation=None, **settings):
    """Return what each sample came to, but for when, and how often one was preempted.

    scarcity: how many blocks there are for each that the largest request may hold.
    """
    if scarcity is not None:
        roomy = SchedulingSettings(**settings, kv_blocks=1000)
        kv_cache = Engine(model, batch_size, settings=roomy).scheduler.kv_cache
        most = [
            kv_cache.most_blocks(len(request.prompt) + request.output_limit) * request.num_beams
            for request in requests
        ]
        settings["kv_blocks"] = int(scarcity * max(most))
    engine = Engine(
        model,
        batch_size,
        settings=SchedulingSettings(**settings),
        is_checked=True,
        speculation=speculation,
    )
    for request in requests:
        engine.add(request)
    found = {}
    num_preempted = 0
    while engine.has_work:
        if engine.scheduler.kv_cache is not None and hasattr(model._cache.store, "keys"):
            plant_nans(engine, model)
        outcome = engine.step()
        num_preempted += sum(isinstance(event, PreemptEvent) for event in outcome.events)
        for result in outcome.results:
            assert result.error is None
            found[result.id, result.index] = replace(result, slot=None, steps=None)
    return found, num_preempted


SCHEDULES = [
    (8, {"max_batch_tokens": 40}),
    (12, {"scarcity": 1.1, "block_size": 4, "max_batch_tokens": 30, "capacity": "on-demand"}),
    (20, {}),
    (8, {"scarcity": 1.15, "block_size": 4}),
    (9, {"scarcity": 2.1, "block_size": 4, "prefill_order": "prefill-first"}),
]


@each_kind
@pytest.mark.parametrize(
    "schedules", mostly_heavy([SCHEDULES[:2], SCHEDULES[2:]], SCHEDULES[:2]), ids=len
)
def test_results_are_equal_to_the_bit_under_every_schedule(kind, schedules):
    alone, _ = run(tiny_model(**KINDS[kind]), 3)
    assert len(alone) == sum(request.n for request in REQUESTS)
    num_preemptions = 0
    for batch_size, settings in schedules:
        found, num_preempted = run(tiny_model(**KINDS[kind]), batch_size, **settings)
        assert found == alone, settings
        num_preemptions += num_preempted
    may_preempt = any("capacity" in settings for _, settings in schedules)
    may_preempt &= kind != "window"  # its rows hold few blocks beside three beams
    assert num_preemptions or not may_preempt


SCARCE = {"scarcity": 1.15, "block_size": 4, "max_batch_tokens": 40}


@each_kind
@pytest.mark.parametrize("settings", mostly_heavy([{}, SCARCE], SCARCE), ids=["plain", "scarce"])
def test_drafts_leave_results_equal_to_the_bit(kind, settings):
    asked = [REQUESTS[0], *REQUESTS[2:6], Request(prompt=[7, 8] * 20, max_tokens=24, logprobs=1)]
    alone, _ = run(tiny_model(**KINDS[kind]), 3, asked)
    prompts = {str(number): request.prompt for number, request in enumerate(asked, 1)}
    known = [(prompts[name], result) for (name, _), result in alone.items()]
    has_trees = not kind.startswith("qwen3-next")
    drafts = [Oracle(known, 0.2, seed, makes_trees=has_trees) for seed in range(2)]
    if kind == "plain":
        drafts += [
            SpeculationSettings(draft=f"{__name__}:DRAFT", draft_tree=tree)
            for tree in (None, "2x3")
        ]
    for draft in drafts:
        found, _ = run(tiny_model(**KINDS[kind]), 8, asked, speculation=draft, **settings)
        assert found == alone, draft
    assert drafts[0].num_accepted


def test_whatever_rows_ask_for_recurrent_states_are_those_of_their_tokens():
    asked = [
        Request(prompt="tell", json_schema=SCHEMA, max_tokens=40),
        Request(
            prompt="tell", json_schema=SCHEMA, cfg_scale=1.5, negative_prompt="N", max_tokens=20
        ),
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
        (8, {"kv_blocks": 60, "block_size": 4, "max_batch_tokens": 20, "capacity": "on-demand"}),
    ):
        found, num_preempted = run(tiny_model(**kind), batch_size, asked, **settings)
        assert found == alone, settings
        assert num_preempted or "kv_blocks" not in settings


def test_states_are_not_turned_back_and_prompts_not_empty():
    model = tiny_model(**QWEN3_NEXT)
    model.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, [1, 2, 3], 0))
    model.forward(batch)
    batch.chunks = [Chunk(0, [3], 2)]
    with pytest.raises(InvariantError, match="position 2, and states after 3 tokens"):
        model.forward(batch)
    requests = [Request(prompt=[], max_tokens=3), Request(prompt=[1], max_tokens=1)]
    results = drained(Engine(tiny_model(), 2), requests).results
    assert [result.finish_reason for result in results] == ["error", "length"]
    assert "needs a token to begin with" in results[0].error.message


class OddRun:
    """Computes rows in another way where there are fewer than `least`, or for each number."""

    def __init__(self, run, least):
        self._run, self._least = run, least

    def __call__(self, outputs, inputs):
        found = self._run(outputs, inputs)
        if "cells" in inputs:  # attention
            return found
        num_rows = len(next(iter(inputs.values())))
        kernel = num_rows if self._least is None else num_rows < self._least
        return [array * np.float32(1 + kernel / 8) for array in found]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3-next q8"])
@pytest.mark.parametrize("least", [2, 9, 40])
def test_a_runtime_that_minds_the_number_of_rows_shows_in_no_bit(kind, least, monkeypatch):
    make = _Session.__init__

    def odd(self, *arguments):
        make(self, *arguments)
        self._run = OddRun(self._run, None if least > 16 else least)

    monkeypatch.setattr(_Session, "__init__", odd)
    asked = REQUESTS[:4]
    model = tiny_model(**KINDS[kind])
    assert model._decoder._body.least_rows == {2: 2, 9: 16, 40: None}[least]
    assert run(model, 3, asked)[0] == run(model, 4, asked, max_batch_tokens=20)[0]


# We compute what transformers did of tiny models; tests/parity/golden_transformers.py asked it.


PATH = Path(__file__).parents[1] / "golden" / "transformers.json"
CASES = json.loads(PATH.read_text())


def test_every_architecture_is_there():
    assert {case["fields"]["architectures"][0] for case in CASES} == {*CLASSES.values()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["fields"]["architectures"][0])
def test_logits_and_tokens_are_those_of_transformers(case, tmp_path):
    checkpoint = open_checkpoint(write_named(tmp_path, case["fields"]))
    transformer = Transformer(checkpoint.config, Weights(checkpoint.tensors))
    logits = logits_after_each(transformer, GOLDEN_PROMPT)[-1]
    assert_allclose(logits, case["logits"], atol=1e-4)

    num_tokens = len(case["tokens"])
    engine = Engine(TransformerModel(transformer, ByteTokenizer(), "tiny", {}), 1)
    engine.add(Request(prompt=GOLDEN_PROMPT, max_tokens=num_tokens, ignore_eos=True))
    [result] = [result for _ in range(num_tokens) for result in engine.step().results]
    assert result.tokens == case["tokens"]


# Groups of layers that share blocks, and how many blocks they take.


def test_groups_share_blocks_and_windows_give_them_back():
    gemma = tiny_config(num_layers=26, sliding_window=20, full_layers=(5, 11, 17, 23))
    assert [(len(group.layers), group.window) for group in cache_groups(gemma)] == [
        (4, None),
        *[(4, 20)] * 5,
        (2, 20),
    ]
    mistral = tiny_config(num_layers=8, sliding_window=20)
    assert [(len(group.layers), group.window) for group in cache_groups(mistral)] == [(8, 20)]
    roomy = tiny_config(num_layers=8, sliding_window=512)  # of a context of 512
    assert [(len(group.layers), group.window) for group in cache_groups(roomy)] == [(8, None)]
    delta_net = DeltaNetSettings(
        layers=(0, 1, 2, 4, 5, 6),
        num_key_heads=2,
        num_value_heads=6,
        key_head_dim=12,
        value_head_dim=8,
        kernel_size=4,
    )
    hybrid = cache_groups(tiny_config(num_layers=8, delta_net=delta_net))
    assert [(group.layers, group.window) for group in hybrid] == [
        ((3, 7), None),
        (delta_net.layers, 2),
    ]
    model = tiny_model(**KINDS["gemma3"])
    model.allocate(1)
    for start in range(0, 320, 40):
        batch = Batch(1)
        batch.join(Chunk(0, [5] * 40, start))
        model.forward(batch)
    # a full group has 5 blocks of 64 by then, one with a window of 20 two at most
    assert OWN_BLOCK_SIZE == 64
    assert model._own.num_blocks == 7
