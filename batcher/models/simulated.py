"""The simulated model: readable sentences, a pure function of the prefix, the same everywhere.

A prefix is hashed token by token, h <- (h + token) * M modulo 2^64, starting with a seed and a
begin token. The part of speech of its last token selects a line in a table of choices, and the top
bits of h select the next token in that line. The cache of a slot is its h, so a stale or mixed-up
slot changes every following token; in pages, the cell of a token has the h after it.

Logits: the tokens are ranked, first those that the grammar allows, in a random order that favours
frequent ones, then all others. The logit falls with the logarithm of the rank, as in Zipf's law,
and by a gap where the grammar ends; the greedy choice goes first. Bits of h select one of several
rankings, and their sharpness.

`reference_next_token` computes a token from its prefix by definition; the cache and the vector
operations of `SimulatedModel` are tested against it.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace as dataclass_replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError, InvariantError
from batcher.models.base import (
    NO_SLOTS,
    Batch,
    Chunk,
    FloatArray,
    IntArray,
    ModelOutput,
    OutputKind,
    Pages,
    draft_parents,
)
from batcher.models.tokenizers import BEGIN_TOKEN_ID, EOS_TOKEN_ID, WordTokenizer, byte_id
from batcher.splitmix64 import Bits, BitsOrInt, scramble
from batcher.tokens import Tokens

NUM_RANKINGS = 16  # of each part of speech
SHARPNESSES = tuple(0.8 * 2.5 ** (step / 15) for step in range(16))
_SHARPNESSES = np.array(SHARPNESSES, np.float32)[:, None]
SHAPE_SHIFT = 46  # place of both in a hash, below the bits that choose the token
TOP_LOGIT = 8.0
ZIPF_EXPONENT = 1.2
GRAMMAR_GAP = 4.5
_BEYOND_THE_GRAMMAR = 100.0  # more than any follower's time: -ln(2^-53) is 37


def uniform_bits(part: BitsOrInt, ranking: BitsOrInt, token: BitsOrInt) -> BitsOrInt:
    """Return 52 random bits, the token's number in (0, 1) for this ranking."""
    bits = scramble((part << 32) + (ranking << 16) + token)
    return bits >> 12  # type: ignore[return-value]  # numpy's stubs lose the sign, numpy does not


Hashes = NDArray[np.uint64]

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX generator
MASK = 2**64 - 1
_PIECE = 1024  # tokens hashed, or logits computed, at once
_NUM_ONE_BY_ONE = 16  # tokens up to which a loop is faster
_RISING = np.full(_PIECE, MULTIPLIER, np.uint64).cumprod()  # M^1 ... M^n
_FALLING = _RISING[::-1].copy()
_INVERSE = np.full(_PIECE, pow(MULTIPLIER, -1, 2**64), np.uint64)  # M^0 ... M^(1-n)
_INVERSE[0] = 1
_INVERSE = _INVERSE.cumprod()


def hash_after(state: int, token_ids: Tokens) -> int:
    """Return the hash after `token_ids`: state * M^n + sum of token_i * M^(n-i)."""
    if len(token_ids) <= _NUM_ONE_BY_ONE:
        for token_id in token_ids:
            state = (state + token_id) * MULTIPLIER & MASK
        return state
    for start in range(0, len(token_ids), _PIECE):
        # through an array, which takes half the time of np.array
        piece = np.frombuffer(array("Q", token_ids[start : start + _PIECE]), np.uint64)
        powers = _FALLING[-len(piece) :]
        state = int(piece.dot(powers)) + state * int(powers[0]) & MASK
    return state


def hashes_after(state: int, token_ids: Tokens) -> Hashes:
    """Return [tokens] the hash after each of `token_ids`: M^i * (state + sum of token_j * M^(1-j)).

    M is odd, so it has an inverse modulo 2^64.
    """
    numbers = array("Q", token_ids)
    hashes = np.frombuffer(numbers, np.uint64, len(numbers))  # shares memory with `numbers`
    for start in range(0, len(numbers), _PIECE):
        numbers[start] = numbers[start] + state & MASK
        piece = hashes[start : start + _PIECE]
        num_tokens = len(piece)
        np.multiply(piece, _INVERSE[:num_tokens], piece)
        np.add.accumulate(piece, 0, None, piece)
        np.multiply(piece, _RISING[:num_tokens], piece)
        state = numbers[start + num_tokens - 1]
    return hashes


