"""The token ids of every row, for models that have no cache and are asked with whole prefixes."""

from typing import Any

from batcher.foreign import attribute_of
from batcher.models.base import Batch, ModelOutput, OutputKind, Tokenizer
from batcher.models.tokenizers import ByteTokenizer

Prefixes = dict[int, list[int]]
"""Prompt and output so far, by slot."""


def extend(prefixes: Prefixes, batch: Batch) -> None:
    """Add the new tokens of every row of `batch` to `prefixes`, whether it yields yet or not."""
    has_chunk = set()
    for chunk in batch.chunks:
        has_chunk.add(chunk.slot)
        prefixes.setdefault(chunk.slot, [])[chunk.start :] = chunk.token_ids
    slots = batch.slots
    for slot, token in zip(slots.tolist(), batch.tokens[slots].tolist(), strict=True):
        if slot not in has_chunk:
            prefixes[slot].append(token)


class PrefixModel:
    """A Model (see base.py) that has no cache, around what is `asked`, from which it has the rest.

    Attributes `settings`, `tokenizer`, `max_context` and `session_overflow` of that are used if it
    has them; text is bytes if not.
    """

    gives: OutputKind
    vocab_size: int | None
    eos_token_id: int | None

    def __init__(self, asked: Any, name: str) -> None:
        self.name = name
        self.settings: dict[str, Any] = attribute_of(asked, "settings", {})
        tokenizer = attribute_of(asked, "tokenizer", None)
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.max_context: int | None = attribute_of(asked, "max_context", None)
        self.session_overflow: Any = attribute_of(asked, "session_overflow", None)
        self._prefixes: Prefixes = {}
        self._num_slots = 0

    def forward(self, batch: Batch) -> ModelOutput:
        """Ask about the rows of `batch`."""
        raise NotImplementedError

    def allocate(self, num_slots: int) -> None:
        self._prefixes.clear()
        self._num_slots = num_slots

    def fork(self, source: int, target: int) -> None:
        self._prefixes[target] = self._prefixes[source].copy()

    def release(self, slot: int) -> None:
        self._prefixes.pop(slot, None)
