"""What transformers computes of tiny models: python tests/parity/golden_transformers.py writes it.

The default tests, which have no torch, compute the same of the same weights.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tiny_checkpoints import CLASSES, GOLDEN_PROMPT, config_json, write_named

PATH = Path(__file__).parents[1] / "golden" / "transformers.json"
NUM_TOKENS = 48
FIELDS = {
    "mistral": {"sliding_window": 20},
    "gemma3": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen3_next": {"num_hidden_layers": 3},
}


def cases():
    found = [case(config_json(name, **FIELDS.get(name, {}))) for name in CLASSES]
    dense = config_json("qwen3_next", **FIELDS["qwen3_next"], num_experts=0)
    return [*found, case(dense)]


def case(fields):
    """Return the logits after a prompt, and the likeliest tokens from there on."""
    with TemporaryDirectory() as folder:
        write_named(Path(folder), fields)
        kind = getattr(transformers, fields["architectures"][0])
        model = kind.from_pretrained(folder, attn_implementation="eager")
    token_ids = torch.tensor([GOLDEN_PROMPT])
    with torch.no_grad():
        logits = model(token_ids).logits[0, -1]
        generated = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),  # or its pads would be left out
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return {
        "fields": fields,
        "logits": [round(logit, 5) for logit in logits.tolist()],
        "tokens": generated[0, len(GOLDEN_PROMPT) :].tolist(),
    }


if __name__ == "__main__":
    PATH.write_text("[\n" + ",\n".join(map(json.dumps, cases())) + "\n]\n")