_CHOICE_BITS = 10
NUM_CHOICES = 2**_CHOICE_BITS
HASH_SHIFT = 64 - _CHOICE_BITS

Rate = Annotated[float, Meta(ge=0, le=1)]

_GRAMMAR = """
    start: opener 0.7, opening pronoun 0.2, opening adverb 0.1
    line: opener 0.7, opening pronoun 0.2, opening adverb 0.1
    other: opener 0.7, opening pronoun 0.2, opening adverb 0.1
    opener: subject adjective 0.4, subject 0.6
    subject adjective: subject 1
    subject: verb 0.85, adverb 0.15
    opening pronoun: verb 0.8, adverb 0.2
    opening adverb: pronoun 1
    pronoun: verb 0.9, adverb 0.1
    adverb: verb 1
    verb: determiner 1
    determiner: object adjective 0.4, object 0.6
    object adjective: object 1
    object: full stop 0.4, preposition 0.3, conjunction 0.2, comma 0.06, dash 0.04
    preposition: determiner 1
    conjunction: pronoun 1
    comma: conjunction 1
    dash: second byte 1
    second byte: third byte 1
    third byte: determiner 1
"""  # part of speech: followers and their frequencies
_BYTES = {
    "comma": byte_id(","),
    "dash": byte_id(0xE2),  # so that texts also split inside characters
    "second byte": byte_id(0x80),
    "third byte": byte_id(0x94),
    "line": byte_id("\n"),
    "full stop": byte_id("."),
}


class SimulatedSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the simulated model; a rate has a resolution of 1/1024."""

    seed: int = 0
    eos_rate: Rate = 0.2  # share of full stops followed by EOS
    newline_rate: Rate = 0.05  # share of full stops followed by a newline; EOS goes first


class SimulatedModel:
    """A PagedModel that needs no weights.

    is_attentive: in pages, read every token of every row again in every step, to detect any change;
    slow. `allocate_pages` applies it.
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
        self.tokenizer = tokenizer = WordTokenizer()
        self.vocab_size = len(tokenizer.token_bytes)
        self.settings: dict[str, Any] = structs.asdict(settings)
        self.seed_hash = scramble(settings.seed)
        self.begin_hash = hash_after(self.seed_hash, [BEGIN_TOKEN_ID])
        eos, newline = settings.eos_rate, min(settings.newline_rate, 1 - settings.eos_rate)
        grammar: dict[str, dict[str, float]] = {}
        for rule in _GRAMMAR.strip().splitlines():
            part, _, ways = rule.strip().partition(": ")
            pairs = (way.rsplit(" ", 1) for way in ways.split(", "))
            grammar[part] = {follower: float(rate) for follower, rate in pairs}
        goes_on = {part: rate * (1 - eos - newline) for part, rate in grammar["start"].items()}
        grammar["full stop"] = {"eos": eos, "line": newline, **goes_on}
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
        self.lines, self.choices = lines, table.reshape(-1)
        self._logits = np.empty((0, self.vocab_size), np.float32)  # of a step, reused
        self.allocate(0)

    def allocate(self, num_slots: int) -> None:
        self._pages: PagedHashes | None = None
        self._parts: dict[int, int] = {}  # slot -> the hash of a row that does not yield yet
        self._hashes = np.zeros(num_slots, np.uint64)
        self._tokens = np.zeros(num_slots, np.int64)
        self._tokens_unsigned = self._tokens.view(np.uint64)
        self._lines: IntArray = np.zeros(num_slots, np.int64)  # of the last tokens
        self._index = np.zeros(num_slots, np.uint64)
        self._index_signed = self._index.view(np.int64)
        # arrays, since an array and a scalar take longer to combine
        self._multiplier = np.full(num_slots, MULTIPLIER, np.uint64)
        self._shift = np.full(num_slots, HASH_SHIFT, np.uint64)
        self._output = ModelOutput(self._tokens)

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        self.allocate(num_slots)
        self._pages = PagedHashes(self, num_slots, num_blocks or 0, block_size)

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute one token for every slot; those of empty slots are arbitrary."""
        tokens, hashes, index = self._tokens, self._hashes, self._index
        if batch.tokens is not tokens:
            tokens[:] = batch.tokens
        output, pages, does_yield = self._output, self._pages, True
        if pages is not None or batch.chunks:
            output, does_yield = self._take_in(batch)
            if not does_yield:
                return output
        self._lines = lines = self.lines[tokens]  # faster than take for so few
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
        if slots.size > len(self._logits):
            self._logits = np.empty((slots.size, self.vocab_size), np.float32)
        logits = self._logits[: slots.size]
        self._gather_logits(lines[slots], hashes[slots], tokens[slots], logits)
        return dataclass_replace(output, logits=logits)

    def fork(self, source: int, target: int) -> None:
        self._hashes[target] = self._hashes[source]

    def release(self, slot: int) -> None:
        self._hashes[slot] = 0
        if self._pages is not None:
            self._pages.release(slot)
        elif self._parts:
            self._parts.pop(slot, None)

    @cached_property
    def _logit_table(self) -> FloatArray:
        """[parts of speech * rankings, vocab] all logits except those of the greedy choices."""
        # By rank, from 1 on. Each token gets an exponential time whose rate is its frequency, and
        # ranks are their order (Efraimidis and Spirakis, Information Processing Letters 97(5),
        # 2006).
        choices, vocab_size = self.choices.reshape(-1, NUM_CHOICES), self.vocab_size
        counts = np.stack([np.bincount(line, minlength=vocab_size) for line in choices])[:, None]
        sizes = len(choices), NUM_RANKINGS, vocab_size
        part, ranking, token = (np.arange(size, dtype=np.uint64) for size in sizes)
        bits = uniform_bits(part[:, None, None], ranking[:, None], token)
        times = -np.log((bits + 0.5) / 2**52) / counts.clip(1)
        times[np.broadcast_to(counts == 0, sizes)] += _BEYOND_THE_GRAMMAR
        by_rank = TOP_LOGIT - ZIPF_EXPONENT * np.log(np.arange(2, vocab_size + 2))
        logits = np.empty(sizes)
        np.put_along_axis(logits, times.argsort(axis=-1), by_rank[None, None], -1)
        logits -= np.where(counts == 0, GRAMMAR_GAP, 0)
        return logits.astype(np.float32).reshape(-1, vocab_size)

    def _gather_logits(
        self, lines: IntArray, hashes: Bits, tokens: IntArray, logits: FloatArray
    ) -> FloatArray:
        """Write the logits of some rows into `logits` [rows, vocab], and return it."""
        shapes = (hashes >> np.uint64(SHAPE_SHIFT)).view(np.int64)
        rankings = shapes // len(SHARPNESSES) % NUM_RANKINGS
        self._logit_table.take(lines // NUM_CHOICES * NUM_RANKINGS + rankings, 0, logits, "clip")
        logits[np.arange(len(tokens)), tokens] = TOP_LOGIT
        logits *= _SHARPNESSES[shapes % len(SHARPNESSES)]
        return logits

    def _take_in(self, batch: Batch) -> tuple[ModelOutput, bool]:
        """Read the chunks and pages of a step; return its output so far, and whether rows yield.

        The last known token of a yielding row is left to `forward`, like a generated one.
        """
        pages, chunks, draft_logits = self._pages, batch.chunks, None
        if pages is not None:
            does_yield = pages.load(batch, self._tokens, self._hashes)
            if not chunks:
                return self._output, does_yield
            if pages.drafts is not None:
                draft_logits = self._logits_at(*pages.drafts)
        chunk_logits = {
            chunk.slot: self._logits_after(self._hash_before(chunk, batch), chunk.token_ids)
            for chunk in chunks
            if chunk.is_scored
        }
        if pages is None:
            parts, has_part = self._parts, False
            for chunk in chunks:
                slot, token_ids = chunk.slot, chunk.token_ids
                before = self._hash_before(chunk, batch)
                if not batch.holds(slot):
                    has_part = True
                    parts[slot] = hash_after(before, token_ids)
                    continue
                if parts:
                    parts.pop(slot, None)
                if not token_ids:
                    before, token_ids = self.seed_hash, [BEGIN_TOKEN_ID]
                self._hashes[slot] = hash_after(before, token_ids[:-1])
                self._tokens[slot] = token_ids[-1]
            does_yield = not has_part or batch.slots.size > 0
        if not chunk_logits and draft_logits is None:
            return self._output, does_yield
        output = ModelOutput(self._tokens, chunk_logits=chunk_logits, draft_logits=draft_logits)
        return output, does_yield

    def _hash_before(self, chunk: Chunk, batch: Batch) -> int:
        if chunk.start == 0:
            return self.begin_hash
        if self._pages is not None:
            return self._pages.hash_before(chunk, pages_of(batch))
        part = self._parts.get(chunk.slot)
        return int(self._hashes[chunk.slot]) if part is None else part

    def _logits_after(self, before: int, token_ids: Tokens) -> Iterator[FloatArray]:
        for start in range(0, len(token_ids), _PIECE):
            piece = token_ids[start : start + _PIECE]
            hashes = hashes_after(before, piece)
            before = int(hashes[-1])
            yield self._logits_at(piece, hashes)

    def _logits_at(self, tokens: Tokens | IntArray, hashes: Hashes) -> FloatArray:
        lines = self.lines[tokens]
        choices = self.choices[(hashes >> np.uint64(HASH_SHIFT)).view(np.int64) + lines]
        logits = np.empty((len(tokens), self.vocab_size), np.float32)
        return self._gather_logits(lines, hashes, choices, logits)


def reference_next_token(model: SimulatedModel, prefix: Sequence[int]) -> int:
    """Return the token after `prefix` (prompt and output so far), slowly, by definition."""
    state = model.seed_hash
    for token_id in [BEGIN_TOKEN_ID, *prefix]:
        state = (state + token_id) * MULTIPLIER & MASK
    first = model.lines[prefix[-1] if prefix else BEGIN_TOKEN_ID]
    return int(model.choices[first + (state >> HASH_SHIFT)])


# -- in pages --------------------------------------------------------------------------------------

# cells before those of block 0
BEGIN = 0  # the hash before every row
SCRATCH = 1
NUM_FIXED = 2


class PagedHashes:
    """The hash after every token, by cell, and the cells that each slot reads and writes.

    A slot reads the cell that it wrote last, and writes the next one, unless `Pages.moved` gives
    another. A slot that does not decode uses a scratch cell. An attentive model also keeps tokens
    by cell, and recomputes the hash of every row.

    drafts: the tokens [drafts] of the step, in the order of its chunks, and the hash after each.
    """

    def __init__(
        self, model: SimulatedModel, num_slots: int, num_blocks: int, block_size: int
    ) -> None:
        self._seed_hash, self._begin_hash = model.seed_hash, model.begin_hash
        self._num_blocks = num_blocks
        self._hashes = np.zeros(NUM_FIXED + num_blocks * block_size, np.uint64)
        self._hashes[BEGIN] = self._begin_hash
        self._view = self._hashes.data
        self._tokens = self._hashes.copy() if model.is_attentive else None
        self._read: IntArray = np.full(num_slots, SCRATCH)
        self._write: IntArray = np.full(num_slots, SCRATCH)
        self._strides: IntArray = np.zeros(num_slots, np.int64)  # 1 where a row decodes
        # views of the same memory, which Python indexes several times as fast
        self._reads, self._writes = self._read.data, self._write.data
        self._stride_of = self._strides.data
        self.drafts: tuple[IntArray, Hashes] | None = None

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Put the hash before each row's token into `hashes`; return whether any row yields."""
        pages, chunks, self.drafts = pages_of(batch), batch.chunks, None
        if pages.copies or pages.moves or pages.num_blocks > self._num_blocks:
            self._prepare(pages)
        if not chunks and self._tokens is None:
            self._move_on(pages)
            self._hashes.take(self._read, None, hashes, "clip")
            return True
        for chunk in chunks:
            if self._stride_of[chunk.slot]:
                self.release(chunk.slot)
        does_yield = any(batch.holds(chunk.slot) for chunk in chunks) or batch.slots.size > 0
        if does_yield:
            self._move_on(pages)
            if self._tokens is not None:
                self._tokens[self._write] = tokens
            if any(chunk.start for chunk in chunks):  # may read cells that others compute now
                self._hashes.take(self._read, None, hashes, "clip")
                self.store((hashes + tokens.view(np.uint64)) * np.uint64(MULTIPLIER))
        entered = self._compute(batch, pages, tokens)
        if does_yield:
            self._hashes.take(self._read, None, hashes, "clip")
            for slot, before in entered.items():
                hashes[slot] = before
            for slot in batch.slots.tolist() if self._tokens is not None else ():
                cell = self._writes[slot] - NUM_FIXED
                if cell >= 0:
                    place = pages.tables[slot].index(cell // pages.block_size)
                    position = place * pages.block_size + cell % pages.block_size
                    hashes[slot] = self._hash_of_all(pages, slot, position)
        return does_yield

    def store(self, hashes: Hashes) -> None:
        self._hashes[self._write] = hashes

    def release(self, slot: int) -> None:
        self._reads[slot] = self._writes[slot] = SCRATCH
        self._stride_of[slot] = 0

    def hash_before(self, chunk: Chunk, pages: Pages) -> int:
        """Return the hash after all tokens before a chunk."""
        if not chunk.start:
            return self._begin_hash
        if self._tokens is not None:
            return self._hash_of_all(pages, chunk.slot, chunk.start)
        return self._view[cell_of(pages, chunk.slot, chunk.start - 1)]

    def _prepare(self, pages: Pages) -> None:
        """Apply moves, allocate new blocks, and apply copies."""
        size, num_more = pages.block_size, 0
        if pages.num_blocks > self._num_blocks:
            num_more = max(pages.num_blocks - self._num_blocks, self._num_blocks)
            self._num_blocks += num_more

        def prepared(cells: Hashes) -> Hashes:
            if pages.moves:
                sources, targets = np.array(pages.moves).T + NUM_FIXED
                cells[targets] = cells[sources]
            if num_more:
                cells = np.concatenate([cells, np.zeros(num_more * size, np.uint64)])
            for source, target in pages.copies:
                first, last = NUM_FIXED + source * size, NUM_FIXED + target * size
                cells[last : last + size] = cells[first : first + size]
            return cells

        self._hashes = prepared(self._hashes)
        self._view = self._hashes.data
        self._tokens = None if self._tokens is None else prepared(self._tokens)

    def _move_on(self, pages: Pages) -> None:
        self._read, self._write = read, write = self._write, self._read
        self._reads, self._writes = reads, writes = self._writes, self._reads
        np.add(read, self._strides, write)
        for slot, position in pages.moved.items():
            self._stride_of[slot] = 1
            writes[slot] = cell_of(pages, slot, position)
            reads[slot] = cell_of(pages, slot, position - 1) if position else BEGIN

    def _compute(self, batch: Batch, pages: Pages, tokens: IntArray) -> dict[int, int]:
        """Compute chunks; return by slot the hash before the last known token of yielding rows.

        That token is then computed like a generated one.
        """
        entered: dict[int, int] = {}
        draft_tokens, draft_hashes = list[int](), list[int]()
        for chunk in batch.chunks:
            slot, token_ids, start = chunk.slot, chunk.token_ids, chunk.start
            before = self.hash_before(chunk, pages)
            num_drafts, num_tokens = chunk.num_drafts, len(token_ids)
            num_known = num_tokens - num_drafts
            hashes = hashes_after(before, token_ids[:num_known] if num_drafts else token_ids)
            if batch.holds(slot):
                if token_ids:
                    tokens[slot] = token_ids[num_known - 1]
                    entered[slot] = hashes.item(num_known - 2) if num_known > 1 else before
                    self._writes[slot] = cell_of(pages, slot, start + num_known - 1)
                    self._stride_of[slot] = 1
                else:
                    tokens[slot], entered[slot] = BEGIN_TOKEN_ID, self._seed_hash
            if num_drafts:  # each follows its parents alone
                after = [hashes.item(num_known - 1)]
                drafts = token_ids[num_known:]
                for token_id, parent in zip(drafts, draft_parents(chunk), strict=True):
                    state = after[parent - num_known + 1] + token_id
                    after.append(state * MULTIPLIER & MASK)
                draft_tokens += drafts
                draft_hashes += after[1:]
                hashes = np.append(hashes, np.array(after[1:], np.uint64))
            size, table, view, own = pages.block_size, pages.tables[slot], self._view, hashes.data
            begin, offset = 0, start % size
            for block in table[start // size : -(-(start + num_tokens) // size)]:
                end = min(begin + size - offset, num_tokens)
                cell = NUM_FIXED + block * size + offset
                view[cell : cell + end - begin] = own[begin:end]
                begin, offset = end, 0
            if self._tokens is not None:
                places = range(start, start + num_tokens)
                self._tokens[[cell_of(pages, slot, place) for place in places]] = token_ids
        if draft_tokens:
            self.drafts = np.array(draft_tokens), np.array(draft_hashes, np.uint64)
        return entered

    def _hash_of_all(self, pages: Pages, slot: int, num_tokens: int) -> int:
        if self._tokens is None:
            raise InvariantError("only an attentive model has the tokens")
        cells = [cell_of(pages, slot, position) for position in range(num_tokens)]
        return hash_after(self._begin_hash, self._tokens[cells].tolist())


def pages_of(batch: Batch) -> Pages:
    if batch.pages is None:
        raise InvariantError("a model that was to keep pages is given none")
    return batch.pages


def cell_of(pages: Pages, slot: int, position: int) -> int:
    size = pages.block_size
    return NUM_FIXED + pages.tables[slot][position // size] * size + position % size


# -- a draft model ---------------------------------------------------------------------------------
#
# After a share of all prefixes it has the logits of the target, and after the rest those of another
# choice, whose second best is right equally often. A hash of the prefix decides, so its drafts are
# the same in every batch.

_NEXT_BEST = np.float32(0.95)  # of the largest logit: above all others


class SimulatedDraft(SimulatedModel):
    """Drafts for the simulated model of the same settings.

    agreement: the share of prefixes after which it has the logits of that model.
    """

    scores_prompts = False

    def __init__(self, settings: SimulatedSettings, agreement: float) -> None:
        super().__init__(settings)
        self.name = f"simulated:{agreement:g}"
        self._agreement = agreement

    def forward(self, batch: Batch) -> ModelOutput:
        output, slots, at = super().forward(batch), batch.slots, batch.logit_slots
        if output.logits is not None:
            self._mistake(output.logits, self._hashes[at], self._lines[at])
        drafts = None if self._pages is None else self._pages.drafts
        if drafts is not None and output.draft_logits is not None:
            tokens, hashes = drafts
            self._mistake(output.draft_logits, hashes, self.lines[tokens])
        rows, _, _, others = self._wrong(self._hashes[slots], self._lines[slots])
        output.tokens[slots[rows]] = others
        return output

    def _mistake(self, logits: FloatArray, hashes: Hashes, lines: IntArray) -> None:
        """Replace the logits of rows that disagree by those of another choice."""
        rows, bits, tokens, others = self._wrong(hashes, lines)
        which, own = np.arange(len(rows)), np.empty((len(rows), self.vocab_size), np.float32)
        self._gather_logits(lines[rows], bits, others, own)
        is_next = _uniform(scramble(bits)) < self._agreement
        own[which[is_next], tokens[is_next]] = _NEXT_BEST * own[which, others][is_next]
        logits[rows] = own

    def _wrong(
        self, hashes: Hashes, lines: IntArray
    ) -> tuple[IntArray, Hashes, IntArray, IntArray]:
        """Return the rows that disagree, their bits, and the choices of both models."""
        bits = scramble(hashes)
        (rows,) = (_uniform(bits) >= self._agreement).nonzero()
        bits, lines = scramble(bits[rows]), lines[rows]
        tokens, others = (
            self.choices[(own >> np.uint64(HASH_SHIFT)).view(np.int64) + lines]
            for own in (hashes[rows], bits)
        )
        is_same = others == tokens
        others[is_same] = (others[is_same] + 1) % self.vocab_size
        return rows, bits, tokens, others


def _uniform(bits: Hashes) -> NDArray[np.float64]:
    uniform: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53, dtype=np.float64)
    return uniform


def simulated_draft(name: str, settings: SimulatedSettings) -> SimulatedDraft:
    """Return the draft model of `simulated:RATE`, for the simulated model of these settings."""
    _, colon, rate = name.partition(":")
    try:
        agreement = msgspec.convert(rate if colon else "1", Rate, strict=False)
    except msgspec.ValidationError:
        raise BatchdecodeError(
            f"{name}: RATE must be the share of correct drafts, from 0 to 1, not {rate}"
        ) from None
    return SimulatedDraft(settings, agreement)
