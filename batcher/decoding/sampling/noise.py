"""Randomness that depends on who asks, never on when: a hash of row, position and token.

The Gumbel-max trick makes a draw of it: the largest of logit + noise is a sample of the softmax
(Gumbel 1954; Maddison, Tarlow, Minka 2014).  Sums and products are modulo 2^64.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from batcher.models.base import IntArray

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 52

UnsignedArray = NDArray[np.uint64]


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64 bits that all the randomness of one sample of a request comes from."""
    name = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    key = int.from_bytes(name, "little")
    for number in (seed, sample):
        key = _splitmix64(key + (number + 1) * _GAMMA)
    return key


def gumbel_noise(
    keys: UnsignedArray, positions: IntArray, rows: IntArray, token_ids: IntArray
) -> NDArray[np.float64]:
    """Return the noise [n] of tokens: token_ids [n] in the rows `rows` [n].

    keys, positions: [rows] of the rows; how many tokens each has generated.
    """
    with np.errstate(over="ignore"):
        starts = _scramble(keys + (positions.astype(np.uint64) + 1) * np.uint64(_GAMMA))
        bits = _scramble(starts[rows] + (token_ids.astype(np.uint64) + 1) * np.uint64(_GAMMA))
    # in the middle of one of 2^52 equal parts of (0, 1): never 0, never 1, both exact in float64
    uniform = ((bits >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) * 2.0**-_BITS
    return -np.log(-np.log(uniform))


def _splitmix64(number: int) -> int:
    """Return the output function of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    number &= _MASK
    number = (number ^ (number >> 30)) * _MULTIPLIERS[0] & _MASK
    number = (number ^ (number >> 27)) * _MULTIPLIERS[1] & _MASK
    return number ^ (number >> 31)


def _scramble(numbers: UnsignedArray) -> UnsignedArray:
    """Return _splitmix64 of every number; changes them in place."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(multiplier)
    numbers ^= numbers >> np.uint64(31)
    return numbers
