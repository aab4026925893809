"""The Model protocol: one call a step for the whole batch.

Arrays are indexed by slot, so nothing has to be gathered or scattered; what stands at a slot that
is not in `Batch.slots` is ignored, both ways.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
OutputKind = Literal["tokens", "logits", "both"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Chunk(Struct, frozen=True, gc=False):
    """All new tokens of one row: a prompt or a part of one, or several generated at once.

    start: the position of the first of `token_ids`, 0 when the slot changes hands.
    """

    slot: int
    token_ids: list[int]
    start: int


class Batch:
    """What one step computes, ragged.  The engine changes it in place between steps.

    chunks: the rows that bring tokens of their own this step.
    tokens: [num_slots] for every other row, the token it generated in the step before; the model
    may write in it.
    logit_slots: [logit rows] the slots whose logits are wanted, ascending, to be read only; the
    model's token for them, if it has one, is not used.
    """

    __slots__ = ("_is_occupied", "chunks", "logit_slots", "tokens")

    def __init__(self, num_slots: int) -> None:
        self.chunks: list[Chunk] = []
        self.tokens: IntArray = np.zeros(num_slots, np.int64)
        self.logit_slots: IntArray = np.zeros(0, np.int64)
        self._is_occupied = np.zeros(num_slots, np.bool_)

    @property
    def slots(self) -> IntArray:
        """[rows] the slots to compute, ascending.  Every one of them yields one token."""
        return self._is_occupied.nonzero()[0]

    def join(self, chunk: Chunk) -> None:
        """Take in the first chunk of a new row."""
        self._is_occupied[chunk.slot] = True
        self.chunks.append(chunk)

    def enter(self, slot: int) -> None:
        """Compute the row in `slot` from now on; it goes on from a cache that was forked."""
        self._is_occupied[slot] = True

    def holds(self, slot: int) -> bool:
        """Whether the row in `slot` is computed."""
        return bool(self._is_occupied[slot])

    def leave(self, slot: int) -> None:
        """Compute the row in `slot` no longer."""
        self._is_occupied[slot] = False
        if self.chunks:
            self.chunks = [chunk for chunk in self.chunks if chunk.slot != slot]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a step gives back.

    tokens: [num_slots] int64, the next token of every row whose logits were not wanted; the model
    may overwrite it in its next call.
    failed: slot -> what went wrong, for rows that have no token; the engine ends those, and only
    those.
    logits: [logit rows, vocab] float32, of Batch.logit_slots in their order; the model may
    overwrite it in its next call.  None if no logits were wanted.
    """

    tokens: IntArray
    failed: Mapping[int, str] = field(default_factory=dict)
    logits: FloatArray | None = None


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes each token id stands for; b"" for tokens that have no text, such as EOS."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; their bytes, joined, are its UTF-8."""


class Model(Protocol):
    """A language model with a cache of its own, addressed by slot.

    The token of a row must be a function of the row's tokens alone: never of its slot or of the
    other rows.
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
        """Compute the new tokens of every row in `batch` and return each row's next token.

        Raises:
            ModelError: no row of this batch has a token; the engine ends all of them.
        """

    def fork(self, source: int, target: int) -> None:
        """Let `target`, whose row is to be forgotten, hold what `source` does."""

    def release(self, slot: int) -> None:
        """Forget what `slot` holds; its sequence has ended."""


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
