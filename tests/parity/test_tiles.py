"""Models of transformers in tiles: the tokens of `generate`, and the same bits in any batch."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from engine_runs import drained, of_kind
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from narrow_model import top_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import (  # noqa: E402 - as above
    PAGED,
    SCHEDULES,
    SWITCH,
    VOCAB,
    be_quiet,
    generated,
    prompts,
    random_model,
    results_of,
    run_of,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - as above
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402 - as above

from batcher import BatchdecodeError, ByteTokenizer, Engine, Request, load_model  # noqa: E402 - as above
from batcher.errors import ModelError  # noqa: E402 - as above
from batcher.events import PreemptEvent  # noqa: E402 - as above
from batcher.hf import loading, tiles  # noqa: E402 - as above
from batcher.hf.model import Sizes, parts_of  # noqa: E402 - as above
from batcher.models import tiles as models_tiles  # noqa: E402 - as above
from batcher.models.base import Batch, Chunk, LogitEdits, free_kv_bytes_of  # noqa: E402 - as above
from batcher.models.tiles import TileModel  # noqa: E402 - as above
from batcher.settings import SchedulingSettings  # noqa: E402 - as above
from batcher.speculation.settings import SpeculationSettings  # noqa: E402 - as above

BY_TOKEN = {"qwen3 with experts", "gpt-oss", "longrope of phi 3.5 with experts"}
"""With other experts for each token; computed one token at a time to be exact."""


@pytest.fixture(autouse=True)
def _alone_and_quiet(monkeypatch):
    be_quiet()
    monkeypatch.setitem(tiles._EXACT_SIZES, "cpu", ((16, 48),))  # several, as on a GPU


@pytest.mark.parametrize("name", PAGED)
def test_tokens_are_those_that_generate_gives(name, tmp_path):
    """Beyond the switch of LongRoPE all prompts have the factors of long ones."""
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    given = prompts()
    if "longrope" in name:
        given = [prompt * (1 + SWITCH // len(prompt)) for prompt in given]
    asked = [{"prompt": prompt, "max_tokens": 40} for prompt in given]
    expected = [generated(theirs, fields["prompt"], 40) for fields in asked]
    assert len({token for tokens in expected for token in tokens}) > 20
    for settings in ({}, {"exact": True}, {"fast_math": True}):
        model = load_model(f"hf:{tmp_path}", **settings)
        assert isinstance(model.inner, TileModel)
        is_exact = settings == {"exact": True} or (not settings and name not in BY_TOKEN)
        assert model.settings["exact"] == is_exact
        assert ("uncaptured" in model.settings) == (name in BY_TOKEN)
        assert ("inexact" in model.settings) == (not settings and name in BY_TOKEN)
        schedules = {"plain": {}} if "fast_math" in settings else SCHEDULES
        for schedule in schedules.values():
            if name in BY_TOKEN and settings and schedule:
                continue
            found = results_of(model, asked, schedule=schedule)
            assert [result.tokens for result in found] == expected, (settings, schedule)
        if not settings and name not in BY_TOKEN:
            assert model.inner._decoder.sizes == (16, 48)


@pytest.mark.parametrize("name", [name for name in PAGED if "longrope" in name])
def test_a_context_up_to_the_switch_has_short_factors(name, tmp_path):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model = load_model(f"hf:{tmp_path}", max_context=SWITCH)
    asked = [{"prompt": prompt, "max_tokens": 10} for prompt in prompts(lengths=(3, 17, 9))]
    found = results_of(model, [*asked, {"prompt": asked[0]["prompt"], "max_tokens": 99}])
    assert [result.tokens for result in found[:-1]] == [
        generated(theirs, fields["prompt"], 10)[: SWITCH - len(fields["prompt"])]
        for fields in asked
    ]
    assert found[-1].tokens == generated(theirs, asked[0]["prompt"], SWITCH - 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with full attention, with windows in all layers, and with windows in some."""
    names = ("llama", "mistral", "gemma 3")
    found = {name: tmp_path_factory.mktemp("model") for name in names}
    for name, folder in found.items():
        random_model(name).save_pretrained(folder)
    return found


