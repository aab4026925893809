"""The hash of the simulated model, h <- (h + token) * M modulo 2^64, of one token or of many."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batcher.models.base import IntArray
from batcher.tokens import Tokens

Hashes = NDArray[np.uint64]

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX generator
MASK = 2**64 - 1
_INVERSE = pow(MULTIPLIER, -1, 2**64)
_PIECE = 2**16  # tokens that are hashed at once, at most
_NUM_ONE_BY_ONE = 16  # tokens that are hashed sooner one by one than all at once


class _Powers:
    """Powers of M and of its inverse, as many as the longest piece needs: a cache of constants."""

    def __init__(self) -> None:
        self.falling = self.rising = self.inverse = np.zeros(0, np.uint64)

    def make(self, count: int) -> None:
        """Have at least `count` of each: M^n ... M^1, M^1 ... M^n, and M^0 ... M^(1-n)."""
        if count > len(self.rising):
            self.rising = np.full(2 * count, MULTIPLIER, np.uint64).cumprod()
            self.falling = self.rising[::-1].copy()
            self.inverse = np.full(2 * count, _INVERSE, np.uint64)
            self.inverse[0] = 1
            self.inverse = self.inverse.cumprod()


_powers = _Powers()


def hash_after(state: int, token_ids: Tokens) -> int:
    """Return the hash after `token_ids`: many at once, state * M^n + sum of token_i * M^(n-i)."""
    return hash_after_first(state, token_ids, len(token_ids))


def hash_after_first(state: int, token_ids: Tokens, num_tokens: int) -> int:
    """Return the hash after the first `num_tokens` of `token_ids`."""
    if num_tokens <= _NUM_ONE_BY_ONE:
        for token_id in token_ids[:num_tokens]:
            state = (state + token_id) * MULTIPLIER & MASK
        return state
    if num_tokens > _PIECE:
        for start in range(0, num_tokens, _PIECE):
            state = hash_after(state, token_ids[start : min(start + _PIECE, num_tokens)])
        return state
    _powers.make(num_tokens)
    powers = _powers.falling[-num_tokens:]
    # Over an array, which is made of a list in half the time that numpy takes.
    terms = np.frombuffer(array("Q", token_ids), np.uint64, num_tokens).dot(powers)
    return int(terms) + state * int(powers[0]) & MASK


def hashes_after(state: int, token_ids: Tokens) -> Hashes:
    """Return [tokens] the hash after each of `token_ids`: M^i * (state + sum of token_j * M^(1-j)).

    M is odd, so that it has an inverse modulo 2^64.
    """
    num_tokens = len(token_ids)
    if num_tokens > _PIECE:
        whole = np.empty(num_tokens, np.uint64)
        for start in range(0, num_tokens, _PIECE):
            piece = hashes_after(state, token_ids[start : start + _PIECE])
            whole[start : start + _PIECE], state = piece, int(piece[-1])
        return whole
    _powers.make(num_tokens)
    sums = (np.array(token_ids, np.uint64) * _powers.inverse[:num_tokens]).cumsum()
    hashes: Hashes = (sums + np.uint64(state)) * _powers.rising[:num_tokens]
    return hashes


class Runs:
    """Tokens on end of several rows, to be hashed all at once, each row from a hash of its own.

    token_ids: [tokens] those of the first row, of the second, and so on.
    firsts: [rows] where those of each begin.  rows: [tokens] whose each is.
    places: [tokens] how many of its row are before it.
    """

    def __init__(self, token_ids: IntArray, lengths: IntArray) -> None:
        self.token_ids = token_ids
        self.firsts: IntArray = lengths.cumsum() - lengths
        self.rows: IntArray = np.arange(len(lengths)).repeat(lengths)
        self.places: IntArray = np.arange(len(token_ids)) - self.firsts[self.rows]
        _powers.make(int(lengths.max()))
        terms = token_ids.view(np.uint64) * _powers.inverse[self.places]
        sums = terms.cumsum()
        sums -= (sums - terms)[self.firsts][self.rows]
        self._sums, self._powers = sums, _powers.rising[self.places]

    def hashes_after(self, states: Hashes) -> Hashes:
        """Return [tokens] the hash after each, as `hashes_after` does; states: [rows]."""
        hashes: Hashes = (self._sums + states[self.rows]) * self._powers
        return hashes


class Tree:
    """The last known token of one row, and drafts that are a tree behind it, as a kind of Runs.

    parents: [drafts] the index of the token that each follows.
    """

    def __init__(self, token_ids: IntArray, parents: Sequence[int]) -> None:
        self.token_ids, self._parents = token_ids, parents
        self.firsts: IntArray = np.zeros(1, np.int64)
        self.rows: IntArray = np.zeros_like(token_ids)
        self.places: IntArray = np.arange(len(token_ids))

    def hashes_after(self, states: Hashes) -> Hashes:
        """Return [tokens] the hash after each, behind those on its way alone; states: [1]."""
        first, *drafts = self.token_ids.tolist()
        hashes = [(int(states[0]) + first) * MULTIPLIER & MASK]
        for token_id, parent in zip(drafts, self._parents, strict=True):
            hashes.append((hashes[parent] + token_id) * MULTIPLIER & MASK)
        return np.array(hashes, np.uint64)
