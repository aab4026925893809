"""The Model protocol: one call a step for the whole batch.

Arrays are indexed by slot, so nothing has to be gathered or scattered; what stands at a slot that
is not in `Batch.slots` is ignored, both ways.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError, Failure
from batcher.events import Layout
from batcher.foreign import attribute_of, calling
from batcher.request import MAX_ANSWER, TO_THE_END
from batcher.tokens import Tokens

IntArray = NDArray[np.int64]
ChatTemplate = Callable[..., Any]
FloatArray = NDArray[np.float32]
OutputKind = Literal["tokens", "logits", "both"]
Side = Literal["left", "right"]

NO_SLOTS: IntArray = np.zeros(0, np.int64)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Chunk(Struct, frozen=True, gc=False):
    """New tokens of one row: a prompt or a part of one, or several generated at once.

    start: the position of the first of `token_ids`; 0 when the slot changes hands, unless earlier
    tokens can be read in pages.
    token_ids: a list; an array for many tokens, but never for a user's model.
    is_scored: return the logits after each of its tokens in ModelOutput.chunk_logits.
    num_drafts: how many of its last tokens are drafts. The token before them is known, and the row
    yields after it. The next step continues after the accepted drafts: by a chunk, or at the
    position in Pages.moved; see also `recomputes_drafts` of a Model.
    draft_parents: for drafts in a tree, the index in `token_ids` of the token that each follows; ()
    for a line. A draft sees only the drafts on its path. It is stored at position `start` + index,
    so accepted ones are moved: see Pages.moves.
    """

    slot: int
    token_ids: Tokens
    start: int
    is_scored: bool = False
    num_drafts: int = 0
    draft_parents: tuple[int, ...] = ()


@dataclass(slots=True)
class Pages:
    """The cells of every row's tokens, for a paged model.

    A cell holds the cache of one token; a block is `block_size` consecutive cells. The token at
    position p of the row in a slot is in cell `p % block_size` of block `tables[slot][p //
    block_size]`. Rows may share blocks.

    tables: [num_slots] the blocks of each row, in order; read-only for the model.
    group_tables: [further cache groups, num_slots] the same of other groups of layers, see
    PagedModel; -1 for blocks that the group no longer reads.
    moved: slot -> position of the token that the row computes in this step, for rows without a
    chunk whose cell does not follow the previous one: a block begins or was copied, the row was
    forked or resumed, or had drafts.
    moves: (source, target) cells, numbered block * block_size + offset, of all groups; to be done
    first.
    copies: (source, target) blocks to copy, in order, before the step.
    num_blocks: how many there are, numbered from 0; it may grow.
    """

    block_size: int
    tables: list[list[int]]
    group_tables: list[list[list[int]]] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    moves: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_blocks: int = 0


class PaddedBatch(NamedTuple):
    """The tokens of one step as a rectangle.

    slots: [rows] int64, ascending.
    input_ids: [rows, longest] int64, 0 in the padding.
    attention_mask: [rows, longest] bool, False in the padding.
    sequence_lengths: [rows] int64, tokens of each row.
    """

    slots: IntArray
    input_ids: IntArray
    attention_mask: NDArray[np.bool_]
    sequence_lengths: IntArray


class Batch:
    """A ragged step. The engine changes it in place between steps.

    chunks: rows that bring tokens of their own in this step. A row that is not in `slots` yields no
    token yet: a later chunk continues it.
    tokens: [num_slots] for every other row in `slots`, its last generated token; writable.
    logit_slots: [logit rows] the slots whose logits are wanted, ascending, read-only; the model's
    own token for them is ignored.
    top_slots: the same of slots for which the largest logits are enough; empty unless the model
    has `num_top_logits`.
    edits: changes to the logits of rows in `top_slots`, before the largest are found; None without.
    pages: None unless the model is paged and the engine pages.
    """

    __slots__ = ("_is_yielding", "chunks", "edits", "logit_slots", "pages", "tokens", "top_slots")

    def __init__(self, num_slots: int, pages: Pages | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.tokens: IntArray = np.zeros(num_slots, np.int64)
        self.logit_slots = self.top_slots = NO_SLOTS
        self.edits: LogitEdits | None = None
        self.pages = pages
        self._is_yielding = bytearray(num_slots)  # by slot, whether its row yields

    @property
    def slots(self) -> IntArray:
        """[rows] the slots whose rows yield a token in this step, ascending."""
        return np.frombuffer(self._is_yielding, np.bool_).nonzero()[0]

    def join(self, chunk: Chunk) -> None:
        """Add the last or only chunk of a prompt; the row yields from now on."""
        self._is_yielding[chunk.slot] = True
        self.chunks.append(chunk)

    def add_part(self, chunk: Chunk) -> None:
        """Add a chunk of a row that yields no token in this step."""
        self._is_yielding[chunk.slot] = False
        self.chunks.append(chunk)

    def enter(self, slot: int) -> None:
        """Compute the row in `slot` from now on, from a forked cache."""
        self._is_yielding[slot] = True

    def holds(self, slot: int) -> bool:
        """Whether the row in `slot` yields tokens."""
        return bool(self._is_yielding[slot])

    def leave(self, slot: int) -> None:
        """Stop computing the row in `slot`."""
        self._is_yielding[slot] = False
        if self.chunks:
            self.chunks = [chunk for chunk in self.chunks if chunk.slot != slot]

    def padded(self, side: Side) -> PaddedBatch:
        """Return the tokens of all rows in the step, padded on `side`."""
        if side not in get_args(Side):
            raise BatchdecodeError(f"rows are padded on the left or on the right, not {side!r}")
        rows: dict[int, Tokens] = {slot: [self.tokens.item(slot)] for slot in self.slots.tolist()}
        rows |= {chunk.slot: chunk.token_ids for chunk in self.chunks}
        slots = sorted(rows)
        lengths = np.array([len(rows[slot]) for slot in slots], np.int64)
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
        if side == "left":
            mask = mask[:, ::-1]
        input_ids = np.zeros(mask.shape, np.int64)
        for line, slot, is_token in zip(input_ids, slots, mask, strict=True):
            line[is_token] = rows[slot]
        return PaddedBatch(np.array(slots, np.int64), input_ids, mask, lengths)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Compute only chunks inside: no row yields, and `tokens` is restored at the end."""
        is_yielding, tokens = self._is_yielding, self.tokens.copy()
        wanted = self.logit_slots, self.top_slots, self.edits
        self._is_yielding = bytearray(len(is_yielding))
        self.logit_slots = self.top_slots = NO_SLOTS
        self.edits = None
        try:
            yield
        finally:
            self._is_yielding, self.tokens = is_yielding, tokens
            self.logit_slots, self.top_slots, self.edits = wanted


