"""A TileDecoder as a PagedModel: rows of a batch become tokens of tiles."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from batcher.errors import Failure, InvariantError
from batcher.models.base import (
    Batch,
    Chunk,
    FloatArray,
    IntArray,
    ModelOutput,
    TopLogits,
)
from batcher.models.transformer import DecoderModel
from batcher.transformer.step import OWN_BLOCK_SIZE, OwnTables

_NUM_TRIED = 24  # tokens
_PIECE = 64  # rows of logits at once
_PATIENCE = 8  # steps before the device looks ahead: a step in vain costs about what these gain
_NO_ROWS: IntArray = np.zeros(0, np.int64)


class _StepTokens(NamedTuple):
    """The new tokens of all rows in a step, those of decoding rows first.

    token_ids, positions, slots: [tokens].
    lasts: [num_slots] indices of the tokens after which rows yield; -1 for other slots.
    drafts: indices of drafts, in the order of the chunks; -1 in failed rows.
    scored: slot -> indices of the tokens of a scored chunk.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    lasts: IntArray
    drafts: IntArray
    scored: dict[int, IntArray]


class _Ahead(NamedTuple):
    """A step that the device computes before the engine asks for it.

    slots, positions, token_ids: [rows] of its tokens. tokens: those after them, on the device.
    """

    slots: IntArray
    positions: IntArray
    token_ids: IntArray
    tokens: Any


