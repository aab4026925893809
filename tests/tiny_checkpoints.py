"""Checkpoints of a few thousand random numbers, as transformers and llama.cpp write them."""

import json
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

from batcher.transformer.config import config_from_json, tensor_specs
from batcher.transformer.stored import StoredTensor
from batcher.transformer.tokenizer import _BYTE_OF

BYTES = [character for character, _ in sorted(_BYTE_OF.items(), key=lambda pair: pair[1])]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTES, "Ġt", "he", "Ġthe", "<think>"]
MERGES = ["Ġ t", "h e", "Ġt he"]
TOKEN_TYPES = [3, 3, *(1 for _ in BYTES), 1, 1, 1, 4]
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}{{ eos_token }}
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
""".removeprefix("\n")
GGUF_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
OWN_FIELDS = {
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    }
}

GOLDEN_PROMPT = [(7 * place * place + 3 * place) % len(TOKENS) for place in range(40)]


def config_json(architecture="llama", **changes):
    """Return a config.json of a tiny model; a change to None takes the field away."""
    fields = {
        "architectures": [CLASSES[architecture]],
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        **OWN_FIELDS.get(architecture, {}),
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def random_tensors(fields, seed=0):
    """Return tensors for a config.json, by name, each [out, in]."""
    shapes = {spec.name: spec.shape for spec in tensor_specs(config_from_json(fields))}
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def random_weights(config):
    """Return what reads weights under which all layers matter, each by its name and shape alone."""
    shapes = {spec.name: spec.shape for spec in tensor_specs(config)}

    def read(name):
        drawn = np.random.default_rng([*name.encode()]).standard_normal(shapes[name], np.float32)
        if name.endswith("A_log"):
            return drawn - 3  # fades by a twentieth a token: what was long ago still counts
        if "norm" in name:
            is_offset = config.has_offset_norms and "linear_attn" not in name
            return drawn * np.float32(0.1) + (0 if is_offset else 1)
        is_table = name.startswith(("model.embed", "lm_head"))
        return drawn if is_table else drawn * np.float32(0.3)

    return read


def random_stored(config):
    """Return the same as tensors in a file, by name."""
    read = random_weights(config)
    return {
        spec.name: StoredTensor("F32", spec.shape, read(spec.name).ravel().view(np.uint8))
        for spec in tensor_specs(config)
    }


def write_folder(folder, fields=None, tensors=None, num_shards=1):
    """Write a checkpoint as transformers does; return its folder."""
    fields = config_json() if fields is None else fields
    tensors = random_tensors(fields) if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    shard_of = {
        name: f"model-{index % num_shards + 1:05}-of-{num_shards:05}.safetensors"
        for index, name in enumerate(tensors)
    }
    for shard in sorted(set(shard_of.values())):
        save_file(
            {name: tensors[name] for name in tensors if shard_of[name] == shard}, folder / shard
        )
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_named(folder, fields):
    read = random_weights(config_from_json(fields))
    tensors = {spec.name: read(spec.name) for spec in tensor_specs(config_from_json(fields))}
    return write_folder(folder, fields, tensors)


class Vocabulary(NamedTuple):
    """Tokens with their types, as GGUF counts them, and which are merged, in this order."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float] = []  # noqa: RUF012 - of a vocabulary of sentencepiece, which has no merges


TINY = Vocabulary(TOKENS, TOKEN_TYPES, MERGES)


def write_gguf(
    path,
    architecture="llama",
    kind="F32",
    tensors=None,
    with_fields=None,
    vocabulary=TINY,
    **fields,
):
    """Write a checkpoint as llama.cpp's conversion does, but for the order of llama's q and k.

    with_fields: a function that adds metadata to the writer; fields: changes to `config_json`.
    """
    fields = config_json(architecture, **fields)
    tensors = random_tensors(fields) if tensors is None else tensors
    writer = GGUFWriter(path, GGUF_ARCHITECTURES.get(architecture, architecture))
    if fields.get("sliding_window") is not None:
        writer.add_sliding_window(fields["sliding_window"])
    num_experts = fields.get("num_local_experts") or fields.get("num_experts")
    if num_experts is not None:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(fields["num_experts_per_tok"])
    if "moe_intermediate_size" in fields:
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields["rope_theta"])
    if vocabulary.scores:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(vocabulary.scores)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if not vocabulary.scores:
        writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    if with_fields is not None:
        with_fields(writer)
    for name, tensor in gguf_tensors(architecture, tensors).items():
        quantisation = GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(tensor, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(architecture, tensors):
    """Return tensors by the names that GGUF has: those of all experts in one, Gemma's norms + 1."""
    fields = config_json(architecture, num_hidden_layers=4, tie_word_embeddings=False)
    specs = {spec.name: spec for spec in tensor_specs(config_from_json(fields))}
    named, stacks = {}, {}
    for name, tensor in tensors.items():
        is_offset = architecture == "gemma3" and name.endswith("norm.weight")
        given = tensor + np.float32(1) if is_offset else tensor
        spec = specs.get(name)
        if spec is None or spec.expert is None:
            named[name if spec is None else spec.gguf] = given
        else:
            stacks.setdefault(spec.gguf, []).append(given)
    return named | {name: np.stack(parts) for name, parts in stacks.items()}
