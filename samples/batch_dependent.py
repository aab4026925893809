"""Models whose outputs depend on the batch, each in another way: `batchdecode verify` finds them.

Try `batchdecode verify requests.jsonl --model batch_dependent:mixes_rows`.
"""

import random
from typing import Any

import numpy as np

from batcher import Batch, ByteTokenizer, ModelOutput


def honest(batch_prefixes: list[list[int]]) -> list[int]:
    """Look at nothing but the row's own tokens."""
    return [next_letter(prefix) for prefix in batch_prefixes]


def mixes_rows(batch_prefixes: list[list[int]]) -> list[int]:
    """Let padding count: rows are filled up to the longest, and nothing masks that."""
    width = max(len(prefix) for prefix in batch_prefixes)
    padded = [prefix + [0] * (width - len(prefix)) for prefix in batch_prefixes]
    return [next_letter(prefix) for prefix in padded]


def forgets_order(batch_prefixes: list[list[int]]) -> list[int]:
    """Sort the rows by length, as some kernels like them, and leave the answers in that order."""
    return [next_letter(prefix) for prefix in sorted(batch_prefixes, key=len)]


def draws(batch_prefixes: list[list[int]]) -> list[int]:
    """Draw from a generator that all rows share: not even one alone is the same twice."""
    return [random.choice(b"abc ") for _ in batch_prefixes]  # noqa: S311 - no secret


class StaleCache:
    """A model with a cache by slot, which forgets to clear a slot for the row that follows."""

    name, gives, vocab_size, eos_token_id = "batch_dependent:StaleCache", "tokens", 256, None

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.tokenizer = ByteTokenizer()

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows."""
        self.cache: list[list[int]] = [[] for _ in range(num_slots)]

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the next token of each row."""
        for chunk in batch.chunks:  # what a longer row has left behind it stays there
            stop = chunk.start + len(chunk.token_ids)
            self.cache[chunk.slot][chunk.start : stop] = chunk.token_ids
        begun = {chunk.slot for chunk in batch.chunks}
        tokens = np.zeros(len(self.cache), np.int64)
        for slot in batch.slots.tolist():
            if slot not in begun:
                self.cache[slot].append(int(batch.tokens[slot]))
            tokens[slot] = next_letter(self.cache[slot])
        return ModelOutput(tokens)

    def release(self, slot: int) -> None:
        """Forget nothing, which is the mistake."""


class KnowsSlots(StaleCache):
    """A model that clears its cache, but whose rows are told apart by their slot."""

    name = "batch_dependent:KnowsSlots"

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the next token of each row, moved on by its slot."""
        output = super().forward(batch)
        return ModelOutput(output.tokens + np.arange(len(self.cache)) % 2)

    def release(self, slot: int) -> None:
        """Forget what `slot` holds."""
        self.cache[slot].clear()


def next_letter(prefix: list[int]) -> int:
    """Return a letter that depends on the last nine tokens."""
    return b"etaoin shrdlu"[sum(token * place**2 for place, token in enumerate(prefix[-9:])) % 13]
