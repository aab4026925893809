"""Noise that depends on who asks, never on when: a hash of row, position and token.

Sums and products of hashes are modulo 2^64.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.logprobs import Floats
from batcher.models.base import IntArray
from batcher.splitmix64 import GAMMA, MASK, Bits, mix, mix_in_place

_BITS = 52
_HIGHEST = np.float32(_BITS * np.log(2) + 1e-3)  # more than what rounding takes of it in float32

_ACCEPTANCE, _DRAFTS = 2**63, 2**63 + 1  # as if they were positions, which no row comes to


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64 bits that all the randomness of one sample of a request comes from."""
    name = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    key = int.from_bytes(name, "little")
    for number in (seed, sample):
        key = mix(key + (number + 1) * GAMMA)
    return key


def token_hashes(keys: Bits, positions: IntArray, token_ids: IntArray) -> Bits:
    """Return the hashes [rows, width] of `token_ids`, same shape.

    keys, positions: [rows]; how many tokens each row has generated.
    """
    starts = _at(keys, positions)
    hashes = token_ids.astype(np.uint64)
    hashes *= np.uint64(GAMMA)
    hashes += (starts + np.uint64(GAMMA))[:, None]
    return mix_in_place(hashes)


def draft_keys(keys: Bits, positions: IntArray) -> Bits:
    """Return keys [rows] for drafts of rows that have so many tokens when these are drawn.

    So no two drafts have the same noise, be they of the same position; nor has a token of the row.
    """
    return _at(_apart(keys, _DRAFTS), positions)


def acceptance_noise(keys: Bits, positions: IntArray) -> Floats:
    """Return numbers [rows], even in (0, 1), that know nothing of other noise of the rows."""
    return _uniform(_at(_apart(keys, _ACCEPTANCE), positions))


def gumbel_noise(hashes: Bits) -> Floats:
    """Return the noise that each of `hashes` stands for."""
    noise: Floats = -np.log(-np.log(_uniform(hashes)))
    return noise


def highest_noise(hashes: Bits) -> NDArray[np.float32]:
    """Return what the noise of each of `hashes` is not above, and near to where it is high.

    -log(u) is not below 1 - u.
    """
    rest = _places(~hashes).astype(np.float32)  # of 1 - u
    rest += np.float32(0.5)
    noise = np.log(rest, out=rest)
    return np.subtract(_HIGHEST, noise, out=noise)


def _apart(keys: Bits, purpose: int) -> Bits:
    """Return keys for noise of another purpose than the tokens of rows."""
    return mix_in_place(keys + np.uint64(purpose * GAMMA & MASK))


def _at(keys: Bits, positions: IntArray) -> Bits:
    """Return what all noise of `keys` comes from in `positions`; [rows] each."""
    return mix_in_place(keys + (positions.astype(np.uint64) + 1) * np.uint64(GAMMA))


def _uniform(hashes: Bits) -> Floats:
    """Return the middle of the part of (0, 1) that each of `hashes` falls into.

    Never 0, never 1, both exact in float64.
    """
    uniform: Floats = _places(hashes) + np.float64(0.5)
    uniform *= 2.0**-_BITS
    return uniform


def _places(hashes: Bits) -> IntArray:
    """Return which of the 2^52 equal parts of (0, 1) each of `hashes` falls into."""
    return (hashes >> np.uint64(64 - _BITS)).view(np.int64)  # turned into floats far faster
