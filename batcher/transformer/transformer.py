"""A decoder-only transformer: one ragged forward over all tokens that a step computes.

Llama, Mistral, Qwen2 and Qwen3 are one architecture with parts that are there or not; the names of
weights are those of Hugging Face's transformers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from batcher.transformer.attention import NOWHERE, Attention, padded_cells
from batcher.transformer.config import RopeSettings, TransformerConfig
from batcher.transformer.feed_forward import ACTIVATIONS, Experts, GatedMLP
from batcher.transformer.kv_store import KVStore
from batcher.transformer.layers import (
    FloatArray,
    IntArray,
    RotaryEmbedding,
    rms_norm,
    soft_cap,
)
from batcher.transformer.linear import FastLinear, Int8Linear, Linear, TiledLinear, tile_of
from batcher.transformer.settings import WeightKind
from batcher.transformer.tensor_names import EXPERT_NAMES

ReadWeight = Callable[[str], FloatArray]
"""Return the weight of a name, [out, in] or [features]."""


class Span(NamedTuple):
    """Tokens on end of one sequence.

    start: the position of the first.  cells: of all positions up to the last of them.
    """

    token_ids: Sequence[int]
    start: int
    cells: IntArray


class _Layer(NamedTuple):
    """The weights of a layer; query, key and value are one product.

    input_norm, feed_forward_norm: before attention, and before what follows it.
    attention_norm, output_norm: of what each of the two comes to, if that is normalised.
    """

    input_norm: FloatArray
    qkv: Linear
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    rotary: RotaryEmbedding
    attention: Attention
    attention_output: Linear
    attention_norm: FloatArray | None
    feed_forward_norm: FloatArray
    feed_forward: GatedMLP | Experts
    output_norm: FloatArray | None


class Transformer:
    """The weights of a model, and what they make of tokens.

    weights: how they are kept and multiplied.  is_fast: whether products of floats are left to
    BLAS, so that last bits depend on the size of the batch.
    """

    def __init__(
        self,
        config: TransformerConfig,
        read: ReadWeight,
        *,
        weights: WeightKind = "fp32",
        is_fast: bool = False,
    ) -> None:
        self.config = config
        self._read, self._kind, self._is_fast = read, weights, is_fast
        self._tiles: dict[tuple[int, ...], int] = {}  # by the shape of the weight
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [self._read_layer(layer) for layer in range(config.num_layers)]
        self._norm = self._read_norm("model.norm")
        head = self._embedding if config.ties_embeddings else read("lm_head.weight")
        self._head = self._linear(head, None)

    def _read_layer(self, layer: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{layer}."
        window = config.window_of(layer)
        scale = config.attention_scale or config.head_dim**-0.5
        has_post_norms = config.has_post_norms
        before = "pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm"
        return _Layer(
            input_norm=self._read_norm(f"{prefix}input_layernorm"),
            qkv=self._read_linear(
                [f"{prefix}self_attn.{name}_proj" for name in "qkv"], has_bias=config.has_qkv_bias
            ),
            query_norm=self._norm_if(f"{prefix}self_attn.q_norm", config.has_qk_norm),
            key_norm=self._norm_if(f"{prefix}self_attn.k_norm", config.has_qk_norm),
            rotary=RotaryEmbedding(config.rope_of(layer), config.head_dim),
            attention=Attention(scale, window, config.attention_softcap),
            attention_output=self._read_linear([f"{prefix}self_attn.o_proj"]),
            attention_norm=self._norm_if(f"{prefix}post_attention_layernorm", has_post_norms),
            feed_forward_norm=self._read_norm(f"{prefix}{before}"),
            feed_forward=self._read_feed_forward(layer, prefix),
            output_norm=self._norm_if(f"{prefix}post_feedforward_layernorm", has_post_norms),
        )

    def _read_feed_forward(self, layer: int, prefix: str) -> GatedMLP | Experts:
        experts = self.config.experts
        if experts is None or layer not in experts.layers:
            return self._read_mlp([f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down")])
        names = EXPERT_NAMES[self.config.architecture]
        return Experts(
            self._read_linear([f"{prefix}{names.router}"]),
            [
                self._read_mlp([f"{prefix}{names.expert}.{number}.{name}" for name in names.parts])
                for number in range(experts.num_experts)
            ],
            experts.num_chosen,
            normalises=experts.normalises,
        )

    def _read_mlp(self, names: list[str]) -> GatedMLP:
        *gate_up, down = names
        activation = ACTIVATIONS[self.config.activation]
        return GatedMLP(self._read_linear(gate_up), self._read_linear([down]), activation)

    def _read_linear(self, names: list[str], *, has_bias: bool = False) -> Linear:
        """Return the product with weights of these names, one above the other."""
        weights = [self._read(f"{name}.weight") for name in names]
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        bias = [self._read(f"{name}.bias") for name in names] if has_bias else None
        return self._linear(weight, None if bias is None else np.concatenate(bias))

    def _linear(self, weight: FloatArray, bias: FloatArray | None) -> Linear:
        if self._kind != "fp32":
            return Int8Linear(weight, bias, per_channel=self._kind == "int8-channel")
        if self._is_fast:
            return FastLinear(weight, bias)
        if weight.shape not in self._tiles:
            self._tiles[weight.shape] = tile_of(weight)
        return TiledLinear(weight, self._tiles[weight.shape], bias)

    def _read_norm(self, name: str) -> FloatArray:
        weight = self._read(f"{name}.weight")
        return weight + np.float32(1) if self.config.has_offset_norms else weight

    def _norm_if(self, name: str, is_there: bool) -> FloatArray | None:  # noqa: FBT001 - reads best
        return self._read_norm(name) if is_there else None

    def new_store(self) -> KVStore:
        """Return room for the keys and values of tokens."""
        config = self.config
        return KVStore(config.num_layers, config.num_kv_heads, config.head_dim)

    def forward(self, spans: Sequence[Span], store: KVStore) -> FloatArray:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order.

        Their keys and values are written into their cells, before any of them is read.
        """
        sizes = [len(span.token_ids) for span in spans]
        positions = np.concatenate(
            [
                np.arange(span.start, span.start + size)
                for span, size in zip(spans, sizes, strict=True)
            ]
        )
        token_ids = np.concatenate([np.asarray(span.token_ids, np.int64) for span in spans])
        own_cells = np.concatenate([span.cells[span.start :] for span in spans])
        mixed = _Mixed(spans, sizes, positions)
        x: FloatArray = self._embedding[token_ids] * np.float32(self.config.embedding_scale)
        eps = self.config.rms_norm_eps
        angles: dict[RopeSettings, tuple[FloatArray, FloatArray]] = {}
        for number, layer in enumerate(self._layers):
            rope = layer.rotary.settings
            if rope not in angles:
                angles[rope] = layer.rotary.angles(positions)
            query, key, value = self._project(layer, x, angles[rope])
            keys, values = store.keys[number], store.values[number]
            keys[own_cells], values[own_cells] = key, value
            attended = mixed.attend(layer.attention, query, keys, values)
            output = layer.attention_output(attended.reshape(len(x), -1))
            x += _normed(output, layer.attention_norm, eps)
            output = layer.feed_forward(rms_norm(x, layer.feed_forward_norm, eps))
            x += _normed(output, layer.output_norm, eps)
        return x

    def _project(
        self, layer: _Layer, x: FloatArray, angles: tuple[FloatArray, FloatArray]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return queries [rows, heads, head_dim], and keys and values [rows, kv_heads, ...]."""
        config, eps = self.config, self.config.rms_norm_eps
        first_key, first_value = config.num_heads, config.num_heads + config.num_kv_heads
        projected = layer.qkv(rms_norm(x, layer.input_norm, eps))
        heads = projected.reshape(len(x), -1, config.head_dim)
        query, key = heads[:, :first_key], heads[:, first_key:first_value]
        query, key = _normed(query, layer.query_norm, eps), _normed(key, layer.key_norm, eps)
        query, key = layer.rotary.rotate(query, *angles), layer.rotary.rotate(key, *angles)
        return query, key, heads[:, first_value:]

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Return the logits [rows, vocab_size] after tokens with these hidden states."""
        logits = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)