HIGHEST = np.finfo(np.float32).max  # limit of edited logits, which are finite


class LogitEdits(NamedTuple):
    """Changes to the logits of some rows, in the order of the fields. `apply` defines them.

    mask_rows: [masks] the rows that have a mask. allowed: [masks, vocab], other tokens become -inf.
    refused_rows, refused_ids: [refused] rows and token ids that become -inf, too.
    bias_rows, bias_ids, bias: [biases] rows and token ids, and float32 numbers to add.
    penalty_rows, penalty_ids, repetition, reduction: [penalties] rows and token ids, and float64
    numbers: positive logits are divided by `repetition`, negative ones multiplied. Then `reduction`
    is subtracted.

    No pair of row and token occurs twice among the biases, or among the penalties.
    """

    mask_rows: IntArray
    allowed: NDArray[np.bool_]
    refused_rows: IntArray
    refused_ids: IntArray
    bias_rows: IntArray
    bias_ids: IntArray
    bias: FloatArray
    penalty_rows: IntArray
    penalty_ids: IntArray
    repetition: NDArray[np.float64]
    reduction: NDArray[np.float64]

    def apply(self, logits: FloatArray) -> FloatArray:
        """Return edited logits; logits: [rows, vocab] float32, unchanged."""
        if np.array_equal(self.mask_rows, np.arange(len(logits))):  # often, and faster
            edited = np.where(self.allowed, logits, np.float32(-np.inf))
        else:
            edited = logits.copy()
            for row, allowed in zip(self.mask_rows.tolist(), self.allowed, strict=True):
                edited[row, ~allowed] = -np.inf
        edited[self.refused_rows, self.refused_ids] = -np.inf
        edited[self.bias_rows, self.bias_ids] += self.bias
        if self.penalty_rows.size:
            values = edited[self.penalty_rows, self.penalty_ids].astype(np.float64)
            with np.errstate(over="ignore"):  # HIGHEST cuts an infinite one
                penalized = np.where(values < 0, values * self.repetition, values / self.repetition)
                penalized = np.minimum(penalized - self.reduction, HIGHEST)
                edited[self.penalty_rows, self.penalty_ids] = penalized
        return edited

    def at(self, places: IntArray) -> "LogitEdits":
        """Return the edits of each row i for row `places[i]` instead; -1 drops them."""
        found: list[NDArray[Any]] = []
        for fields in (self[:2], self[2:4], self[4:7], self[7:]):
            rows = places[fields[0]]
            is_kept = rows >= 0
            found += [rows[is_kept], *(field[is_kept] for field in fields[1:])]
        return LogitEdits(*found)


