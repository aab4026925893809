"""Token healing: the end of the prompt is given back, and its bytes forced on the output.

A prompt that ends in `http:` makes a model that knows `://` as one token stumble, since `:` was
cut off from it.  So the last tokens are backed up, and the output has to begin with their bytes,
in whatever tokens (S. Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing",
2023).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from batcher.errors import InvariantError
from batcher.models.base import IntArray

MAX_KEPT_BEGINNINGS = 1 << 16  # of texts


class VocabularyIndex:
    """The tokens of a vocabulary by their bytes.

    Tokens without bytes are special, and so is EOS: they are never found.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.vocab_size = vocab_size
        self._bytes_of = list(token_bytes[:vocab_size])
        for token_id in eos_token_ids:
            if token_id < len(self._bytes_of):
                self._bytes_of[token_id] = b""
        ids = [token_id for token_id, text in enumerate(self._bytes_of) if text]
        ids.sort(key=self._bytes_of.__getitem__)
        self._sorted = [self._bytes_of[token_id] for token_id in ids]
        self._ids = np.array(ids, np.int64)
        self.only_beginning = lru_cache(MAX_KEPT_BEGINNINGS)(self._only_beginning)
        self.max_length = max(map(len, self._sorted), default=0)  # bytes of the longest token

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes_of[token_id] if token_id < len(self._bytes_of) else b""

    def is_proper_prefix(self, text: bytes) -> bool:
        return self._starting_with(text).stop > self._equal_to(text).stop

    def _only_beginning(self, text: bytes) -> int | None:
        """Return the one token that anything can begin with which begins with `text`.

        None if there are several, or it takes more than `text` to decide.
        """
        found = [self._equal_to(text[:size]) for size in range(1, len(text) + 1)]
        places = [place for equal in found for place in equal]
        is_sure = len(places) == 1 and not self.is_proper_prefix(text)
        return int(self._ids[places[0]]) if is_sure else None

    def next_tokens(self, text: bytes) -> IntArray:
        """Return the ids of the tokens that the output can begin with, if `text` begins it.

        Those are the tokens that start with `text`, and those that `text` starts with if the
        vocabulary can write the rest as well: without a token for each byte it may not.
        """
        size = len(text)
        can_write = [True] * size
        for begin in reversed(range(1, size)):
            can_write[begin] = bool(self._starting_with(text[begin:])) or any(
                can_write[end] and self._equal_to(text[begin:end]) for end in range(begin + 1, size)
            )
        found = [self._starting_with(text)]
        found += [self._equal_to(text[:size]) for size in range(1, len(text)) if can_write[size]]
        return np.concatenate([self._ids[places.start : places.stop] for places in found])

    def heal(self, prompt_tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """Return the tokens of the prompt that are kept, and the bytes the output begins with.

        Backs up to the earliest token from which on the prompt is the beginning, but not the whole,
        of some token: there a longer token may have been meant.  Special tokens are never given
        back, nor is the first token, since a model may have nothing to compute from without one.
        Where no longer token exists the whole prompt is kept, and b"" returned.
        """
        num_kept, forced, tail = len(prompt_tokens), b"", b""
        for place in range(len(prompt_tokens) - 1, 0, -1):
            text = self.bytes_of(prompt_tokens[place])
            tail = text + tail
            if not text or len(tail) >= self.max_length:
                break
            if self.is_proper_prefix(tail):
                num_kept, forced = place, tail
        return list(prompt_tokens[:num_kept]), forced

    def _starting_with(self, prefix: bytes) -> range:
        size = len(prefix)
        begin = bisect_left(self._sorted, prefix)
        return range(begin, bisect_right(self._sorted, prefix, begin, key=lambda t: t[:size]))

    def _equal_to(self, text: bytes) -> range:
        begin = bisect_left(self._sorted, text)
        return range(begin, bisect_right(self._sorted, text, begin))


class HealingRow:
    """What is allowed a row whose output begins with given bytes; its methods are a GrammarRow's.

    remaining: the bytes still to come; with b"" the row limits nothing any more.
    """

    __slots__ = ("_index", "remaining")

    may_force = True

    def __init__(self, index: VocabularyIndex, remaining: bytes) -> None:
        self._index, self.remaining = index, remaining

    @property
    def is_active(self) -> bool:
        return bool(self.remaining)

    @property
    def failure(self) -> str | None:
        """Why no token is allowed, which only a vocabulary without these bytes can bring about."""
        if self.remaining and not len(self._index.next_tokens(self.remaining)):
            return f"no token begins like the end of the prompt, {self.remaining!r}"
        return None

    def packed_mask(self) -> bytes:
        """Return the tokens allowed next, one bit each: all of them when nothing remains."""
        is_allowed = np.full(self._index.vocab_size, not self.remaining)
        is_allowed[self._index.next_tokens(self.remaining)] = True
        return np.packbits(is_allowed, bitorder="little").tobytes()

    def forced_tokens(self, most: int) -> Sequence[int]:
        """Return the tokens that come next whatever is chosen, at most so many."""
        forced: list[int] = []
        remaining = self.remaining
        while remaining and len(forced) < most:
            tokens = self._index.next_tokens(remaining)
            if len(tokens) != 1:
                break
            forced.append(int(tokens[0]))
            remaining = remaining[len(self._index.bytes_of(forced[-1])) :]
        return forced

    def advance(self, token: int) -> None:
        if not self.remaining:
            return
        if token not in self._index.next_tokens(self.remaining):
            raise InvariantError(f"token {token} does not go on with {self.remaining!r}")
        self.remaining = self.remaining[len(self._index.bytes_of(token)) :]

    def advance_forced(self, num_tokens: int) -> None:
        for token in self.forced_tokens(num_tokens):
            self.advance(token)

    def fork(self) -> "HealingRow":
        return HealingRow(self._index, self.remaining)