def _normed(x: FloatArray, weight: FloatArray | None, eps: float) -> FloatArray:
    """Return x, normalised if there is a weight for it."""
    return x if weight is None else rms_norm(x, weight, eps)


class _Mixed:
    """Which tokens of a step attend to what: single ones together, those on end by sequences."""

    def __init__(self, spans: Sequence[Span], sizes: list[int], positions: IntArray) -> None:
        ends = np.cumsum(sizes).tolist()
        parts = [*zip(spans, sizes, ends, strict=True)]
        self._chunks = [
            (slice(end - size, end), span.start, padded_cells(span.cells))
            for span, size, end in parts
            if size > 1
        ]
        tables = [padded_cells(span.cells) for span, size, _ in parts if size == 1]
        self._rows = np.array([end - 1 for _, size, end in parts if size == 1], np.int64)
        self._positions = positions[self._rows]
        self._cells = np.full((len(tables), max(map(len, tables), default=0)), NOWHERE)
        for line, table in zip(self._cells, tables, strict=True):
            line[: len(table)] = table

    def attend(
        self, attention: Attention, query: FloatArray, keys: FloatArray, values: FloatArray
    ) -> FloatArray:
        """Return the output [tokens, heads, head_dim] of all queries."""
        output = np.empty_like(query)
        for rows, start, cells in self._chunks:
            output[rows] = attention.of_chunk(query[rows], start, cells, keys, values)
        if self._rows.size:
            output[self._rows] = attention.of_rows(
                query[self._rows], self._positions, self._cells, keys, values
            )
        return output