class TopLogits(NamedTuple):
    """The largest logits of some rows after `Batch.edits`; of equal ones, those of the lower ids.

    token_ids: [rows, num_top_logits] int64, ascending in each row; as many as the vocabulary has if
    these are fewer. logits: the same shape, float32.
    log_sums: [rows] float64, log(sum(exp)) of all edited logits of a row, which does not overflow.
    raw_logits, raw_log_sums: logits of the same tokens, and the sum, without edits. The sum is NaN
    if a logit of the row is NaN.
    whole: takes indices of rows, and returns all their logits [indices, vocab] float32 without
    edits; valid until the next call of the model.
    """

    token_ids: IntArray
    logits: FloatArray
    log_sums: NDArray[np.float64]
    raw_logits: FloatArray
    raw_log_sums: NDArray[np.float64]
    whole: Callable[[IntArray], FloatArray]

    def of(self, rows: IntArray) -> "TopLogits":
        """Return the same of some rows."""

        def whole(indices: IntArray) -> FloatArray:
            return self.whole(rows[indices])

        of_raw = self.raw_logits[rows], self.raw_log_sums[rows]
        return TopLogits(
            self.token_ids[rows], self.logits[rows], self.log_sums[rows], *of_raw, whole
        )


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The result of a step.

    tokens: [num_slots] int64, the next token of rows whose logits are not wanted; valid until the
    next call.
    failed: slot -> error message, or a Failure with its own code. The engine ends those rows alone.
    logits: [logit rows, vocab] float32, of Batch.logit_slots in order; valid until the next call.
    None if no logits were wanted.
    chunk_logits: slot -> the logits after each token of a scored chunk, in pieces [tokens, vocab]
    float32, which may be computed lazily before the next call.
    draft_logits: [drafts of all chunks, vocab] float32, the logits after each draft, in the order
    of the chunks; arbitrary for failed rows. None without drafts.
    top_logits: of Batch.top_slots in order; None without them.
    """

    tokens: IntArray
    failed: Mapping[int, str | Failure] = field(default_factory=dict)
    logits: FloatArray | None = None
    chunk_logits: Mapping[int, Iterable[FloatArray]] = field(default_factory=dict)
    draft_logits: FloatArray | None = None
    top_logits: TopLogits | None = None


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token id; b"" for tokens without text, such as EOS."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; their joined bytes are its UTF-8."""

    # Optional: `prefix_token_ids`, put before a prompt that begins with text, such as BOS;
    # `encode_array`, which returns the tokens of a long text as an array; `apply_chat_template`,
    # see below.


