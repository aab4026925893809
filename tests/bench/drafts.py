"""Benchmark of verifying drafts: what steps of one row of SmolLM2 cost with some, and without.

All are taken in turn, at the same place of the same row, in seconds of the processor; the median of
the ratios is told.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from report import Row

from batcher import BatchdecodeError
from batcher.models.base import Batch, Chunk, Pages
from batcher.models.checkpoints import load_transformer, smollm2_file
from batcher.models.transformer import TransformerModel
from batcher.transformer.config import TransformerSettings

NUM_DRAFTS = (1, 2, 3, 4, 7, 8, 15)
TREE = (0, 0, 0, 0, 1, 2, 3, 4)  # four tokens, each with one behind it
NUM_PROMPT_TOKENS, BLOCK_SIZE, TIMES = 64, 16, 9
KINDS = {
    "fp32": TransformerSettings(),
    "int8-channel": TransformerSettings(weights="int8-channel"),
}


class OneRow:
    """A row behind its prompt, of which any step can be taken again and again."""

    def __init__(self, model: TransformerModel) -> None:
        num_blocks = NUM_PROMPT_TOKENS // BLOCK_SIZE + 2
        self.batch = Batch(1, Pages(BLOCK_SIZE, [[*range(num_blocks)]], num_blocks=num_blocks))
        draw = random.Random(0)
        self.tokens = [draw.randrange(3, model.vocab_size) for _ in range(NUM_PROMPT_TOKENS + 16)]
        model.allocate_pages(1, num_blocks, BLOCK_SIZE)
        self.batch.join(Chunk(0, self.tokens[:NUM_PROMPT_TOKENS], 0))
        model.forward(self.batch)

    def seconds(self, model: TransformerModel, parents: tuple[int, ...], num_drafts: int) -> float:
        """Return what a step takes with so many drafts, or with a tree of them."""
        own = self.tokens[NUM_PROMPT_TOKENS:][: 1 + num_drafts]
        chunk = Chunk(0, own, NUM_PROMPT_TOKENS, num_drafts=num_drafts, draft_parents=parents)
        self.batch.chunks = [chunk]
        began = time.process_time()
        model.forward(self.batch)
        return time.process_time() - began


def steps_of(model: TransformerModel) -> dict[str, Callable[[], float]]:
    """Return by its name what takes a step, and says how long it took."""
    row = OneRow(model)

    def step(parents: tuple[int, ...] = (), num: int = 0) -> Callable[[], float]:
        return lambda: row.seconds(model, parents, num)

    return {
        "": step(),
        **{f"{num} draft{'s' * (num > 1)}": step((), num) for num in NUM_DRAFTS},
        f"a tree of {len(TREE)} drafts": step(TREE, len(TREE)),
    }


def drafts(folder: Path) -> Iterator[Row]:
    """Yield what steps cost with drafts, against plain ones."""
    try:
        smollm2_file()
    except BatchdecodeError as error:
        yield Row(f"SmolLM2: {error}", "not run", "")
        return
    for kind, settings in KINDS.items():
        steps = steps_of(load_transformer("smollm2", settings))
        rounds = [{name: step() for name, step in steps.items()} for _ in range(TIMES + 1)][1:]
        plain = statistics.median(each[""] for each in rounds)
        for name in [*steps][1:]:
            ratio = statistics.median(each[name] / each[""] for each in rounds)
            title = f"SmolLM2, {kind}, B=1: a step of {name}, a plain one {1000 * plain:.0f} ms"
            yield Row(title, f"{ratio:.2f}x", "")
