"""Tiny models of transformers with random weights, of every kind that is computed differently."""

from random import Random

import torch
import transformers
from engine_runs import drained

from batcher import Engine, Request
from batcher.settings import SchedulingSettings

SCHEDULES = {
    "plain": {},
    "chunks": {"max_batch_tokens": 7, "prefill_order": "prefill-first"},
    "few blocks": {"kv_blocks": 80, "block_size": 4, "max_batch_tokens": 12},
    "prefix cache": {"prefix_cache": True, "block_size": 4, "long_prefill_threshold": 5},
}
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
SWITCH = 28  # tokens: some of what is generated is shorter, some prompts are longer
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": SWITCH,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PHI = {"original_max_position_embeddings": SWITCH, "sliding_window": None}


def turned(kind, rope, **fields):
    return kind, {**SIZES, "rope_parameters": {"rope_theta": 1e4, **rope}, **fields}


ROPES = {  # by type and model
    "default": turned("LlamaConfig", {"rope_type": "default"}),
    "linear": turned("LlamaConfig", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": turned("LlamaConfig", {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": turned(
        "LlamaConfig",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SWITCH},
    ),
    "llama3": turned("LlamaConfig", LLAMA_3),
    "proportional": turned(
        "LlamaConfig", {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    ),
    "longrope": turned("LlamaConfig", LONG_ROPE),
    "longrope of phi 3": turned("Phi3Config", LONG_ROPE, **PHI),
    "longrope of phi 4 mini": turned(
        "Phi3Config",
        {
            **LONG_ROPE,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0] * 6,
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        },
        tie_word_embeddings=True,
        **PHI,
    ),
    "longrope of phi 3.5 with experts": turned(
        "PhimoeConfig",
        {**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.6},
        num_local_experts=4,
        **PHI,
    ),
}
PAGED = ROPES | {
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
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16},
    ),
    "bamba": (
        "BambaConfig",
        {
            **SIZES,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
    ),
    "rwkv": (
        "RwkvConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 160},
    ),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
}

STRENGTHS = {
    "gpt-2": 8,
    "bloom": 20,
    "longrope": 4,
    "longrope of phi 3": 4,
    "longrope of phi 4 mini": 8,
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


def be_quiet():
    torch.set_num_threads(1)  # of tiny products several only wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def prompts(draw=None, lengths=(3, 17, 9, 30, 1, 12, 50)):
    draw = draw or Random(0)
    shared = [draw.randrange(3, VOCAB) for _ in range(8)]
    drawn = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    return [*drawn, shared + drawn[0], shared + drawn[1]]


def run_of(model, requests, batch_size=3, schedule=None, speculation=None):
    settings = SchedulingSettings(**(schedule or {}))
    engine = Engine(model, batch_size, settings=settings, speculation=speculation)
    asked = [
        Request(**{"id": str(number), "ignore_eos": True, **fields})
        for number, fields in enumerate(requests)
    ]
    run = drained(engine, asked)
    assert not [result.error for result in run.results if result.error]
    run.results.sort(key=lambda result: (int(result.id), result.index))
    return run


def results_of(*given, **more):
    return run_of(*given, **more).results