class Model(Protocol):
    """A language model with a cache of its own, addressed by slot.

    The token of a row must depend on the row's tokens alone, never on its slot or on other rows.
    The cache of a row that is neither in `Batch.slots` nor has a chunk does not change. Once a row
    yields, it yields in every step until it is released, except in steps in which it has a part or
    no row yields.

    Optional attributes:
    scores_prompts: it returns `chunk_logits` of scored chunks.
    is_paged: it is a PagedModel.
    num_top_logits: for rows in `Batch.top_slots`, it returns this number of largest logits.
    verifies_drafts: it is paged, has logits, and returns `draft_logits` of chunks with drafts.
    verifies_trees: drafts may be a tree, see Chunk.draft_parents.
    recomputes_drafts: accepted drafts are computed again, as the first tokens of the next chunk, as
    recurrent states require.
    """

    @property
    def name(self) -> str:
        """The name that `--model` takes: `simulated`, or `package.module:name`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The JSON settings that reproduce the model; --resume requires equal ones."""

    @property
    def gives(self) -> OutputKind:
        """The output of `forward`: "logits" means that the logits of every row are wanted."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of text prompts, text stops and results."""

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest token id; None if the model takes any."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, or None."""

    def allocate(self, num_slots: int) -> None:
        """Allocate `num_slots` empty rows. Called once, before the first step."""

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows in `batch`; return the next one of each in `slots`.

        Raises:
            ModelError: nothing was computed; the engine ends all rows that yield or have a chunk.
        """

    def fork(self, source: int, target: int) -> None:
        """Copy the row in `source` to `target`, whose row is forgotten."""

    def release(self, slot: int) -> None:
        """Forget the row in `slot`, if any; it has finished or was preempted."""


class PagedModel(Model, Protocol):
    """A Model that keeps its cache in pages, which rows share.

    It keeps nothing by slot: a row's past is read through `Batch.pages`. A chunk may begin after
    tokens that another row computed in an earlier step, or in this one, by an earlier chunk or by a
    row without a chunk. `fork` does nothing then.
    """

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        """Allocate `num_slots` rows in `num_blocks` blocks. Called instead of `allocate`.

        num_blocks: None if `Pages.num_blocks` grows without a limit.
        """


def told(model: Model, name: str, default: Any) -> Any:
    """Return an attribute of a model, or of the model inside a CheckedModel; else `default`."""
    return attribute_of(getattr(model, "inner", model), name, default)


def can_page(model: Model) -> TypeGuard[PagedModel]:
    return bool(getattr(model, "is_paged", False))


def can_score(model: Model) -> bool:
    return bool(getattr(model, "scores_prompts", False))


def can_verify(model: Model) -> bool:
    return bool(getattr(model, "verifies_drafts", False))


def can_verify_trees(model: Model) -> bool:
    return can_verify(model) and bool(getattr(model, "verifies_trees", False))


def chat_template_of(model: Model) -> ChatTemplate | None:
    """Return the chat template of `model` or its tokenizer, or None.

    It is called as `apply_chat_template(messages, tokenize=True, add_generation_prompt=True)`, and
    returns token ids (perhaps as `input_ids` of a mapping) or text. The project's own tokenizers
    return text, so that a long text becomes an array.
    """
    for holder in (getattr(model, "inner", model), model.tokenizer):
        template = attribute_of(holder, "apply_chat_template", None)
        if callable(template):
            is_plain = hasattr(holder, "encode_array")
            return partial(template, tokenize=not is_plain, add_generation_prompt=True)
    return None


def special_encoder_of(model: Model) -> Callable[[str], list[int]] | None:
    """Return a function that encodes a prompt with special tokens and prefix, or None.

    It calls `encode_with_special` of the tokenizer.
    """
    encode: Any = getattr(model.tokenizer, "encode_with_special", None)
    prefix = list(getattr(model.tokenizer, "prefix_token_ids", ()))

    def encode_prompt(text: str) -> list[int]:
        tokens: list[int] = encode(text)
        return tokens if tokens[: len(prefix)] == prefix else [*prefix, *tokens]

    return None if encode is None else encode_prompt


def number_of(model: Model, name: str) -> int | None:
    """Return max_context, kv_bytes_per_token or num_top_logits of a model, or None."""
    number = told(model, name, None)
    return number if type(number) is int and number > 0 else None


_SHARE = 0.9  # of free memory that a KV cache may take


def free_kv_bytes_of(model: Model) -> int:
    """Return the bytes that KV blocks may take: most of what is free where the model computes.

    A model on another device has `num_free_bytes()`.

    Raises:
        BatchdecodeError: the free memory is unknown.
        RaisedError: the model raised.
    """
    tell, num_bytes = told(model, "num_free_bytes", None), None
    if callable(tell):
        with calling(f"{model.name} cannot say how much memory is free:"):
            num_bytes = tell()
    if not num_bytes:
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise BatchdecodeError("the free memory is unknown: give --kv-memory SIZE") from error
        [num_bytes] = [int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line]
    return int(_SHARE * num_bytes)


def kv_block_bytes_of(model: Model, block_size: int) -> int | None:
    """Return the bytes of a KV block; None if the model does not report them.

    A model has `kv_block_bytes(block_size)` or `kv_bytes_per_token`.

    Raises:
        BatchdecodeError: the model returns no number of bytes.
        RaisedError: the model raised.
    """
    tell = told(model, "kv_block_bytes", None)
    if not callable(tell):
        token_size = number_of(model, "kv_bytes_per_token")
        return None if token_size is None else token_size * block_size
    with calling(f"{model.name} cannot say what a block of {block_size} tokens takes:"):
        num_bytes = tell(block_size)
    if type(num_bytes) is not int or num_bytes < 1:
        raise BatchdecodeError(f"{model.name}: kv_block_bytes did not return a number of bytes")
    return num_bytes


def eos_token_ids_of(model: Model) -> tuple[int, ...]:
    """Return the tokens that end a text: `eos_token_id`, and others of its `eos_token_ids`."""
    first, others = model.eos_token_id, told(model, "eos_token_ids", ())
    return tuple(dict.fromkeys([*others] if first is None else [first, *others]))


def layout_of(model: Model) -> Layout:
    """Return "padded" if that is the `layout` of a model, else "ragged"."""
    layout = told(model, "layout", None)
    return "padded" if type(layout) is str and layout == "padded" else "ragged"


def bytes_of(token_id: int, token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes of `token_id`; U+FFFD for an id beyond the tokenizer's."""
    return token_bytes[token_id] if token_id < len(token_bytes) else REPLACEMENT


