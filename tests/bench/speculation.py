"""Benchmark of speculation: whole runs with drafts against the same without.

Runs are compared by the seconds of the processor, one after the other in one process.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from report import Row

from batcher import BatchdecodeError, Engine, Request
from batcher.models.checkpoints import load_transformer
from batcher.models.transformer import TransformerModel
from batcher.scheduling.clock import WallClock
from batcher.speculation.settings import SpeculationSettings
from batcher.transformer.config import TransformerSettings

PAIR = Path(__file__).parents[2] / "samples" / "shakespeare"
KINDS = {"fp32": TransformerSettings(), "--fast-math": TransformerSettings(fast_math=True)}
TEXT = (
    "The lighthouse keeper kept a ledger of every ship that passed. On the third of March he "
    "wrote: the brig Marigold, two masts, bound for Lisbon, passed at dawn in a light fog."
)
QUOTE = (
    "<|im_start|>user\nRepeat the following text word for word, then repeat it again:\n"
    f"{TEXT}<|im_end|>\n<|im_start|>assistant\n"
)
SPEECHES = ["ROMEO. ", "My lord, I ", "What is thy name?", "Good morrow, cousin."]
NUM_ROWS = 64


def seconds(
    model: TransformerModel,
    requests: list[Request],
    num_slots: int,
    speculation: SpeculationSettings | None,
) -> float:
    """Return what it takes to decode all requests, once their prompts are computed."""
    engine = Engine(model.twin(), num_slots, clock=WallClock(), speculation=speculation)
    for request in requests:
        engine.add(request)
    engine.step()
    began = time.process_time()
    while engine.has_work:
        engine.step()
    return time.process_time() - began


def speedup(
    model: TransformerModel, requests: list[Request], num_slots: int, how: SpeculationSettings
) -> str:
    """Return how much faster a run is with drafts."""
    without = seconds(model, requests, num_slots, None)
    return f"{without / seconds(model, requests, num_slots, how):.2f}x"


def speculation(folder: Path) -> Iterator[Row]:
    """Yield all rows; those of SmolLM2 if it is installed."""
    speeches = [
        Request(prompt=p, max_tokens=120, temperature=1.0, ignore_eos=True) for p in SPEECHES
    ]
    for kind, how in KINDS.items():
        target = load_transformer(str(PAIR / "target"), how)
        for number in (2, 3):
            draft = SpeculationSettings(draft=str(PAIR / "draft"), draft_tokens=number)
            name = f"samples/shakespeare, {kind}, B=1, {number} drafts of its draft model"
            yield Row(name, speedup(target, speeches, 1, draft), ">= 1.3x")
        tree = SpeculationSettings(draft=str(PAIR / "draft"), draft_tree="4x1")
        name = f"samples/shakespeare, {kind}, B=1, 4 drafts of its draft model, a tree of 4x1"
        yield Row(name, speedup(target, speeches, 1, tree), "")
    for kind, how in KINDS.items():
        try:
            smollm2 = load_transformer("smollm2", how)
        except BatchdecodeError as error:
            yield Row(f"SmolLM2: {error}", "not run", "")
            return
        quote = [Request(prompt=QUOTE, max_tokens=64, ignore_eos=True)]
        for draft, number in (("ngram", 8), ("ngram", "auto")):
            how_many = SpeculationSettings(draft=draft, draft_tokens=number)
            name = f"SmolLM2 quoting, {kind}, B=1, {draft}, {number} drafts"
            target = {"fp32": ">= 2x", "--fast-math": ">= 1.2x"}[kind] if draft == "ngram" else ""
            yield Row(name, speedup(smollm2, quote, 1, how_many), target)
        tree = SpeculationSettings(draft="ngram", draft_tree="2x4")
        name = f"SmolLM2 quoting, {kind}, B=1, ngram, 8 drafts in a tree of 2x4"
        yield Row(name, speedup(smollm2, quote, 1, tree), "")
    auto = SpeculationSettings(draft="ngram", draft_tokens="auto")
    many = [
        Request(prompt=f"Write about the number {number}.", max_tokens=128, ignore_eos=True)
        for number in range(NUM_ROWS)
    ]
    name = f"SmolLM2 writing, --fast-math, B={NUM_ROWS}, ngram, auto"
    yield Row(name, speedup(smollm2, many, NUM_ROWS, auto), ">= 0.97x")
