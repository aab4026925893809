"""The hash of the simulated model: h <- (h + token) * M modulo 2^64, over many tokens at once."""

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX generator
MASK = 2**64 - 1
_INVERSE = pow(MULTIPLIER, -1, 2**64)
_NUM_ONE_BY_ONE = 16  # tokens that are hashed sooner one by one than all at once


class _Powers:
    """Powers of M and of its inverse, as many as the longest prompt needs: a cache of constants."""

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


def hash_after(state: int, token_ids: list[int]) -> int:
    """Return the hash after `token_ids`: many at once, state * M^n + sum of token_i * M^(n-i)."""
    num_tokens = len(token_ids)
    if num_tokens <= _NUM_ONE_BY_ONE:
        for token_id in token_ids:
            state = (state + token_id) * MULTIPLIER & MASK
        return state
    _powers.make(num_tokens)
    powers = _powers.falling[-num_tokens:]
    terms = np.vdot(np.array(token_ids, np.uint64), powers)
    return int(terms) + state * int(powers[0]) & MASK


def hashes_after(state: int, token_ids: list[int]) -> Hashes:
    """Return [tokens] the hash after each of `token_ids`: M^i * (state + sum of token_j * M^(1-j)).

    M is odd, so that it has an inverse modulo 2^64.
    """
    num_tokens = len(token_ids)
    _powers.make(num_tokens)
    sums = (np.array(token_ids, np.uint64) * _powers.inverse[:num_tokens]).cumsum()
    hashes: Hashes = (sums + np.uint64(state)) * _powers.rising[:num_tokens]
    return hashes
