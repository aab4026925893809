"""A decoder-only transformer: one ragged forward over all tokens that a step computes.

All models are one architecture with parts that are there or not; the names of weights are those of
Hugging Face's transformers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from batcher.events import Layout
from batcher.transformer.config import (
    EXPERT_NAMES,
    PARTS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    DeltaNetSettings,
    TransformerConfig,
)
from batcher.transformer.kv_store import (
    CacheGroup,
    CacheSize,
    KVStore,
    RecurrentStates,
    cache_groups,
    cache_size,
    num_kv_layers,
)
from batcher.transformer.layers import Attention, FloatArray, RotaryEmbedding, rms_norm, soft_cap
from batcher.transformer.linear import Linear, WholeLinears
from batcher.transformer.mixers import (
    ACTIVATIONS,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    SelfAttention,
    SharedExpert,
)
from batcher.transformer.step import Span, Step

EMBEDDING = "model.embed_tokens.weight"
ReadWeight = Callable[[str], FloatArray]
"""Return the weight of a name, [out, in] or [features]."""
Watch = Callable[[int, int], None]
"""Called before each tensor with how many are read, never all, and of how many there are."""


class ModelSizes(Protocol):
    """What is to be known of any model that makes logits of tokens."""

    @property
    def vocab_size(self) -> int:
        """How many logits there are."""

    @property
    def max_position_embeddings(self) -> int:
        """How many tokens a row may have."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a text."""


class CausalModel(Protocol):
    """A model that makes hidden states and logits of tokens, wherever it is computed."""

    @property
    def config(self) -> ModelSizes:
        """Its sizes."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Which of its layers share a block table."""

    @property
    def cache_size(self) -> CacheSize:
        """How much memory it takes to keep what it does of sequences."""

    def new_store(self) -> KVStore:
        """Return room for the keys and values of tokens."""

    def new_states(self) -> RecurrentStates | None:
        """Return room for the states of recurrent layers; None if there are no such layers."""

    def forward(
        self,
        spans: Sequence[Span],
        store: KVStore,
        states: RecurrentStates | None = None,
    ) -> FloatArray:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order."""

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Return the logits [rows, vocab_size] after tokens with these hidden states."""


class _Layer(NamedTuple):
    """The weights of a layer: a mixer of tokens, then a network for each token.

    mixer_norm, feed_forward_norm: before each of the two.
    mixed_norm, output_norm: of what each of them comes to, if that is normalised.
    """

    mixer_norm: FloatArray
    mixer: SelfAttention | GatedDeltaNet
    mixed_norm: FloatArray | None
    feed_forward_norm: FloatArray
    feed_forward: GatedMLP | Experts
    output_norm: FloatArray | None


