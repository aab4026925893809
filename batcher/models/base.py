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

    start: the position of the first of `token_ids`; 0 when the slot changes hands, unless what is
    before it can be read in pages.
    token_ids: a list; of many tokens perhaps an array, but never for a model of one's own.
    is_scored: whether the logits after each of its tokens are wanted, in ModelOutput.chunk_logits.
    num_prompt: how many tokens the prompt of the row has; 0 if those of its first chunk.
    num_drafts: how many of its last tokens are drafts, for a model that verifies them; there is one
    before them, after which the row yields.  The next step goes on after those that were accepted:
    by a chunk, or where Pages.moved says; see also `recomputes_drafts` of a Model.
    draft_parents: of drafts that are a tree, for each the index in `token_ids` of the token that it
    follows, a draft before it or the last that is none; () of a line, in which each follows the one
    before.  A draft follows, and sees, those on its way alone.  It is kept where its place in the
    chunk says, at position `start` + index, so those that are accepted are moved: see Pages.moves.
    """

    slot: int
    token_ids: Tokens
    start: int
    is_scored: bool = False
    num_drafts: int = 0
    draft_parents: tuple[int, ...] = ()
    num_prompt: int = 0


@dataclass(slots=True)
class Pages:
    """Where the tokens of every row are kept, for a model that is paged.

    A cell holds what the model keeps of one token; a block is `block_size` cells on end.  The token
    at position p of the row in a slot is in cell `p % block_size` of block
    `tables[slot][p // block_size]`.  Rows may share blocks.

    tables: [num_slots] the blocks of each row, in order; the model only reads them.
    group_tables: [further cache groups, num_slots] the same of the other groups of layers, if
    the model has told of several, see PagedModel; -1 where the group reads nothing any more.
    moved: slot -> the position of the token that the row computes in this step, for rows that
    compute the one they generated last, where its cell is not the one after that of the token
    before: a block begins, a block was copied, the row was forked or has come back, or had drafts.
    moves: (source, target) cells, numbered block * block_size + offset: what is kept in each source
    is to be in its target, before anything else is done in this step.  All groups' are among them.
    copies: (source, target) blocks to copy, in order, before anything is computed in this step.
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
    """The tokens that one step computes, as a rectangle.

    slots: [rows] int64, whose they are, ascending.
    input_ids: [rows, longest] int64, 0 where there is no token.
    attention_mask: [rows, longest] bool, whether there is one.
    sequence_lengths: [rows] int64, how many tokens of each row are computed.
    """

    slots: IntArray
    input_ids: IntArray
    attention_mask: NDArray[np.bool_]
    sequence_lengths: IntArray


