"""The simulated model: readable sentences, a pure function of the prefix, the same everywhere.

A prefix is hashed token by token, h <- (h + token) * M modulo 2^64, from a seed and a begin token
on.  The part of speech of its last token selects a line in a table of choices, and the top bits of
h select the next token in that line.  A slot's cache is its h alone, so a stale or mixed-up slot
changes every token that follows; in pages, that of a token is the h after it.

`reference_next_token` computes from a prefix by the definition and nothing else; the cache and the
vector operations of `SimulatedModel` are tested against it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace as dataclass_replace
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs
from msgspec.structs import replace
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

# The simulated model's logits: a few likely words about its greedy choice, then a long tail.
#
# The tokens are ranked: those that the grammar allows come first, in a random order in which what
# is frequent tends to be early; then come all the others. The logit falls with the logarithm of the
# rank, as in Zipf's law, and by a gap where the grammar ends. The greedy choice comes before the
# first. Bits of the prefix's hash select one of several rankings, and how sharp it is: how sure the
# model seems to be.
#
# `reference_logits` in simulated.py is the same, slowly and for one prefix.

NUM_RANKINGS = 16  # of each part of speech
SHARPNESSES = tuple(0.8 * 2.5 ** (step / 15) for step in range(16))
SHAPE_SHIFT = 46  # where a hash has the bits for both, below those that choose the token
TOP_LOGIT = 8.0
ZIPF_EXPONENT = 1.2
GRAMMAR_GAP = 4.5

_BEYOND_THE_GRAMMAR = 100.0  # no follower comes up as late: -ln(2^-53) is 37


class LogitTable:
    """All logits but those of the greedy choices, and the sharpnesses to multiply them with."""

    def __init__(self, choices: IntArray, vocab_size: int) -> None:
        """Take the choices: [parts of speech, choices] what follows, as often as it does."""
        # By rank, from 1 on.  A token comes up after an exponential time whose rate is its
        # frequency, and ranks are the order of these (Efraimidis and Spirakis, Information
        # Processing Letters 97(5), 2006).
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
        self._logits: FloatArray = logits.astype(np.float32).reshape(-1, vocab_size)
        self._sharpnesses = np.array(SHARPNESSES, np.float32)[:, None]
        self._buffer = np.empty((0, vocab_size), np.float32)

    def gather(
        self, parts: IntArray, hashes: Bits, tokens: IntArray, logits: FloatArray | None = None
    ) -> FloatArray:
        """Return the logits of some rows: [rows, vocab], good until the next call.

        parts, hashes, tokens: [rows] the part of speech of the last token, the hash of the prefix,
        the greedy choice.  logits: [rows, vocab] to write into, in place of a shared buffer.
        """
        num_rows = len(tokens)
        if logits is None:
            if num_rows > len(self._buffer):
                self._buffer = np.empty((num_rows, self._logits.shape[1]), np.float32)
            logits = self._buffer[:num_rows]
        shapes = (hashes >> np.uint64(SHAPE_SHIFT)).view(np.int64)
        rankings = shapes // len(SHARPNESSES) % NUM_RANKINGS
        self._logits.take(parts * NUM_RANKINGS + rankings, 0, logits, "clip")
        logits[np.arange(num_rows), tokens] = TOP_LOGIT
        logits *= self._sharpnesses[shapes % len(SHARPNESSES)]
        return logits


def uniform_bits(part: BitsOrInt, ranking: BitsOrInt, token: BitsOrInt) -> BitsOrInt:
    """Return 52 random bits: where in (0, 1) the token's number for this ranking lies."""
    bits = scramble((part << 32) + (ranking << 16) + token)
    return bits >> 12  # type: ignore[return-value]  # numpy's stubs lose the sign, numpy does not


# The hash of the simulated model, h <- (h + token) * M modulo 2^64, of one token or of many.

Hashes = NDArray[np.uint64]

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX generator
MASK = 2**64 - 1
_INVERSE = pow(MULTIPLIER, -1, 2**64)
_HASHED_AT_ONCE = 2**16  # tokens that are hashed at once, at most
_NUM_ONE_BY_ONE = 16  # tokens that are hashed sooner one by one than all at once


