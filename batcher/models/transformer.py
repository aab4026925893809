"""Decoders as Models: rows of a batch become tokens of a step.

In pages the engine's block tables locate keys, values and states; otherwise each slot has tables of
its own here.

Drafts are computed like all tokens: keys and values of rejected drafts are overwritten before they
are read. States of recurrent layers cannot be undone, so those after drafts are not kept: a row of
such a model continues from the token before its drafts.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from batcher.errors import Failure, InvariantError
from batcher.events import Layout
from batcher.models.base import (
    Batch,
    Chunk,
    FloatArray,
    IntArray,
    ModelOutput,
    OutputKind,
    Tokenizer,
    TopLogits,
    node_paths,
)
from batcher.transformer.layers import NOWHERE
from batcher.transformer.step import (
    OWN_BLOCK_SIZE,
    CacheSize,
    OwnTables,
    Snapshot,
    Span,
    spans_of_tree,
)
from batcher.transformer.transformer import Transformer


class DecoderModel:
    """A model around a decoder, which has its sizes in `config`.

    name, settings: identify it. max_context: tokens of a row at most.
    session_overflow: the action for a conversation beyond that.
    eos_token_ids: all that end a text; eos_token_id: the first of them.
    """

    gives: OutputKind = "both"
    scores_prompts = True
    needs_prompt = True
    _cache: Any = None

    def __init__(
        self,
        decoder: Any,
        tokenizer: Tokenizer,
        name: str,
        settings: dict[str, Any],
        max_context: int | None = None,
    ) -> None:
        self._decoder, sizes = decoder, decoder.config
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
        twin._cache = None  # noqa: SLF001 - of this model
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


class StepTokens(NamedTuple):
    """The new tokens of all rows in a step, those of decoding rows first.

    token_ids, positions, slots: [tokens].
    lasts: [num_slots] indices of the tokens after which rows yield; -1 for other slots.
    drafts: indices of drafts, in the order of the chunks; -1 in failed rows.
    scored: slot -> indices of the tokens of a scored chunk.
    grown: slot -> start and stop of the tokens of a row that may need blocks.
    failed: slot -> why its row is not computed.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    lasts: IntArray
    drafts: IntArray
    scored: dict[int, IntArray]
    grown: dict[int, tuple[int, int]]
    failed: dict[int, str | Failure]


