"""Which tokens would complete a bad word, whatever the tokens that it is cut into.

The automaton of a trie over bytes, lifted to the tokens of a vocabulary for the states that are
reached: all that a row's text means for what follows is one number.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.stops import StopReader
from batcher.decoding.stops.automaton import END, Exit, StopAutomaton
from batcher.models.base import IntArray, bytes_of

MAX_LINES = 256  # of states, the latest in use

Bools = NDArray[np.bool_]


class Vocabulary:
    """The bytes of all tokens; ids from the tokenizer's last to vocab_size show as U+FFFD."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int) -> None:
        self.token_bytes, self.size = token_bytes, vocab_size

    @cached_property
    def columns(self) -> list[tuple[IntArray, NDArray[np.uint8]]]:
        """For each j, the ids of the tokens that have a byte j, and these bytes."""
        tokens = [bytes_of(token, self.token_bytes) for token in range(self.size)]
        lengths = np.array([len(token) for token in tokens])
        ends = lengths.cumsum()
        joined = np.frombuffer(b"".join(tokens), np.uint8)
        columns = []
        for place in range(lengths.max(initial=0)):
            (token_ids,) = (lengths > place).nonzero()
            columns.append((token_ids, joined[ends[token_ids] - lengths[token_ids] + place]))
        return columns


class BadWords:
    """Finds `words`, none of them empty, in tokens of `vocabulary`; state 0 is the start."""

    def __init__(self, words: Iterable[str], vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        exits = tuple(Exit(word.encode(), END, word) for word in words)
        [(_, trie)] = StopReader(StopAutomaton((exits,)), self._token_bytes).tries
        self._next_states = trie.next_nodes()
        is_end = np.array([way is not None for way in trie.best])
        make_line = partial(_completing, self._next_states, is_end, vocabulary)
        self._line = lru_cache(MAX_LINES)(make_line)

    def completes(self, states: Iterable[int]) -> Bools:
        """Return [states, vocab]: whether a word comes to its end with any byte of a token."""
        return np.stack([self._line(state) for state in states])

    def next_state(self, state: int, token: int) -> int:
        """Return the state after all bytes of `token`, whether it completes a word or not."""
        for byte in bytes_of(token, self._token_bytes):
            state = int(self._next_states[state, byte])
        return state


def _completing(next_states: IntArray, is_end: Bools, vocabulary: Vocabulary, state: int) -> Bools:
    """Return [vocab]: which tokens complete a word after `state`.

    next_states: [states, 256] by byte.  is_end: [states] whether a word has just been completed.
    """
    states = np.full(vocabulary.size, state)
    line = np.zeros(vocabulary.size, np.bool_)
    for token_ids, values in vocabulary.columns:
        reached = next_states[states[token_ids], values]
        states[token_ids] = reached
        line[token_ids] |= is_end[reached]
    return line
