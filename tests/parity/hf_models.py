"""Tiny models of transformers with random weights, of every kind that is computed differently."""

import torch
import transformers

VOCAB = 300
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
}
NO_EOS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = {"query_pre_attn_scalar": 16, **WINDOW, **ALTERNATING}
PAGED = {
    "llama": ("LlamaConfig", SIZES),
    "llama with tied weights": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SIZES, **WINDOW}),
    "qwen3": ("Qwen3Config", SIZES),
    "qwen3 with experts": ("Qwen3MoeConfig", {**SIZES, **EXPERTS, "num_experts": 4}),
    "gemma 2": ("Gemma2Config", {**SIZES, **GEMMA}),
    "gemma 3": ("Gemma3TextConfig", {**SIZES, **GEMMA}),
    "gpt-oss": ("GptOssConfig", {**SIZES, **WINDOW, "num_local_experts": 4}),
    "gpt-2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_positions": 160, "n_embd": 64, "n_layer": 4, "n_head": 4},
    ),
}
ROW_BY_ROW = {
    "qwen3-next": ("Qwen3NextConfig", {**SIZES, **DELTA_NET, "num_experts": 0}),
    "mamba 2": (
        "Mamba2Config",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "n_groups": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
        },
    ),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
}

STRENGTHS = {
    "gpt-2": 8,
    "bloom": 20,
    "llama with tied weights": 8,
}  # or else outputs repeat a token


def random_model(name, **changes):
    """Return a model whose greedy outputs are of many tokens."""
    kind, fields = (PAGED | ROW_BY_ROW)[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**fields, **NO_EOS, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(STRENGTHS.get(name, 1.6))
    return model


def generated(model, prompt, max_tokens, **settings):
    """Return what transformers generates, greedily and alone."""
    given = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        tokens = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_tokens,
            do_sample=False,
            **{"eos_token_id": None, "pad_token_id": 0, **settings},
        )
    return tokens[0, len(prompt) :].tolist()