@pytest.fixture(params=["llama", "mistral", "gemma 3"])
def folder(folders, request):
    return folders[request.param]


def mixture(draw, num_groups):
    """Return a batch size and a schedule, some with preemption, chunks and a prefix cache."""
    schedule = {}
    batch_size = draw.choice([1, 2, 3, 5, 8, 20])
    if draw.random() < 0.6:
        schedule["block_size"] = draw.choice([1, 3, 4, 16])
        schedule["prefix_cache"] = draw.random() < 0.6
        if draw.random() < 0.6:
            schedule["kv_blocks"] = num_groups * (
                draw.randint(85, 110) // schedule["block_size"] + 1
            )
    if draw.random() < 0.6:
        schedule["max_batch_tokens"] = max(batch_size, 16) + draw.choice([0, 1, 10, 40])
    if draw.random() < 0.3:
        schedule["long_prefill_threshold"] = draw.randint(1, 20)
    return batch_size, schedule


def test_logprobs_are_equal_to_the_bit_in_a_hundred_mixtures(folder):
    model = load_model(f"hf:{folder}", exact=True, dtype="bfloat16")
    draw = Random(1)
    asked = [
        {
            "prompt": prompt,
            "max_tokens": draw.randint(1, 30),
            "logprobs": 2,
            **({"temperature": 1.0, "top_k": 9} if draw.random() < 0.4 else {}),
        }
        for prompt in prompts(draw)
    ]
    told = [
        [(result.tokens, result.logprobs) for result in results_of(model, [fields], 1)]
        for fields in ({**fields, "id": str(n)} for n, fields in enumerate(asked))
    ]
    num_preemptions = 0
    for number in range(34):
        batch_size, schedule = mixture(draw, len(model.inner.cache_windows))
        order = draw.sample(range(len(asked)), draw.randint(1, len(asked)))
        mixed = [
            {
                **asked[place],
                "id": str(place),
                "arrival_time": draw.choice([0.0, draw.random() * 9]),
            }
            for place in order
        ]
        run = run_of(model, mixed, batch_size, schedule)
        num_preemptions += len(of_kind(run.events, PreemptEvent))
        for result in run.results:
            expected = told[int(result.id)]
            assert [(result.tokens, result.logprobs)] == expected, (number, batch_size, schedule)
    assert num_preemptions or model.inner.cache_windows == (8,)  # which holds few blocks


