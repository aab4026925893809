"""Weights as integers of eight bits: symmetric, for a whole matrix or for each of its rows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.layers import FloatArray

LARGEST = 127  # -128 is not used, so that zero is in the middle


class Quantized(NamedTuple):
    """Numbers as integers times a scale.

    integers: [out, in] from -127 to 127.  scales: [out], or [1] for all.
    """

    integers: NDArray[np.int8]
    scales: FloatArray


def quantize_weights_int8(weights: FloatArray, *, per_channel: bool = False) -> Quantized:
    """Return weights [out, in] as int8: divided by max|w| / 127, rounded to the nearest.

    per_channel: whether each output has a scale of its own.  Zeros have the scale 1.
    """
    axes = 1 if per_channel else None
    scales = np.atleast_1d(np.abs(weights).max(axes) / np.float32(LARGEST)).astype(np.float32)
    scales[scales == 0] = 1
    integers = np.rint(weights / scales[:, None]).clip(-LARGEST, LARGEST)
    return Quantized(integers.astype(np.int8), scales)
