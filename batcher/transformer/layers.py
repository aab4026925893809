"""The layers of a transformer that have no weights to multiply by, or only one for each feature.

Each works on the last axis alone, so that what a row comes to never depends on the rows beside it.
"""

from math import pi, sqrt

import numpy as np
from numpy.typing import NDArray

from batcher.transformer.config import (
    FrequencyFactors,
    LinearScaling,
    RopeSettings,
)

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


def rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """Return x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    x: [..., features].  weight: [features].
    """
    mean: FloatArray = np.vecdot(x, x)[..., None]
    mean /= np.float32(x.shape[-1])
    mean += np.float32(eps)
    np.sqrt(mean, out=mean)
    normed: FloatArray = x / mean
    normed *= weight
    return normed


def sigmoid(x: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)) of each element.

    Where the power is above all floats, it is infinite, and what comes of it is 0, as it should be.
    """
    activated = _one_and_power(x)
    return np.divide(np.float32(1), activated, out=activated)


def silu(x: FloatArray) -> FloatArray:
    """Return x * sigmoid(x) of each element."""
    activated = _one_and_power(x)
    return np.divide(x, activated, out=activated)


def _one_and_power(x: FloatArray) -> FloatArray:
    """Return 1 + exp(-x) of each element; it may be infinite."""
    power: FloatArray = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(power, out=power)
    power += np.float32(1)
    return power


def softplus(x: FloatArray) -> FloatArray:
    """Return log(1 + exp(x)) of each element; nothing overflows."""
    positive: FloatArray = np.maximum(x, 0)
    return positive + np.log1p(np.exp(-np.abs(x)))


def gelu_tanh(x: FloatArray) -> FloatArray:
    """Return x * P(X <= x) of a normal X, by way of tanh (Hendrycks and Gimpel, 2016)."""
    inner = np.float32(sqrt(2 / pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: FloatArray = np.float32(0.5) * x * np.add(np.tanh(inner), 1, dtype=np.float32)
    return activated


def soft_cap(x: FloatArray, cap: float) -> FloatArray:
    """Return cap * tanh(x / cap), which lies between -cap and cap (Gemma 2)."""
    capped: FloatArray = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


class RotaryEmbedding:
    """Turns pairs of features by angles that grow with the position (Su et al., "RoFormer", 2021).

    frequencies: [pairs] by how much each pair is turned from one position to the next.
    """

    def __init__(self, settings: RopeSettings, head_dim: int) -> None:
        rotary_dim = settings.rotary_dim(head_dim)
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        self.frequencies = _scaled(np.power(settings.theta, -exponents), settings)
        self.settings = settings
        self._is_interleaved = settings.style == "interleaved"

    def angles(self, positions: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the cosines and sines [rows, 1, pairs] at `positions` [rows]."""
        angles = positions[:, None, None] * self.frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotate(self, x: FloatArray, cosines: FloatArray, sines: FloatArray) -> FloatArray:
        """Return x [rows, heads, head_dim], turned.

        Half-split, feature i is paired with i + pairs; interleaved, 2i with 2i + 1.  What is not in
        a pair stays as it is.
        """
        half = len(self.frequencies)
        end = 2 * half
        is_interleaved = self._is_interleaved
        firsts = (..., slice(0, end, 2)) if is_interleaved else (..., slice(None, half))
        seconds = (..., slice(1, end, 2)) if is_interleaved else (..., slice(half, end))
        turned = np.empty_like(x)
        turned[..., end:] = x[..., end:]
        first = np.multiply(x[firsts], cosines, out=turned[firsts])
        first -= x[seconds] * sines
        second = np.multiply(x[seconds], cosines, out=turned[seconds])
        second += x[firsts] * sines
        return turned


def _scaled(frequencies: NDArray[np.float64], settings: RopeSettings) -> NDArray[np.float64]:
    """Return the frequencies of a model that was trained further on a longer context."""
    scaling = settings.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, FrequencyFactors):
        divided: NDArray[np.float64] = frequencies / np.array(scaling.factors)
        return divided
    # Llama 3.1: high frequencies stay, low ones are divided, those between are mixed.
    original, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    num_turns = original * frequencies / (2 * pi)
    share = np.clip((num_turns - low) / (high - low), 0, 1)
    mixed: NDArray[np.float64] = frequencies * (share + (1 - share) / scaling.factor)
    return mixed