def test_verify_proves_it(folders, tmp_path):
    lines = [
        {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "logprobs": 2}
        for prompt in prompts(Random(2))
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tool = Path(sys.executable).with_name("batchdecode")
    model = f"hf:{folders['llama']}"
    command = [tool, "verify", requests, "--model", model, "--exact", "--settings", "40", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    proof = json.loads(done.stdout)
    assert proof["is_proven"]
    assert proof["exercised"]["preemptions"] > 0


def test_drafts_beams_and_scores_are_those_without_a_batch(folder):
    model = load_model(f"hf:{folder}", exact=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"prompt": prompt, "max_tokens": 30} for prompt in prompts(Random(0))]
    expected = [generated(theirs, fields["prompt"], 30) for fields in asked]
    for draft in (f"hf:{folder}", "ngram"):
        found = results_of(model, asked, speculation=SpeculationSettings(draft=draft))
        assert [result.tokens for result in found] == expected
    long = prompts(Random(0))[3]
    asked = [
        {"prompt": long, "max_tokens": 2, "prompt_logprobs": 0},
        {"prompt": long, "max_tokens": 20, "num_beams": 3},
        {"prompt": long, "max_tokens": 20, "n": 2, "temperature": 1, "seed": 1},
        {"prompt": long, "max_tokens": 20},
    ]
    schedules = ({}, {"max_batch_tokens": 8}, {"kv_blocks": 160, "block_size": 4})
    whole, *others = (results_of(model, asked, 6, schedule) for schedule in schedules)
    for other in others:
        assert [result.tokens for result in other] == [result.tokens for result in whole]
        assert other[0].prompt_logprobs == whole[0].prompt_logprobs
    with torch.no_grad():
        logits = theirs(torch.tensor([long])).logits[0].log_softmax(-1)
    wanted = [logits[at, token].item() for at, token in enumerate(long[1:])]
    told = [of_token.logprob for of_token in whole[0].prompt_logprobs[1:]]
    assert told == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("num_top", [10, 60])
def test_the_largest_logits_choose_as_all_of_them_do(folders, monkeypatch, num_top):
    model = load_model(f"hf:{folders['llama']}", exact=True, dtype="bfloat16")
    for each in (model, model.inner):  # for constraints
        monkeypatch.setattr(each, "eos_token_id", VOCAB - 1)
        monkeypatch.setattr(each, "tokenizer", ByteTokenizer())
    settings = [
        {"logprobs": 3},
        {"temperature": 1.0, "top_k": 8, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 9, "min_p": 0.1, "logprobs": 2},
        {"temperature": 0.7, "min_p": 0.02},
        {"temperature": 0.7, "min_p": 0.3, "logprobs": 5, "logprobs_mode": "processed"},
        {"temperature": 1.5, "top_k": 5, "n": 2, "best_of": 3},
        {},
        {"temperature": 0.8, "top_p": 0.7, "logprobs": 1},
        {"temperature": 1.0, "top_k": 5, "frequency_penalty": 0.5, "logprobs": 0},
        {"repetition_penalty": 1.4, "logit_bias": {"30": 5.0, "31": -3.0}},
        {"temperature": 0.9, "top_k": 6, "bad_words": ["b"], "regex": "([a-f][a-c ]?)+"},
        {"choice": ["one", "two of them"]},
        {"temperature": 1.0, "min_p": 0.1, "allowed_token_ids": [*range(40, 90)], "min_tokens": 3},
        {"temperature": 1.0, "logit_bias": {"30": 5.0}},  # these have all logits
        {"logprobs": 2, "presence_penalty": 0.5},
    ]
    asked = [
        {"prompt": prompt, "max_tokens": 12, "seed": 3, "ignore_eos": False, **fields}
        for prompt, fields in zip(2 * prompts(Random(3)), settings, strict=False)
    ]
    told, largest = [], tiles._largest
    used = []
    monkeypatch.setattr(tiles, "_largest", lambda *given: used.append(given[1]) or largest(*given))
    for number, batch_size in ((0, 4), (num_top, 4), (num_top, 20)):  # 20: more than a head takes
        monkeypatch.setattr(TileModel, "num_top_logits", number)
        told.append(
            [
                (result.tokens, result.logprobs, result.cumulative_logprob)
                for result in results_of(model, asked, batch_size, {"max_batch_tokens": 40})
            ]
        )
    assert told[0] == told[1] == told[2]
    assert {*used} == {num_top}


def test_edits_of_a_row_that_fails_reach_no_other_row(folders):
    model = load_model(f"hf:{folders['llama']}", exact=True, max_context=20).inner
    model.allocate(40)
    rng, batch, num_rows = np.random.default_rng(0), Batch(40), 37
    for slot in range(num_rows):
        batch.join(Chunk(slot, [5] * (21 if slot % 5 == 0 else slot % 3 + 1), 0))
    batch.top_slots = np.arange(num_rows)
    rows, none = np.arange(num_rows), np.zeros(0, np.int64)
    cells = rows, rows + 7
    allowed = rng.random((num_rows, VOCAB)) < 0.5
    biases = *cells, rng.normal(0, 5, num_rows).astype(np.float32)
    penalties = *cells, np.full(num_rows, 1.5), np.full(num_rows, 0.25)
    batch.edits = LogitEdits(rows, allowed, none, none, *biases, *penalties)
    output = model.forward(batch)
    assert [*output.failed] == [*range(0, num_rows, 5)]
    found = output.top_logits.of(np.delete(rows, [*output.failed]))
    raw = np.zeros((num_rows, VOCAB), np.float32)
    raw[np.delete(rows, [*output.failed])] = found.whole(np.arange(len(found.logits)))
    expected = top_logits(raw, 256, batch.edits).of(np.delete(rows, [*output.failed]))
    for part, other in zip(found[:5], expected[:5], strict=True):
        assert part == pytest.approx(other, rel=1e-12)


@given(seed=st.integers(0, 2**32 - 1))
@examples(200)
def test_the_device_edits_logits_to_the_bit_as_documented(seed):
    rng = np.random.default_rng(seed)
    vocab_size, num_rows = int(rng.integers(1, 70)), 5
    logits = rng.choice([0.0, -0.0, -np.inf, 3e38, -3e38, 1e-40, 1.5, -2.25], (5, vocab_size))
    logits = np.where(rng.random(logits.shape) < 0.5, logits, rng.normal(0, 9, logits.shape))
    logits = torch.from_numpy(logits.astype(np.float32)).to(
        torch.float32 if seed % 2 else torch.bfloat16
    )

    def cells():
        return (rng.random((num_rows, vocab_size)) < rng.choice([0, 0.3, 1])).nonzero()

    masked = rng.permutation(num_rows)[: rng.integers(0, num_rows + 1)]
    refused, biased, penalized = cells(), cells(), cells()
    edits = LogitEdits(
        masked,
        rng.random((len(masked), vocab_size)) < 0.5,
        *refused,
        *biased,
        rng.normal(0, 50, len(biased[0])).astype(np.float32),
        *penalized,
        rng.choice([1.0, 0.7, 1.3, 1e-3, 10.0], len(penalized[0])),
        rng.choice([0.0, 0.1, -2.0, 77.7], len(penalized[0])),
    )
    expected = edits.apply(logits.float().numpy())
    before = logits.clone()
    found = tiles._edited(logits, edits).numpy()
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert torch.equal(logits, before)


@pytest.fixture(scope="module")
def exact_models(folders):
    return {name: load_model(f"hf:{folder}", exact=True) for name, folder in folders.items()}


@given(seed=st.integers(0, 2**32 - 1))
@examples(400)
def test_steps_ahead_change_no_result(exact_models, seed):
    """Rows stop, are aborted, preempted and forked, and others arrive, when the device is ahead."""
    draw = Random(seed)
    model = exact_models[draw.choice([*exact_models])]
    batch_size, schedule = mixture(draw, len(model.inner.cache_windows))
    batch_size = max(batch_size, 2)  # beams need two
    asked = []
    for number, prompt in enumerate(prompts(draw, (3, 9, 30, 1, 12))):
        fields = draw.choice(
            [{}] * 5
            + [
                {"n": 2, "temperature": 1.0},
                {"num_beams": 2},
                {"temperature": 1.0},
                {"logprobs": 1},
            ]
        )
        stops = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 0, 20, 60]))]
        asked.append(
            Request(
                id=str(number),
                prompt=prompt,
                max_tokens=draw.randint(1, 40),
                stop_token=stops or None,
                arrival_time=draw.choice([0.0, 0.0, draw.random() * 60]),
                ignore_eos=True,
                **fields,
            )
        )
    aborts = {draw.randint(3, 60): str(draw.randrange(len(asked))) for _ in range(2)}
    found = []
    for patience in (0, 2**62):
        with patch.object(models_tiles, "_PATIENCE", patience):
            engine = Engine(model, batch_size, settings=SchedulingSettings(**schedule))
            for request in asked:
                engine.add(request)
            results = []
            step = 0
            while engine.has_work:
                if step in aborts:
                    with suppress(BatchdecodeError):  # it has ended
                        engine.abort(aborts[step])
                results += engine.step().results
                step += 1
            assert (model.inner._ahead is None) >= (patience > 0)
            found.append(sorted((result.id, result.index, result.tokens) for result in results))
    assert found[0] == found[1]