def join_bytes(token_ids: Sequence[int], token_bytes: Sequence[bytes]) -> bytes:
    """Return the joined `bytes_of` of all token ids."""
    try:
        if len(token_ids) > 1:  # itemgetter of one id returns no tuple; a comprehension is slower
            return b"".join(itemgetter(*token_ids)(token_bytes))
        return b"".join([token_bytes[token_id] for token_id in token_ids])
    except IndexError:
        return b"".join([bytes_of(token_id, token_bytes) for token_id in token_ids])


Prefixes = dict[int, list[int]]
"""Prompt and output so far, by slot: for models that are asked with whole prefixes."""


def extend_prefixes(prefixes: Prefixes, batch: Batch) -> None:
    """Append the new tokens of every row of `batch` to `prefixes`."""
    has_chunk = set()
    for chunk in batch.chunks:
        has_chunk.add(chunk.slot)
        prefixes.setdefault(chunk.slot, [])[chunk.start :] = chunk.token_ids
    slots = batch.slots
    for slot, token in zip(slots.tolist(), batch.tokens[slots].tolist(), strict=True):
        if slot not in has_chunk:
            prefixes[slot].append(token)


# Drafts of a chunk may be a tree, which one call verifies (Miao et al., "SpecInfer", 2024). A node
# is the index of a draft in the tokens of its chunk.


def node_paths(chunk: Chunk) -> list[list[int]]:
    """Return for each draft of a chunk the nodes from the first on its path to itself."""
    root = len(chunk.token_ids) - chunk.num_drafts - 1
    paths: dict[int, list[int]] = {root: []}
    for node, parent in enumerate(draft_parents(chunk), root + 1):
        paths[node] = [*paths[parent], node]
    del paths[root]
    return [*paths.values()]


