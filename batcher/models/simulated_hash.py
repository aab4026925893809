"""The hash of the simulated model: h <- (h + token) * M modulo 2^64, over many tokens at once."""

import numpy as np
from numpy.typing import NDArray

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
    terms = np.vdot(np.array(token_ids[:num_tokens], np.uint64), powers)
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