def test_the_device_is_ahead_of_rows_that_go_on(exact_models, monkeypatch):
    """A step ahead is used although a row begins a block in it, and others have stopped."""
    model = exact_models["gemma 3"]
    monkeypatch.setattr(models_tiles, "_PATIENCE", 0)
    used, take = [], TileModel._take_ahead
    monkeypatch.setattr(
        TileModel, "_take_ahead", lambda *given: used.append(take(*given)) or used[-1]
    )
    asked = [
        {"prompt": prompt, "max_tokens": 20 + 5 * number}
        for number, prompt in enumerate(prompts(Random(0), (3, 5)))
    ]
    for schedule in ({}, {"kv_blocks": 99, "block_size": 4}):
        used.clear()
        results_of(model, asked, 4, schedule)
        assert used == [False] + [True] * (max(fields["max_tokens"] for fields in asked) - 2)


def test_rows_beyond_the_context_and_empty_ones_fail_alone(folders):
    model = load_model(f"hf:{folders['llama']}", exact=True, max_context=20).inner
    model.allocate(3)
    batch = Batch(3)
    batch.join(Chunk(0, [5] * 21, 0))
    batch.join(Chunk(1, [], 0))
    batch.join(Chunk(2, [5] * 20, 0))
    first = model.forward(batch)
    assert first.failed == {
        0: "21 tokens are more than its context of 20",
        1: "an empty prompt: this model needs a token to begin with",
    }
    batch.chunks = []
    batch.leave(0)
    batch.leave(1)
    assert model.forward(batch).failed == {2: "21 tokens are more than its context of 20"}


