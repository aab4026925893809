"""Tiny transformers with random weights, and attention by its definition."""

import numpy as np
from tiny_checkpoints import random_weights

from batcher import ByteTokenizer
from batcher.events import Layout
from batcher.models.transformer import TransformerModel
from batcher.transformer.config import RopeSettings, TransformerConfig, WeightKind
from batcher.transformer.linear import WholeLinears
from batcher.transformer.transformer import Transformer

HIDDEN, HEAD, VOCABULARY, WIDE = 48, 8, 256, 80


def tiny_config(**changes: object) -> TransformerConfig:
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
        "rope": RopeSettings(theta=10000.0, style="half-split", scaling=None),
        "sliding_window": None,
        "has_qkv_bias": False,
        "has_qk_norm": False,
        "ties_embeddings": True,
        "eos_token_ids": (),
    }
    return TransformerConfig(**fields | changes)


def tiny_model(
    *,
    weights: WeightKind = "fp32",
    is_fast: bool = False,
    layout: Layout = "ragged",
    **changes: object,
) -> TransformerModel:
    config = tiny_config(**changes)
    read = random_weights(config)
    transformer = Transformer(config, read, WholeLinears(weights, is_fast=is_fast), layout)
    return TransformerModel(transformer, ByteTokenizer(), "tiny", {}, layout=layout)


def attention_by_definition(query, keys, values, window: int | None = None) -> np.ndarray:
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