def draft_parents(chunk: Chunk) -> Sequence[int]:
    """Return for each draft of a chunk the index of the token that it follows."""
    root = len(chunk.token_ids) - chunk.num_drafts - 1
    return chunk.draft_parents or range(root, root + chunk.num_drafts)


def moves_along(path: Sequence[int], chunk: Chunk, pages: Pages) -> list[tuple[int, int]]:
    """Return the moves for an accepted path: see Pages.moves.

    path: nodes of the tree of `chunk`, from its first on.
    pages: as they were when the chunk was computed.
    """
    size, first = pages.block_size, len(chunk.token_ids) - chunk.num_drafts
    tables = [pages.tables[chunk.slot], *(tables[chunk.slot] for tables in pages.group_tables)]

    def cells(index: int) -> list[int]:
        place, offset = divmod(chunk.start + index, size)
        return [table[place] * size + offset for table in tables]

    return [
        move
        for index, node in enumerate(path, first)
        if node != index
        for move in zip(cells(node), cells(index), strict=True)
    ]


# The context limit: a prompt and its output together have at most max_context tokens.

UNLIMITED = sys.maxsize
DROP_OLDEST = "drop-oldest"


class Context(Struct, frozen=True):
    """The context limit of a model.

    max_context: tokens of a row, prompt and output; UNLIMITED without a limit.
    least_prompt: tokens that a prompt needs at least, 0 or 1.
    drops_oldest: drop the oldest turns of a conversation that exceeds the limit.
    """

    max_context: int = UNLIMITED
    least_prompt: int = 0
    drops_oldest: bool = False

    def holds(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Return whether a request fits with all tokens that it may generate."""
        return self.least_prompt <= num_prompt_tokens <= self.max_context - max_tokens

    def output_limit(self, max_tokens: int, num_prompt_tokens: int) -> int:
        """Return how many tokens a request may generate; of TO_THE_END 1 at least."""
        if max_tokens != TO_THE_END:
            return max_tokens
        if self.max_context == UNLIMITED:
            return MAX_ANSWER
        return max(self.max_context - num_prompt_tokens, 1)

    def num_reserved(self, max_tokens: int) -> int:
        """Return the output tokens for which a conversation drops turns."""
        return max_tokens if max_tokens != TO_THE_END else self.max_context // 4

    def why_never(
        self, prompts: Mapping[str, int], max_tokens: int, *, is_computed: bool
    ) -> Failure | None:
        """Return why a request can never run, or None.

        prompts: name -> tokens, of all prompts of the request.
        is_computed: whether prompts are computed even if max_tokens is 0.
        """
        for name, num_tokens in prompts.items():
            if is_computed and num_tokens < self.least_prompt:
                message = f"the {name} is empty, and this model needs a token to begin with"
                return Failure("empty-prompt", message)
            length = f"the {name} has {num_tokens:,} tokens"
            if num_tokens > self.max_context:
                message = f"{length}, more than the context of {self.max_context:,}"
                return Failure("prompt-too-long", message)
            if max_tokens and num_tokens == self.max_context:
                message = f"{length}, which fills the context of {self.max_context:,}"
                return Failure("prompt-too-long", message)
        return None

    def num_dropped(self, turns: Sequence[tuple[int, int]], num_more: int) -> int:
        """Return how many of the oldest `turns` to drop so that `num_more` tokens fit."""
        num_tokens = num_more + sum(num_turn for num_turn, _ in turns)
        for number, (num_turn, num_lasting) in enumerate(turns):
            if num_tokens <= self.max_context:
                return number
            num_tokens -= num_turn - num_lasting
        return len(turns)


ANY_LENGTH = Context()


def context_of(model: Model) -> Context:
    """Return the context limit of `model`, or ANY_LENGTH itself."""
    context = Context(
        number_of(model, "max_context") or UNLIMITED,
        int(told(model, "needs_prompt", None) is True),
        told(model, "session_overflow", None) == DROP_OLDEST,
    )
    return ANY_LENGTH if context == ANY_LENGTH else context