def test_a_twin_has_a_cache_of_its_own(folders):
    model = load_model(f"hf:{folders['llama']}", exact=True).inner
    model.allocate(2)
    twin = model.twin()
    twin.allocate(2)
    found = []
    for own, ids in ((model, [5, 6, 7]), (twin, [200, 100, 9, 4])):
        batch = Batch(2)
        batch.join(Chunk(0, ids, 0))
        found.append((own, batch, own.forward(batch).tokens[0]))
    for own, batch, token in found:
        batch.chunks, batch.tokens[0] = [], token
        ids = [5, 6, 7] if own is model else [200, 100, 9, 4]
        alone = Batch(1)
        alone.join(Chunk(0, [*ids, int(token)], 0))
        after = own.forward(batch).tokens[0]
        own.allocate(1)
        assert own.forward(alone).tokens[0] == after


def test_a_size_whose_bits_differ_is_not_used(folders, monkeypatch):
    computed = tiles.TileCache.choose

    def differs_in_large_tiles(self, *given):
        tokens, logits, top = computed(self, *given)
        return tokens, logits + (len(self._tiles) > 1) * self.last_size, top

    monkeypatch.setattr(tiles.TileCache, "last_size", 0, raising=False)
    compute = tiles.TileCache.compute

    def noting(self, token_ids, *others):
        self.last_size = max(self.decoder.sizes_of(len(token_ids)))
        return compute(self, token_ids, *others)

    monkeypatch.setattr(tiles.TileCache, "compute", noting)
    monkeypatch.setattr(tiles.TileCache, "choose", differs_in_large_tiles)
    monkeypatch.setitem(tiles._EXACT_SIZES, "cpu", ((32, 48), (32,)))
    model = load_model(f"hf:{folders['llama']}", exact=True).inner
    assert model._decoder.sizes == (32,)


def test_a_model_that_is_not_captured_runs_kernel_by_kernel(folders, monkeypatch):
    """Triton fails, too, so that the reference computes attention."""
    captured, attended = tiles._captured, []

    def fails(compute, decoder, pool):
        if decoder.uncaptured is None:
            decoder.attend = lambda *_: pytest.fail("Triton's kernels fail")
        if decoder.attend is not tiles.reference_attention:
            raise tiles.TileError("its kernels were not captured: why")
        attended.append(decoder.uncaptured)
        return captured(compute, decoder, pool)

    monkeypatch.setattr(tiles, "_captured", fails)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders["gemma 3"])
    model = load_model(f"hf:{folders['gemma 3']}")
    assert model.settings["uncaptured"] == "its kernels were not captured: why"
    assert model.settings["exact"]
    asked = [{"prompt": prompt, "max_tokens": 20} for prompt in prompts(Random(0))]
    assert [result.tokens for result in results_of(model, asked)] == [
        generated(theirs, fields["prompt"], 20) for fields in asked
    ]
    assert attended


