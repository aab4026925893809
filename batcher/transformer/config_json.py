"""Hugging Face's config.json, as transformers 4 and 5 write it."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.transformer.config import (
    Activation,
    Architecture,
    DeltaNetSettings,
    ExpertSettings,
    LinearScaling,
    Llama3Scaling,
    NumLayers,
    Positive,
    RopeSettings,
    Scaling,
    Share,
    Size,
    TokenId,
    TransformerConfig,
    head_dim_of,
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
}
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SCALINGS: dict[str, type[Scaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}
HEAD_DIMS = {"qwen3": 128, "gemma3": 256, "qwen3_next": 256}  # if unsaid; else hidden_size, shared
ROTARY_FACTORS = {"qwen3_next": 0.25}  # if unsaid; others turn all of a head
GEMMA_PATTERN = 6  # if unsaid; every sixth layer attends to all tokens
QWEN3_NEXT_PATTERN = 4  # the same


class _Unsaid(NamedTuple):
    """What holds of experts if unsaid; None for what a kind of them does not have."""

    num_experts: int
    num_chosen: int
    normalises: bool
    intermediate_size: int | None = None
    shared_intermediate_size: int | None = None


EXPERTS = {
    "mixtral": _Unsaid(8, 2, normalises=True),
    "qwen3_moe": _Unsaid(128, 8, normalises=False, intermediate_size=768),
    "qwen3_next": _Unsaid(
        512, 10, normalises=True, intermediate_size=512, shared_intermediate_size=512
    ),
}

Eos = TokenId | list[TokenId] | None


class _Fields(Struct):
    """The fields of config.json that matter here, with the values that they have if left out."""

    architectures: Annotated[list[str], Meta(min_length=1)]
    vocab_size: Size
    num_hidden_layers: NumLayers
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Positive = 1e-6
    hidden_act: str | None = None
    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    partial_rotary_factor: float | None = None
    rope_theta: Positive = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0)] = 28
    layer_types: list[str] | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: Eos = None
    quantization_config: Any = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: bool | None = None
    sliding_window_pattern: Size | None = None
    full_attention_interval: Size | None = None
    rope_local_base_freq: Positive = 10_000.0
    num_local_experts: Size | None = None
    num_experts: Annotated[int, Meta(ge=0, le=2**24)] | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None


class _Rope(Struct):
    rope_theta: Positive
    rope_type: str = "default"
    partial_rotary_factor: Share = 1.0


class _DeltaNetFields(Struct):
    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size


def config_from_json(mapping: Mapping[str, Any]) -> TransformerConfig:
    """Return what config.json says.

    Raises:
        BatchdecodeError: it is of another architecture, has a feature that is not supported, or is
        wrong.
    """
    known = ", ".join(ARCHITECTURES)
    named = mapping.get("architectures")
    name = named[0] if isinstance(named, list) and named else named
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BatchdecodeError(
            f"architecture {name!r} is not supported, known: {known}; for others use hf:FOLDER, "
            "which needs `pip install 'batchdecode[hf]'`"
        )
    architecture = ARCHITECTURES[name]
    try:
        fields = msgspec.convert(mapping, _Fields)
        try:
            rope, local_rope = _ropes_of(fields, architecture)
        except msgspec.ValidationError as error:
            raise BatchdecodeError(_in_config(str(error), fields)) from None
        kinds = _kinds_of(fields, architecture)
        delta_net = _delta_net_of(mapping, kinds)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(str(error)) from None
    _refuse_unsupported(fields)
    is_gemma, is_next = architecture == "gemma3", architecture == "qwen3_next"
    has_window = SLIDING in kinds and fields.sliding_window is not None
    scalar, ties = fields.query_pre_attn_scalar, fields.tie_word_embeddings
    head_dim = fields.head_dim or HEAD_DIMS.get(architecture)
    return TransformerConfig(
        architecture,
        vocab_size=fields.vocab_size,
        num_layers=fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=head_dim or head_dim_of(fields.hidden_size, fields.num_attention_heads),
        intermediate_size=fields.intermediate_size,
        rms_norm_eps=fields.rms_norm_eps,
        max_position_embeddings=fields.max_position_embeddings,
        rope=rope,
        sliding_window=fields.sliding_window if has_window else None,
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture in {"qwen3", "qwen3_moe", "qwen3_next", "gemma3"},
        ties_embeddings=is_gemma if ties is None else ties,
        eos_token_ids=eos_token_ids(fields.eos_token_id),
        full_layers=tuple(n for n, kind in enumerate(kinds) if kind == FULL) if has_window else (),
        local_rope=local_rope if has_window else None,
        activation=_activation_of(fields, architecture),
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_softcap=fields.attn_logit_softcapping,
        logit_softcap=fields.final_logit_softcapping,
        embedding_scale=fields.hidden_size**0.5 if is_gemma else 1.0,
        has_offset_norms=is_gemma or is_next,
        has_post_norms=is_gemma,
        has_output_gate=is_next,
        experts=_experts_of(fields, architecture),
        delta_net=delta_net,
    )


def eos_token_ids(given: Eos) -> tuple[int, ...]:
    """Return the tokens that end a text, which config.json has as none, one or a list."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(dict.fromkeys(given))


