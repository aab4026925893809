"""Benchmark of transformers: decoding SmolLM2 against the products with its weights alone."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from report import Row

from batcher import BatchdecodeError, Engine, Request
from batcher.models.transformer import TransformerModel, load_transformer
from batcher.transformer.settings import TransformerSettings

BATCHES = (1, 8, 16, 64)
NUM_STEPS = 12
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # [out, in] of the weights
NUM_LAYERS, HEAD = 30, (49152, 576)
KINDS = {
    "--fast-math": TransformerSettings(fast_math=True),
    "fp32": TransformerSettings(),
    "int8-channel": TransformerSettings(weights="int8-channel"),
}


def weights() -> list[np.ndarray]:
    """Weights of SmolLM2's sizes, each with memory of its own as in the model."""
    return [np.ones(shape, np.float32) for shape in [*LAYER * NUM_LAYERS, HEAD]]


def products(matrices: list[np.ndarray], num_rows: int) -> float:
    """Return how many tokens a second the products with all weights allow."""
    rows = {width: np.ones((num_rows, width), np.float32) for width in (576, 1536)}
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for matrix in matrices:
            rows[matrix.shape[1]] @ matrix.T
        seconds.append(time.perf_counter() - began)
    return num_rows / min(seconds)


def decoding(model: TransformerModel, num_rows: int) -> float:
    """Return how many tokens a second decode steps of full batches give."""
    draw = random.Random(0)
    engine = Engine(model, num_rows)
    for _ in range(num_rows):
        prompt = [draw.randrange(3, HEAD[0]) for _ in range(20)]
        engine.add(Request(prompt=prompt, max_tokens=NUM_STEPS + 1, ignore_eos=True))
    engine.step()
    seconds = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return num_rows / min(seconds)


def models(_: Path) -> Iterator[Row]:
    """Yield the rows of decoding with each kind of weights, at each batch size."""
    try:
        loaded = {kind: load_transformer("smollm2", how) for kind, how in KINDS.items()}
    except BatchdecodeError as error:
        yield Row(f"SmolLM2: {error}", "not run", "")
        return
    matrices = weights()
    for num_rows in BATCHES:
        limit = products(matrices, num_rows)
        for kind, model in loaded.items():
            rate = decoding(model.twin(), num_rows)
            name = f"SmolLM2, {kind}, B={num_rows}: {rate:.0f} tokens/s, its products {limit:.0f}"
            target = "" if kind == "fp32" and num_rows < 16 else ">= 0.8x"  # a tile has 16 rows
            yield Row(name, f"{rate / limit:.2f}x", target)
