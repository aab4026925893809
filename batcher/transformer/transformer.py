"""A decoder-only transformer: one ragged forward over all tokens of a step.

All models are one architecture with optional parts; weights have the names of Hugging Face's
transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from batcher.errors import InvariantError
from batcher.events import Layout
from batcher.transformer.config import (
    EXPERT_NAMES,
    PARTS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    DeltaNetSettings,
    TransformerConfig,
)
from batcher.transformer.layers import (
    Attention,
    FloatArray,
    Linear,
    OwnHeads,
    RotaryEmbedding,
    WholeLinears,
    gelu_tanh,
    rms_norm,
    sigmoid,
    silu,
    soft_cap,
    softplus,
)
from batcher.transformer.step import (
    CacheGroup,
    CacheSize,
    KVStore,
    RecurrentStates,
    Span,
    Step,
    cache_groups,
    cache_size,
    num_kv_layers,
)

ReadWeight = Callable[[str], FloatArray]
"""Return the weight of a name, [out, in] or [features]."""


class Weights:
    """Makes the parts of a layer from the weights with its prefix."""

    def __init__(
        self, config: TransformerConfig, read: ReadWeight, linears: WholeLinears, prefix: str = ""
    ) -> None:
        self.config, self.prefix, self._read, self._linears = config, prefix, read, linears

    def read(self, name: str) -> FloatArray:
        return self._read(f"{self.prefix}{name}")

    def linear(self, *names: str, has_bias: bool = False) -> Linear:
        """Return one product for the concatenated weights of all names."""
        weights = [self.read(f"{name}.weight") for name in names]
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        bias = [self.read(f"{name}.bias") for name in names] if has_bias else None
        return self._linears.linear(weight, None if bias is None else np.concatenate(bias))

    def norm(self, name: str) -> FloatArray:
        weight = self.read(f"{name}.weight")
        return weight + np.float32(1) if self.config.has_offset_norms else weight


class SelfAttention:
    """Self-attention with rotary embeddings and optional norms, window and gate."""

    def __init__(
        self, layer: int, groups: Sequence[CacheGroup], own_heads: OwnHeads, weights: Weights
    ) -> None:
        config, self._own_heads = weights.config, own_heads
        self._config = config
        [self._group] = [number for number, one in enumerate(groups) if layer in one.layers]
        self._cache = groups[self._group].layers.index(
            layer
        )  # index of its keys and values in the store
        names = [f"self_attn.{name}_proj" for name in "qkv"]
        self._qkv = weights.linear(*names, has_bias=config.has_qkv_bias)
        self._query_norm = self._key_norm = None
        if config.has_qk_norm:
            self._query_norm = weights.norm("self_attn.q_norm")
            self._key_norm = weights.norm("self_attn.k_norm")
        self._rotary = RotaryEmbedding(config.rope_of(layer), config.head_dim)
        scale = config.attention_scale or config.head_dim**-0.5
        self._attention = Attention(scale, config.window_of(layer), config.attention_softcap)
        self._output = weights.linear("self_attn.o_proj")

    def __call__(self, x: FloatArray, step: Step) -> FloatArray:
        """Return the output [tokens, hidden_size] of x [tokens, hidden_size].

        Keys and values of all tokens are written before any is read.
        """
        config, own = self._config, self._own_heads.which
        every = 2 if config.has_output_gate else 1  # each query is followed by its gate
        first_key = config.num_heads * every
        first_value = first_key + config.num_kv_heads
        group = first_key // config.num_kv_heads
        heads = self._qkv(x).reshape(len(x), -1, config.head_dim)
        queries = heads[:, own.start * group : own.stop * group]
        query = self._turned(queries[:, ::every], self._query_norm, step)
        own_keys = heads[:, first_key:first_value][:, own]
        keys, values = step.store.update(
            self._cache,
            step.own_cells[self._group],
            self._turned(own_keys, self._key_norm, step),
            heads[:, first_value:][:, own],
        )
        attended = query  # without heads
        if query.size:
            attended = step.mixed[self._group].attend(self._attention, query, keys, values)
        if config.has_output_gate:
            attended *= sigmoid(queries[:, 1::every])
        width = config.num_heads // config.num_kv_heads * config.head_dim
        by_kv_head = attended.reshape(len(x), own.stop - own.start, width)
        return self._output(self._own_heads.gather(by_kv_head))

    def _turned(self, heads: FloatArray, norm: FloatArray | None, step: Step) -> FloatArray:
        """Return heads [tokens, heads, head_dim], normalised and rotated."""
        normed = heads if norm is None else rms_norm(heads, norm, self._config.rms_norm_eps)
        return self._rotary.rotate(normed, *step.angles(self._rotary))


# The network of a layer: one gated network, or a few of many experts.

ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


class GatedMLP:
    """down(activation(gate(x)) * up(x)): with SiLU, SwiGLU (Shazeer, 2020)."""

    def __init__(self, weights: Weights, name: str, parts: tuple[str, str, str] = PARTS) -> None:
        gate, up, down = (f"{name}.{part}" for part in parts)
        self._gate_up, self._down = weights.linear(gate, up), weights.linear(down)
        self._activation = ACTIVATIONS[weights.config.activation]

    def __call__(self, x: FloatArray) -> FloatArray:
        gate_up = self._gate_up.by_feature(x)
        half = len(gate_up) // 2
        activated = self._activation(gate_up[:half])
        activated *= gate_up[half:]
        return self._down(activated.T)


class Experts:
    """The likeliest experts of each token by a router, and perhaps a shared one.

    Outputs are added in the order of the experts, so a token's sum is always the same.
    """

    def __init__(self, weights: Weights) -> None:
        settings, names = weights.config.experts, EXPERT_NAMES[weights.config.architecture]
        if settings is None:
            raise InvariantError("experts, and no settings of them")
        self._num_chosen, self._normalises = settings.num_chosen, settings.normalises
        self._shared_gate: Linear | None = None
        if settings.shared_intermediate_size is not None:
            self._shared_gate = weights.linear(SHARED_EXPERT_GATE)
            self._shared = GatedMLP(weights, SHARED_EXPERT)
        self._router = weights.linear(names.router)
        self._experts = [
            GatedMLP(weights, f"{names.expert}.{number}", names.parts)
            for number in range(settings.num_experts)
        ]

    def __call__(self, x: FloatArray) -> FloatArray:
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
        if self._shared_gate is not None:
            output += self._shared(x) * sigmoid(self._shared_gate(x))
        return output


_EPS = np.float32(1e-6)  # added to squared lengths of keys and queries


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The token mixer of recurrent layers: a short convolution, then memory under the delta rule.

    A head keeps a matrix that maps keys to values. With each token it decays, and its value for the
    token's key moves towards the token's value; its value for the query is the output. See Yang,
    Kautz and Hatamizadeh, "Gated Delta Networks" (2025). Value heads are in groups, one for each
    key head.

    Tokens are computed one by one, so bits do not depend on chunks; independent spans are one
    operation with separate products.

    cache: the index of its states among those of all such layers.
    qkvz: one product for queries, keys, values and output gates.
    ba: one for the update strength of values, and the decay of memories.
    convolution: [kernel_size, channels], the token's own weight last.
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

    @classmethod
    def of_layer(cls, layer: int, settings: DeltaNetSettings, weights: Weights) -> "GatedDeltaNet":
        groups, prefix = (settings.num_key_heads, -1), "linear_attn."
        return cls(
            cache=settings.layers.index(layer),
            settings=settings,
            eps=weights.config.rms_norm_eps,
            qkvz=weights.linear(f"{prefix}in_proj_qkvz"),
            ba=weights.linear(f"{prefix}in_proj_ba"),
            convolution=np.ascontiguousarray(weights.read(f"{prefix}conv1d.weight")[:, 0].T),
            fading=np.exp(weights.read(f"{prefix}A_log")).reshape(groups),
            fading_bias=weights.read(f"{prefix}dt_bias").reshape(groups),
            norm=weights.read(f"{prefix}norm.weight"),
            output=weights.linear(f"{prefix}out_proj"),
        )

    def __call__(self, x: FloatArray, step: Step) -> FloatArray:
        """Return the output [tokens, hidden_size] of x [tokens, hidden_size].

        States in snapshots are written into their cells.
        """
        if step.states is None:
            raise InvariantError("recurrent layers, and no cells for their states")
        convolution = step.states.convolution[self.cache]
        delta = step.states.delta[self.cache]
        # Each key head has its query, its key, and all values and gates of its group.
        projected = self.qkvz(x)
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
        projected = self.ba(x)
        groups = projected.reshape(len(projected), self.settings.num_key_heads, -1)
        strength, fading = np.split(groups, 2, axis=2)
        decay = np.exp(-self.fading * softplus(fading + self.fading_bias))
        strength, decay = sigmoid(strength)[..., None, None], decay[..., None, None]
        recalled = np.zeros_like(gate)  # no wave includes padding
        for wave in step.waves:
            past = convolution[wave.sources].swapaxes(0, 1).reshape(-1, channels.shape[1])
            inputs = np.concatenate([past, channels[wave.rows]])
            convolution[wave.kept_cells] = inputs[wave.kept_inputs]
            convolved = np.zeros((len(wave.rows), channels.shape[1]), np.float32)
            for rows, weight in zip(wave.inputs, self.convolution, strict=True):
                convolved += inputs[rows] * weight
            mixed, num_rows = silu(convolved), len(wave.rows)
            query, key, value = np.split(mixed, [sizes.key_size, 2 * sizes.key_size], axis=1)
            heads = (num_rows, sizes.num_key_heads, 1, 1, sizes.key_head_dim)
            query, key = _unit(query.reshape(heads)), _unit(key.reshape(heads))
            query *= np.float32(sizes.key_head_dim**-0.5)
            columns = key.swapaxes(3, 4)
            value = value.reshape(num_rows, sizes.num_key_heads, -1, 1, sizes.value_head_dim)
            memory = delta[wave.sources].reshape(
                len(wave.sources), sizes.num_key_heads, -1, *delta.shape[2:]
            )
            changes, found = np.empty_like(memory), np.empty_like(value)
            strengths, decays = strength[wave.rows], decay[wave.rows]
            for time, (start, stop) in enumerate(pairwise(wave.bounds)):
                now = slice(start, stop)
                own, change = memory[: stop - start], changes[: stop - start]
                own *= decays[now]
                moved = value[now] - key[now] @ own
                moved *= strengths[now]
                np.multiply(columns[now], moved, out=change)
                own += change
                np.matmul(query[now], own, out=found[now])
                kept = wave.kept.get(time + 1)
                if kept is not None:
                    delta[kept.cells] = memory[kept.spans].reshape(-1, *delta.shape[1:])
            recalled[wave.rows] = found.reshape(num_rows, -1, sizes.value_head_dim)
        normed = rms_norm(recalled, self.norm, self.eps)
        normed *= silu(gate)
        return self.output(normed.reshape(len(x), -1))


def _unit(x: FloatArray) -> FloatArray:
    """Return x [..., features], normalised to length 1."""
    squares: FloatArray = np.square(x).sum(-1, keepdims=True)
    unit: FloatArray = x / np.sqrt(squares + _EPS)
    return unit


EMBEDDING = "model.embed_tokens.weight"
Watch = Callable[[int, int], None]
"""Called before each tensor with how many are read, never all, and of how many there are."""


class ModelSizes(Protocol):
    """The sizes of any model that returns logits; eos_token_ids: all of them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class CausalModel(Protocol):
    """A model that computes hidden states and logits, in any process.

    cache_groups: layers that share a block table. cache_size: bytes of its store and states.
    """

    @property
    def config(self) -> ModelSizes: ...
    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]: ...
    @property
    def cache_size(self) -> CacheSize: ...
    def new_store(self) -> KVStore: ...
    def new_states(self) -> RecurrentStates | None: ...
    def forward(
        self, spans: Sequence[Span], store: KVStore, states: RecurrentStates | None = None
    ) -> FloatArray:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order."""

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Return the logits [rows, vocab_size] of hidden states."""


