"""What Hugging Face calls the tensors of a GGUF file; those of all experts lie in one there."""

from collections.abc import Iterator, Mapping

from batcher.errors import BatchdecodeError
from batcher.transformer.config import TransformerConfig
from batcher.transformer.stored import StoredTensor
from batcher.transformer.tensor_names import EXPERT_NAMES

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
POST_NORM_NAMES = {  # of layers that normalise what attention and the network come to as well
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
ROUTER = "ffn_gate_inp.weight"
STACKED = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
"""The parts of all experts, [experts, out, in], in the order of `ExpertNames.parts`."""


def gguf_layer_names(config: TransformerConfig) -> dict[str, str]:
    """Return what Hugging Face calls the tensors of a layer, but for those of experts."""
    return GGUF_LAYER_NAMES | (POST_NORM_NAMES if config.has_post_norms else {})


def from_gguf_names(
    config: TransformerConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors of a file by Hugging Face's names; what has none keeps its own.

    Raises:
        BatchdecodeError: there are not as many experts as there should be.
    """
    layer_names = gguf_layer_names(config)
    named: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        block, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        if block != "blk":
            named[GGUF_NAMES.get(name, name)] = tensor
        elif part in layer_names:
            named[f"model.layers.{index}.{layer_names[part]}"] = tensor
        elif config.experts is not None and part in {ROUTER, *STACKED}:
            for expert_name, own in _of_experts(config, name, part, tensor):
                named[f"model.layers.{index}.{expert_name}"] = own
        else:
            named[name] = tensor
    return named


def _of_experts(
    config: TransformerConfig, name: str, part: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the router, or the same part of each expert, by its name in the layer."""
    names = EXPERT_NAMES[config.architecture]
    if part == ROUTER:
        yield f"{names.router}.weight", tensor
        return
    num_experts = 0 if config.experts is None else config.experts.num_experts
    if len(tensor.shape) < 2 or tensor.shape[0] != num_experts:  # noqa: PLR2004 - of one or more
        shape = list(tensor.shape)
        raise BatchdecodeError(f"{name} is {shape}, and the model has {num_experts} experts")
    for number, data in enumerate(tensor.data.reshape(num_experts, -1)):
        own = StoredTensor(tensor.kind, tensor.shape[1:], data)
        yield f"{names.expert}.{number}.{names.parts[STACKED.index(part)]}.weight", own
