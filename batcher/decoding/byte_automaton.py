"""Where texts come to their end in a stream of tokens, whatever the tokens they are cut into.

The automaton of Aho and Corasick (CACM 18(6), 1975) over bytes, lifted to the tokens of a
vocabulary for the states that are reached: a row's state is one number.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batcher.models.base import REPLACEMENT, IntArray

MAX_LINES = 256  # of states, the latest in use

Bools = NDArray[np.bool_]


class Vocabulary:
    """The bytes of all tokens; ids from the tokenizer's last to vocab_size show as U+FFFD."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int) -> None:
        self._token_bytes, self.size = token_bytes, vocab_size

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token."""
        return self._token_bytes[token] if token < len(self._token_bytes) else REPLACEMENT

    @cached_property
    def columns(self) -> list[tuple[IntArray, NDArray[np.uint8]]]:
        """For each j, the ids of the tokens that have a byte j, and these bytes."""
        tokens = [self.bytes_of(token) for token in range(self.size)]
        lengths = np.array([len(token) for token in tokens])
        ends = lengths.cumsum()
        joined = np.frombuffer(b"".join(tokens), np.uint8)
        columns = []
        for place in range(lengths.max(initial=0)):
            (token_ids,) = (lengths > place).nonzero()
            columns.append((token_ids, joined[ends[token_ids] - lengths[token_ids] + place]))
        return columns


class TokenAutomaton:
    """Finds `texts`, of at least one byte each, in tokens of `vocabulary`; state 0 is the start."""

    def __init__(self, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._next_states, self._is_end = byte_automaton(texts)
        self._lines: dict[int, Bools] = {}

    def completes(self, states: Iterable[int]) -> Bools:
        """Return [states, vocab]: whether a text comes to its end with any byte of a token."""
        return np.stack([self._line(state) for state in states])

    def next_state(self, state: int, token: int) -> int:
        """Return the state after all bytes of `token`, whether it completes a text or not."""
        for byte in self._vocabulary.bytes_of(token):
            state = int(self._next_states[state, byte])
        return state

    def _line(self, state: int) -> Bools:
        line = self._lines.pop(state, None)
        if line is None:
            line = self._make_line(state)
        self._lines[state] = line  # the last is the latest in use
        if len(self._lines) > MAX_LINES:
            del self._lines[next(iter(self._lines))]
        return line

    def _make_line(self, state: int) -> Bools:
        states = np.full(self._vocabulary.size, state)
        line = np.zeros(self._vocabulary.size, np.bool_)
        for token_ids, values in self._vocabulary.columns:
            reached = self._next_states[states[token_ids], values]
            states[token_ids] = reached
            line[token_ids] |= self._is_end[reached]
        return line


def byte_automaton(texts: Sequence[bytes]) -> tuple[IntArray, Bools]:
    """Return the next state [num_states, 256] of (state, byte), and which states end a text."""
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for text in texts:
        state = 0
        for byte in text:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True
    table = np.zeros((len(children), 256), np.int64)
    queue = deque([(0, 0)])
    while queue:  # breadth first: the row of the suffix, which is shorter, is complete
        state, suffix = queue.popleft()
        ends[state] |= ends[suffix]
        table[state] = table[suffix]
        for byte, child in children[state].items():
            queue.append((child, int(table[suffix, byte]) if state else 0))
            table[state, byte] = child
    return table, np.array(ends)