class _Powers:
    """Powers of M and of its inverse, as many as the longest piece needs: a cache of constants."""

    def __init__(self) -> None:
        self.falling = self.rising = self.inverse = np.zeros(0, np.uint64)

    def make(self, count: int) -> None:
        """Have at least `count` of each: M^n ... M^1, M^1 ... M^n, and M^0 ... M^(1-n)."""
        if count > len(self.rising):
            self.rising = np.full(2 * count, MULTIPLIER, np.uint64).cumprod()
            self.falling = self.rising[::-1].copy()
            self.inverse = np.full(2 * count, _INVERSE, np.uint64)
            self.inverse[0] = 1
            self.inverse = self.inverse.cumprod()


_powers = _Powers()


def hash_after(state: int, token_ids: Tokens, num_tokens: int | None = None) -> int:
    """Return the hash after `token_ids`, or the first `num_tokens` of them.

    Many are hashed at once: state * M^n + sum of token_i * M^(n-i).
    """
    if num_tokens is None:
        num_tokens = len(token_ids)
    if num_tokens <= _NUM_ONE_BY_ONE:
        for token_id in token_ids[:num_tokens]:
            state = (state + token_id) * MULTIPLIER & MASK
        return state
    if num_tokens > _HASHED_AT_ONCE:
        for start in range(0, num_tokens, _HASHED_AT_ONCE):
            state = hash_after(state, token_ids[start : min(start + _HASHED_AT_ONCE, num_tokens)])
        return state
    _powers.make(num_tokens)
    powers = _powers.falling[-num_tokens:]
    # Over an array, which is made of a list in half the time that numpy takes.
    terms = np.frombuffer(array("Q", token_ids), np.uint64, num_tokens).dot(powers)
    return int(terms) + state * int(powers[0]) & MASK


def hashes_after(state: int, token_ids: Tokens) -> Hashes:
    """Return [tokens] the hash after each of `token_ids`: M^i * (state + sum of token_j * M^(1-j)).

    M is odd, so that it has an inverse modulo 2^64.
    """
    num_tokens = len(token_ids)
    if num_tokens > _HASHED_AT_ONCE:
        whole = np.empty(num_tokens, np.uint64)
        for start in range(0, num_tokens, _HASHED_AT_ONCE):
            piece = hashes_after(state, token_ids[start : start + _HASHED_AT_ONCE])
            whole[start : start + _HASHED_AT_ONCE], state = piece, int(piece[-1])
        return whole
    _powers.make(num_tokens)
    sums = (np.array(token_ids, np.uint64) * _powers.inverse[:num_tokens]).cumsum()
    hashes: Hashes = (sums + np.uint64(state)) * _powers.rising[:num_tokens]
    return hashes


