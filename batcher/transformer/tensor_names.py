"""Which tensors a model has, of which shapes, and what Hugging Face and GGUF call them."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from batcher.transformer.config import TransformerConfig

Shape = tuple[int, ...]
ROPE_FACTORS = "rope_freqs.weight"  # of GGUF
GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

_IGNORED = {
    ROPE_FACTORS,  # read with the settings of RoPE
    "lm_head.weight",  # a copy of the embedding, where that is tied
}


class ExpertNames(NamedTuple):
    """What the parts of a layer with experts are called; parts: gate, up and down."""

    router: str
    expert: str
    parts: tuple[str, str, str]


EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ExpertNames("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def tensor_shapes(config: TransformerConfig) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of a model, by Hugging Face's name, and its shape: [out, in] of weights.

    One by one, since a config may claim more layers and experts than there is memory for names.
    """
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.ties_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    attention = _attention_shapes(config)
    for index in range(config.num_layers):
        for name, shape in chain(attention.items(), _feed_forward_shapes(config, index)):
            yield f"model.layers.{index}.{name}", shape


def _attention_shapes(config: TransformerConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.has_qkv_bias:
        shapes["self_attn.q_proj.bias"] = (queries,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (keys,)
    if config.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.has_post_norms:
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    return shapes


def _feed_forward_shapes(config: TransformerConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or layer not in experts.layers:
        wide = config.intermediate_size
        yield "mlp.gate_proj.weight", (wide, hidden)
        yield "mlp.up_proj.weight", (wide, hidden)
        yield "mlp.down_proj.weight", (hidden, wide)
        return
    names, wide = EXPERT_NAMES[config.architecture], experts.intermediate_size
    yield f"{names.router}.weight", (experts.num_experts, hidden)
    for number in range(experts.num_experts):
        for name, shape in zip(names.parts, [(wide, hidden)] * 2 + [(hidden, wide)], strict=True):
            yield f"{names.expert}.{number}.{name}.weight", shape


def from_gguf_name(name: str) -> str:
    """Return what Hugging Face calls the tensor that GGUF calls `name`, or `name` itself."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    if block == "blk" and part in GGUF_LAYER_NAMES:
        return f"model.layers.{index}.{GGUF_LAYER_NAMES[part]}"
    return name


def is_ignored(name: str) -> bool:
    """Return whether a model may have a tensor of this name that is not needed."""
    return name in _IGNORED or name.endswith(".rotary_emb.inv_freq")  # which follows from theta