def test_a_model_without_exact_tiles_is_fast_or_refused(folders, monkeypatch):
    monkeypatch.setattr(TileModel, "_has_equal_bits", lambda _self: False)
    model = load_model(f"hf:{folders['llama']}")
    reason = "torch computes the same token in several ways"
    assert (model.settings["exact"], model.settings["inexact"]) == (False, reason)
    assert model.inner._decoder.sizes == tiles._FAST_SIZES["cpu"]
    with pytest.raises(BatchdecodeError, match=f"--exact: {reason}"):
        load_model(f"hf:{folders['llama']}", exact=True)


def test_exact_and_fast_at_once_are_an_error(folders):
    with pytest.raises(BatchdecodeError, match="--exact cannot be used with --fast-math"):
        load_model(f"hf:{folders['llama']}", exact=True, fast_math=True)


KERNEL = """
import torch
from batcher.hf.attention import paged_attention
from batcher.hf.model import AttentionCall
from batcher.hf.tiles import Where, reference_attention

draw = torch.Generator().manual_seed(0)
CASES = [  # heads, key heads, features of keys and of values, window, softcap, block size
    (8, 2, 64, 64, None, None, 4), (4, 4, 20, 12, None, None, 1), (6, 2, 16, 16, 7, 5.0, 5),
    (4, 1, 32, 32, 70, None, 16), (2, 2, 16, 16, None, 30.0, 16),
]
for number, (heads, kv_heads, key_dim, value_dim, window, softcap, size) in enumerate(CASES):
    num_blocks = 700 // size + 9
    keys = torch.randn(3 + num_blocks * size, kv_heads, key_dim, generator=draw)
    values = torch.randn(3 + num_blocks * size, kv_heads, value_dim, generator=draw)
    own = torch.tensor([1, 2, 0, 1, 40, 41, 2])
    longest = -(-130 // size)
    tables = torch.randperm(num_blocks, generator=draw)[: longest * 5].reshape(longest, 5).int()
    slots, lengths = torch.tensor([0, 1, 0, 2, 3, 4, 1]), torch.tensor([1, 130, 0, 33, 17, 64, 65])
    query = torch.randn(7, heads, key_dim, generator=draw)
    sinks = torch.randn(heads, generator=draw) if number % 2 else None
    call = AttentionCall(query, query, query, key_dim**-0.5, window, softcap, sinks)
    where = Where(tables, slots, lengths, own, 3, size)
    found = paged_attention(call, keys, values, where)
    expected = reference_attention(call, keys, values, where.reads(window, 0))
    gathered = reference_attention(call, keys, values, where.reads(window, 200))
    assert torch.allclose(gathered, expected, atol=1e-5), number
    assert torch.allclose(found, expected, atol=1e-5), number
    alone = AttentionCall(query[1:2], *(query,) * 2, key_dim**-0.5, window, softcap, sinks)
    one = where._replace(slots=slots[1:2], lengths=lengths[1:2], own_cells=own[1:2])
    by_itself = paged_attention(alone, keys, values, one)
    assert torch.equal(by_itself[0], found[1]), number
print("equal")
"""


def test_the_kernel_computes_what_its_definition_says():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr


# A device that is not there: how much fits into it.

CUDA = torch.device("cuda:0")