def _tail_hashes(before: int, chunk: Chunk) -> list[int]:
    """Return the hash after the last known token of a chunk, and after each draft.

    before: the hash before that token.  A draft is hashed behind those on its way alone.
    """
    last = len(chunk.token_ids) - chunk.num_drafts - 1
    hashes = [(before + chunk.token_ids[last]) * MULTIPLIER & MASK]
    for token_id, parent in zip(chunk.token_ids[last + 1 :], draft_parents(chunk), strict=True):
        hashes.append((hashes[parent - last] + token_id) * MULTIPLIER & MASK)
    return hashes


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
        tokenizer = self.tokenizer
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
        self.lines, self.choices = lines, table.reshape(-1)
        self.allocate(0)

    def allocate(self, num_slots: int) -> None:
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
        self._hashes[target] = self._hashes[source]

    def release(self, slot: int) -> None:
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
        hash_before = self._hash_before
        if pages is not None:
            does_yield = pages.load(batch, self._tokens, self._hashes)
            if not batch.chunks:
                return self._output, does_yield
            hash_before = partial(pages.hash_before, pages=pages_of(batch))
            if pages.drafts is not None:
                draft_logits = self._fill(*pages.drafts)
        chunk_logits = {
            chunk.slot: self._logits_after(hash_before(chunk), chunk.token_ids)
            for chunk in batch.chunks
            if chunk.is_scored
        }
        if pages is None:
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
                self._hashes[slot] = hash_after(before, token_ids, len(token_ids) - 1)
                self._tokens[slot] = token_ids[-1]
            does_yield = not has_part or batch.slots.size > 0
        if not chunk_logits and draft_logits is None:
            return self._output, does_yield
        output = ModelOutput(self._tokens, chunk_logits=chunk_logits, draft_logits=draft_logits)
        return output, does_yield

    def _logits_after(self, before: int, token_ids: Tokens) -> Iterator[FloatArray]:
        for start in range(0, len(token_ids), _PIECE):
            piece = token_ids[start : start + _PIECE]
            hashes = hashes_after(before, piece)
            before = int(hashes[-1])
            yield self._fill(piece, hashes)

    def _fill(self, tokens: Tokens | IntArray, hashes: Hashes) -> FloatArray:
        lines = self.lines[tokens]
        choices = self.choices[(hashes >> np.uint64(HASH_SHIFT)).view(np.int64) + lines]
        logits = np.empty((len(tokens), self.vocab_size), np.float32)
        return self._logit_table.gather(lines // NUM_CHOICES, hashes, choices, logits)

    def _hash_before(self, chunk: Chunk) -> int:
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


# The cells of the simulated model in pages: a number for each token, where the token is.
#
# Nothing is kept by slot but where its row stands, so that only the block tables say whose past a
# row goes on from.

# Cells before those of block 0.
BEGIN = 0  # the hash that every row begins with
SCRATCH = 1
NUM_FIXED = 2


class Cells:
    """A number for every cell of every block, behind a few fixed ones.

    num_blocks: how many there are so far.
    view: of the same memory; Python reads and writes it several times as fast one by one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.values: Hashes = np.zeros(NUM_FIXED + num_blocks * block_size, np.uint64)
        self.view = self.values.data

    def prepare(self, pages: Pages) -> None:
        """Move what is to be moved, make room for new blocks, and copy those that are to be."""
        if pages.moves:
            sources, targets = np.array(pages.moves).T + NUM_FIXED
            self.values[targets] = self.values[sources]
        if pages.num_blocks > self.num_blocks:
            num_more = max(pages.num_blocks - self.num_blocks, self.num_blocks)
            more = np.zeros(num_more * pages.block_size, np.uint64)
            self.values = np.concatenate([self.values, more])
            self.view, self.num_blocks = self.values.data, self.num_blocks + num_more
        size = pages.block_size
        for source, target in pages.copies:
            first, last = NUM_FIXED + source * size, NUM_FIXED + target * size
            self.values[last : last + size] = self.values[first : first + size]


class Drafts(NamedTuple):
    """The drafts of a step, in the order of its chunks: [drafts] each, and the hash after it."""

    tokens: IntArray
    hashes: Hashes

    @classmethod
    def of(cls, chunks: Iterable[tuple[Chunk, list[int]]]) -> "Drafts | None":
        """Return the drafts of chunks, each with its `_tail_hashes`; None if there are none."""
        tokens: list[int] = []
        hashes: list[int] = []
        for chunk, own_hashes in chunks:
            tokens += chunk.token_ids[-chunk.num_drafts :]
            hashes += own_hashes[1:]
        return cls(np.array(tokens, np.int64), np.array(hashes, np.uint64)) if tokens else None


def pages_of(batch: Batch) -> Pages:
    """Return where the tokens of a batch are; a model that was to keep pages is given some."""
    if batch.pages is None:
        raise InvariantError("a model that was to keep pages is given none")
    return batch.pages


def cell_of(pages: Pages, slot: int, position: int) -> int:
    block, offset = divmod(position, pages.block_size)
    return NUM_FIXED + pages.tables[slot][block] * pages.block_size + offset


def cells_of(pages: Pages, slot: int, start: int, stop: int) -> IntArray:
    """Return [stop - start] the cells of the tokens from position `start` on."""
    size = pages.block_size
    first = start // size
    blocks = np.array(pages.tables[slot][first : -(-stop // size)], np.int64)
    cells = (blocks * size + NUM_FIXED)[:, None] + np.arange(size)
    return cells.reshape(-1)[start - first * size : stop - first * size]


# The simulated model in pages, reading every token of every row again in every step.


class AttentivePages:
    """Every token, by cell; the hash of a row is computed from all of its tokens in every step."""

    def __init__(self, num_blocks: int, block_size: int, seed_hash: int, begin_hash: int) -> None:
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._cells = Cells(num_blocks, block_size)
        self._positions: dict[int, int] = {}  # slot -> that of the token it computes
        self.drafts: Drafts | None = None  # of the step

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Do what that of PagedHashes does."""
        pages, slots, self.drafts = pages_of(batch), batch.slots.tolist(), None
        self._cells.prepare(pages)
        values, positions = self._cells.values, self._positions
        if slots:
            for slot in positions:
                positions[slot] += 1
            positions.update(pages.moved)
        for chunk in batch.chunks:
            positions.pop(chunk.slot, None)
            stop = chunk.start + len(chunk.token_ids)
            if chunk.token_ids:
                cells = cells_of(pages, chunk.slot, chunk.start, stop)
                values[cells] = chunk.token_ids
            if batch.holds(chunk.slot):
                last = len(chunk.token_ids) - chunk.num_drafts - 1
                positions[chunk.slot] = chunk.start + last
                tokens[chunk.slot] = chunk.token_ids[last] if chunk.token_ids else BEGIN_TOKEN_ID
        for slot in slots:
            if positions[slot] >= 0:
                values[cell_of(pages, slot, positions[slot])] = tokens[slot]
        for slot in slots:
            hashes[slot] = self._hash_before(slot, pages)
        self.drafts = Drafts.of(
            self._with_tail_hashes(chunk, pages) for chunk in batch.chunks if chunk.num_drafts
        )
        return bool(slots)

    def _with_tail_hashes(self, chunk: Chunk, pages: Pages) -> tuple[Chunk, list[int]]:
        stop = chunk.start + len(chunk.token_ids)
        cells = cells_of(pages, chunk.slot, chunk.start, stop)
        read = replace(chunk, token_ids=self._cells.values[cells].tolist())
        last = stop - chunk.num_drafts - 1
        return read, _tail_hashes(self._hash_of(chunk.slot, last, pages), read)

    def store(self, hashes: Hashes) -> None:
        """Do nothing: no hash is kept."""

    def release(self, slot: int) -> None:
        self._positions.pop(slot, None)

    def hash_before(self, chunk: Chunk, pages: Pages) -> int:
        return self._hash_of(chunk.slot, chunk.start, pages)

    def _hash_before(self, slot: int, pages: Pages) -> int:
        position = self._positions[slot]
        return self._seed_hash if position < 0 else self._hash_of(slot, position, pages)

    def _hash_of(self, slot: int, num_tokens: int, pages: Pages) -> int:
        cells = cells_of(pages, slot, 0, num_tokens)
        return hash_after(self._begin_hash, self._cells.values[cells].tolist())


# The simulated model in pages: in each cell the hash after its token.

_UNMADE = 0x5DEECE66D  # in cells whose hash is still to be made: for who reads them wrongly


class _Computed(Struct, gc=False):
    """A chunk that is computed, whose hashes are made when the first of them is asked for.

    before: the hash before its first token, which is at position `start`.
    """

    before: int
    token_ids: Tokens
    start: int
    made: Hashes | None = None

    @property
    def hashes(self) -> Hashes:
        if self.made is None:
            self.made = hashes_after(self.before, self.token_ids)
        return self.made


class PagedHashes:
    """The hash after every token, by cell, and where each slot reads and writes in the next step.

    A slot reads the cell of the token before, which is the one that it wrote last, and writes the
    one behind it, unless `Pages.moved` says where it is.  A slot that does not decode stays at a
    scratch cell, so that nothing real is overwritten.  What a chunk has put into its cells is told
    by block: every row that has a block has it at the same place of its table.
    """

    def __init__(
        self, num_slots: int, num_blocks: int, block_size: int, seed_hash: int, begin_hash: int
    ) -> None:
        self._cells = Cells(num_blocks, block_size)
        self._cells.values[BEGIN] = begin_hash
        self._unmade = np.full(block_size, _UNMADE, np.uint64).data
        self._seed_hash, self._begin_hash = seed_hash, begin_hash
        self._computed: dict[int, _Computed] = {}
        self._read: IntArray = np.full(num_slots, SCRATCH)
        self._write: IntArray = np.full(num_slots, SCRATCH)
        self._strides: IntArray = np.zeros(num_slots, np.int64)  # 1 where a row decodes
        # Of the same memory, as one by one Python reads and writes these several times as fast.
        self._reads, self._writes = self._read.data, self._write.data
        self._stride_of = self._strides.data
        self.drafts: Drafts | None = None  # of the step

    def load(self, batch: Batch, tokens: IntArray, hashes: Hashes) -> bool:
        """Put the hash before each row's token into `hashes`; return whether any row yields.

        tokens: [num_slots] gets the last token of every chunk.
        """
        pages, chunks, self.drafts = pages_of(batch), batch.chunks, None
        if pages.copies or pages.moves or pages.num_blocks > self._cells.num_blocks:
            self._cells.prepare(pages)
            for source, target in pages.copies:  # in order, as a target may be the next source
                self._computed.pop(target, None)
                if source in self._computed:
                    self._computed[target] = self._computed[source]
        if chunks:
            return self._compute_chunks(chunks, batch, pages, tokens, hashes)
        self._move_on(pages)
        self._cells.values.take(self._read, None, hashes, "clip")
        return True

    def _compute_chunks(
        self, chunks: list[Chunk], batch: Batch, pages: Pages, tokens: IntArray, hashes: Hashes
    ) -> bool:
        values, goes_on = self._cells.values, False  # perhaps after what others compute now
        strides = self._stride_of
        for chunk in chunks:
            if strides[chunk.slot]:
                self.release(chunk.slot)
            if chunk.start:
                goes_on = True
        does_yield = batch.holds(chunk.slot) or batch.slots.size > 0
        if does_yield:
            self._move_on(pages)
            if goes_on:
                values.take(self._read, None, hashes, "clip")
                values[self._write] = (hashes + tokens.view(np.uint64)) * np.uint64(MULTIPLIER)
        entered, size = {}, pages.block_size  # slot -> the hash before the last known token
        drafts: list[tuple[Chunk, list[int]]] = []
        for chunk in chunks:
            slot, token_ids = chunk.slot, chunk.token_ids
            if not chunk.num_drafts:
                before = self._compute(chunk, pages)
                if not batch.holds(slot):
                    continue
                if not token_ids:
                    tokens[slot], entered[slot] = BEGIN_TOKEN_ID, self._seed_hash
                    continue
            # As if it went on by the last of its tokens that are known.
            last = len(token_ids) - chunk.num_drafts - 1
            if chunk.num_drafts:
                before = self._compute(Chunk(slot, token_ids[:last], chunk.start), pages)
            before = hash_after(before, token_ids, last)
            tokens[slot], entered[slot] = token_ids[last], before
            position = chunk.start + last
            if chunk.num_drafts:
                drafts.append((chunk, _tail_hashes(before, chunk)))
                self._keep_tail(drafts[-1][1], pages.tables[slot], position, size)
            cell = pages.tables[slot][position // size] * size + position % size
            self._writes[slot], strides[slot] = NUM_FIXED + cell, 1
        self.drafts = Drafts.of(drafts)
        if does_yield:
            values.take(self._read, None, hashes, "clip")
        for slot, before in entered.items():
            hashes[slot] = before
        return does_yield

    def _keep_tail(self, hashes: list[int], table: list[int], start: int, size: int) -> None:
        cells, offset = self._cells.view, start % size
        if offset:
            self._settle(table[start // size], start - offset, size)
        for position, state in enumerate(hashes, start):
            block = table[position // size]
            self._computed.pop(block, None)
            cells[NUM_FIXED + block * size + position % size] = state

    def store(self, hashes: Hashes) -> None:
        self._cells.values[self._write] = hashes

    def release(self, slot: int) -> None:
        self._reads[slot] = self._writes[slot] = SCRATCH
        self._stride_of[slot] = 0

    def hash_before(self, chunk: Chunk, pages: Pages) -> int:
        """Return the hash after all tokens before a chunk, which are computed by now."""
        if not chunk.start:
            return self._begin_hash
        position = chunk.start - 1
        place, offset = divmod(position, pages.block_size)
        block = pages.tables[chunk.slot][place]
        computed = self._computed.get(block)
        if computed is not None:
            number = position - computed.start
            if 0 <= number < len(computed.token_ids):
                return int(computed.hashes[number])
        return int(self._cells.values[NUM_FIXED + block * pages.block_size + offset])

    def _move_on(self, pages: Pages) -> None:
        self._read, self._write = read, write = self._write, self._read
        self._reads, self._writes = reads, writes = self._writes, self._reads
        np.add(read, self._strides, write)
        if not pages.moved:
            return
        size, tables, computed = pages.block_size, pages.tables, self._computed
        strides, before = self._stride_of, NUM_FIXED - 1
        for slot, position in pages.moved.items():
            table, place = tables[slot], position // size
            block = table[place]
            strides[slot] = 1
            if offset := position % size:
                self._settle(block, position - offset, size)
                writes[slot] = cell = NUM_FIXED + block * size + offset
                reads[slot] = cell - 1
                continue
            writes[slot] = NUM_FIXED + block * size
            reads[slot] = (table[place - 1] + 1) * size + before if place else BEGIN
            if block in computed:
                del computed[block]

    def _compute(self, chunk: Chunk, pages: Pages) -> int:
        start, token_ids, size = chunk.start, chunk.token_ids, pages.block_size
        before = self.hash_before(chunk, pages) if start else self._begin_hash
        stop = start + len(token_ids)
        if start == stop:
            return before
        blocks = pages.tables[chunk.slot][start // size : -(-stop // size)]
        cells, unmade, offset = self._cells.view, self._unmade, start % size
        if offset:  # some of the first block is there
            self._settle(blocks[0], start - offset, size)
            cell = NUM_FIXED + blocks[0] * size
            cells[cell + offset : cell + size] = unmade[offset:]
        for block in blocks[1:] if offset else blocks:
            cell = NUM_FIXED + block * size
            cells[cell : cell + size] = unmade
        self._computed.update(dict.fromkeys(blocks, _Computed(before, token_ids, start)))
        return before

    def _settle(self, block: int, first: int, size: int) -> None:
        """Put the hashes of a block into its cells, of which some are about to be written.

        first: the position of its first cell.
        """
        computed = self._computed.pop(block, None)
        if computed is not None:
            begin = max(computed.start - first, 0)
            part = computed.hashes[max(first - computed.start, 0) :][: size - begin]
            cell = NUM_FIXED + block * size + begin
            self._cells.values[cell : cell + len(part)] = part


# A simulated model that drafts for another: as often right as it is told to be.
#
# After a share of all prefixes it has the logits of the other model, and after the rest those of
# another choice; there its next best token is right as often. Which prefixes these are is a
# function of their hash, so its drafts are the same in every batch.

_NEXT_BEST = np.float32(0.95)  # of the largest logit: more than any other is


class SimulatedDraft(SimulatedModel):
    """Drafts for the simulated model of the same settings.

    agreement: after which share of prefixes it has the logits of that.
    """

    scores_prompts = False

    def __init__(self, settings: SimulatedSettings, agreement: float) -> None:
        super().__init__(settings)
        self.name = f"simulated:{agreement:g}"
        self._agreement = agreement

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute one token for every slot; what an empty slot gets means nothing."""
        output, slots, at = super().forward(batch), batch.slots, batch.logit_slots
        if output.logits is not None:
            self._mistake(output.logits, self._hashes[at], self._lines[at])
        if output.draft_logits is not None and self._pages is not None:
            drafts = self._pages.drafts
            if drafts is not None:
                self._mistake(output.draft_logits, drafts.hashes, self.lines[drafts.tokens])
        rows, _, _, others = self._wrong(self._hashes[slots], self._lines[slots])
        output.tokens[slots[rows]] = others
        return output

    def _mistake(self, logits: FloatArray, hashes: Hashes, lines: IntArray) -> None:
        """Put the logits of another choice into the rows that are not to agree.

        logits: [rows, vocab].  hashes, lines: [rows] of the prefix, and of its last token.
        """
        rows, bits, tokens, others = self._wrong(hashes, lines)
        parts, which = lines[rows] // NUM_CHOICES, np.arange(len(rows))
        own = np.empty((len(rows), self.vocab_size), np.float32)
        self._logit_table.gather(parts, bits, others, own)
        is_next = _uniform(scramble(bits)) < self._agreement
        own[which[is_next], tokens[is_next]] = _NEXT_BEST * own[which, others][is_next]
        logits[rows] = own

    def _wrong(
        self, hashes: Hashes, lines: IntArray
    ) -> tuple[IntArray, Hashes, IntArray, IntArray]:
        """Return which rows are not to agree, their bits, and what either model chooses for them.

        Arguments: as above.
        """
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
    """Return what `simulated:RATE` names, for the simulated model of these settings.

    Raises:
        BatchdecodeError: RATE is no number from 0 to 1.
    """
    _, colon, rate = name.partition(":")
    try:
        agreement = msgspec.convert(rate if colon else "1", Rate, strict=False)
    except msgspec.ValidationError:
        raise BatchdecodeError(
            f"{name}: RATE says how often it is right, from 0 to 1, not {rate}"
        ) from None
    return SimulatedDraft(settings, agreement)
