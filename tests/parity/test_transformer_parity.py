"""Logits and greedy tokens of every architecture are those of transformers on the same weights."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_runs import drained  # noqa: E402 - as above
from one_forward import logits_after_each  # noqa: E402 - after what may be missing

from batcher import ByteTokenizer, Engine, Request  # noqa: E402 - as above
from batcher.models.checkpoints import open_checkpoint  # noqa: E402 - as above
from batcher.models.transformer import TransformerModel  # noqa: E402 - as above
from batcher.transformer.transformer import Transformer  # noqa: E402 - as above
from batcher.transformer.weights import Weights  # noqa: E402 - as above

SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    **EXPERTS,
    "head_dim": 16,
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
CASES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama 3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": 20}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 with windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma 3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 10.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"head_dim": 8, "num_local_experts": 4}),
    "qwen3 with experts": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3 with some experts": ("Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [1]}),
    "qwen3-next": ("Qwen3NextConfig", HYBRID),
    "qwen3-next with dense layers": ("Qwen3NextConfig", {**HYBRID, "num_experts": 0}),
    "qwen3-next with some of each": (
        "Qwen3NextConfig",
        {
            **HYBRID,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
        },
    ),
}


def saved(name, folder):
    """Return a model of transformers with random weights, after saving it."""
    kind, changes = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    is_offset = kind.startswith(("Gemma", "Qwen3Next"))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            drawn = torch.randn_like(weight) * (0.2 if weight.ndim > 1 else 0.1)
            is_plain = "linear_attn.norm" in weight_name or not is_offset
            if weight_name.endswith("A_log"):
                drawn -= 3  # memories that fade at once are about 0, and then normalised
            weight.copy_(drawn + (1 if "norm" in weight_name and is_plain else 0))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_transformers_does(name, tmp_path):
    theirs = saved(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ours = Transformer(checkpoint.config, Weights(checkpoint.tensors))
    token_ids = np.random.default_rng(1).integers(0, 256, 90)
    with torch.no_grad():
        expected = theirs(torch.tensor(token_ids)[None]).logits[0].numpy()
    logits = logits_after_each(ours, token_ids.tolist())
    assert np.abs(logits - expected).max() < 1e-4

    engine = Engine(TransformerModel(ours, ByteTokenizer(), name, {}), 3)
    request = Request(prompt=token_ids[:40].tolist(), max_tokens=64, ignore_eos=True)
    [result] = drained(engine, [request]).results
    with torch.no_grad():
        generated = theirs.generate(
            torch.tensor(token_ids[:40])[None],
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert result.tokens == generated[0, 40:].tolist()


def test_the_golden_cases_are_those_of_transformers():
    import golden_transformers  # noqa: PLC0415 - it needs torch

    kept = json.loads(golden_transformers.PATH.read_text())
    for case, expected in zip(kept, golden_transformers.cases(), strict=True):
        assert case.pop("logits") == pytest.approx(expected.pop("logits"), abs=1e-4)
        assert case == expected