def test_blocks_that_do_not_fit_are_an_error_that_says_how_many_do(exact_models, monkeypatch):
    decoder = exact_models["llama"].inner._decoder

    def has_no_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(decoder, "device", CUDA)
    monkeypatch.setattr(decoder, "num_free_bytes", lambda: 2**21)
    made = []
    monkeypatch.setattr(tiles, "TileCache", lambda *sizes: made.append(sizes[1:]))
    decoder.new_cache(4, None, 16)  # for 160 tokens of each row, or half of the memory
    decoder.new_cache(400, None, 16)
    block_bytes = 16 * 2 * 4 * 2 * 16 * 4  # tokens, keys and values, layers, heads, features, bytes
    assert made == [(4, 40, 16), (400, 2**20 // block_bytes, 16)]
    monkeypatch.setattr(tiles, "TileCache", has_no_memory)
    message = (
        "99,000 KV blocks of 16 tokens take 1.5 GiB, but cuda:0 has 0.0 GiB free: "
        f"at most {int(0.9 * 2**21) // block_bytes} blocks fit"
    )
    with pytest.raises(BatchdecodeError, match=message):
        decoder.new_cache(4, 99_000, 16)


def test_a_cache_on_a_device_does_not_grow(folders, monkeypatch):
    model = load_model(f"hf:{folders['llama']}", exact=True)
    model.inner.allocate(2)
    cache = model.inner._cache
    cache.make_room(3)
    monkeypatch.setattr(cache, "_device", CUDA)
    with pytest.raises(ModelError, match="cuda:0 has only 3 KV blocks: set"):
        cache.make_room(4)


def test_rows_that_find_no_block_fail_and_free_theirs(folders, monkeypatch):
    model = load_model(f"hf:{folders['llama']}", exact=True)
    begin = TileModel._begin

    def has_three_blocks(self, *sizes):
        begin(self, *sizes)
        self._own.max_blocks = 3

    monkeypatch.setattr(TileModel, "_begin", has_three_blocks)
    engine = Engine(model, 2)
    asked = [{"prompt": [5] * 50, "max_tokens": 90}] * 2  # two blocks of 64 tokens, then a third
    asked += [{"prompt": [number], "max_tokens": 70} for number in (6, 7, 8)]
    requests = [Request(id=str(n), ignore_eos=True, **fields) for n, fields in enumerate(asked)]
    results = {result.id: result for result in drained(engine, requests).results}
    for name in "01":
        assert results[name].error.message.endswith(
            "all 3 KV blocks that fit are in use: set --kv-memory auto, or a smaller --batch"
        )
    assert len(results["4"].tokens) == 70
    again = Request(id="long", prompt=[9] * 150, max_tokens=9, ignore_eos=True)  # three blocks
    assert not drained(engine, [again]).results[0].error


def test_weights_that_do_not_fit_are_an_error(monkeypatch):
    class Large(torch.nn.Linear):
        def to(self, _device):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**29, 2**33))
    message = "its weights take 1.0 GiB, and cuda:1 has 0.5 GiB free: use a smaller model"
    with pytest.raises(BatchdecodeError, match=message):
        loading._moved(Large(2**14, 2**14, device="meta"), "cuda:1")


def test_the_free_memory_is_that_of_the_device(exact_models, monkeypatch):
    model = exact_models["llama"]
    assert free_kv_bytes_of(model) > 2**20  # of the computer
    monkeypatch.setattr(model.inner, "num_free_bytes", lambda: 1000)
    assert free_kv_bytes_of(model) == 900


# A graph that is not one of CUDA: the same operations on the same tensors, and no Python.


class Tape(TorchDispatchMode):
    """Records operations; `replay` repeats them on the tensors that were there before."""

    def __init__(self, compute):
        super().__init__()
        self.calls = []
        with torch.inference_mode(), self:
            compute()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def replay(self):
        made = {}  # by the id of a tensor of the recording

        def now(recorded):
            return made.get(id(recorded), recorded)

        for func, args, kwargs, output in self.calls:
            args_now, kwargs_now = tree_map_only(torch.Tensor, now, (args, kwargs))
            again = func(*args_now, **kwargs_now)
            pairs = zip(tree_leaves(output), tree_leaves(again), strict=True)
            made |= {id(old): new for old, new in pairs if isinstance(old, torch.Tensor)}