def _refuse_unsupported(fields: _Fields) -> None:
    """Raise a BatchdecodeError if a model has what is not computed here."""
    for name in ("attention_bias", "mlp_bias"):
        if getattr(fields, name):
            raise BatchdecodeError(
                f"{name} is not supported; known: biases of q, k and v in Qwen2ForCausalLM"
            )
    if fields.use_bidirectional_attention:
        raise BatchdecodeError("use_bidirectional_attention is not supported: nothing is generated")
    if fields.quantization_config is not None:
        raise BatchdecodeError(
            "quantization_config is not supported; known: F32, F16 and BF16, or a .gguf file"
        )


def _activation_of(fields: _Fields, architecture: Architecture) -> Activation:
    unsaid = "gelu_pytorch_tanh" if architecture == "gemma3" else "silu"
    name = fields.hidden_act or fields.hidden_activation or unsaid
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise BatchdecodeError(f"hidden_act {name!r} is not supported, known: {known}")
    return ACTIVATIONS[name]


def _in_config(message: str, fields: _Fields) -> str:
    """Return what is wrong with the RoPE, with the place in config.json."""
    for holder in ("rope_parameters", "rope_scaling"):
        given = getattr(fields, holder)
        found = re.search(r"`\$\.(\w+)", message)
        if given and found is None:
            return f"{message} - at `$.{holder}`"
        if given and found is not None and found[1] in given:
            return message.replace("`$.", f"`$.{holder}.", 1)
    return message


def _ropes_of(
    fields: _Fields, architecture: Architecture
) -> tuple[RopeSettings, RopeSettings | None]:
    """Return the RoPE of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    The second is that of layers with a window, where it is another one.

    Raises:
        BatchdecodeError: it is of a kind that is not supported.
        ValidationError: a value is wrong.
    """
    part = fields.partial_rotary_factor
    given = {
        "rope_theta": fields.rope_theta,
        "partial_rotary_factor": ROTARY_FACTORS.get(architecture, 1.0) if part is None else part,
        **(fields.rope_scaling or {}),
        **(fields.rope_parameters or {}),
    }
    if architecture != "gemma3":
        return _rope_of(given, architecture), None
    by_kind = {
        kind: value for kind in (FULL, SLIDING) if isinstance(value := given.pop(kind, None), dict)
    }
    local = by_kind.get(SLIDING, {"rope_theta": fields.rope_local_base_freq})
    return _rope_of(by_kind.get(FULL, given), architecture), _rope_of(local, architecture)


