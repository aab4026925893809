"""Stops as deterministic automata over token ids: checking a row is one table lookup.

Both kinds are those of Aho and Corasick (CACM 18(6), 1975): over the ids of id patterns, and over
the bytes of text patterns, lifted from bytes to whole tokens.
"""

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batcher.models.base import REPLACEMENT, IntArray

MATCHED = -1  # the state once a stop completed; there is no way on from it


class TokenMatrix:
    """The bytes of a vocabulary, transposed; made when the first text stop asks for it.

    The last token stands for all ids beyond the vocabulary, which show as U+FFFD.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    @property
    def num_tokens(self) -> int:
        """How many token ids have bytes of their own."""
        return len(self._token_bytes)

    @cached_property
    def lengths(self) -> IntArray:
        """[num_tokens + 1] how many bytes each token has."""
        return np.array([*map(len, self._token_bytes), len(REPLACEMENT)])

    @cached_property
    def columns(self) -> NDArray[np.uint8]:
        """[longest token, num_tokens + 1] byte j of every token; 0 beyond its end."""
        columns = np.zeros((self.lengths.max(), self.num_tokens + 1), np.uint8)
        for token_id, token in enumerate([*self._token_bytes, REPLACEMENT]):
            columns[: len(token), token_id] = np.frombuffer(token, np.uint8)
        return columns


def text_automaton(patterns: Sequence[bytes], matrix: TokenMatrix) -> IntArray:
    """Return [num_states, num_tokens + 1]: the state after all bytes of a token; see aho_corasick.

    A pattern may complete anywhere in the token.
    """
    byte_table = aho_corasick(patterns, 256)
    past_the_end = np.full((1, 256), MATCHED)
    byte_table = np.concatenate([byte_table, past_the_end])  # which MATCHED, -1, indexes
    num_states = len(byte_table) - 1
    states = np.repeat(np.arange(num_states)[:, None], len(matrix.lengths), axis=1)
    for position, byte in enumerate(matrix.columns):
        (going_on,) = (matrix.lengths > position).nonzero()
        states[:, going_on] = byte_table[states[:, going_on], byte[going_on]]
    return states


def aho_corasick(patterns: Sequence[Sequence[int]], width: int) -> IntArray:
    """Return [num_states, width]: the next state of (state, symbol), MATCHED at a pattern's end.

    State 0 is the start; symbols are from 0 to width - 1.
    """
    children: list[dict[int, int]] = [{}]
    accepting = [False]
    for pattern in patterns:
        state = 0
        for symbol in pattern:
            if symbol not in children[state]:
                children[state][symbol] = len(children)
                children.append({})
                accepting.append(False)
            state = children[state][symbol]
        accepting[state] = True
    table = np.zeros((len(children), width), np.int64)
    queue = deque((child, 0) for child in children[0].values())
    for symbol, child in children[0].items():
        table[0, symbol] = child
    while queue:  # breadth first: the row of the suffix, which is shorter, is complete
        state, suffix = queue.popleft()
        accepting[state] |= accepting[suffix]
        table[state] = table[suffix]
        for symbol, child in children[state].items():
            queue.append((child, int(table[suffix, symbol])))
            table[state, symbol] = child
    table[np.array(accepting)[table]] = MATCHED
    return table
