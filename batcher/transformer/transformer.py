"""A decoder-only transformer: one ragged forward over all tokens that a step computes.

All models are one architecture with parts that are there or not; the names of weights are those of
Hugging Face's transformers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from batcher.events import Layout
from batcher.transformer.config import TransformerConfig
from batcher.transformer.kv_store import (
    CacheGroup,
    CacheSize,
    KVStore,
    RecurrentStates,
    cache_groups,
    cache_size,
    num_kv_layers,
)
from batcher.transformer.layers import FloatArray, rms_norm, soft_cap
from batcher.transformer.linear import WholeLinears
from batcher.transformer.mixers import (
    Experts,
    GatedDeltaNet,
    GatedMLP,
    ReadWeight,
    SelfAttention,
    Weights,
)
from batcher.transformer.step import Span, Step

EMBEDDING = "model.embed_tokens.weight"
Watch = Callable[[int, int], None]
"""Called before each tensor with how many are read, never all, and of how many there are."""


class ModelSizes(Protocol):
    """What is to be known of any model that makes logits of tokens.

    vocab_size: how many logits there are.  max_position_embeddings: how many tokens a row may have.
    eos_token_ids: all tokens that end a text.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class CausalModel(Protocol):
    """A model that makes hidden states and logits of tokens, wherever it is computed.

    cache_groups: which of its layers share a block table.  cache_size: how much memory it takes to
    keep what it does of sequences, in a store and, of recurrent layers, in states.
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
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order.

        Their keys and values are written into their cells, and states into those of snapshots.
        """

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
    """The weights of a model, and what they make of tokens: a CausalModel.

    linears: makes the products with them.  layout: whether tokens come with padding.
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
            self._layer_of(layer, Weights(config, read, linears, f"model.layers.{layer}."))
            for layer in range(config.num_layers)
        ]
        self._norm = Weights(config, read, linears).norm("model.norm")
        if not config.ties_embeddings:
            self._head = linears.linear(read("lm_head.weight"))

    def _layer_of(self, layer: int, weights: Weights) -> _Layer:
        delta_net, experts = self.config.delta_net, self.config.experts
        mixer: SelfAttention | GatedDeltaNet
        if delta_net is None or layer not in delta_net.layers:
            mixer = SelfAttention(layer, self.cache_groups, self._own_heads, weights)
        else:
            mixer = GatedDeltaNet.of_layer(layer, delta_net, weights)
        has_experts = experts is not None and layer in experts.layers
        feed_forward = Experts(weights) if has_experts else GatedMLP(weights, "mlp")
        mixer_norm = weights.norm("input_layernorm")
        after_mixer = weights.norm("post_attention_layernorm")
        if not self.config.has_post_norms:
            return _Layer(mixer_norm, mixer, None, after_mixer, feed_forward, None)
        return _Layer(
            mixer_norm,
            mixer,
            after_mixer,
            weights.norm("pre_feedforward_layernorm"),
            feed_forward,
            weights.norm("post_feedforward_layernorm"),
        )

    def new_store(self) -> KVStore:
        config, own = self.config, self._own_heads.which
        return KVStore(num_kv_layers(self.cache_groups), own.stop - own.start, config.head_dim)

    def new_states(self) -> RecurrentStates | None:
        delta_net = self.config.delta_net
        return None if delta_net is None else RecurrentStates(delta_net)

    def forward(
        self, spans: Sequence[Span], store: KVStore, states: RecurrentStates | None = None
    ) -> FloatArray:
        step, eps = Step(spans, store, states, self._layout), self.config.rms_norm_eps
        x: FloatArray = self._embedding(step.token_ids) * np.float32(self.config.embedding_scale)
        for layer in self._layers:
            mixed = layer.mixer(rms_norm(x, layer.mixer_norm, eps), step)
            x += mixed if layer.mixed_norm is None else rms_norm(mixed, layer.mixed_norm, eps)
            output = layer.feed_forward(rms_norm(x, layer.feed_forward_norm, eps))
            x += output if layer.output_norm is None else rms_norm(output, layer.output_norm, eps)
        return x[: step.num_tokens]

    def logits(self, hidden: FloatArray) -> FloatArray:
        logits = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)
