"""What `generate` finds in tiny models: `python tests/parity/golden_beams.py` writes it.

The default tests, which have no torch, search the same tables.
"""

import json
import random
from pathlib import Path

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

PATH = Path(__file__).parents[1] / "golden" / "beams.json"
VOCAB_SIZE = 6
START, EOS, PAD = 1, 0, 10**6


class MarkovModel(PreTrainedModel, GenerationMixin):
    """A causal language model whose logits are a line of `table`, by the last token.

    They get a tenth sharper with each token, or sequences of the same pairs of tokens would tie.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, table):
        super().__init__(PretrainedConfig(vocab_size=len(table), is_encoder_decoder=False))
        self.table = torch.nn.Parameter(torch.tensor(table))

    def forward(self, input_ids, **_):
        sharpness = 1 + torch.arange(input_ids.shape[1]) / 10
        return CausalLMOutput(logits=self.table[input_ids] * sharpness[:, None])


def cases():
    draw = random.Random(11)
    return [
        case
        for num_beams in (2, 3, 5)
        for length_penalty in (-1.0, 0.0, 1.0, 2.0)
        for case in cases_of_one_model(draw, num_beams, length_penalty)
    ]


def cases_of_one_model(draw, num_beams, length_penalty):
    """Return what each early_stopping gives, of a model where they differ as far as they can."""
    num_distinct = 3 if length_penalty > 0 else 2 if length_penalty < 0 else 1
    while True:
        logits = [
            [round(draw.gauss(0, 1.5), 4) for _ in range(VOCAB_SIZE)] for _ in range(VOCAB_SIZE)
        ]
        same = {"num_beams": num_beams, "length_penalty": length_penalty, "max_tokens": 9}
        cases = [case(logits, **same, early_stopping=kind) for kind in (False, True, "never")]
        if len({str(case["tokens"]) for case in cases}) >= num_distinct:
            return cases


def case(logits, *, num_beams, length_penalty, early_stopping, max_tokens):
    output = MarkovModel(logits).generate(
        torch.tensor([[START]]),
        attention_mask=torch.ones(1, 1, dtype=torch.int64),
        do_sample=False,
        use_cache=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=max_tokens,
        eos_token_id=EOS,
        pad_token_id=PAD,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return {
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "max_tokens": max_tokens,
        "logits": logits,
        "tokens": [
            [token for token in row if token != PAD] for row in output.sequences[:, 1:].tolist()
        ],
        "scores": [round(score, 6) for score in output.sequences_scores.tolist()],
    }


if __name__ == "__main__":
    PATH.write_text("[\n" + ",\n".join(map(json.dumps, cases())) + "\n]\n")
