"""Writes a trained model as a folder that `--model` and transformers read."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batcher.errors import BatchdecodeError
from batcher.training.data import write_whole
from batcher.transformer.checkpoint import CONFIG
from batcher.transformer.config import TransformerConfig
from batcher.transformer.stored import ALONE
from batcher.transformer.tokenizer import TOKENIZER


def write_model(
    folder: Path, config: TransformerConfig, weights: dict[str, Any], tokenizer: bytes
) -> None:
    """Write config.json, tokenizer.json and, at last, model.safetensors.

    weights: by name, arrays that are written as float16.

    Raises:
        BatchdecodeError: a weight is too large for float16.
        OSError: there is no room, or no permission.
    """
    from safetensors.numpy import save  # noqa: PLC0415 - optional

    with np.errstate(over="ignore"):  # of which more is said below
        halves = {name: weight.astype(np.float16) for name, weight in weights.items()}
    for name, weight in halves.items():
        if not np.isfinite(weight).all():
            raise BatchdecodeError(f"{name} has a weight that is too large for float16")
    fields = msgspec.json.format(msgspec.json.encode(config_json(config)), indent=2)
    write_whole(folder / CONFIG, fields + b"\n")
    write_whole(folder / TOKENIZER, tokenizer)
    write_whole(folder / ALONE, save(halves, {"format": "pt"}))


def config_json(config: TransformerConfig) -> dict[str, Any]:
    """Return config.json of a Llama, as transformers has it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.ties_embeddings,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_ids[0],
    }
