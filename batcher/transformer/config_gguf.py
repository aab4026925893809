"""The sizes of a model as the metadata of a GGUF file has them, under names such as llama.*.

Their meaning is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from batcher.errors import BatchdecodeError
from batcher.transformer.config import (
    Architecture,
    FrequencyFactors,
    LinearScaling,
    NumLayers,
    Positive,
    RopeSettings,
    RopeStyle,
    Scaling,
    Size,
    TokenId,
    TransformerConfig,
    head_dim_of,
)
from batcher.transformer.stored import StoredTensor
from batcher.transformer.tensor_names import ROPE_FACTORS

STYLES: dict[Architecture, RopeStyle] = {
    "llama": "interleaved",  # llama.cpp's conversion permutes the rows of q and k
    "qwen2": "half-split",
    "qwen3": "half-split",
}
MAX_FACTOR = 1e6


class _Fields(Struct):
    """Of the architecture; Mistral's models are of llama's."""

    num_layers: NumLayers = field(name="block_count")
    max_position_embeddings: Size = field(name="context_length")
    hidden_size: Size = field(name="embedding_length")
    intermediate_size: Size = field(name="feed_forward_length")
    num_heads: Size = field(name="attention.head_count")
    rms_norm_eps: Positive = field(name="attention.layer_norm_rms_epsilon")
    num_kv_heads: Size | None = field(name="attention.head_count_kv", default=None)
    head_dim: Size | None = field(name="attention.key_length", default=None)
    value_length: Size | None = field(name="attention.value_length", default=None)
    sliding_window: Size | None = field(name="attention.sliding_window", default=None)
    rope_dimensions: Size | None = field(name="rope.dimension_count", default=None)
    rope_theta: Positive = field(name="rope.freq_base", default=10_000.0)
    rope_scaling: str = field(name="rope.scaling.type", default="linear")
    rope_factor: Positive | None = field(name="rope.scaling.factor", default=None)
    num_experts: int = field(name="expert_count", default=0)


class _EndTokens(Struct):
    """After these a text has ended: it, one's turn, one's message."""

    eos: TokenId | None = field(name="tokenizer.ggml.eos_token_id", default=None)
    eot: TokenId | None = field(name="tokenizer.ggml.eot_token_id", default=None)
    eom: TokenId | None = field(name="tokenizer.ggml.eom_token_id", default=None)


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> TransformerConfig:
    """Return what the metadata says, and what follows from which tensors there are.

    Raises:
        BatchdecodeError: it is of another architecture, has a feature that is not supported, or is
        wrong.
    """
    named = metadata.get("general.architecture")
    architecture = next((known for known in STYLES if known == named), None)
    if architecture is None:
        raise BatchdecodeError(
            f"architecture {named!r} is not supported, known: {', '.join(STYLES)}; models "
            "of others can be called by way of package.module:name"
        )
    prefix = f"{architecture}."
    own = {
        name.removeprefix(prefix): value
        for name, value in metadata.items()
        if name.startswith(prefix)
    }
    try:
        fields = msgspec.convert(own, _Fields)
        ends = msgspec.convert(metadata, _EndTokens)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(f"metadata: {error}") from None
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise BatchdecodeError("token_embd.weight is missing")
    head_dim = fields.head_dim or head_dim_of(fields.hidden_size, fields.num_heads)
    _refuse_unsupported(fields, head_dim)
    return TransformerConfig(
        architecture,
        vocab_size=embedding.shape[0],
        num_layers=fields.num_layers,
        hidden_size=fields.hidden_size,
        num_heads=fields.num_heads,
        num_kv_heads=fields.num_kv_heads or fields.num_heads,
        head_dim=head_dim,
        intermediate_size=fields.intermediate_size,
        rms_norm_eps=fields.rms_norm_eps,
        max_position_embeddings=fields.max_position_embeddings,
        rope=RopeSettings(
            fields.rope_theta, STYLES[architecture], _scaling_of(fields, head_dim, tensors)
        ),
        sliding_window=fields.sliding_window,
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture == "qwen3",
        ties_embeddings="output.weight" not in tensors,
        eos_token_ids=tuple(
            dict.fromkeys(end for end in (ends.eos, ends.eot, ends.eom) if end is not None)
        ),
    )


def _refuse_unsupported(fields: _Fields, head_dim: int) -> None:
    """Raise a BatchdecodeError if a model has what is not computed here."""
    if fields.num_experts:
        raise BatchdecodeError("experts are not supported; known: dense models")
    for name, size in (
        ("attention.value_length", fields.value_length),
        ("rope.dimension_count", fields.rope_dimensions),
    ):
        if size not in {None, head_dim}:
            raise BatchdecodeError(f"{name} {size} is not supported, known: that of a head")


def _scaling_of(
    fields: _Fields, head_dim: int, tensors: Mapping[str, StoredTensor]
) -> Scaling | None:
    """Return how RoPE is scaled: by a factor, or for Llama 3 by a tensor of them."""
    kinds = ("none", "linear")
    if fields.rope_scaling not in kinds:
        raise BatchdecodeError(
            f"RoPE scaled by {fields.rope_scaling!r} is not supported, known: {', '.join(kinds)}"
        )
    if ROPE_FACTORS in tensors:
        if tensors[ROPE_FACTORS].shape != (head_dim // 2,):
            raise BatchdecodeError(f"{ROPE_FACTORS} is not one factor for each pair of a head")
        factors = tensors[ROPE_FACTORS].read().tolist()
        if not all(0 < factor < MAX_FACTOR for factor in factors):
            raise BatchdecodeError(f"{ROPE_FACTORS} has factors that no frequency is divided by")
        return FrequencyFactors(tuple(factors))
    if fields.rope_scaling == "linear" and fields.rope_factor is not None:
        return LinearScaling(fields.rope_factor)
    return None
