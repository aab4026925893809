"""Benchmark of transformers: decoding SmolLM2 against the products with its weights alone.

Whatever is compared is done in turn, step by step, and the median of the ratios is told.
"""

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from model_peers import peers
from workload import Row

from batcher import BatchdecodeError, Engine, Request
from batcher.models.checkpoints import load_transformer, smollm2_file
from batcher.settings import SchedulingSettings
from batcher.transformer.config import TransformerSettings

BATCHES = (1, 8, 16, 64)
NUM_STEPS = 12
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # [out, in] of the weights
NUM_LAYERS, HEAD = 30, (49152, 576)
KINDS = {
    "--fast-math": TransformerSettings(fast_math=True),
    "fp32": TransformerSettings(),
    "int8-channel": TransformerSettings(weights="int8-channel"),
}
NUM_PROMPTS, NUM_SYSTEM, NUM_OWN = 64, 512, 16  # prompts, and tokens: of all, and of each
CACHE = SchedulingSettings(block_size=16, prefix_cache=True, max_batch_tokens=2048)


def weights():
    return [np.ones(shape, np.float32) for shape in [*LAYER * NUM_LAYERS, HEAD]]


def seconds_of_products(matrices, num_rows):
    rows = {width: np.ones((num_rows, width), np.float32) for width in (576, 1536)}
    began = time.perf_counter()
    for matrix in matrices:
        rows[matrix.shape[1]] @ matrix.T
    return time.perf_counter() - began


class Watched:
    """Notes how long each step of a model takes, and how many tokens of prompts they have."""

    def __init__(self, model):
        self.seconds = []
        self.num_prompt_tokens = 0
        self._forward = model.forward
        model.forward = self._watch

    def _watch(self, batch):
        self.num_prompt_tokens += sum(len(chunk.token_ids) for chunk in batch.chunks)
        began = time.perf_counter()
        output = self._forward(batch)
        self.seconds.append(time.perf_counter() - began)
        return output


class Decoding:
    """An engine whose every slot decodes."""

    def __init__(self, model, num_rows):
        draw = random.Random(0)
        self.watched = Watched(model)
        self._engine = Engine(model, num_rows)
        for _ in range(num_rows):
            prompt = [draw.randrange(3, HEAD[0]) for _ in range(20)]
            self._engine.add(Request(prompt=prompt, max_tokens=NUM_STEPS + 3, ignore_eos=True))
        self.step()
        self.step()

    def step(self):
        began = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began


def decoding(loaded, num_rows):
    """Yield how fast steps of full batches are, against their products and each other."""
    matrices = weights()
    engines = {kind: Decoding(model.twin(), num_rows) for kind, model in loaded.items()}
    seconds = {"products": []} | {kind: [] for kind in engines}
    for _ in range(NUM_STEPS):
        seconds["products"].append(seconds_of_products(matrices, num_rows))
        for kind, engine in engines.items():
            seconds[kind].append(engine.step())

    def speed(kind, other):
        pairs = zip(seconds[other], seconds[kind], strict=True)
        return f"{statistics.median(one / own for one, own in pairs):.2f}x"

    rates = {kind: num_rows / statistics.median(each) for kind, each in seconds.items()}
    for kind in engines:
        name = f"SmolLM2, {kind}, B={num_rows}: {rates[kind]:.0f} tokens/s, "
        target = "" if kind == "fp32" else ">= 0.8x"
        yield Row(f"{name}its products {rates['products']:.0f}", speed(kind, "products"), target)
        if kind != "--fast-math":
            target = "" if kind == "fp32" and num_rows < 16 else ">= 0.8x"
            yield Row("the same against --fast-math", speed(kind, "--fast-math"), target)
    if num_rows == BATCHES[-1]:
        forwards = engines["--fast-math"].watched.seconds[-NUM_STEPS:]
        pairs = zip(seconds["--fast-math"], forwards, strict=True)
        share = statistics.median(1 - model / step for step, model in pairs)
        yield Row(f"the engine's own share of a step, B={num_rows}", f"{share:.1%}", "<= 2 %")


def prefix_cache(model):
    """Yield what a prefix cache saves of prompts that begin alike, and until their first tokens."""
    draw = random.Random(0)
    drawn = [draw.randrange(3, HEAD[0]) for _ in range(NUM_SYSTEM + NUM_PROMPTS * NUM_OWN)]
    first_tokens, computed = [], []
    for settings in (CACHE, SchedulingSettings(max_batch_tokens=CACHE.max_batch_tokens)):
        twin = model.twin()
        watched = Watched(twin)
        engine = Engine(twin, NUM_PROMPTS, settings=settings)
        for number in range(NUM_PROMPTS):
            own = drawn[NUM_SYSTEM + number * NUM_OWN :][:NUM_OWN]
            engine.add(Request(prompt=[*drawn[:NUM_SYSTEM], *own], max_tokens=1, ignore_eos=True))
        began, waits = time.perf_counter(), []
        while engine.has_work:
            num_ended = len(engine.step().results)
            waits += [time.perf_counter() - began] * num_ended
        first_tokens.append(statistics.mean(waits))
        computed.append(watched.num_prompt_tokens)
    saved = 1 - computed[0] / computed[1]
    name = f"{NUM_PROMPTS} prompts, {NUM_SYSTEM} tokens of which are the same, prefix cache"
    yield Row(f"{name}: prompt work saved", f"{saved:.0%}", ">= 90 %")
    times = f"{first_tokens[0]:.1f} s, without {first_tokens[1]:.1f} s"
    faster = f"{first_tokens[1] / first_tokens[0]:.1f}x"
    yield Row(f"the same: time to first token {times}", faster, ">= 5x")


def loading(folder):
    """Yield how long a command takes that loads SmolLM2 and generates one token."""
    source, target = folder / "one.jsonl", folder / "one.results.jsonl"
    source.write_text('{"prompt": "Once upon a time", "max_tokens": 1}\n')
    tool = str(Path(sys.executable).with_name("batchdecode"))
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        command = [tool, "run", str(source), "--model", "smollm2", "-o", str(target), "-q"]
        subprocess.run([*command, "--force"], check=True)
        seconds.append(time.perf_counter() - began)
    name = "SmolLM2, fp32: a command from its start to its first token"
    yield Row(name, f"{min(seconds):.1f} s", "<= 5 s")


def models(folder):
    """Yield all rows of SmolLM2; of other engines, if they are installed."""
    try:
        path = smollm2_file()
    except BatchdecodeError as error:
        yield Row(f"SmolLM2: {error}", "not run", "")
        return
    loaded = {kind: load_transformer("smollm2", how) for kind, how in KINDS.items()}
    for num_rows in BATCHES:
        yield from decoding(loaded, num_rows)
    yield from loading(folder)
    yield from prefix_cache(loaded["--fast-math"])
    yield from peers(loaded, path)
