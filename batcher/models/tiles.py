"""A TileDecoder as a PagedModel: rows of a batch become tokens of tiles."""

from typing import Any, NamedTuple

import numpy as np

from batcher.models.base import Batch, Chunk, FloatArray, IntArray, ModelOutput, TopLogits
from batcher.models.transformer import PagedDecoderModel, StepTokens

_NUM_TRIED = 24  # tokens
_PATIENCE = 8  # steps before the device looks ahead: a step in vain costs about what these gain
_NO_ROWS: IntArray = np.zeros(0, np.int64)


class _Ahead(NamedTuple):
    """A step that the device computes before the engine asks for it.

    slots, positions, token_ids: [rows] of its tokens. tokens: those after them, on the device.
    """

    slots: IntArray
    positions: IntArray
    token_ids: IntArray
    tokens: Any


class TileModel(PagedDecoderModel):
    """A TileDecoder with a TileCache.

    If all rows decode greedily for some steps, the device does not wait for the engine: the next
    step is computed with the tokens that the device has chosen. It is dropped if the engine asks
    for anything else; then the engine's step overwrites its keys and values, as after rejected
    drafts. Rows that have stopped do no harm.

    An exact decoder is tested first: if bits of a token differ between tiles, it gets others, at
    last fast ones.

    decoder: a TileDecoder of batcher/hf/tiles.py.
    """

    num_top_logits = 256

    def _prepare(self) -> None:
        super()._prepare()
        decoder = self._decoder
        self.num_free_bytes = decoder.num_free_bytes
        while decoder.is_exact and not self._has_equal_bits():
            decoder.choose_sizes()
            self._cache = None
        self.allocate(1)  # whether it can be captured
        self._cache = None  # frees its memory
        self.allocate(0)

    def _has_equal_bits(self) -> bool:
        """Return whether a sequence has the same logits alone and at several places of tiles."""
        ids = [token % self.vocab_size for token in range(min(_NUM_TRIED, self.max_context))]
        num_rows = self._decoder.sizes[-1] // len(ids) + 2
        self.allocate(num_rows)

        def logits(num_rows: int) -> list[FloatArray]:
            batch = Batch(len(self._lengths))
            for slot in range(num_rows):
                batch.join(Chunk(slot, ids, 0, is_scored=True))
            scored = self.forward(batch).chunk_logits
            return [np.concatenate([*scored[slot]]) for slot in range(num_rows)]

        [alone] = logits(1)
        return all(np.array_equal(alone, other) for other in logits(num_rows))

    def _begin(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        super()._begin(num_slots, num_blocks, block_size)
        self._ahead: _Ahead | None = None
        self._num_quiet = 0  # steps of greedy rows without a chunk
        asked = num_slots, num_blocks or 0, block_size
        made = self._cache.made_for if self._cache else (0, 0, 0)
        is_of_kind = made[2] == block_size and bool(made[1]) == bool(num_blocks)
        if not is_of_kind or any(asked[at] > made[at] for at in range(2)):
            self._cache = None  # frees its memory
            self._cache = self._decoder.new_cache(num_slots, num_blocks, block_size)
            self._cache.made_for = asked  # it stays for what needs less, with its graphs
        if self._own is not None:
            self._own.max_blocks = self._cache.max_blocks

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self._ahead = None
        if self._own is not None:
            length = self._lengths.item(target)
            self._cache.set_tables({target: self._own.grow(target, length, length)})

    def _step(self, batch: Batch) -> ModelOutput:
        is_quiet = not (batch.chunks or batch.logit_slots.size or batch.top_slots.size)
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        if is_quiet and self._take_ahead(batch):
            return ModelOutput(self._tokens)
        self._ahead = None
        output = super()._step(batch)
        if self._num_quiet > _PATIENCE:
            slots = np.setdiff1d(batch.slots, [*output.failed])
            self._look_ahead(slots, self._tokens[slots])
        return output

    def _take_ahead(self, batch: Batch) -> bool:
        """Return whether the step was computed ahead, and take its tokens if so."""
        cache, ahead, pages, slots = self._cache, self._ahead, batch.pages, batch.slots
        if not ahead or not slots.size or (pages and (pages.moves or pages.copies)):
            return False
        positions, at = self._lengths[slots], ahead.slots.searchsorted(slots)
        at = np.minimum(at, len(ahead.slots) - 1)
        wanted = [slots, positions, batch.tokens[slots]]
        if not np.array_equal(wanted, [part[at] for part in ahead[:3]]):
            return False
        is_new = positions % cache.block_size == 0
        if pages and not is_new[np.isin(slots, [*pages.moved])].all():
            return False
        if is_new.any():
            spans = zip(slots[is_new].tolist(), positions[is_new].tolist(), strict=True)
            self._set_tables(batch, {slot: (start, start + 1) for slot, start in spans})
            cache.fill_blocks(slots[is_new], positions[is_new])
        self._lengths[slots] += 1
        tokens, wait = cache.fetch(ahead.tokens, at)
        self._look_ahead(slots, tokens)
        self._tokens[slots] = found = wait()
        if self._ahead is not None:
            self._ahead = self._ahead._replace(token_ids=found)
        return True

    def _look_ahead(self, slots: IntArray, token_ids: Any) -> None:
        """Compute the next token of rows after `token_ids` [rows], which may be on the device."""
        positions, self._ahead = self._lengths[slots], None
        if slots.size and positions.max() < self.max_context:
            tokens = self._cache.look_ahead(token_ids, positions, slots)
            self._ahead = _Ahead(slots, positions, token_ids, tokens)

    def _set_tables(self, batch: Batch, grown: dict[int, tuple[int, int]]) -> None:
        tables = {slot: self._tables_of(batch, slot, *span) for slot, span in grown.items()}
        self._cache.set_tables(tables)

    def _hidden_of(self, batch: Batch, step: StepTokens, wanted: IntArray) -> Any:
        if step.grown:
            self._set_tables(batch, step.grown)
        return self._cache.compute(step.token_ids, step.positions, step.slots, wanted)

    def _logits(self, hidden: Any) -> FloatArray:
        logits: FloatArray = self._cache.choose(hidden, np.arange(len(hidden)), _NO_ROWS, 0)[1]
        return logits

    def _choose(
        self, batch: Batch, hidden: Any, chosen: IntArray, needed: IntArray, tops: IntArray
    ) -> tuple[IntArray, FloatArray, TopLogits | None]:
        top_rows = chosen.searchsorted(np.maximum(tops, chosen[0]))  # any for failed slots
        rows, edits = np.unique(top_rows), batch.edits
        if edits is not None:
            edits = edits.at(np.where(tops >= 0, top_rows, -1))
        tokens, logits, top = self._cache.choose(
            hidden, chosen.searchsorted(needed), rows, self.num_top_logits, edits
        )
        of_tops = TopLogits(*top).of(rows.searchsorted(top_rows)) if tops.size else None
        return tokens, logits, of_tops
