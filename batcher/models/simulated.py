"""The simulated model: readable sentences, a pure function of the prefix, the same everywhere.

A prefix is hashed token by token, h <- (h + token) * M modulo 2^64, from a seed and a begin token
on.  The part of speech of its last token selects a line in a table of choices, and the top bits of
h select the next token in that line.  A slot's cache is its h alone, so a stale or mixed-up slot
changes every token that follows; in pages, that of a token is the h after it.

`reference_next_token` computes from a prefix by the definition and nothing else; the cache and the
vector operations of `SimulatedModel` are tested against it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as dataclass_replace
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, structs

from batcher.models.base import (
    NO_SLOTS,
    Batch,
    Chunk,
    FloatArray,
    IntArray,
    ModelOutput,
    OutputKind,
)
from batcher.models.simulated_attentive import AttentivePages
from batcher.models.simulated_cells import Drafts, pages_of
from batcher.models.simulated_hash import (
    MASK,
    MULTIPLIER,
    Hashes,
    hash_after,
    hash_after_first,
    hashes_after,
)
from batcher.models.simulated_logits import LogitTable
from batcher.models.simulated_pages import PagedHashes
from batcher.models.tokenizers import BEGIN_TOKEN_ID, EOS_TOKEN_ID, WordTokenizer, byte_id
from batcher.splitmix64 import scramble
from batcher.tokens import Tokens

_CHOICE_BITS = 10
NUM_CHOICES = 2**_CHOICE_BITS
HASH_SHIFT = 64 - _CHOICE_BITS
_PIECE = 1024  # tokens whose logits are there at once

Rate = Annotated[float, Meta(ge=0, le=1)]

_START = {"opener": 0.7, "opening pronoun": 0.2, "opening adverb": 0.1}
_GRAMMAR: dict[str, dict[str, float]] = {  # part of speech -> what follows it, how often
    "start": _START,
    "line": _START,
    "other": _START,
    "opener": {"subject adjective": 0.4, "subject": 0.6},
    "subject adjective": {"subject": 1},
    "subject": {"verb": 0.85, "adverb": 0.15},
    "opening pronoun": {"verb": 0.8, "adverb": 0.2},
    "opening adverb": {"pronoun": 1},
    "pronoun": {"verb": 0.9, "adverb": 0.1},
    "adverb": {"verb": 1},
    "verb": {"determiner": 1},
    "determiner": {"object adjective": 0.4, "object": 0.6},
    "object adjective": {"object": 1},
    "object": {
        "full stop": 0.4,
        "preposition": 0.3,
        "conjunction": 0.2,
        "comma": 0.06,
        "dash": 0.04,
    },
    "preposition": {"determiner": 1},
    "conjunction": {"pronoun": 1},
    "comma": {"conjunction": 1},
    # a character of three bytes, so that texts split inside characters too
    "dash": {"dash, second byte": 1},
    "dash, second byte": {"dash, third byte": 1},
    "dash, third byte": {"determiner": 1},
}
_BYTES = {
    "comma": byte_id(","),
    "dash": byte_id(0xE2),
    "dash, second byte": byte_id(0x80),
    "dash, third byte": byte_id(0x94),
    "line": byte_id("\n"),
    "full stop": byte_id("."),
}


class SimulatedSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What the simulated model writes; a rate has a resolution of 1/1024."""

    seed: int = 0
    eos_rate: Rate = 0.2  # of full stops, how many are followed by EOS
    newline_rate: Rate = 0.05  # of full stops, how many are followed by a new line; EOS goes first


