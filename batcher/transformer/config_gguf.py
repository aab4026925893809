"""The sizes of a model as the metadata of a GGUF file has them, under names such as llama.*.

Their meaning is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from batcher.errors import BatchdecodeError
from batcher.transformer.config import (
    Architecture,
    ExpertSettings,
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
from batcher.transformer.config_json import GEMMA_PATTERN
from batcher.transformer.stored import StoredTensor
from batcher.transformer.tensor_names import ROPE_FACTORS

RopeFactor = Annotated[float, Meta(ge=0, le=1e6)]  # 0 for none, as llama.cpp has it
NumExperts = Annotated[int, Meta(ge=0, le=4096)]


class _Known(NamedTuple):
    architecture: Architecture
    style: RopeStyle


KNOWN: dict[str, _Known] = {
    # llama.cpp's conversion permutes the rows of q and k
    "llama": _Known("llama", "interleaved"),
    "qwen2": _Known("qwen2", "half-split"),
    "qwen3": _Known("qwen3", "half-split"),
    "qwen3moe": _Known("qwen3_moe", "half-split"),
    "gemma3": _Known("gemma3", "half-split"),
}
MAX_FACTOR = 1e6
LARGEST_GEMMA = 62  # layers of Gemma 3 27B


class _Fields(Struct):
    """Of the architecture; Mistral's models, with experts or without, are of llama's."""

    num_layers: NumLayers = field(name="block_count")
    max_position_embeddings: Size = field(name="context_length")
    hidden_size: Size = field(name="embedding_length")
    num_heads: Size = field(name="attention.head_count")
    rms_norm_eps: Positive = field(name="attention.layer_norm_rms_epsilon")
    intermediate_size: Size | None = field(name="feed_forward_length", default=None)
    num_kv_heads: Size | None = field(name="attention.head_count_kv", default=None)
    head_dim: Size | None = field(name="attention.key_length", default=None)
    value_length: Size | None = field(name="attention.value_length", default=None)
    sliding_window: Size | None = field(name="attention.sliding_window", default=None)
    rope_dimensions: Size | None = field(name="rope.dimension_count", default=None)
    rope_theta: Positive = field(name="rope.freq_base", default=10_000.0)
    rope_scaling: str = field(name="rope.scaling.type", default="linear")
    rope_factor: RopeFactor = field(name="rope.scaling.factor", default=0.0)
    old_rope_factor: RopeFactor = field(name="rope.scale_linear", default=0.0)
    window_pattern: Size | list[bool] | None = field(
        name="attention.sliding_window_pattern", default=None
    )
    local_theta: Positive = field(name="rope.freq_base_swa", default=10_000.0)
    attention_softcap: Positive | None = field(name="attn_logit_softcapping", default=None)
    logit_softcap: Positive | None = field(name="final_logit_softcapping", default=None)
    num_experts: NumExperts = field(name="expert_count", default=0)
    num_chosen: NumExperts = field(name="expert_used_count", default=0)
    expert_size: Size | None = field(name="expert_feed_forward_length", default=None)
    normalises: bool = field(name="expert_weights_norm", default=True)


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
    if named not in KNOWN:
        raise BatchdecodeError(
            f"architecture {named!r} is not supported, known: {', '.join(KNOWN)}; for others use "
            "hf:FOLDER, a folder of the same model for transformers"
        )
    architecture, style = KNOWN[named]
    prefix = f"{named}."
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
    experts = _experts_of(fields)
    intermediate_size = fields.intermediate_size or fields.expert_size
    if intermediate_size is None:
        raise BatchdecodeError(f"{prefix}feed_forward_length is missing")
    is_gemma = architecture == "gemma3"
    has_local_layers = is_gemma and fields.sliding_window is not None
    return TransformerConfig(
        "mixtral" if architecture == "llama" and experts is not None else architecture,
        vocab_size=embedding.shape[0],
        num_layers=fields.num_layers,
        hidden_size=fields.hidden_size,
        num_heads=fields.num_heads,
        num_kv_heads=fields.num_kv_heads or fields.num_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        rms_norm_eps=fields.rms_norm_eps,
        max_position_embeddings=fields.max_position_embeddings,
        rope=RopeSettings(fields.rope_theta, style, _scaling_of(fields, head_dim, tensors)),
        sliding_window=fields.sliding_window,
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture in {"qwen3", "qwen3_moe", "gemma3"},
        ties_embeddings="output.weight" not in tensors,
        eos_token_ids=tuple(
            dict.fromkeys(end for end in (ends.eos, ends.eot, ends.eom) if end is not None)
        ),
        full_layers=_full_layers_of(fields) if has_local_layers else (),
        local_rope=RopeSettings(fields.local_theta, style) if has_local_layers else None,
        activation="gelu_tanh" if is_gemma else "silu",
        attention_scale=_scale_of_gemma(fields) if is_gemma else None,
        attention_softcap=fields.attention_softcap,
        logit_softcap=fields.logit_softcap,
        embedding_scale=fields.hidden_size**0.5 if is_gemma else 1.0,
        has_post_norms=is_gemma,  # and no has_offset_norms: the conversion has added the one
        experts=experts,
    )


def _scale_of_gemma(fields: _Fields) -> float | None:
    """Return the scale of scores where it is not that of a head: a file does not say it."""
    is_largest = fields.num_layers == LARGEST_GEMMA
    return (fields.hidden_size / fields.num_heads) ** -0.5 if is_largest else None


def _full_layers_of(fields: _Fields) -> tuple[int, ...]:
    """Return the layers of Gemma that attend to all tokens: every sixth, if a file says nothing.

    Raises:
        BatchdecodeError: it says so of too few layers.
    """
    pattern, num_layers = fields.window_pattern or GEMMA_PATTERN, fields.num_layers
    if isinstance(pattern, int):
        return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern == 0)
    if len(pattern) < num_layers:
        raise BatchdecodeError(f"the sliding_window_pattern is not one of {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not pattern[layer])


def _experts_of(fields: _Fields) -> ExpertSettings | None:
    """Return the experts of all layers, if there are any.

    Raises:
        BatchdecodeError: a token goes through none of them, or through more than there are.
    """
    wide = fields.expert_size or fields.intermediate_size
    if not fields.num_experts or wide is None:
        return None
    if not 0 < fields.num_chosen <= fields.num_experts:
        raise BatchdecodeError(
            f"expert_used_count is {fields.num_chosen}, of {fields.num_experts} experts"
        )
    return ExpertSettings(
        layers=tuple(range(fields.num_layers)),
        num_experts=fields.num_experts,
        num_chosen=fields.num_chosen,
        intermediate_size=wide,
        normalises=fields.normalises,
    )


def _refuse_unsupported(fields: _Fields, head_dim: int) -> None:
    """Raise a BatchdecodeError if a model has what is not computed here."""
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
    factor = fields.rope_factor or fields.old_rope_factor
    return LinearScaling(factor) if fields.rope_scaling == "linear" and factor else None
