"""Noise that depends on who asks, never on when: a hash of row, position and token.

Sums and products of hashes are modulo 2^64.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.sampling.logprobs import Floats
from batcher.models.base import IntArray

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 52
_HIGHEST = np.float32(_BITS * np.log(2) + 1e-3)  # more than what rounding takes of it in float32

_ACCEPTANCE, _DRAFTS = 2**63, 2**63 + 1  # as if they were positions, which no row comes to

UnsignedArray = NDArray[np.uint64]


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64 bits that all the randomness of one sample of a request comes from."""
    name = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    key = int.from_bytes(name, "little")
    for number in (seed, sample):
        key = _splitmix64(key + (number + 1) * _GAMMA)
    return key


def token_hashes(keys: UnsignedArray, positions: IntArray, token_ids: IntArray) -> UnsignedArray:
    """Return the hashes [rows, width] of `token_ids`, same shape.

    keys, positions: [rows]; how many tokens each row has generated.
    """
    starts = _at(keys, positions)
    hashes = token_ids.astype(np.uint64)
    hashes *= np.uint64(_GAMMA)
    hashes += (starts + np.uint64(_GAMMA))[:, None]
    return _scramble(hashes)


def draft_keys(keys: UnsignedArray, positions: IntArray) -> UnsignedArray:
    """Return keys [rows] for drafts of rows that have so many tokens when these are drawn.

    So no two drafts have the same noise, be they of the same position; nor has a token of the row.
    """
    return _at(_apart(keys, _DRAFTS), positions)


def acceptance_noise(keys: UnsignedArray, positions: IntArray) -> Floats:
    """Return numbers [rows], even in (0, 1), that know nothing of other noise of the rows."""
    return _uniform(_at(_apart(keys, _ACCEPTANCE), positions))


def gumbel_noise(hashes: UnsignedArray) -> Floats:
    """Return the noise that each of `hashes` stands for."""
    noise: Floats = -np.log(-np.log(_uniform(hashes)))
    return noise


def highest_noise(hashes: UnsignedArray) -> NDArray[np.float32]:
    """Return what the noise of each of `hashes` is not above, and near to where it is high.

    -log(u) is not below 1 - u.
    """
    rest = _places(~hashes).astype(np.float32)  # of 1 - u
    rest += np.float32(0.5)
    noise = np.log(rest, out=rest)
    return np.subtract(_HIGHEST, noise, out=noise)


def _apart(keys: UnsignedArray, purpose: int) -> UnsignedArray:
    """Return keys for noise of another purpose than the tokens of rows."""
    return _scramble(keys + np.uint64(purpose * _GAMMA & _MASK))


def _at(keys: UnsignedArray, positions: IntArray) -> UnsignedArray:
    """Return what all noise of `keys` comes from in `positions`; [rows] each."""
    return _scramble(keys + (positions.astype(np.uint64) + 1) * np.uint64(_GAMMA))


def _uniform(hashes: UnsignedArray) -> Floats:
    """Return the middle of the part of (0, 1) that each of `hashes` falls into.

    Never 0, never 1, both exact in float64.
    """
    uniform: Floats = _places(hashes) + np.float64(0.5)
    uniform *= 2.0**-_BITS
    return uniform


def _places(hashes: UnsignedArray) -> IntArray:
    """Return which of the 2^52 equal parts of (0, 1) each of `hashes` falls into."""
    return (hashes >> np.uint64(64 - _BITS)).view(np.int64)  # turned into floats far faster


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
