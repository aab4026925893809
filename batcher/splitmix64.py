"""SplitMix64: well-mixed bits of any number (Steele, Lea, Flood, OOPSLA 2014)."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

GAMMA = 0x9E3779B97F4A7C15  # between the numbers that a generator mixes, one after the other
MASK = 2**64 - 1
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Bits = NDArray[np.uint64]
BitsOrInt = TypeVar("BitsOrInt", int, Bits)


def mix(number: BitsOrInt) -> BitsOrInt:
    """Return 64 well-mixed bits of each number: the output function."""
    mixed = number & MASK
    mixed = (mixed ^ mixed >> 30) * _MULTIPLIERS[0] & MASK
    mixed = (mixed ^ mixed >> 27) * _MULTIPLIERS[1] & MASK
    return mixed ^ mixed >> 31  # type: ignore[return-value]  # numpy's stubs lose the sign


def mix_in_place(numbers: Bits) -> Bits:
    """Return `numbers`, each `mix`ed in place, which is faster."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(multiplier)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def scramble(seed: BitsOrInt) -> BitsOrInt:
    """Return 64 well-mixed bits of each seed: the first number of its generator."""
    return mix(seed + GAMMA)
