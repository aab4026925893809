"""Which tensors a model has, of which shapes, and what Hugging Face calls them."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from batcher.transformer.config import DeltaNetSettings, TransformerConfig

Shape = tuple[int, ...]
ROPE_FACTORS = "rope_freqs.weight"  # of GGUF

_IGNORED = {
    ROPE_FACTORS,  # read with the settings of RoPE
    "lm_head.weight",  # a copy of the embedding, where that is tied
}


PARTS = ("gate_proj", "up_proj", "down_proj")  # of a gated network


class ExpertNames(NamedTuple):
    """What the parts of a layer with experts are called; parts: gate, up and down."""

    router: str
    expert: str
    parts: tuple[str, str, str]


EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ExpertNames("mlp.gate", "mlp.experts", PARTS),
    "qwen3_next": ExpertNames("mlp.gate", "mlp.experts", PARTS),
}
SHARED_EXPERT, SHARED_EXPERT_GATE = "mlp.shared_expert", "mlp.shared_expert_gate"


def tensor_shapes(config: TransformerConfig) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of a model, by Hugging Face's name, and its shape: [out, in] of weights.

    One by one, since a config may claim more layers and experts than there is memory for names.
    """
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.ties_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    attention, delta_net = _attention_shapes(config), config.delta_net
    recurrent = {} if delta_net is None else _delta_net_shapes(delta_net, hidden)
    recurrent_layers = () if delta_net is None else delta_net.layers
    norms: dict[str, Shape] = {"post_attention_layernorm.weight": (hidden,)}
    if config.has_post_norms:
        norms["pre_feedforward_layernorm.weight"] = (hidden,)
        norms["post_feedforward_layernorm.weight"] = (hidden,)
    for index in range(config.num_layers):
        yield f"model.layers.{index}.input_layernorm.weight", (hidden,)
        mixer = recurrent if index in recurrent_layers else attention
        feed_forward = _feed_forward_shapes(config, index)
        for name, shape in chain(mixer.items(), norms.items(), feed_forward):
            yield f"model.layers.{index}.{name}", shape


def _attention_shapes(config: TransformerConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries * (2 if config.has_output_gate else 1), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if config.has_qkv_bias:
        shapes["self_attn.q_proj.bias"] = (queries,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (keys,)
    if config.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _delta_net_shapes(delta_net: DeltaNetSettings, hidden: int) -> dict[str, Shape]:
    num_heads = delta_net.num_value_heads
    return {
        "linear_attn.in_proj_qkvz.weight": (delta_net.num_channels + delta_net.value_size, hidden),
        "linear_attn.in_proj_ba.weight": (2 * num_heads, hidden),
        "linear_attn.conv1d.weight": (delta_net.num_channels, 1, delta_net.kernel_size),
        "linear_attn.dt_bias": (num_heads,),
        "linear_attn.A_log": (num_heads,),
        "linear_attn.norm.weight": (delta_net.value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, delta_net.value_size),
    }


def _feed_forward_shapes(config: TransformerConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or layer not in experts.layers:
        yield from _network_shapes("mlp", PARTS, config.intermediate_size, hidden)
        return
    names = EXPERT_NAMES[config.architecture]
    yield f"{names.router}.weight", (experts.num_experts, hidden)
    for number in range(experts.num_experts):
        name = f"{names.expert}.{number}"
        yield from _network_shapes(name, names.parts, experts.intermediate_size, hidden)
    if experts.shared_intermediate_size is not None:
        yield f"{SHARED_EXPERT_GATE}.weight", (1, hidden)
        yield from _network_shapes(SHARED_EXPERT, PARTS, experts.shared_intermediate_size, hidden)


def _network_shapes(
    name: str, parts: tuple[str, str, str], wide: int, hidden: int
) -> Iterator[tuple[str, Shape]]:
    for part, shape in zip(parts, [(wide, hidden), (wide, hidden), (hidden, wide)], strict=True):
        yield f"{name}.{part}.weight", shape


def is_ignored(name: str) -> bool:
    """Return whether a model may have a tensor of this name that is not needed."""
    return (
        name in _IGNORED
        or name.endswith(".rotary_emb.inv_freq")  # which follows from theta
        or name.startswith("mtp.")  # of Qwen3-Next: drafts of the tokens after the next
    )
