"""What is asked of a row's constraint at every step, and the grammars' answer to it.

A constraint follows the output token by token and says which tokens may come next.  The masks of
all rows are made in one call, `allowed_tokens`; each row keeps its own until it moves on, so asking
for a forced token after a mask, or before it, costs no second one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from batcher.errors import InvariantError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class RowConstraint(Protocol):
    """What limits the tokens of one row, at the place its output has reached."""

    @property
    def is_active(self) -> bool:
        """Whether it still limits anything; once False, it stays False."""

    @property
    def failure(self) -> str | None:
        """Why the constraint cannot be followed any further; then it allows no token at all."""

    def packed_mask(self) -> bytes:
        """Return the tokens allowed next: bit i % 8 of byte i // 8 is token i; 0 beyond the end.

        Of a grammar, EOS is among them exactly if the output so far is a whole.
        """

    def forced_token(self) -> int | None:
        """Return the only token allowed next, None if there are several or it is EOS.

        Appending it without asking the model changes no output.
        """

    def advance(self, token: int) -> None:
        """Follow the output by `token`, which is not EOS; this may bring about a `failure`.

        Raises:
            InvariantError: the token was not allowed.
        """

    def fork(self) -> Self:
        """Return a constraint of the same state that moves on by itself."""


def allowed_tokens(rows: Sequence[RowConstraint], vocab_size: int) -> NDArray[np.bool_]:
    """Return the tokens each of `rows` allows: [rows, vocab], C-contiguous.

    A row without any True is at its end (without an EOS token) or has failed.
    """
    width = (vocab_size + 7) // 8
    # One call for each row is faster than llguidance's executor for all (measured on two cores, 1
    # to 64 rows): rows of one grammar share a lexer behind a lock, and so they wait in turn anyway.
    packed = b"".join([row.packed_mask()[:width].ljust(width, b"\0") for row in rows])
    bits = np.frombuffer(packed, np.uint8).reshape(len(rows), width)
    return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


class GrammarRow:
    """The RowConstraint of a compiled grammar.

    eos_token_id: in the numbering of the matcher's tokenizer, which has an EOS always.
    """

    __slots__ = ("_eos_token_id", "_mask", "_matcher")

    is_active = True

    def __init__(self, matcher: "LLMatcher", eos_token_id: int) -> None:
        self._matcher, self._eos_token_id = matcher, eos_token_id
        self._mask: bytes | None = None

    @property
    def failure(self) -> str | None:
        """Why no token keeps the grammar, or llguidance's limit that was reached."""
        self.packed_mask()  # some failures come to light only here
        if not self._matcher.is_error():
            return None
        message = self._matcher.get_error().partition("\n")[0]
        return "the grammar allows nothing here" if message.startswith("NoExtension") else message

    def packed_mask(self) -> bytes:
        """Return the tokens allowed next, one bit each."""
        if self._mask is None:
            mask = self._matcher.compute_bitmask()
            # a matcher in error never raises, and its mask holds EOS
            self._mask = b"" if self._matcher.is_error() else mask
        return self._mask

    def forced_token(self) -> int | None:
        """Return the only token allowed next, None if there are several or it is EOS."""
        tokens = int.from_bytes(self.packed_mask(), "little")  # bit i is token i
        if not tokens or tokens & (tokens - 1):
            return None
        token = tokens.bit_length() - 1
        return None if token == self._eos_token_id else token

    def advance(self, token: int) -> None:
        """Follow the output by `token`; if that reaches a limit of llguidance, the row fails."""
        # EOS is never fed: llguidance would take it, and count it in what it undoes
        if token == self._eos_token_id or not self._allows(token):
            raise InvariantError(f"token {token} is not one that the grammar allows")
        if not self._matcher.consume_token(token) and not self._matcher.is_error():
            raise InvariantError(f"token {token} is allowed, but cannot be followed")
        self._mask = None

    def fork(self) -> "GrammarRow":
        """Return a row of the same state that moves on by itself."""
        copy = GrammarRow(self._matcher.deep_copy(), self._eos_token_id)
        copy._mask = self._mask
        return copy

    def _allows(self, token: int) -> bool:
        """Return whether the mask holds `token`."""
        mask = self.packed_mask()
        return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)