def fixed_attention(call, keys, values, where):
    """Return the same as the kernel, of all cells that a table may have, without a loop."""
    size, tables = where.block_size, where.tables
    at = torch.arange(len(tables) * size)
    last, lengths = where.lengths[:, None] - 1, where.lengths[:, None]
    cells = where.first_cell + tables[at // size][:, where.slots].T * size + at % size
    cells = torch.where(at == last, where.own_cells[:, None], cells)
    mask = (at < lengths) & (at >= lengths - (call.window or len(at)))
    mask |= lengths == 0  # padding, whose numbers should be finite
    return call.of(call.query[:, None], keys[cells], values[cells], mask[:, None, None])[:, 0]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma 2", "gemma 3", "yarn", "gpt-2"])
def test_a_tile_can_be_captured(name, tmp_path, monkeypatch):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    tapes = []

    def captured(compute, *_):
        tapes.append(Tape(compute))
        return tapes[-1].replay

    def new_cache(self, num_slots, num_blocks, block_size):
        return tiles.TileCache(self, num_slots, num_blocks or 64 * num_slots, block_size)

    monkeypatch.setattr(tiles, "_captured", captured)
    monkeypatch.setattr(tiles.TileDecoder, "new_cache", new_cache)
    monkeypatch.setattr(tiles, "reference_attention", fixed_attention)
    monkeypatch.setattr(tiles.Where, "reads", lambda self, *_: self)
    monkeypatch.setattr(models_tiles, "_PATIENCE", 2)
    model = load_model(f"hf:{tmp_path}", exact=True, max_context=96)
    assert model.inner._decoder.sizes == (16, 48)
    asked = [{"prompt": prompt, "max_tokens": 25} for prompt in prompts(Random(0))]
    for schedule in ({}, {"kv_blocks": 70, "block_size": 4}):
        num_tapes = len(tapes)
        found = results_of(model, asked, schedule=schedule)
        assert len(tapes) == num_tapes + 3  # two sizes of tiles, and the head
        assert [result.tokens for result in found] == [
            generated(theirs, fields["prompt"], 25) for fields in asked
        ]


def test_a_cache_stays_if_it_is_large_enough(exact_models, monkeypatch):
    model, made = exact_models["llama"].inner.twin(), []
    new_cache = tiles.TileDecoder.new_cache
    monkeypatch.setattr(
        tiles.TileDecoder, "new_cache", lambda *sizes: made.append(sizes[1:]) or new_cache(*sizes)
    )
    model.allocate_pages(4, 100, 16)
    model.allocate_pages(2, 90, 16)
    assert made == [(4, 100, 16)]
    for sizes in ((5, 90, 16), (5, 91, 16), (5, 91, 8), (5, None, 8)):
        model.allocate_pages(*sizes)
        assert made.pop() == sizes
    model.allocate_pages(5, None, 8)
    model.allocate_pages(5, 10, 8)
    assert made.pop() == (5, 10, 8)
    model.allocate(5)
    assert made[1:] == [(5, None, 64)]


def test_tiles_that_are_not_exact_have_more_sizes(folders):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders["gemma 3"])
    asked = [{"prompt": prompt, "max_tokens": 30} for prompt in prompts(Random(0))]
    expected = [generated(theirs, fields["prompt"], 30) for fields in asked]
    sizes = Sizes(VOCAB, 160, ())
    decoder = tiles.TileDecoder(parts_of(theirs), sizes, is_exact=False)
    assert [*decoder.sizes_of(9)] == [16]
    assert [*decoder.sizes_of(330)] == [256, 256]
    model = TileModel(decoder, ByteTokenizer(), "fast", {})
    found = results_of(model, asked, schedule={"max_batch_tokens": 20})
    assert [result.tokens for result in found] == expected


def test_trees_of_drafts_are_refused(exact_models):
    with pytest.raises(BatchdecodeError, match=r"`hf:` models cannot.*; use --draft-tokens"):
        results_of(
            exact_models["llama"],
            [],
            speculation=SpeculationSettings(draft="ngram", draft_tree="2x2"),
        )
