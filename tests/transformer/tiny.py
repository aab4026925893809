"""Tiny transformers of every kind with random weights, and attention by its definition."""

import numpy as np
from tiny_checkpoints import random_stored

from batcher import ByteTokenizer
from batcher.models.transformer import TransformerModel
from batcher.transformer.config import (
    DeltaNetSettings,
    ExpertSettings,
    RopeSettings,
    TransformerConfig,
)
from batcher.transformer.transformer import Transformer
from batcher.transformer.weights import Weights

HIDDEN, HEAD, VOCABULARY, WIDE = 48, 8, 256, 80
QWEN3_NEXT = {
    "architecture": "qwen3_next",
    "num_layers": 3,
    "head_dim": 16,
    "rope": RopeSettings(partial_rotary_factor=0.25),
    "has_qk_norm": True,
    "has_offset_norms": True,
    "has_output_gate": True,
    "experts": ExpertSettings(
        layers=(0, 1),
        num_experts=4,
        num_chosen=2,
        intermediate_size=32,
        normalises=True,
        shared_intermediate_size=20,
    ),
    "delta_net": DeltaNetSettings(
        layers=(0, 2),
        num_key_heads=2,
        num_value_heads=6,
        key_head_dim=12,
        value_head_dim=8,
        kernel_size=4,
    ),
}
KINDS = {  # of caches, of weights and of what follows attention
    "plain": {},
    "window": {"sliding_window": 20},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True, "ties_embeddings": False},
    "gemma3": {
        "architecture": "gemma3",
        "sliding_window": 20,
        "full_layers": (1,),
        "local_rope": RopeSettings(theta=100.0),
        "activation": "gelu_tanh",
        "attention_softcap": 5.0,
        "logit_softcap": 10.0,
        "embedding_scale": 48**0.5,
        "has_qk_norm": True,
        "has_offset_norms": True,
        "has_post_norms": True,
    },
    "experts": {
        "architecture": "mixtral",
        "experts": ExpertSettings(
            layers=(1,), num_experts=4, num_chosen=2, intermediate_size=32, normalises=True
        ),
    },
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next q8": {**QWEN3_NEXT, "weights": "q8"},
    "q8": {"weights": "q8"},
}


def tiny_config(**changes):
    fields = {
        "architecture": "llama",
        "vocab_size": VOCABULARY,
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": HEAD,
        "intermediate_size": WIDE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope": RopeSettings(),
        "ties_embeddings": True,
    }
    return TransformerConfig(**fields | changes)


def tiny_model(*, weights="fp32", layout="ragged", **changes):
    config = tiny_config(**changes)
    transformer = Transformer(config, Weights(random_stored(config), weights), layout)
    model = TransformerModel(transformer, ByteTokenizer(), "tiny", {})
    model.layout = layout
    return model


def attention_by_definition(query, keys, values, window=None):
    """Return softmax(QK^T / sqrt(d)) V of one sequence, [tokens, heads, d], in float64.

    query: of its last tokens.
    """
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    first = len(keys) - len(query)
    outputs = np.zeros_like(query)
    for token in range(len(query)):
        stop = first + token + 1
        start = 0 if window is None else max(stop - window, 0)
        for head in range(query.shape[1]):
            scores = keys[start:stop, head] @ query[token, head] / np.sqrt(query.shape[-1])
            shares = np.exp(scores - scores.max())
            outputs[token, head] = shares / shares.sum() @ values[start:stop, head]
    return outputs
