"""Tiny models of every kind of cache, of weights and of what follows attention."""

from batcher.transformer.config import DeltaNetSettings, ExpertSettings, RopeSettings

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
KINDS = {
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
    "qwen3-next int8": {**QWEN3_NEXT, "weights": "int8-channel"},
    "int8": {"weights": "int8"},
    "int8-channel": {"weights": "int8-channel"},
}