def _rope_of(given: dict[str, Any], architecture: Architecture) -> RopeSettings:
    given.setdefault("rope_type", given.get("type") or "default")
    if any(isinstance(value, dict) for value in given.values()):
        raise BatchdecodeError("layers with a RoPE of their own are not supported")
    rope = msgspec.convert(given, _Rope)
    if rope.rope_type not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise BatchdecodeError(f"RoPE of type {rope.rope_type!r} is not supported, known: {known}")
    if rope.partial_rotary_factor != 1 and architecture not in ROTARY_FACTORS:
        raise BatchdecodeError("partial_rotary_factor is not supported, known: 1")
    kind = SCALINGS[rope.rope_type]
    scaling = None if kind is None else msgspec.convert(given, kind)
    return RopeSettings(rope.rope_theta, "half-split", scaling, rope.partial_rotary_factor)


def _kinds_of(fields: _Fields, architecture: Architecture) -> list[str]:
    """Return what each layer mixes tokens by.

    Raises:
        BatchdecodeError: there is one of another kind, or not one for each layer.
    """
    num_layers, kinds = fields.num_hidden_layers, fields.layer_types
    if architecture == "llama":
        return [FULL] * num_layers
    if architecture in {"mistral", "mixtral"}:
        return [FULL if fields.sliding_window is None else SLIDING] * num_layers
    if kinds is None and architecture == "gemma3":
        pattern = fields.sliding_window_pattern or GEMMA_PATTERN
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    is_next = architecture == "qwen3_next"
    if kinds is None and is_next:
        pattern = fields.full_attention_interval or QWEN3_NEXT_PATTERN
        return [LINEAR if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    if kinds is None:
        first = fields.max_window_layers if fields.use_sliding_window else num_layers
        return [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    known = (FULL, LINEAR if is_next else SLIDING)
    if len(kinds) != num_layers or not {*kinds} <= {*known}:
        raise BatchdecodeError(
            f"layer_types are not one for each of {num_layers} layers, known: {', '.join(known)}"
        )
    if SLIDING in kinds and fields.sliding_window is None:
        raise BatchdecodeError(f"layers have {SLIDING}, and no sliding_window")
    return kinds


def _delta_net_of(mapping: Mapping[str, Any], kinds: list[str]) -> DeltaNetSettings | None:
    """Return the gated delta nets of a model, if it has any.

    Raises:
        ValidationError: a size is missing or wrong.
    """
    if LINEAR not in kinds:
        return None
    fields = msgspec.convert(mapping, _DeltaNetFields)
    return DeltaNetSettings(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
        num_key_heads=fields.linear_num_key_heads,
        num_value_heads=fields.linear_num_value_heads,
        key_head_dim=fields.linear_key_head_dim,
        value_head_dim=fields.linear_value_head_dim,
        kernel_size=fields.linear_conv_kernel_dim,
    )


def _experts_of(fields: _Fields, architecture: Architecture) -> ExpertSettings | None:
    """Return the experts of a model, if it has any.

    Raises:
        BatchdecodeError: a token goes through more than there are.
    """
    unsaid, is_mixtral = EXPERTS.get(architecture), architecture == "mixtral"
    if unsaid is None or (fields.num_experts == 0 and not is_mixtral):
        return None
    num_experts = fields.num_local_experts or fields.num_experts or unsaid.num_experts
    num_chosen = fields.num_experts_per_tok or unsaid.num_chosen
    if num_chosen > num_experts:
        raise BatchdecodeError(f"{num_chosen} experts for a token, of {num_experts}")
    step, dense = fields.decoder_sparse_step, {*(fields.mlp_only_layers or ())}
    normalises = unsaid.normalises if fields.norm_topk_prob is None else fields.norm_topk_prob
    wide = None if is_mixtral else fields.moe_intermediate_size or unsaid.intermediate_size
    shared = fields.shared_expert_intermediate_size or unsaid.shared_intermediate_size
    return ExpertSettings(
        layers=tuple(
            layer
            for layer in range(fields.num_hidden_layers)
            if layer not in dense and (layer + 1) % step == 0
        ),
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=wide or fields.intermediate_size,
        normalises=is_mixtral or normalises,
        shared_intermediate_size=shared if architecture == "qwen3_next" else None,
    )