class TileModel(DecoderModel):
    """A TileDecoder that keeps the cache of rows, by slot or in pages.

    If all rows decode greedily for some steps, the device does not wait for the engine: the next
    step is computed with the tokens that the device has chosen. It is dropped if the engine asks
    for anything else; then the engine's step overwrites its keys and values, as after rejected
    drafts. Rows that have stopped do no harm.

    An exact decoder is tested first: if bits of a token differ between tiles, it gets others, at
    last fast ones.

    decoder: a TileDecoder of batcher/hf/tiles.py.
    cache_windows, kv_bytes_per_token: as of a TransformerModel.
    """

    is_paged = True
    verifies_drafts = True
    num_top_logits = 256

    def _prepare(self) -> None:
        decoder = self._decoder
        self.cache_windows = tuple(group.window for group in decoder.cache_groups)
        self.kv_bytes_per_token = decoder.cache_size.per_token
        self._cache: Any = None
        self._ahead: _Ahead | None = None
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

    def kv_block_bytes(self, block_size: int) -> int:
        num_bytes: int = self._decoder.cache_size.of_block(block_size)
        return num_bytes

    def num_free_bytes(self) -> int | None:
        """Return the free memory of the device; None for a CPU."""
        free: int | None = self._decoder.num_free_bytes()
        return free

    def allocate(self, num_slots: int) -> None:
        self._own: OwnTables | None = OwnTables(num_slots, self._decoder.cache_groups)
        self._begin(num_slots, None, OWN_BLOCK_SIZE)
        self._own.max_blocks = self._cache.max_blocks

    def twin(self) -> Self:
        twin = super().twin()
        twin._cache = None  # noqa: SLF001 - of this model
        twin.allocate(0)
        return twin

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        self._own = None
        self._begin(num_slots, num_blocks, block_size)

    def _begin(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        self._lengths: IntArray = np.zeros(num_slots, np.int64)  # computed tokens of rows
        self._tokens: IntArray = np.zeros(num_slots, np.int64)
        self._ahead = None
        self._num_quiet = 0  # steps of greedy rows without a chunk
        asked = num_slots, num_blocks or 0, block_size
        made = self._cache.made_for if self._cache else (0, 0, 0)
        is_of_kind = made[2] == block_size and bool(made[1]) == bool(num_blocks)
        if not is_of_kind or any(asked[at] > made[at] for at in range(2)):
            self._cache = None  # frees its memory
            self._cache = self._decoder.new_cache(num_slots, num_blocks, block_size)
            self._cache.made_for = asked  # it stays for what needs less, with its graphs

    def fork(self, source: int, target: int) -> None:
        self._ahead = None
        length = self._lengths[target] = int(self._lengths[source])
        if self._own is not None:
            copies = [*self._own.fork(source, target)]
            self._cache.make_room(self._own.num_blocks)
            self._cache.copy(copies)
            self._cache.set_tables({target: self._own.grow(target, length, length)})

    def release(self, slot: int) -> None:
        self._lengths[slot] = 0
        if self._own is not None:
            self._own.release(slot)

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows; a row that exceeds the context fails."""
        if batch.pages is not None:
            self._cache.make_room(batch.pages.num_blocks)
            self._lengths[[*batch.pages.moved]] = [*batch.pages.moved.values()]
        is_quiet = not (batch.chunks or batch.logit_slots.size or batch.top_slots.size)
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        if is_quiet and self._take_ahead(batch):
            return ModelOutput(self._tokens)
        self._ahead = None
        failed: dict[int, str | Failure] = {}
        step = self._tokens_of(batch, failed)
        lasts, tops, drafts = (
            step.lasts[batch.logit_slots],
            step.lasts[batch.top_slots],
            step.drafts,
        )
        yields = batch.slots[step.lasts[batch.slots] >= 0]
        chosen = np.union1d(step.lasts[yields], drafts[drafts >= 0])
        wanted = np.unique(np.concatenate([chosen, *step.scored.values()]))
        hidden = self._cache.compute(step.token_ids, step.positions, step.slots, wanted)
        chunk_logits = {
            slot: self._logits_of(hidden[at : at + len(own)])
            for slot, own in step.scored.items()
            for at in [int(wanted.searchsorted(own[0]))]
        }
        needed = np.union1d(lasts[lasts >= 0], drafts[drafts >= 0])
        logits = np.zeros((0, self.vocab_size), np.float32)
        top_logits: TopLogits | None = None
        if chosen.size:
            at = wanted.searchsorted(chosen)
            own = hidden if at.size == len(hidden) else hidden[at]
            top_rows = chosen.searchsorted(np.maximum(tops, chosen[0]))  # any for failed slots
            rows = np.unique(top_rows)
            edits = batch.edits
            if edits is not None:
                edits = edits.at(np.where(tops >= 0, top_rows, -1))
            tokens, logits, top = self._cache.choose(
                own, chosen.searchsorted(needed), rows, self.num_top_logits, edits
            )
            self._tokens[yields] = tokens[chosen.searchsorted(step.lasts[yields])]
            if tops.size:
                top_logits = TopLogits(*top).of(rows.searchsorted(top_rows))
        elif tops.size:  # of failed rows alone
            none = np.zeros((len(tops), 1), np.float32)
            ids, sums = none.astype(np.int64), none[:, 0].astype(np.float64)
            top_logits = TopLogits(ids, none, sums, none, sums, lambda rows: none[rows])

        def logits_at(tokens: IntArray) -> FloatArray | None:
            if not tokens.size or np.array_equal(tokens, needed):  # without a copy
                return logits if tokens.size else None
            lines: FloatArray = np.zeros((len(tokens), self.vocab_size), np.float32)
            lines[tokens >= 0] = logits[needed.searchsorted(tokens[tokens >= 0])]
            return lines

        if self._num_quiet > _PATIENCE:
            self._look_ahead(yields, self._tokens[yields])
        all_logits = logits_at(lasts), chunk_logits, logits_at(drafts), top_logits
        return ModelOutput(self._tokens, failed, *all_logits)

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

    def _tokens_of(self, batch: Batch, failed: dict[int, str | Failure]) -> _StepTokens:
        """Return the tokens to compute, whose blocks are there; add rows to `failed`."""
        cache, pages, lengths = self._cache, batch.pages, self._lengths
        if pages is not None:
            if pages.moves:
                cache.move(pages.moves)
            cache.copy(pages.copies)
        slots = np.setdiff1d(batch.slots, [chunk.slot for chunk in batch.chunks])
        is_long = lengths[slots] >= self.max_context
        if is_long.any():
            failed |= dict.fromkeys(slots[is_long].tolist(), self.refusal(self.max_context + 1))
            slots = slots[~is_long]
        starts, num_tokens = lengths[slots], len(slots)
        parts = [(batch.tokens[slots], starts, slots)]
        is_new = np.isin(slots, [*pages.moved]) if pages else starts % OWN_BLOCK_SIZE == 0
        spans = zip(slots[is_new].tolist(), starts[is_new].tolist(), strict=True)
        grown = {slot: (start, start + 1) for slot, start in spans}
        lasts = np.full(len(lengths), -1)
        lasts[slots] = np.arange(num_tokens)
        lengths[slots] += 1
        drafts: list[int] = []
        scored: dict[int, IntArray] = {}
        is_yielding = {*batch.slots.tolist()}
        for chunk in batch.chunks:
            slot, start, size = chunk.slot, chunk.start, len(chunk.token_ids)
            if chunk.draft_parents:
                raise InvariantError(f"drafts in a tree, which {self.name} does not verify")
            reason = self.refusal(start + size if size else 0)
            if reason is not None:
                failed[slot] = reason
                drafts += [-1] * chunk.num_drafts
                continue
            ids = np.asarray(chunk.token_ids, np.int64)
            parts.append((ids, np.arange(start, start + size), np.full(size, slot)))
            grown[slot] = start, start + size
            lengths[slot] = start + size
            own = np.arange(num_tokens, num_tokens + size)
            num_tokens += size
            if slot in is_yielding:
                lasts[slot] = own[-1 - chunk.num_drafts]
                drafts += own[size - chunk.num_drafts :].tolist()
            if chunk.is_scored:
                scored[slot] = own
        if grown:
            self._set_tables(batch, grown)
        token_ids, positions, of_slots = map(np.concatenate, zip(*parts, strict=True))
        of_drafts = np.array(drafts, np.int64)
        return _StepTokens(token_ids, positions, of_slots, lasts, of_drafts, scored)

    def _set_tables(self, batch: Batch, grown: dict[int, tuple[int, int]]) -> None:
        """Show the block tables of rows to the cache; grown: slot -> start and stop of tokens."""
        pages, own = batch.pages, self._own
        if pages is not None:
            every = [pages.tables, *pages.group_tables]
            tables = {slot: [tables[slot] for tables in every] for slot in grown}
        elif own is not None:
            tables = {slot: own.grow(slot, *span) for slot, span in grown.items()}
            self._cache.make_room(own.num_blocks)
        else:
            raise InvariantError("a batch without pages, for a model that was promised some")
        self._cache.set_tables(tables)

    def _logits_of(self, hidden: Any) -> Iterator[FloatArray]:
        for start in range(0, len(hidden), _PIECE):
            piece = hidden[start : start + _PIECE]
            yield self._cache.choose(piece, np.arange(len(piece)), _NO_ROWS, 0)[1]
