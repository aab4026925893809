"""What a layer does to each token by itself: one gated network, or a few of many experts."""

from collections.abc import Callable

import numpy as np

from batcher.transformer.layers import FloatArray, gelu_tanh, sigmoid, silu
from batcher.transformer.linear import Linear

Activation = Callable[[FloatArray], FloatArray]
ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh}


class GatedMLP:
    """down(activation(gate(x)) * up(x)): with SiLU, SwiGLU (Shazeer, 2020).

    gate_up: gate and up as one product.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return [rows, features] of x [rows, features]."""
        gate_up = self._gate_up.by_feature(x)
        half = len(gate_up) // 2
        activated = self._activation(gate_up[:half])
        activated *= gate_up[half:]
        return self._down(activated.T)


class SharedExpert:
    """A network that every token goes through, to the share that a gate gives it."""

    def __init__(self, gate: Linear, network: GatedMLP) -> None:
        self._gate, self._network = gate, network

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return [rows, features] of x [rows, features]."""
        return self._network(x) * sigmoid(self._gate(x))


class Experts:
    """Of several networks, the `num_chosen` that a router finds likeliest for a token.

    Their outputs are added in the order of the experts, so a token's sum is always the same.

    normalises: whether the shares of those that are chosen are made to add up to one.
    shared: what is added for every token, if anything is.
    """

    def __init__(
        self,
        router: Linear,
        experts: list[GatedMLP],
        num_chosen: int,
        *,
        normalises: bool,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router, self._experts, self._shared = router, experts, shared
        self._num_chosen, self._normalises = num_chosen, normalises

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return [rows, features] of x [rows, features]."""
        scores = self._router(x)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        chosen = (-shares).argsort(1, kind="stable")[:, : self._num_chosen]
        is_chosen = np.zeros(shares.shape, np.bool_)
        np.put_along_axis(is_chosen, chosen, values=True, axis=1)
        if self._normalises:
            shares /= np.where(is_chosen, shares, 0).sum(1, keepdims=True)
        output = np.zeros_like(x)
        for number, expert in enumerate(self._experts):
            rows = is_chosen[:, number].nonzero()[0]
            if rows.size:
                output[rows] += expert(x[rows]) * shares[rows, number, None]
        if self._shared is not None:
            output += self._shared(x)
        return output
