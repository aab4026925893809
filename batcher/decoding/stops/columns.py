"""Which column of a table each token id has, and which columns show as text with a given byte."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from batcher.decoding.stops.automaton import StopAutomaton
from batcher.models.base import REPLACEMENT, IntArray

MAX_BEYOND = 2**16  # ids beyond the tokenizer's that have columns of their own
END_OF_TEXT = 256  # in the place of a byte that follows
NUM_SECONDS = 257


class TokenColumns:
    """The columns of a vocabulary.

    Every id has a column of its own, unless the model takes any id, or many more than the tokenizer
    knows: then those beyond the tokenizer's share the last column, but for the ones that are asked
    for.

    vocab_size: None for a model that takes any id.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int | None) -> None:
        self._token_bytes = token_bytes[:vocab_size]
        num_known = len(self._token_bytes)
        self._takes_any_id = vocab_size is None or vocab_size - num_known > MAX_BEYOND
        self._num_plain = num_known if vocab_size is None or self._takes_any_id else vocab_size
        self._asked_for: IntArray = np.zeros(0, np.int64)  # ascending ids
        self._column_of: dict[int, int] = {}  # of those

    @property
    def num_columns(self) -> int:
        """How many columns there are."""
        return self._num_plain + (len(self._asked_for) + 1 if self._takes_any_id else 0)

    def of_all(self, tokens: IntArray) -> IntArray:
        """Return the column of each token."""
        if not self._takes_any_id:
            return tokens
        num_asked_for = len(self._asked_for)
        if not num_asked_for:
            return np.minimum(tokens, self._num_plain)
        places = np.minimum(self._asked_for.searchsorted(tokens), num_asked_for - 1)
        places = np.where(self._asked_for[places] == tokens, places, num_asked_for)
        return np.where(tokens < self._num_plain, tokens, self._num_plain + places)

    def of(self, token_id: int) -> int:
        """Return the column of one token; one that cannot occur has that of another."""
        if token_id < self._num_plain:
            return token_id
        return self._column_of.get(token_id, self.num_columns - 1)

    def touching(self, pattern: bytes) -> IntArray:
        """Return the columns whose text may have `pattern` in it, or begin it at its end."""
        return self._texts.touching(pattern)

    def beginning(self, byte: int) -> IntArray:
        """Return the columns whose text begins with `byte`."""
        return self._texts.beginning(byte)

    @property
    def without_text(self) -> IntArray:
        """The columns that show as nothing."""
        return self._texts.empty

    def has_asked_for(self, automaton: StopAutomaton) -> bool:
        """Return whether all ids of `automaton` have columns of their own."""
        return not self._takes_any_id or self._shared_ids([automaton]) <= self._column_of.keys()

    def ask_for(self, automata: Iterable[StopAutomaton]) -> None:
        """Give the ids of these automata columns of their own, and no other ids."""
        ids = sorted(self._shared_ids(automata))
        self._asked_for = np.array(ids, np.int64)
        self._column_of = {token_id: self._num_plain + place for place, token_id in enumerate(ids)}
        self.__dict__.pop("_texts", None)

    def _shared_ids(self, automata: Iterable[StopAutomaton]) -> set[int]:
        """Return the ids of `automata` beyond the tokenizer's."""
        exits = chain.from_iterable(exits for automaton in automata for exits in automaton.exits)
        patterns = [way.pattern for way in exits if isinstance(way.pattern, tuple)]
        return {token_id for ids in patterns for token_id in ids if token_id >= self._num_plain}

    @cached_property
    def _texts(self) -> "ByteIndex":
        num_beyond = self.num_columns - len(self._token_bytes)
        return ByteIndex([*self._token_bytes, *[REPLACEMENT] * num_beyond])


class ByteIndex:
    """Finds texts by the bytes they have, each with the one that follows it."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        lengths = np.array([len(text) for text in texts])
        ends = lengths.cumsum()[lengths > 0]
        firsts = np.frombuffer(b"".join(texts), np.uint8).astype(np.int64)
        seconds = np.append(firsts[1:], END_OF_TEXT)
        seconds[ends - 1] = END_OF_TEXT
        pairs = firsts * NUM_SECONDS + seconds
        order = pairs.argsort(kind="stable")
        owners = np.repeat(np.arange(len(texts)), lengths)
        self._pairs = pairs[order]
        self._owners: IntArray = owners[order]
        self._is_first = (np.diff(owners, prepend=-1) != 0)[order]
        self.empty: IntArray = (lengths == 0).nonzero()[0]

    def touching(self, pattern: bytes) -> IntArray:
        """Return the places of texts that may have `pattern` in them, or begin it at their end."""
        first = pattern[0] * NUM_SECONDS
        if len(pattern) == 1:
            return self._owners[self._between(first, first + NUM_SECONDS)]
        inside, at_end = first + pattern[1], first + END_OF_TEXT
        found = [self._owners[self._between(pair, pair + 1)] for pair in (inside, at_end)]
        return np.concatenate(found)

    def beginning(self, byte: int) -> IntArray:
        """Return the places of texts that begin with `byte`."""
        here = self._between(byte * NUM_SECONDS, (byte + 1) * NUM_SECONDS)
        places: IntArray = self._owners[here][self._is_first[here]]
        return places

    def _between(self, low: int, high: int) -> slice:
        """Return where the pairs from `low` to below `high` are."""
        return slice(*self._pairs.searchsorted([low, high]))