class SimulatedModel:
    """A VerifyingModel and ScoringModel (see base.py) that needs no weights.

    is_attentive: whether, in pages, every token of every row is read again in every step, so that
    nothing a row has can change unnoticed.  Slow; `allocate_pages` looks at it.
    """

    name = "simulated"
    eos_token_id = EOS_TOKEN_ID
    gives: OutputKind = "both"

    is_paged = True
    scores_prompts = True
    verifies_drafts = verifies_trees = True
    recomputes_drafts = False

    def __init__(
        self, settings: SimulatedSettings | None = None, *, is_attentive: bool = False
    ) -> None:
        settings = settings or SimulatedSettings()
        self.is_attentive = is_attentive
        self.tokenizer = WordTokenizer()
        self.vocab_size = len(self.tokenizer.token_bytes)
        self.settings: dict[str, Any] = structs.asdict(settings)
        self.seed_hash = scramble(settings.seed)
        self.begin_hash = hash_after(self.seed_hash, [BEGIN_TOKEN_ID])
        self.lines, self.choices = _choices(settings, self.tokenizer)
        self.allocate(0)

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows."""
        self._pages: PagedHashes | AttentivePages | None = None
        self._parts: dict[int, int] = {}  # slot -> the hash of a row that yields no token yet
        self._hashes = np.zeros(num_slots, np.uint64)
        self._tokens = np.zeros(num_slots, np.int64)
        self._tokens_unsigned = self._tokens.view(np.uint64)
        self._lines: IntArray = np.zeros(num_slots, np.int64)  # of the last tokens
        self._index = np.zeros(num_slots, np.uint64)
        self._index_signed = self._index.view(np.int64)
        # arrays, since numpy takes longer to combine an array with a scalar
        self._multiplier = np.full(num_slots, MULTIPLIER, np.uint64)
        self._shift = np.full(num_slots, HASH_SHIFT, np.uint64)
        self._output = ModelOutput(self._tokens)
        self._draft_logits = np.empty((0, self.vocab_size), np.float32)

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        """Make room for `num_slots` rows in blocks, of as many as `Pages.num_blocks` says by then.

        num_blocks: how many to make room for at once.
        """
        self.allocate(num_slots)
        room, hashes = (num_blocks or 0, block_size), (self.seed_hash, self.begin_hash)
        if self.is_attentive:
            self._pages = AttentivePages(*room, *hashes)
        else:
            self._pages = PagedHashes(num_slots, *room, *hashes)

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute one token for every slot; what an empty slot gets means nothing."""
        tokens, hashes, index = self._tokens, self._hashes, self._index
        if batch.tokens is not tokens:
            tokens[:] = batch.tokens
        output, pages, does_yield = self._output, self._pages, True
        if pages is not None or batch.chunks:
            output, does_yield = self._take_in(batch)
            if not does_yield:
                return output
        self._lines = lines = self.lines[tokens]  # of so few, sooner than by take
        np.add(hashes, self._tokens_unsigned, hashes)
        np.multiply(hashes, self._multiplier, hashes)
        np.right_shift(hashes, self._shift, index)
        np.add(self._index_signed, lines, self._index_signed)
        self.choices.take(self._index_signed, None, tokens, "clip")
        if pages is not None:
            pages.store(hashes)
        slots = batch.logit_slots
        if slots is NO_SLOTS or not slots.size:
            return output
        parts = lines[slots] // NUM_CHOICES
        logits = self._logit_table.gather(parts, hashes[slots], tokens[slots])
        return dataclass_replace(output, logits=logits)

    def fork(self, source: int, target: int) -> None:
        """Let `target` hold what `source` does; in pages, it does already."""
        self._hashes[target] = self._hashes[source]

    def release(self, slot: int) -> None:
        """Forget the row in `slot`."""
        self._hashes[slot] = 0
        if self._pages is not None:
            self._pages.release(slot)
        elif self._parts:
            self._parts.pop(slot, None)

    @cached_property
    def _logit_table(self) -> LogitTable:
        return LogitTable(self.choices.reshape(-1, NUM_CHOICES), self.vocab_size)

    def _take_in(self, batch: Batch) -> tuple[ModelOutput, bool]:
        """Take in what a step brings; return what is known of its output, and whether rows yield.

        The last known token of a row that does is left to `forward`, which takes it in like a
        generated one.
        """
        pages, draft_logits = self._pages, None
        if pages is not None:
            does_yield = pages.load(batch, self._tokens, self._hashes)
            if not batch.chunks:
                return self._output, does_yield
            chunk_logits = self._score(batch, partial(pages.hash_before, pages=pages_of(batch)))
            if pages.drafts is not None:
                draft_logits = self._logits_after_drafts(pages.drafts)
        else:
            chunk_logits = self._score(batch, self._hash_before)
            does_yield = self._prefill(batch)
        if not chunk_logits and draft_logits is None:
            return self._output, does_yield
        output = ModelOutput(self._tokens, chunk_logits=chunk_logits, draft_logits=draft_logits)
        return output, does_yield

    def _score(
        self, batch: Batch, hash_before: Callable[[Chunk], int]
    ) -> dict[int, Iterator[FloatArray]]:
        """Return by slot the logits after each token of chunks that are scored."""
        return {
            chunk.slot: self._logits_after(hash_before(chunk), chunk.token_ids)
            for chunk in batch.chunks
            if chunk.is_scored
        }

    def _logits_after(self, before: int, token_ids: Tokens) -> Iterator[FloatArray]:
        """Yield the logits after each of `token_ids`, `before` being the hash before the first."""
        for start in range(0, len(token_ids), _PIECE):
            piece = token_ids[start : start + _PIECE]
            hashes = hashes_after(before, piece)
            before = int(hashes[-1])
            yield self._fill(np.empty((len(piece), self.vocab_size), np.float32), piece, hashes)

    def _logits_after_drafts(self, drafts: Drafts) -> FloatArray:
        """Return the logits after each of some drafts, good until the next call."""
        num_drafts = len(drafts.tokens)
        if num_drafts > len(self._draft_logits):
            self._draft_logits = np.empty((num_drafts, self.vocab_size), np.float32)
        return self._fill(self._draft_logits[:num_drafts], drafts.tokens, drafts.hashes)

    def _fill(self, logits: FloatArray, tokens: Tokens | IntArray, hashes: Hashes) -> FloatArray:
        """Return `logits` [tokens, vocab], with those after some tokens written into it.

        hashes: [tokens] the hash after each.
        """
        lines = self.lines[tokens]
        choices = (hashes >> np.uint64(HASH_SHIFT)).view(np.int64) + lines
        parts = lines // NUM_CHOICES
        return self._logit_table.gather_into(logits, parts, hashes, self.choices[choices])

    def _prefill(self, batch: Batch) -> bool:
        """Take in the chunks of a step, by slot; return whether any row yields a token."""
        parts, has_part = self._parts, False
        for chunk in batch.chunks:
            slot, token_ids = chunk.slot, chunk.token_ids
            before = self.begin_hash if chunk.start == 0 else self._hash_before(chunk)
            if not batch.holds(slot):
                has_part = True
                parts[slot] = hash_after(before, token_ids)
                continue
            if parts:
                parts.pop(slot, None)
            if not token_ids:
                before, token_ids = self.seed_hash, [BEGIN_TOKEN_ID]
            self._hashes[slot] = hash_after_first(before, token_ids, len(token_ids) - 1)
            self._tokens[slot] = token_ids[-1]
        return not has_part or batch.slots.size > 0

    def _hash_before(self, chunk: Chunk) -> int:
        """Return the hash that a chunk goes on from."""
        if chunk.start == 0:
            return self.begin_hash
        part = self._parts.get(chunk.slot)
        return int(self._hashes[chunk.slot]) if part is None else part


