"""A Model of a decoder that computes one sequence at a time: each slot has a cache of its own."""

from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np

from batcher.models.base import Batch, Chunk, FloatArray, ModelOutput, OutputKind, Tokenizer
from batcher.transformer.transformer import ModelSizes


class SequenceDecoder(Protocol):
    """What computes the next tokens of one sequence."""

    @property
    def config(self) -> ModelSizes:
        """Its sizes."""

    def forward(
        self, token_ids: list[int], cache: Any | None, *, is_scored: bool = False
    ) -> tuple[FloatArray, Any]:
        """Return the logits [rows, vocab_size] after tokens, and the cache of them all.

        cache: of the tokens before, which goes over into the new one; None if there are none.
        is_scored: whether there is a row for each token; else that after the last is enough.
        """

    def copy(self, cache: Any) -> Any:
        """Return a cache that holds the same."""


class SlotModel:
    """A decoder with the caches of all rows, by slot.

    Nothing of a row shows in another: they are computed one by one.
    """

    gives: OutputKind = "both"
    scores_prompts = True
    needs_prompt = True

    def __init__(
        self,
        decoder: SequenceDecoder,
        tokenizer: Tokenizer,
        name: str,
        settings: dict[str, Any],
        max_context: int | None = None,
    ) -> None:
        sizes = decoder.config
        self.name, self.settings, self.tokenizer = name, settings, tokenizer
        self.vocab_size = sizes.vocab_size
        self.eos_token_ids = sizes.eos_token_ids
        self.eos_token_id = sizes.eos_token_ids[0] if sizes.eos_token_ids else None
        self.max_context = max_context or sizes.max_position_embeddings
        self.session_overflow: str | None = settings.get("session_overflow")
        self._decoder = decoder
        self.allocate(0)

    def twin(self) -> Self:
        """Return one of the same weights, with caches of its own."""
        return type(self)(self._decoder, self.tokenizer, self.name, self.settings, self.max_context)

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows, all empty."""
        self._caches: list[Any] = [None] * num_slots
        self._tokens = np.zeros(num_slots, np.int64)

    def fork(self, source: int, target: int) -> None:
        """Let `target` hold what `source` does."""
        self._caches[target] = self._decoder.copy(self._caches[source])

    def release(self, slot: int) -> None:
        """Forget the row in `slot`."""
        self._caches[slot] = None

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows, one row after the other."""
        wanted = {slot: line for line, slot in enumerate(batch.logit_slots.tolist())}
        logits = np.zeros((len(wanted), self.vocab_size), np.float32) if wanted else None
        chunk_logits: dict[int, list[FloatArray]] = {}
        for chunk in _chunks_of(batch):
            slot, cache = chunk.slot, self._caches[chunk.slot] if chunk.start else None
            scores, self._caches[slot] = self._decoder.forward(
                [*chunk.token_ids], cache, is_scored=chunk.is_scored
            )
            self._tokens[slot] = scores[-1].argmax()
            if chunk.is_scored:
                chunk_logits[slot] = [scores]
            if logits is not None and slot in wanted:
                logits[wanted[slot]] = scores[-1]
        return ModelOutput(self._tokens, {}, logits, chunk_logits)


def _chunks_of(batch: Batch) -> Iterator[Chunk]:
    """Yield the tokens of all rows; those that a row generated last as a chunk, too."""
    brings = {chunk.slot for chunk in batch.chunks}
    for slot in batch.slots.tolist():
        if slot not in brings:
            yield Chunk(slot, [batch.tokens.item(slot)], start=1)  # anywhere but at the beginning
    yield from batch.chunks