class PagedDecoderModel(DecoderModel):
    """A decoder that keeps the cache of rows, by slot or in pages.

    cache_windows: how far back each group of layers reads, see `cache_windows_of`.
    kv_bytes_per_token: bytes of keys and values of a token, in all groups.
    """

    is_paged = True
    verifies_drafts = True
    verifies_trees = False

    def _prepare(self) -> None:
        self.cache_windows = tuple(group.window for group in self._decoder.cache_groups)
        size: CacheSize = self._decoder.cache_size
        self.kv_bytes_per_token, self.kv_block_bytes = size.per_token, size.of_block

    def allocate(self, num_slots: int) -> None:
        self._own: OwnTables | None = OwnTables(num_slots, self._decoder.cache_groups)
        self._begin(num_slots, None, OWN_BLOCK_SIZE)

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        self._own = None
        self._begin(num_slots, num_blocks, block_size)

    def _begin(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:  # noqa: ARG002 - for the cache
        self._lengths: IntArray = np.zeros(num_slots, np.int64)  # computed tokens of rows
        self._tokens: IntArray = np.zeros(num_slots, np.int64)

    def fork(self, source: int, target: int) -> None:
        self._lengths[target] = self._lengths[source]
        if self._own is not None:
            copies = [*self._own.fork(source, target)]
            self._cache.make_room(self._own.num_blocks)
            self._cache.copy(copies)

    def release(self, slot: int) -> None:
        self._lengths[slot] = 0
        if self._own is not None:
            self._own.release(slot)

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows; a row that exceeds the context fails."""
        if batch.pages is not None:
            self._cache.make_room(batch.pages.num_blocks)
            self._lengths[[*batch.pages.moved]] = [*batch.pages.moved.values()]
        return self._step(batch)

    def _step(self, batch: Batch) -> ModelOutput:
        if batch.pages is not None:
            if batch.pages.moves:
                self._cache.move(batch.pages.moves)
            self._cache.copy(batch.pages.copies)
        step = self._tokens_of(batch)
        lasts, drafts = step.lasts[batch.logit_slots], step.drafts
        yields = batch.slots[step.lasts[batch.slots] >= 0]
        chosen = np.sort(np.concatenate([step.lasts[yields], drafts[drafts >= 0]]))
        wanted = np.unique(np.concatenate([chosen, *step.scored.values()]))
        hidden = self._hidden_of(batch, step, wanted)
        chunk_logits = {
            slot: self._logits_of(hidden[at : at + len(own)])
            for slot, own in step.scored.items()
            for at in [int(wanted.searchsorted(own[0]))]
        }
        needed = np.sort(np.concatenate([lasts[lasts >= 0], drafts[drafts >= 0]]))
        logits, top_logits = np.zeros((0, self.vocab_size), np.float32), None
        if chosen.size:
            own = hidden if len(chosen) == len(hidden) else hidden[wanted.searchsorted(chosen)]
            tops = step.lasts[batch.top_slots]
            tokens, logits, top_logits = self._choose(batch, own, chosen, needed, tops)
            self._tokens[yields] = tokens[chosen.searchsorted(step.lasts[yields])]
        elif batch.top_slots.size:  # of failed rows alone
            none = np.zeros((len(batch.top_slots), 1), np.float32)
            ids, sums = none.astype(np.int64), none[:, 0].astype(np.float64)
            top_logits = TopLogits(ids, none, sums, none, sums, lambda rows: none[rows])

        def logits_at(tokens: IntArray) -> FloatArray | None:
            if not tokens.size or np.array_equal(tokens, needed):  # without a copy
                return logits if tokens.size else None
            lines: FloatArray = np.zeros((len(tokens), self.vocab_size), np.float32)
            lines[tokens >= 0] = logits[needed.searchsorted(tokens[tokens >= 0])]
            return lines

        all_logits = logits_at(lasts), chunk_logits, logits_at(drafts), top_logits
        return ModelOutput(self._tokens, step.failed, *all_logits)

    def _tokens_of(self, batch: Batch) -> StepTokens:
        """Return the tokens of rows that fit into the context, and count them as computed."""
        pages, lengths = batch.pages, self._lengths
        failed: dict[int, str | Failure] = {}
        slots = batch.slots
        if batch.chunks:
            slots = np.setdiff1d(slots, [chunk.slot for chunk in batch.chunks])
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
            paths = node_paths(chunk) if chunk.draft_parents else []
            if paths and not self.verifies_trees:
                raise InvariantError(f"drafts in a tree, which {self.name} does not verify")
            length = start + size - len(paths) + max(map(len, paths), default=0)
            reason = self.refusal(length if size else 0)
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
        token_ids, positions, of_slots = map(np.concatenate, zip(*parts, strict=True))
        of_drafts = np.array(drafts, np.int64)
        return StepTokens(token_ids, positions, of_slots, lasts, of_drafts, scored, grown, failed)

    def _tables_of(self, batch: Batch, slot: int, start: int, stop: int) -> list[list[int]]:
        """Return the block tables of a row, by group; tokens start..stop have their blocks."""
        if batch.pages is not None:
            every = batch.pages.tables, *batch.pages.group_tables
            return [tables[slot] for tables in every]
        if self._own is None:
            raise InvariantError("a batch without pages, for a model that was promised some")
        tables = self._own.grow(slot, start, stop)
        self._cache.make_room(self._own.num_blocks)
        return tables

    def _logits_of(self, hidden: Any) -> Iterator[FloatArray]:
        for start in range(0, len(hidden), _PIECE):
            yield self._logits(hidden[start : start + _PIECE])

    def _hidden_of(self, batch: Batch, step: StepTokens, wanted: IntArray) -> Any:
        """Compute tokens; return the hidden states [wanted, hidden_size] of some of them."""
        raise NotImplementedError

    def _logits(self, hidden: Any) -> FloatArray:
        """Return the logits [rows, vocab] after hidden states."""
        raise NotImplementedError

    def _choose(
        self, batch: Batch, hidden: Any, chosen: IntArray, needed: IntArray, tops: IntArray
    ) -> tuple[IntArray, FloatArray, TopLogits | None]:
        """Return the likeliest tokens [chosen], and the logits [needed, vocab] of some rows.

        chosen, needed: ascending indices of tokens; hidden: [chosen, hidden_size].
        tops: the indices of `batch.top_slots`, -1 for failed rows.
        """
        raise NotImplementedError


class SpanCache:
    """Keys, values and states of all rows, in blocks.

    state_lengths: cell of states -> number of tokens they cover.
    """

    def __init__(self, decoder: Transformer, num_blocks: int, block_size: int) -> None:
        self.store, self.states = decoder.new_store(), decoder.new_states()
        self.state_lengths: dict[int, int] = {}
        self.block_size = block_size
        self.make_room(num_blocks)

    def make_room(self, num_blocks: int) -> None:
        self.store.make_room(num_blocks * self.block_size)
        if self.states is not None:
            self.states.make_room(NOWHERE + num_blocks)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            self.store.copy(source, target, self.block_size)
            if self.states is not None:
                first, second = _state_cell(source), _state_cell(target)
                self.states.copy(first, second)
                self.state_lengths[second] = self.state_lengths.get(first, 0)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self.store.move(moves)

    def span(
        self, tables: list[list[int]], token_ids: list[int], start: int, num_drafts: int
    ) -> Span:
        """Return tokens of a row with these block tables, and count its states."""
        stop, size = start + len(token_ids), self.block_size
        kv_tables = tables if self.states is None else tables[:-1]
        cells = [self.store.cells(table, size, stop) for table in kv_tables]
        if self.states is None:
            return Span(token_ids, start, cells, num_drafts=num_drafts)
        states, known = tables[-1], stop - num_drafts
        source = _state_cell(states[(start - 1) // size]) if start else NOWHERE
        if (length := self.state_lengths.get(source, 0)) != start:
            raise InvariantError(f"position {start}, and states after {length} tokens")
        boundaries = [*range((start // size + 1) * size, known, size), known]
        kept = [(boundary - start, states[(boundary - 1) // size]) for boundary in boundaries]
        snapshots = [Snapshot(num, _state_cell(block)) for num, block in kept if block >= 0]
        self.state_lengths |= {each.cell: start + each.num_tokens for each in snapshots}
        return Span(token_ids, start, cells, source, snapshots, num_drafts)


class TransformerModel(PagedDecoderModel):
    """A Transformer with a SpanCache.

    layout: of the decoder; padded, decoding rows and chunks are computed separately.
    recomputes_drafts: whether it has recurrent layers; if not, it also verifies_trees.
    """

    layout: Layout = "ragged"
    _decoder: Transformer
    _cache: SpanCache

    def _prepare(self) -> None:
        super()._prepare()
        self.recomputes_drafts = any(group.is_recurrent for group in self._decoder.cache_groups)
        self.verifies_trees = not self.recomputes_drafts
        self.allocate(0)

    def _begin(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        super()._begin(num_slots, num_blocks, block_size)
        self._cache = SpanCache(self._decoder, num_blocks or 0, block_size)

    def _hidden_of(self, batch: Batch, step: StepTokens, wanted: IntArray) -> FloatArray:
        chunks = {chunk.slot: chunk for chunk in batch.chunks}
        begins = [0, *((step.slots[1:] != step.slots[:-1]).nonzero()[0] + 1).tolist()]
        decoding, of_chunks = list[Span](), list[Span]()
        for begin, end in pairwise([*begins, len(step.slots)] if step.slots.size else ()):
            slot, start = step.slots.item(begin), step.positions.item(begin)
            tables = self._tables_of(batch, slot, start, start + end - begin)
            chunk, token_ids = chunks.get(slot), step.token_ids[begin:end].tolist()
            num_drafts = 0 if chunk is None else chunk.num_drafts
            span = self._cache.span(tables, token_ids, start, num_drafts)
            if chunk is None:
                decoding.append(span)
            elif chunk.draft_parents:
                of_chunks += spans_of_tree(span, node_paths(chunk))
            else:
                of_chunks.append(span)
        parts = [decoding, of_chunks] if self.layout == "padded" else [[*decoding, *of_chunks]]
        kept = self._cache.store, self._cache.states
        outputs = [self._decoder.forward(spans, *kept) for spans in parts if spans]
        return np.concatenate(outputs)[wanted] if outputs else np.zeros((0, 0), np.float32)

    def _logits(self, hidden: FloatArray) -> FloatArray:
        return self._decoder.logits(hidden)

    def _choose(
        self, _batch: Batch, hidden: FloatArray, chosen: IntArray, needed: IntArray, _tops: IntArray
    ) -> tuple[IntArray, FloatArray, None]:
        scores = self._decoder.logits(hidden)  # one product; no row depends on the others
        return scores.argmax(1), scores[chosen.searchsorted(needed)], None


def _state_cell(block: int) -> int:
    if block < 0:
        raise InvariantError("a row continues from freed states")
    return NOWHERE + 1 + block