def reference_next_token(model: SimulatedModel, prefix: Sequence[int]) -> int:
    """Return the token after `prefix` (prompt and output so far), slowly, by the definition."""
    state = model.seed_hash
    for token_id in [BEGIN_TOKEN_ID, *prefix]:
        state = (state + token_id) * MULTIPLIER & MASK
    first = model.lines[prefix[-1] if prefix else BEGIN_TOKEN_ID]
    return int(model.choices[first + (state >> HASH_SHIFT)])


def _choices(settings: SimulatedSettings, tokenizer: WordTokenizer) -> tuple[IntArray, IntArray]:
    """Return [vocab] where each token's line begins, and [lines * 1024] the tokens to choose."""
    eos, newline = settings.eos_rate, min(settings.newline_rate, 1 - settings.eos_rate)
    goes_on = {part: rate * (1 - eos - newline) for part, rate in _START.items()}
    grammar = {**_GRAMMAR, "full stop": {"eos": eos, "line": newline, **goes_on}}
    token_ids = {
        **tokenizer.words,
        **{part: [byte] for part, byte in _BYTES.items()},
        "eos": [EOS_TOKEN_ID],
    }
    table = np.zeros((len(grammar), NUM_CHOICES), np.int64)
    lines = np.full(len(tokenizer.token_bytes), list(grammar).index("other") * NUM_CHOICES)
    lines[[EOS_TOKEN_ID, BEGIN_TOKEN_ID]] = list(grammar).index("start") * NUM_CHOICES
    for number, (part, followers) in enumerate(grammar.items()):
        if part in token_ids:
            lines[token_ids[part]] = number * NUM_CHOICES
        end, rate_so_far = 0, 0.0
        for follower, rate in followers.items():
            begin, rate_so_far = end, rate_so_far + rate
            end = round(rate_so_far * NUM_CHOICES)
            words = np.array(token_ids[follower])
            table[number, begin:end] = words[np.arange(end - begin) % len(words)]
    return lines, table.reshape(-1)