class _Layer:
    """A mixer of tokens, then a network, each with a norm before it and perhaps one after."""

    def __init__(
        self, layer: int, groups: Sequence[CacheGroup], own_heads: OwnHeads, weights: Weights
    ) -> None:
        config, self._eps = weights.config, weights.config.rms_norm_eps
        self._mixer: SelfAttention | GatedDeltaNet
        if config.delta_net is None or layer not in config.delta_net.layers:
            self._mixer = SelfAttention(layer, groups, own_heads, weights)
        else:
            self._mixer = GatedDeltaNet.of_layer(layer, config.delta_net, weights)
        has_experts = config.experts is not None and layer in config.experts.layers
        self._network = Experts(weights) if has_experts else GatedMLP(weights, "mlp")
        self._norms = [weights.norm("input_layernorm"), weights.norm("post_attention_layernorm")]
        self._has_post_norms = config.has_post_norms
        if self._has_post_norms:
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                self._norms.append(weights.norm(name))

    def add_to(self, x: FloatArray, step: Step) -> None:
        """Add the layer's output to x [tokens, hidden_size]."""
        norms, eps, has_post = self._norms, self._eps, self._has_post_norms
        mixed = self._mixer(rms_norm(x, norms[0], eps), step)
        x += rms_norm(mixed, norms[1], eps) if has_post else mixed
        output = self._network(rms_norm(x, norms[2 if has_post else 1], eps))
        x += rms_norm(output, norms[3], eps) if has_post else output


