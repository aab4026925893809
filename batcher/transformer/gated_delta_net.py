"""The token mixer of recurrent layers: a short convolution, then a memory under the delta rule.

A head keeps a matrix that maps keys to values.  With each token it fades, and what it has for the
token's key moves towards the token's value; what it has for the query is the output.  See Yang,
Kautz and Hatamizadeh, "Gated Delta Networks" (2025).

That goes token by token, so no chunk shows in the bits; what spans at the same time do is one
operation for all, in which each has products of its own.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from batcher.errors import InvariantError
from batcher.transformer.config import DeltaNetSettings
from batcher.transformer.layers import FloatArray, rms_norm, sigmoid, silu, softplus
from batcher.transformer.linear import Linear
from batcher.transformer.step import Step
from batcher.transformer.waves import Wave

_EPS = np.float32(1e-6)  # of the lengths that keys and queries are divided by


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The weights of a layer, whose value heads are in groups, one for each key head.

    cache: the number of its states among those of all such layers.
    qkvz: one product for queries, keys, values and output gates.
    ba: one for how far values are moved to, and by how much memories fade.
    convolution: [kernel_size, channels], that of the token itself last.
    fading, fading_bias: [key heads, value heads of a group].
    norm: [value_head_dim] of each head's output.
    """

    cache: int
    settings: DeltaNetSettings
    eps: float
    qkvz: Linear
    ba: Linear
    convolution: FloatArray
    fading: FloatArray
    fading_bias: FloatArray
    norm: FloatArray
    output: Linear

    def __call__(self, x: FloatArray, step: Step) -> FloatArray:
        """Return the output [tokens, hidden_size] of x [tokens, hidden_size].

        The states that spans keep are written into their cells.

        Raises:
            InvariantError: there are no cells for them.
        """
        if step.states is None:
            raise InvariantError("recurrent layers, and no cells for their states")
        convolution = step.states.convolution[self.cache]
        delta = step.states.delta[self.cache]
        channels, gate = self._split(self.qkvz(x))
        strength, decay = self._strength_and_decay(self.ba(x))
        recalled = np.zeros_like(gate)  # padding is in no wave
        for wave in step.waves:
            mixed = self._convolve(channels, wave, convolution)
            recalled[wave.rows] = self._recall(
                mixed, strength[wave.rows], decay[wave.rows], wave, delta
            )
        normed = rms_norm(recalled, self.norm, self.eps)
        normed *= silu(gate)
        return self.output(normed.reshape(len(x), -1))

    def _split(self, projected: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return what is mixed [tokens, channels], and gates [tokens, value heads, head_dim].

        Projected, each key head has its query, its key, and all values and gates of its group.
        """
        sizes, num_tokens = self.settings, len(projected)
        groups = projected.reshape(num_tokens, sizes.num_key_heads, -1)
        first_value = 2 * sizes.key_head_dim
        first_gate = first_value + sizes.value_size // sizes.num_key_heads
        parts = (
            groups[:, :, : sizes.key_head_dim],
            groups[:, :, sizes.key_head_dim : first_value],
            groups[:, :, first_value:first_gate],
        )
        channels = np.concatenate([part.reshape(num_tokens, -1) for part in parts], 1)
        gate = groups[:, :, first_gate:].reshape(num_tokens, -1, sizes.value_head_dim)
        return channels, gate

    def _strength_and_decay(self, projected: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return two numbers from 0 to 1 for each head, [tokens, key heads, group, 1, 1]."""
        groups = projected.reshape(len(projected), self.settings.num_key_heads, -1)
        strength, fading = np.split(groups, 2, axis=2)
        decay = np.exp(-self.fading * softplus(fading + self.fading_bias))
        return sigmoid(strength)[..., None, None], decay[..., None, None]

    def _convolve(self, channels: FloatArray, wave: Wave, states: FloatArray) -> FloatArray:
        """Return what each token is together with those just before it, [tokens, channels]."""
        past = states[wave.sources].swapaxes(0, 1).reshape(-1, channels.shape[1])
        inputs = np.concatenate([past, channels[wave.rows]])
        states[wave.kept_cells] = inputs[wave.kept_inputs]
        mixed = np.zeros((len(wave.rows), channels.shape[1]), np.float32)
        for rows, weight in zip(wave.inputs, self.convolution, strict=True):
            mixed += inputs[rows] * weight
        return silu(mixed)

    def _recall(
        self,
        mixed: FloatArray,
        strength: FloatArray,
        decay: FloatArray,
        wave: Wave,
        states: FloatArray,
    ) -> FloatArray:
        """Return what the memories have for each query, [tokens, value heads, value_head_dim].

        All of the tokens of the wave, in its order.
        """
        sizes, num_tokens = self.settings, len(mixed)
        query, key, value = np.split(mixed, [sizes.key_size, 2 * sizes.key_size], axis=1)
        heads = (num_tokens, sizes.num_key_heads, 1, 1, sizes.key_head_dim)
        query, key = _unit(query.reshape(heads)), _unit(key.reshape(heads))
        query *= np.float32(sizes.key_head_dim**-0.5)
        columns = key.swapaxes(3, 4)
        value = value.reshape(num_tokens, sizes.num_key_heads, -1, 1, sizes.value_head_dim)
        memory = states[wave.sources].reshape(
            len(wave.sources), sizes.num_key_heads, -1, *states.shape[2:]
        )
        changes = np.empty_like(memory)
        recalled = np.empty_like(value)
        for time, (start, stop) in enumerate(pairwise(wave.bounds)):
            now = slice(start, stop)
            own, change = memory[: stop - start], changes[: stop - start]
            own *= decay[now]
            moved = value[now] - key[now] @ own
            moved *= strength[now]
            np.multiply(columns[now], moved, out=change)
            own += change
            np.matmul(query[now], own, out=recalled[now])
            kept = wave.kept.get(time + 1)
            if kept is not None:
                states[kept.cells] = memory[kept.spans].reshape(-1, *states.shape[1:])
        return recalled.reshape(num_tokens, -1, sizes.value_head_dim)


def _unit(x: FloatArray) -> FloatArray:
    """Return x [..., features], of length 1."""
    squares: FloatArray = np.square(x).sum(-1, keepdims=True)
    unit: FloatArray = x / np.sqrt(squares + _EPS)
    return unit