class Transformer:
    """The weights of a model, and what they make of tokens.

    linears: makes the products with them.  layout: whether tokens come with padding.
    cache_groups: which of its layers share a block table.
    """

    def __init__(
        self,
        config: TransformerConfig,
        read: ReadWeight,
        linears: WholeLinears,
        layout: Layout = "ragged",
    ) -> None:
        self.config, self.cache_groups = config, cache_groups(config)
        self.cache_size = cache_size(config)
        self._read, self._linears, self._layout = read, linears, layout
        self._own_heads = linears.heads(config.num_kv_heads)
        table = read(EMBEDDING)
        if config.ties_embeddings:
            self._embedding, self._head = linears.tied(table)
        else:
            self._embedding = linears.embedding(table)
        self._layers = [self._read_layer(layer) for layer in range(config.num_layers)]
        self._norm = self._read_norm("model.norm")
        if not config.ties_embeddings:
            self._head = linears.linear(read("lm_head.weight"))

    def _read_layer(self, layer: int) -> _Layer:
        prefix, has_post_norms = f"model.layers.{layer}.", self.config.has_post_norms
        delta_net = self.config.delta_net
        mixer: SelfAttention | GatedDeltaNet
        if delta_net is None or layer not in delta_net.layers:
            mixer = self._read_self_attention(layer, f"{prefix}self_attn.")
        else:
            mixer = self._read_gated_delta_net(delta_net, layer, f"{prefix}linear_attn.")
        before = "pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm"
        return _Layer(
            mixer_norm=self._read_norm(f"{prefix}input_layernorm"),
            mixer=mixer,
            mixed_norm=self._norm_if(f"{prefix}post_attention_layernorm", has_post_norms),
            feed_forward_norm=self._read_norm(f"{prefix}{before}"),
            feed_forward=self._read_feed_forward(layer, prefix),
            output_norm=self._norm_if(f"{prefix}post_feedforward_layernorm", has_post_norms),
        )

    def _read_self_attention(self, layer: int, prefix: str) -> SelfAttention:
        config = self.config
        scale = config.attention_scale or config.head_dim**-0.5
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        (group,) = [
            number for number, group in enumerate(self.cache_groups) if layer in group.layers
        ]
        return SelfAttention(
            group=group,
            cache=self.cache_groups[group].layers.index(layer),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            own_heads=self._own_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qkv=self._read_linear(names, has_bias=config.has_qkv_bias),
            query_norm=self._norm_if(f"{prefix}q_norm", config.has_qk_norm),
            key_norm=self._norm_if(f"{prefix}k_norm", config.has_qk_norm),
            rotary=RotaryEmbedding(config.rope_of(layer), config.head_dim),
            attention=Attention(scale, config.window_of(layer), config.attention_softcap),
            output=self._read_linear([f"{prefix}o_proj"]),
            has_output_gate=config.has_output_gate,
        )

    def _read_gated_delta_net(
        self, settings: DeltaNetSettings, layer: int, prefix: str
    ) -> GatedDeltaNet:
        kernel = self._read(f"{prefix}conv1d.weight")[:, 0]
        groups = (settings.num_key_heads, -1)
        return GatedDeltaNet(
            cache=settings.layers.index(layer),
            settings=settings,
            eps=self.config.rms_norm_eps,
            qkvz=self._read_linear([f"{prefix}in_proj_qkvz"]),
            ba=self._read_linear([f"{prefix}in_proj_ba"]),
            convolution=np.ascontiguousarray(kernel.T),
            fading=np.exp(self._read(f"{prefix}A_log")).reshape(groups),
            fading_bias=self._read(f"{prefix}dt_bias").reshape(groups),
            norm=self._read(f"{prefix}norm.weight"),
            output=self._read_linear([f"{prefix}out_proj"]),
        )

    def _read_feed_forward(self, layer: int, prefix: str) -> GatedMLP | Experts:
        experts = self.config.experts
        if experts is None or layer not in experts.layers:
            return self._read_mlp([f"{prefix}mlp.{part}" for part in PARTS])
        names, shared = EXPERT_NAMES[self.config.architecture], None
        if experts.shared_intermediate_size is not None:
            shared = SharedExpert(
                self._read_linear([f"{prefix}{SHARED_EXPERT_GATE}"]),
                self._read_mlp([f"{prefix}{SHARED_EXPERT}.{part}" for part in PARTS]),
            )
        return Experts(
            self._read_linear([f"{prefix}{names.router}"]),
            [
                self._read_mlp([f"{prefix}{names.expert}.{number}.{name}" for name in names.parts])
                for number in range(experts.num_experts)
            ],
            experts.num_chosen,
            normalises=experts.normalises,
            shared=shared,
        )

    def _read_mlp(self, names: list[str]) -> GatedMLP:
        *gate_up, down = names
        activation = ACTIVATIONS[self.config.activation]
        return GatedMLP(self._read_linear(gate_up), self._read_linear([down]), activation)

    def _read_linear(self, names: list[str], *, has_bias: bool = False) -> Linear:
        weights = [self._read(f"{name}.weight") for name in names]
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        bias = [self._read(f"{name}.bias") for name in names] if has_bias else None
        return self._linears.linear(weight, None if bias is None else np.concatenate(bias))

    def _read_norm(self, name: str) -> FloatArray:
        weight = self._read(f"{name}.weight")
        return weight + np.float32(1) if self.config.has_offset_norms else weight

    def _norm_if(self, name: str, is_there: bool) -> FloatArray | None:  # noqa: FBT001 - reads best
        return self._read_norm(name) if is_there else None

    def new_store(self) -> KVStore:
        config, own = self.config, self._own_heads.which
        return KVStore(num_kv_layers(self.cache_groups), own.stop - own.start, config.head_dim)

    def new_states(self) -> RecurrentStates | None:
        delta_net = self.config.delta_net
        return None if delta_net is None else RecurrentStates(delta_net)

    def forward(
        self,
        spans: Sequence[Span],
        store: KVStore,
        states: RecurrentStates | None = None,
    ) -> FloatArray:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order.

        Their keys and values are written into their cells, and states into those of snapshots.
        """
        step, eps = Step(spans, store, states, self._layout), self.config.rms_norm_eps
        x: FloatArray = self._embedding(step.token_ids) * np.float32(self.config.embedding_scale)
        for layer in self._layers:
            mixed = layer.mixer(rms_norm(x, layer.mixer_norm, eps), step)
            x += _normed(mixed, layer.mixed_norm, eps)
            output = layer.feed_forward(rms_norm(x, layer.feed_forward_norm, eps))
            x += _normed(output, layer.output_norm, eps)
        return x[: step.num_tokens]

    def logits(self, hidden: FloatArray) -> FloatArray:
        logits = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)


def _normed(x: FloatArray, weight: FloatArray | None, eps: float) -> FloatArray:
    return x if weight is None else rms_norm(x, weight, eps)
