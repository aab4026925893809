"""Benchmark of int8: how much likelihood of a text SmolLM2 loses, and the memory of its weights."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from report import Row

from batcher import BatchdecodeError, Engine, Request
from batcher.models.checkpoints import load_transformer, smollm2_file
from batcher.models.transformer import TransformerModel
from batcher.transformer.checkpoint import open_checkpoint
from batcher.transformer.config import TransformerSettings
from batcher.transformer.layers import FloatArray
from batcher.transformer.linear import FastLinear, Linear, WholeLinears, quantize_weights_int8
from batcher.transformer.transformer import Transformer

DOCS = Path(__file__).parents[2] / "docs"
NUM_TOKENS = 400
PACKED = TransformerSettings(weights="int8-channel", low_memory=True)


class RoundedWeights(WholeLinears):
    """Weights are rounded to int8, a scale for each output, and multiplied as floats."""

    def linear(self, weight: FloatArray, bias: FloatArray | None = None) -> Linear:
        """Return the product with a weight [out, in], rounded."""
        integers, scales = quantize_weights_int8(weight, per_channel=True)
        return FastLinear(integers * scales[:, None], bias)


def prose() -> str:
    """Return the paragraphs of a page of the docs, without tables, lists and what is run."""
    blocks = (DOCS / "scheduling.md").read_text().split("\n\n")
    return "\n".join(block.replace("\n", " ") for block in blocks if block[0].isalpha())


def loss(model: TransformerModel, tokens: list[int]) -> float:
    """Return the mean negative log-likelihood of tokens, each after those before it."""
    engine = Engine(model, 1)
    engine.add(Request(prompt=tokens, max_tokens=1, prompt_logprobs=0))
    results = []
    while engine.has_work:
        results += engine.step().results
    told = results[0].prompt_logprobs or []
    return -float(np.mean([entry.logprob for entry in told if entry.logprob is not None]))


def quality(_: Path) -> Iterator[Row]:
    """Yield the rows of likelihood, and of memory."""
    try:
        model = load_transformer("smollm2", TransformerSettings(fast_math=True))
    except BatchdecodeError as error:
        yield Row(f"SmolLM2: {error}", "not run", "")
        return
    checkpoint = open_checkpoint(smollm2_file())
    tokens = checkpoint.tokenizer.encode(prose())[:NUM_TOKENS]
    exact = loss(model, tokens)
    rounded = Transformer(checkpoint.config, checkpoint.read, RoundedWeights())
    tracemalloc.start()
    packed = load_transformer("smollm2", PACKED)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    of_weights = loss(TransformerModel(rounded, checkpoint.tokenizer, "rounded", {}), tokens)
    of_both = loss(packed, tokens)
    name = f"SmolLM2, {len(tokens)} tokens of the docs: log-likelihood lost to int8-channel"
    yield Row(f"{name}, weights alone", f"{of_weights / exact - 1:+.2%}", "<= 1 %")
    yield Row(f"{name}, activations too", f"{of_both / exact - 1:+.2%}", "<= 2 %")
    num_numbers = sum(checkpoint.read(each).size for each in checkpoint.names)
    share = num_bytes / (4 * num_numbers)
    yield Row("SmolLM2, --low-memory: of the memory of fp32", f"{share:.2f}x", "<= 0.27x")