class Batch:
    """What one step computes, ragged.  The engine changes it in place between steps.

    chunks: the tokens of rows that bring some of their own this step.  A row that is not in `slots`
    yields no token yet: its chunk is a part, and a later one goes on where it ends.
    tokens: [num_slots] for every other row in `slots`, the token it generated in the step before;
    the model may write in it.
    logit_slots: [logit rows] the slots whose logits are wanted, ascending, to be read only; the
    model's token for them, if it has one, is not used.
    pages: where tokens are kept, None unless the model is paged and the engine pages.
    """

    __slots__ = ("_is_yielding", "chunks", "logit_slots", "pages", "tokens")

    def __init__(self, num_slots: int, pages: Pages | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.tokens: IntArray = np.zeros(num_slots, np.int64)
        self.logit_slots = NO_SLOTS
        self.pages = pages
        self._is_yielding = bytearray(num_slots)  # by slot, whether it does

    @property
    def slots(self) -> IntArray:
        """[rows] the slots whose rows yield a token in this step, ascending; one for each."""
        return np.frombuffer(self._is_yielding, np.bool_).nonzero()[0]

    def join(self, chunk: Chunk) -> None:
        """Take in the last chunk of a prompt, or the only one; the row yields from now on."""
        self._is_yielding[chunk.slot] = True
        self.chunks.append(chunk)

    def add_part(self, chunk: Chunk) -> None:
        """Take in a chunk of a row that yields no token in this step."""
        self._is_yielding[chunk.slot] = False
        self.chunks.append(chunk)

    def enter(self, slot: int) -> None:
        """Compute the row in `slot` from now on; it goes on from a cache that was forked."""
        self._is_yielding[slot] = True

    def holds(self, slot: int) -> bool:
        """Whether the row in `slot` yields tokens."""
        return bool(self._is_yielding[slot])

    def leave(self, slot: int) -> None:
        """Compute the row in `slot` no longer."""
        self._is_yielding[slot] = False
        if self.chunks:
            self.chunks = [chunk for chunk in self.chunks if chunk.slot != slot]

    def padded(self, side: Side) -> PaddedBatch:
        """Return the tokens of all rows that the step computes, filled up on `side`."""
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
        """Let a step inside compute the chunks alone: no row yields, and none forgets that it does.

        What a model writes into `tokens` inside is undone; no logits are wanted.
        """
        is_yielding, tokens, logit_slots = self._is_yielding, self.tokens.copy(), self.logit_slots
        self._is_yielding = bytearray(len(is_yielding))
        self.logit_slots = NO_SLOTS
        try:
            yield
        finally:
            self._is_yielding, self.tokens, self.logit_slots = is_yielding, tokens, logit_slots


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a step gives back.

    tokens: [num_slots] int64, the next token of every row whose logits were not wanted; the model
    may overwrite it in its next call.
    failed: slot -> what went wrong, for rows that have no token, or whose part could not be
    computed; the engine ends those, and only those.  A Failure where that has a code of its own.
    logits: [logit rows, vocab] float32, of Batch.logit_slots in their order; the model may
    overwrite it in its next call.  None if no logits were wanted.
    chunk_logits: slot -> the logits after each token of its chunk, for chunks that are scored: in
    pieces [some tokens, vocab] float32, in order, so that they need not all be there at once.  The
    engine reads them, or does not, before the model's next call.
    draft_logits: [drafts of all chunks, vocab] float32, the logits after each draft, in the order
    of the chunks; whatever stands there of rows that have failed.  None if there are no drafts.
    """

    tokens: IntArray
    failed: Mapping[int, str | Failure] = field(default_factory=dict)
    logits: FloatArray | None = None
    chunk_logits: Mapping[int, Iterable[FloatArray]] = field(default_factory=dict)
    draft_logits: FloatArray | None = None


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes each token id stands for; b"" for tokens that have no text, such as EOS."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; their bytes, joined, are its UTF-8."""

    # It may have `prefix_token_ids`, which stand before a prompt that begins with a text, as BOS.
    # It may have `encode_array`, which gives the same of a long text as an array.
    # One that knows how its model is spoken to also has `apply_chat_template`; see below.


class Model(Protocol):
    """A language model with a cache of its own, addressed by slot.

    The token of a row must be a function of the row's tokens alone: never of its slot or of the
    other rows.  A row that is neither in `Batch.slots` nor has a chunk stands still: what the model
    holds for it stays as it is.  Once a row yields, it yields in every step until it is released,
    but for steps in which it has a part, and those in which no row yields.

    It may say more of itself; what follows from each is at the functions below.  True is
    scores_prompts: of one that gives `chunk_logits` of the chunks that are scored.
    is_paged: of a PagedModel.
    verifies_drafts: of one that is paged, has logits, and gives `draft_logits` of chunks that end
    in drafts.
    verifies_trees: of one whose drafts may be a tree, see Chunk.draft_parents.
    recomputes_drafts: of one whose rows go on behind the token before their drafts, whatever was
    accepted: accepted drafts are then the first tokens of the next chunk.  So it is where recurrent
    states keep no way back.
    """

    @property
    def name(self) -> str:
        """The name that finds this model again: `simulated`, or `package.module:name`."""

    @property
    def settings(self) -> dict[str, Any]:
        """What beside its name reproduces the model, ready for JSON; --resume wants it equal."""

    @property
    def gives(self) -> OutputKind:
        """What `forward` can return: with "logits", the logits of every row are wanted."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of text prompts, text stops and results."""

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest token id; None if the model takes any."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows, all empty.  Called once, before the first step."""

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows in `batch`; return the next one of each in `slots`.

        Raises:
            ModelError: nothing was computed; the engine ends all rows that yield or have a chunk.
        """

    def fork(self, source: int, target: int) -> None:
        """Let `target`, whose row is to be forgotten, hold what `source` does."""

    def release(self, slot: int) -> None:
        """Forget what `slot` holds, if anything; its sequence has ended, or waits again."""


class PagedModel(Model, Protocol):
    """A Model that can keep its cache in pages, where rows share what they have in common.

    With pages it holds nothing by slot: a row's past is read through `Batch.pages`, whoever wrote
    it there.  A chunk may begin after tokens that another row computed, in an earlier step or in
    this one, by a chunk before it or by a row without a chunk.  `fork` has nothing to do then.
    """

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        """Make room for `num_slots` rows in `num_blocks` blocks.  Called instead of `allocate`.

        num_blocks: None if `Pages.num_blocks` grows without a limit.
        """


def told(model: Model, name: str, default: Any) -> Any:
    """Return what a model, or the one that a check is around, says of itself; else `default`."""
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
    """Return what makes prompts of chats with `model`; None if neither it nor its tokenizer can.

    That is `apply_chat_template(messages, tokenize=True, add_generation_prompt=True)`, which
    returns token ids (perhaps as `input_ids` of a mapping) or text.  A tokenizer of ours, whose
    template has no tokens but those of its text, is asked for that: a long text becomes an array.
    """
    for holder in (getattr(model, "inner", model), model.tokenizer):
        template = attribute_of(holder, "apply_chat_template", None)
        if callable(template):
            is_plain = hasattr(holder, "encode_array")
            return partial(template, tokenize=not is_plain, add_generation_prompt=True)
    return None


def special_encoder_of(model: Model) -> Callable[[str], list[int]] | None:
    """Return what encodes a whole prompt in which special tokens are special; None if none can.

    That is `encode_with_special` of the tokenizer, after its prefix, unless the text has that.
    """
    encode: Any = getattr(model.tokenizer, "encode_with_special", None)
    prefix = list(getattr(model.tokenizer, "prefix_token_ids", ()))

    def encode_prompt(text: str) -> list[int]:
        tokens: list[int] = encode(text)
        return tokens if tokens[: len(prefix)] == prefix else [*prefix, *tokens]

    return None if encode is None else encode_prompt


def number_of(model: Model, name: str) -> int | None:
    """Return max_context, the tokens a row may have, or kv_bytes_per_token; None if not told."""
    number = told(model, name, None)
    return number if type(number) is int and number > 0 else None


def kv_block_bytes_of(model: Model, block_size: int) -> int | None:
    """Return how many bytes a KV block takes; None if the model does not tell.

    It does by `kv_block_bytes(block_size)`, or its tokens alone take `kv_bytes_per_token`.

    Raises:
        BatchdecodeError: what it tells is no number of bytes.
        RaisedError: the model raised.
    """
    tell = told(model, "kv_block_bytes", None)
    if not callable(tell):
        token_size = number_of(model, "kv_bytes_per_token")
        return None if token_size is None else token_size * block_size
    with calling(f"{model.name} cannot say what a block of {block_size} tokens takes:"):
        num_bytes = tell(block_size)
    if type(num_bytes) is not int or num_bytes < 1:
        raise BatchdecodeError(f"{model.name}: kv_block_bytes gives no number of bytes")
    return num_bytes


def eos_token_ids_of(model: Model) -> tuple[int, ...]:
    """Return the tokens that end a text: `eos_token_id`, and others of its `eos_token_ids`."""
    first, others = model.eos_token_id, told(model, "eos_token_ids", ())
    return tuple(dict.fromkeys([*others] if first is None else [first, *others]))


def layout_of(model: Model) -> Layout:
    """Return "padded" if that is the `layout` of a model: chunks are as long as the longest."""
    layout = told(model, "layout", None)
    return "padded" if type(layout) is str and layout == "padded" else "ragged"


def bytes_of(token_id: int, token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes `token_id` stands for; an id beyond the tokenizer's stands for U+FFFD."""
    return token_bytes[token_id] if token_id < len(token_bytes) else REPLACEMENT


def join_bytes(token_ids: Sequence[int], token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes `token_ids` stand for, as `bytes_of` tells them."""
    try:
        if len(token_ids) > 1:  # the getter of one is another; a comprehension takes longer
            return b"".join(itemgetter(*token_ids)(token_bytes))
        return b"".join([token_bytes[token_id] for token_id in token_ids])
    except IndexError:
        return b"".join([bytes_of(token_id, token_bytes) for token_id in token_ids])


Prefixes = dict[int, list[int]]
"""Prompt and output so far, by slot: for models that are asked with whole prefixes."""


def extend_prefixes(prefixes: Prefixes, batch: Batch) -> None:
    """Add the new tokens of every row of `batch` to `prefixes`, whether it yields yet or not."""
    has_chunk = set()
    for chunk in batch.chunks:
        has_chunk.add(chunk.slot)
        prefixes.setdefault(chunk.slot, [])[chunk.start :] = chunk.token_ids
    slots = batch.slots
    for slot, token in zip(slots.tolist(), batch.tokens[slots].tolist(), strict=True):
        if slot not in has_chunk:
            prefixes[slot].append(token)


# Drafts of a chunk may be a tree, which one call verifies (Miao et al., "SpecInfer", 2024).  A node
# is the index of a draft in the tokens of its chunk.


def node_paths(chunk: Chunk) -> list[list[int]]:
    """Return for each draft of a chunk the nodes from the first on its way to itself."""
    root = len(chunk.token_ids) - chunk.num_drafts - 1
    paths: dict[int, list[int]] = {root: []}
    for node, parent in enumerate(draft_parents(chunk), root + 1):
        paths[node] = [*paths[parent], node]
    del paths[root]
    return [*paths.values()]


def draft_parents(chunk: Chunk) -> Sequence[int]:
    """Return for each draft of a chunk the index in its tokens of the one that it follows."""
    root = len(chunk.token_ids) - chunk.num_drafts - 1
    return chunk.draft_parents or range(root, root + chunk.num_drafts)


def moves_along(path: Sequence[int], chunk: Chunk, pages: Pages) -> list[tuple[int, int]]:
    """Return what is to be moved when the nodes of a path are accepted: see Pages.moves.

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


# How many tokens a row of a model may have, and which requests that leaves no room for.
#
# Rule: a prompt and its output together have at most max_context tokens.

UNLIMITED = sys.maxsize
DROP_OLDEST = "drop-oldest"


class Context(Struct, frozen=True):
    """What the rows of a model may be.

    max_context: how many tokens they may have, prompt and output; UNLIMITED without a limit.
    least_prompt: how many tokens a prompt needs to be computed, 0 or 1.
    drops_oldest: whether a conversation that would be longer loses its oldest turns.
    """

    max_context: int = UNLIMITED
    least_prompt: int = 0
    drops_oldest: bool = False

    def holds(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Return whether there is room for all that such a request may generate."""
        return self.least_prompt <= num_prompt_tokens <= self.max_context - max_tokens

    def output_limit(self, max_tokens: int, num_prompt_tokens: int) -> int:
        """Return how many tokens a request of so many may generate; of TO_THE_END 1 at least."""
        if max_tokens != TO_THE_END:
            return max_tokens
        if self.max_context == UNLIMITED:
            return MAX_ANSWER
        return max(self.max_context - num_prompt_tokens, 1)

    def num_reserved(self, max_tokens: int) -> int:
        """Return for how many tokens of output a conversation drops turns."""
        return max_tokens if max_tokens != TO_THE_END else self.max_context // 4

    def why_never(
        self, prompts: Mapping[str, int], max_tokens: int, *, is_computed: bool
    ) -> Failure | None:
        """Return why a request can never run, if so.

        prompts: name -> tokens, of all that each of its outputs goes on from.
        is_computed: whether the prompts are, even if max_tokens is 0.
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
                message = f"{length}, and the context of {self.max_context:,} no room for more"
                return Failure("prompt-too-long", message)
        return None

    def num_dropped(self, turns: Sequence[tuple[int, int]], num_more: int) -> int:
        """Return how many of the oldest `turns` are dropped so that `num_more` tokens have room."""
        num_tokens = num_more + sum(num_turn for num_turn, _ in turns)
        for number, (num_turn, num_lasting) in enumerate(turns):
            if num_tokens <= self.max_context:
                return number
            num_tokens -= num_turn - num_lasting
        return len(turns)


ANY_LENGTH = Context()


def context_of(model: Model) -> Context:
    """Return what the rows of `model` may be, as far as it tells; else ANY_LENGTH itself."""
    context = Context(
        number_of(model, "max_context") or UNLIMITED,
        int(told(model, "needs_prompt", None) is True),
        told(model, "session_overflow", None) == DROP_OLDEST,
    )
    return ANY_LENGTH if context == ANY_LENGTH else context
