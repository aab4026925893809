"""A StopSet as a deterministic automaton over token ids: checking a row is one table lookup.

Aho and Corasick (CACM 18(6), 1975) give one automaton over the id patterns and one over the bytes
of the text patterns; the second is lifted from bytes to whole tokens, and both run side by side as
one product automaton.
"""

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.stops import StopSet
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


def build(stops: StopSet, width: int, matrix: TokenMatrix) -> IntArray:
    """Return the automaton of `stops`: [num_states, width], the next state of (state, token id).

    State 0 is the start; MATCHED stands where the token completes a stop.
    """
    over_ids = _aho_corasick(stops.id_patterns, width)
    if not stops.texts:
        return over_ids
    over_text = _lift(_aho_corasick(stops.text_patterns, 256), matrix)
    token_ids = np.minimum(np.arange(width), matrix.num_tokens)
    return _product(over_ids, over_text[:, token_ids])


def _aho_corasick(patterns: Sequence[Sequence[int]], width: int) -> IntArray:
    """Return [num_states, width]: the next state of (state, symbol), MATCHED at a pattern's end."""
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


def _lift(byte_table: IntArray, matrix: TokenMatrix) -> IntArray:
    """Return [num_states, num_tokens + 1]: where `byte_table` leads with all bytes of a token."""
    states = np.repeat(np.arange(len(byte_table))[:, None], len(matrix.lengths), axis=1)
    for position, byte in enumerate(matrix.columns):
        goes_on = (matrix.lengths > position) & (states != MATCHED)
        states = np.where(goes_on, byte_table[states, byte], states)
    return states


def _product(left: IntArray, right: IntArray) -> IntArray:
    """Return the automaton that runs `left` and `right` at once and matches when either does.

    Only pairs that can be reached become states.  They are few: each side remembers a suffix of the
    same output, and the longer suffix mostly decides the shorter one.
    """
    pairs = [(0, 0)]
    number_of = {(0, 0): 0}
    rows = []
    for left_state, right_state in pairs:  # grows while it is walked
        left_next, right_next = left[left_state], right[right_state]
        has_matched = (left_next == MATCHED) | (right_next == MATCHED)
        codes = np.where(has_matched, MATCHED, left_next * len(right) + right_next)
        reached, inverse = np.unique(codes, return_inverse=True)
        numbers = []
        for code in reached.tolist():
            pair = divmod(code, len(right))
            if code != MATCHED and pair not in number_of:
                number_of[pair] = len(pairs)
                pairs.append(pair)
            numbers.append(MATCHED if code == MATCHED else number_of[pair])
        rows.append(np.array(numbers)[inverse])
    return np.stack(rows)