class Transformer:
    """A CausalModel in this process.

    linears: makes the products. layout: of steps.
    """

    def __init__(
        self,
        config: TransformerConfig,
        read: ReadWeight,
        linears: WholeLinears,
        layout: Layout = "ragged",
    ) -> None:
        self.config, self._layout = config, layout
        self.cache_groups, self.cache_size = cache_groups(config), cache_size(config)
        self._own_heads = linears.heads(config.num_kv_heads)
        table = read(EMBEDDING)
        if config.ties_embeddings:
            self._embedding, self._head = linears.tied(table)
        else:
            self._embedding = linears.embedding(table)
        self._layers = [
            _Layer(
                layer,
                self.cache_groups,
                self._own_heads,
                Weights(config, read, linears, f"model.layers.{layer}."),
            )
            for layer in range(config.num_layers)
        ]
        self._norm = Weights(config, read, linears).norm("model.norm")
        if not config.ties_embeddings:
            self._head = linears.linear(read("lm_head.weight"))

    def new_store(self) -> KVStore:
        config, own = self.config, self._own_heads.which
        return KVStore(num_kv_layers(self.cache_groups), own.stop - own.start, config.head_dim)

    def new_states(self) -> RecurrentStates | None:
        delta_net = self.config.delta_net
        return None if delta_net is None else RecurrentStates(delta_net)

    def forward(
        self, spans: Sequence[Span], store: KVStore, states: RecurrentStates | None = None
    ) -> FloatArray:
        step = Step(spans, store, states, self._layout)
        x: FloatArray = self._embedding(step.token_ids) * np.float32(self.config.embedding_scale)
        for layer in self._layers:
            layer.add_to(x, step)
        return x[: step.num_tokens]

    def logits(self, hidden: FloatArray) -> FloatArray:
        logits = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)
