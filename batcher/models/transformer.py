"""A transformer as a PagedModel: rows of a batch become spans of tokens.

In pages the engine's block tables locate keys, values and states; otherwise each slot has tables of
its own here.

Drafts are computed like all tokens: keys and values of rejected drafts are overwritten before they
are read. States of recurrent layers cannot be undone, so those after drafts are not kept: a row of
such a model continues from the token before its drafts.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from itertools import groupby
from typing import Any, NamedTuple, Self, cast

import numpy as np

from batcher.errors import InvariantError
from batcher.events import Layout
from batcher.models.base import (
    Batch,
    Chunk,
    FloatArray,
    ModelOutput,
    OutputKind,
    Tokenizer,
    node_paths,
)
from batcher.transformer.layers import NOWHERE
from batcher.transformer.step import OWN_BLOCK_SIZE, OwnTables, Snapshot, Span, spans_of_tree
from batcher.transformer.transformer import CausalModel, ModelSizes


class DecoderModel:
    """A model around a decoder, which has its sizes in `config`.

    name, settings: identify it. max_context: tokens of a row at most.
    session_overflow: the action for a conversation beyond that.
    eos_token_ids: all that end a text; eos_token_id: the first of them.
    """

    gives: OutputKind = "both"
    scores_prompts = True
    needs_prompt = True

    def __init__(
        self,
        decoder: Any,
        tokenizer: Tokenizer,
        name: str,
        settings: dict[str, Any],
        max_context: int | None = None,
    ) -> None:
        self._decoder, sizes = decoder, cast(ModelSizes, decoder.config)
        self.name, self.settings, self.tokenizer = name, settings, tokenizer
        self.vocab_size, self.eos_token_ids = sizes.vocab_size, sizes.eos_token_ids
        self.eos_token_id = next(iter(sizes.eos_token_ids), None)
        self.max_context = max_context or sizes.max_position_embeddings
        self.session_overflow: str | None = settings.get("session_overflow")
        self._prepare()

    def _prepare(self) -> None:
        """Set what depends on the decoder alone."""

    def refusal(self, num_tokens: int) -> str | None:
        """Return why a row of this length cannot be computed, or None."""
        if not num_tokens:
            return "an empty prompt: this model needs a token to begin with"
        if num_tokens > self.max_context:
            return f"{num_tokens} tokens are more than its context of {self.max_context}"
        return None

    def twin(self) -> Self:
        """Return a model of the same weights, with caches of its own."""
        twin = copy(self)
        twin.allocate(0)
        return twin

    def allocate(self, num_slots: int) -> None:
        raise NotImplementedError


class SlotModel(DecoderModel):
    """A decoder of one sequence at a time, with the caches of all rows, by slot.

    decoder: has `forward(token_ids, cache, is_scored=...)`, which returns logits [rows, vocab_size]
    after tokens, for each of them if it is scored, else at least after the last; and the cache of
    all tokens. The given cache, None at the start, is used up. `copy(cache)` returns an equal one.
    """

    def allocate(self, num_slots: int) -> None:
        self._caches: list[Any] = [None] * num_slots
        self._tokens = np.zeros(num_slots, np.int64)

    def fork(self, source: int, target: int) -> None:
        self._caches[target] = self._decoder.copy(self._caches[source])

    def release(self, slot: int) -> None:
        self._caches[slot] = None

    def forward(self, batch: Batch) -> ModelOutput:
        wanted = {slot: line for line, slot in enumerate(batch.logit_slots.tolist())}
        logits = np.zeros((len(wanted), self.vocab_size), np.float32) if wanted else None
        chunk_logits: dict[int, list[FloatArray]] = {}
        brings = {chunk.slot for chunk in batch.chunks}
        generated = [  # any start after the beginning
            Chunk(slot, [batch.tokens.item(slot)], start=1)
            for slot in batch.slots.tolist()
            if slot not in brings
        ]
        for chunk in (*generated, *batch.chunks):
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


_PIECE = 64  # rows of logits at once


class _Row(NamedTuple):
    """A row in a step.

    spans: one, or several for drafts in a tree.
    chunk: None if the row computes the token it generated last.
    """

    slot: int
    spans: list[Span]
    chunk: Chunk | None
    num_tokens: int
    num_drafts: int


class TransformerModel(DecoderModel):
    """A CausalModel that keeps the cache of rows, by slot or in pages.

    cache_windows: how far back each group of layers reads, see `cache_windows_of`.
    kv_bytes_per_token: bytes of keys and values of a token, in all groups.
    layout: of the decoder; padded, decoding rows and chunks are computed separately.
    recomputes_drafts: whether it has recurrent layers; if not, it also verifies_trees.
    """

    is_paged = True
    verifies_drafts = True
    layout: Layout = "ragged"
    _decoder: CausalModel

    def _prepare(self) -> None:
        self._groups, self._cache_size = self._decoder.cache_groups, self._decoder.cache_size
        self.cache_windows = tuple(group.window for group in self._groups)
        self.kv_bytes_per_token = self._cache_size.per_token
        self.recomputes_drafts = any(group.is_recurrent for group in self._groups)
        self.verifies_trees = not self.recomputes_drafts
        self.allocate(0)

    def kv_block_bytes(self, block_size: int) -> int:
        return self._cache_size.of_block(block_size)

    def allocate(self, num_slots: int) -> None:
        self._own: OwnTables | None = OwnTables(num_slots, self._groups)
        self._begin(num_slots)

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        self._own = None
        self._begin(num_slots)
        self._make_room(num_blocks or 0, block_size)

    def _begin(self, num_slots: int) -> None:
        self._store = self._decoder.new_store()
        self._states = self._decoder.new_states()
        self._lengths = [0] * num_slots  # computed tokens of each row
        self._state_lengths: dict[int, int] = {}  # cell of states -> number of tokens they cover
        self._tokens = np.zeros(num_slots, np.int64)

    def fork(self, source: int, target: int) -> None:
        self._lengths[target] = self._lengths[source]
        if self._own is None:
            return
        copies = [*self._own.fork(source, target)]
        self._make_room(self._own.num_blocks, OWN_BLOCK_SIZE)
        self._copy(copies, OWN_BLOCK_SIZE)

    def _make_room(self, num_blocks: int, block_size: int) -> None:
        self._store.make_room(num_blocks * block_size)
        if self._states is not None:
            self._states.make_room(NOWHERE + num_blocks)

    def _copy(self, copies: Iterable[tuple[int, int]], block_size: int) -> None:
        for source, target in copies:
            self._store.copy(source, target, block_size)
            if self._states is not None:
                first, second = _state_cell(source), _state_cell(target)
                self._states.copy(first, second)
                self._state_lengths[second] = self._state_lengths.get(first, 0)

    def release(self, slot: int) -> None:
        self._lengths[slot] = 0
        if self._own is not None:
            self._own.release(slot)

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows; a row that exceeds the context fails."""
        if batch.pages is not None:
            if batch.pages.moves:
                self._store.move(batch.pages.moves)
            self._make_room(batch.pages.num_blocks, batch.pages.block_size)
            self._copy(batch.pages.copies, batch.pages.block_size)
        rows: list[_Row] = []
        failed: dict[int, str] = {}
        brings = {chunk.slot for chunk in batch.chunks}
        moved = {} if batch.pages is None else batch.pages.moved
        asked: list[tuple[int, int, list[int], Chunk | None]] = [
            (slot, moved.get(slot, self._lengths[slot]), [batch.tokens.item(slot)], None)
            for slot in batch.slots.tolist()
            if slot not in brings
        ]
        asked += [(chunk.slot, chunk.start, [*chunk.token_ids], chunk) for chunk in batch.chunks]
        for slot, start, token_ids, chunk in asked:
            stop = start + len(token_ids)
            paths = node_paths(chunk) if chunk is not None and chunk.draft_parents else []
            length = stop - len(paths) + max(map(len, paths), default=0)
            if paths and not self.verifies_trees:
                raise InvariantError(f"drafts in a tree, which {self.name} does not verify")
            reason = self.refusal(length if token_ids else 0)
            if reason is not None:
                failed[slot] = reason
            else:
                num_drafts = 0 if chunk is None else chunk.num_drafts
                span = self._span(batch, slot, token_ids, start, num_drafts)
                spans = spans_of_tree(span, paths) if paths else [span]
                rows.append(_Row(slot, spans, chunk, len(token_ids), num_drafts))
                self._lengths[slot] = stop
        logits, draft_logits = (  # zeros for failed rows
            np.zeros((num_rows, self.vocab_size), np.float32) if num_rows else None
            for num_rows in (
                batch.logit_slots.size,
                sum(chunk.num_drafts for chunk in batch.chunks),
            )
        )
        if not rows:
            return ModelOutput(self._tokens, failed, logits, draft_logits=draft_logits)
        parts = [rows]
        if self.layout == "padded":
            parts = [[*part] for _, part in groupby(rows, lambda row: row.chunk is None)]
        outputs = [
            self._decoder.forward(
                [span for row in part for span in row.spans], self._store, self._states
            )
            for part in parts
        ]
        hidden = outputs[0] if len(outputs) == 1 else np.concatenate(outputs)
        ends = np.cumsum([row.num_tokens for row in rows])
        chunk_logits = {
            row.slot: self._logits_of(hidden[end - row.num_tokens : end])
            for row, end in zip(rows, ends.tolist(), strict=True)
            if row.chunk is not None and row.chunk.is_scored
        }
        yields = {*batch.slots.tolist()}
        numbers = {row.slot: number for number, row in enumerate(rows) if row.slot in yields}
        if numbers:  # one product, in which a row does not depend on the others
            slots, counts = [*numbers], np.array([row.num_drafts for row in rows])
            lasts = (ends - counts)[[*numbers.values()]] - 1
            behind = [np.arange(end - num, end) for end, num in zip(ends, counts, strict=True)]
            scores = self._decoder.logits(hidden[np.concatenate([lasts, *behind])])
            self._tokens[slots] = scores[: len(slots)].argmax(1)
            if logits is not None:
                places = {slot: place for place, slot in enumerate(slots)}
                for line, slot in zip(logits, batch.logit_slots.tolist(), strict=True):
                    if slot in places:
                        line[:] = scores[places[slot]]
            if draft_logits is not None:
                is_there = [
                    chunk.slot in numbers for chunk in batch.chunks for _ in range(chunk.num_drafts)
                ]
                draft_logits[is_there] = scores[len(slots) :]
        return ModelOutput(self._tokens, failed, logits, chunk_logits, draft_logits)

    def _logits_of(self, hidden: FloatArray) -> Iterator[FloatArray]:
        for start in range(0, len(hidden), _PIECE):
            yield self._decoder.logits(hidden[start : start + _PIECE])

    def _span(
        self, batch: Batch, slot: int, token_ids: list[int], start: int, num_drafts: int
    ) -> Span:
        stop, pages, size = start + len(token_ids), batch.pages, OWN_BLOCK_SIZE
        if pages is not None:
            tables = [pages.tables[slot], *(tables[slot] for tables in pages.group_tables)]
            size = pages.block_size
        elif self._own is None:
            raise InvariantError("a batch without pages, for a model that was promised some")
        else:
            tables = self._own.grow(slot, start, stop)
            self._make_room(self._own.num_blocks, size)
        kv_tables = tables if self._states is None else tables[:-1]
        cells = [self._store.cells(table, size, stop) for table in kv_tables]
        if self._states is None:
            return Span(token_ids, start, cells, num_drafts=num_drafts)
        states, known = tables[-1], stop - num_drafts
        source = _state_cell(states[(start - 1) // size]) if start else NOWHERE
        if self._state_lengths.get(source, 0) != start:
            length = self._state_lengths.get(source, 0)
            raise InvariantError(f"position {start}, and states after {length} tokens")
        boundaries = [*range((start // size + 1) * size, known, size), known]
        kept = [(boundary - start, states[(boundary - 1) // size]) for boundary in boundaries]
        snapshots = [Snapshot(num, _state_cell(block)) for num, block in kept if block >= 0]
        self._state_lengths |= {
            snapshot.cell: start + snapshot.num_tokens for snapshot in snapshots
        }
        return Span(token_ids, start, cells, source, snapshots, num_drafts)


def _state_cell(block: int) -> int:
    if block < 0:
        raise InvariantError("a row continues from freed states")
    return NOWHERE + 1 + block
