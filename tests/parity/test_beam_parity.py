"""Beam search equals Hugging Face's `generate`, sequence for sequence, on tiny random models."""

import json
import random
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from batcher.decoding.beams import BeamSearch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # more only wait for each other, on models as small as these

PAD = 10**6  # no token: where `generate` pads, a sequence has ended


class Setting(NamedTuple):
    architecture: Literal["llama", "gpt2"]
    vocab_size: int
    eos: tuple[int, ...]
    eos_bias: float
    prompt: tuple[int, ...]
    num_beams: int
    num_results: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_tokens: int
    repetition_penalty: float
    min_tokens: int


def random_settings(count):
    draw = random.Random(7)
    settings = []
    for number in range(count):
        num_beams = number % 6 + 1
        vocab_size = draw.choice([30, 64, 100])
        max_tokens = draw.choice([1, 2, 5, 9, 16, 16])
        settings.append(
            Setting(
                architecture=draw.choice(["llama", "gpt2"]),
                vocab_size=vocab_size,
                eos=draw.choice([(), (2,), (2,), (2,), (2,), (2, 5), (2, 5, 6)]),
                eos_bias=draw.choice([1.0, 3.0, 5.0]),
                prompt=tuple(draw.randrange(7, vocab_size) for _ in range(draw.randint(1, 8))),
                num_beams=num_beams,
                num_results=draw.randint(1, num_beams),
                length_penalty=draw.choice([-1.0, -0.3, 0.0, 0.5, 1.0, 2.0]),
                early_stopping=draw.choice([False, True, "never"]),
                max_tokens=max_tokens,
                repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
                min_tokens=draw.choice([0, 0, max_tokens // 2]),
            )
        )
    return settings


@cache
def model_of(architecture, vocab_size, eos, eos_bias):
    torch.manual_seed(vocab_size)
    sizes = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": None}
    model: Any
    if architecture == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=False,
            **sizes,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=64, tie_word_embeddings=False, **sizes
        )
        model = transformers.GPT2LMHeadModel(config)
    model.lm_head = torch.nn.Linear(16, vocab_size)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.5)
        model.lm_head.bias.zero_()
        for token in eos:
            model.lm_head.bias[token] += eos_bias
    return model.eval()


def by_generate(setting):
    """Return the sequences of `generate` and their scores, which one beam does not have."""
    output = model_of(*setting[:4]).generate(
        torch.tensor([setting.prompt]),
        attention_mask=torch.ones(1, len(setting.prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=setting.num_beams,
        num_return_sequences=setting.num_results,
        length_penalty=setting.length_penalty,
        early_stopping=setting.early_stopping,
        max_new_tokens=setting.max_tokens,
        min_new_tokens=setting.min_tokens,
        repetition_penalty=setting.repetition_penalty,
        eos_token_id=list(setting.eos) or None,
        pad_token_id=PAD,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = output.sequences[:, len(setting.prompt) :].tolist()
    scores = None if setting.num_beams == 1 else output.sequences_scores.tolist()
    return [[token for token in row if token != PAD] for row in rows], scores


def by_beam_search(setting):
    search = BeamSearch(
        num_beams=setting.num_beams,
        num_results=setting.num_results,
        length_penalty=setting.length_penalty,
        early_stopping=setting.early_stopping,
        max_tokens=setting.max_tokens,
        num_eos=len(setting.eos),
    )
    processors = processors_of(setting)
    prefixes = [list(setting.prompt)]
    while True:
        step = search.advance(
            log_probs(setting, processors, prefixes), lambda _, token: token in setting.eos
        )
        if step is None:
            return search.results()
        prefixes = [
            [*prefixes[parent], token]
            for parent, token in zip(step.parents, step.tokens, strict=True)
        ]


def processors_of(setting):
    processors = transformers.LogitsProcessorList()
    if setting.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(setting.repetition_penalty))
    if setting.eos and setting.min_tokens:
        processors.append(
            transformers.MinNewTokensLengthLogitsProcessor(
                len(setting.prompt), setting.min_tokens, list(setting.eos)
            )
        )
    return processors


def log_probs(setting, processors, prefixes):
    rows = torch.tensor(prefixes)
    with torch.no_grad():
        scores = model_of(*setting[:4])(rows).logits[:, -1]
    if setting.num_beams > 1:  # one beam is greedy decoding, whose processors get logits
        scores = torch.log_softmax(scores, dim=-1)
    return np.asarray(processors(rows, scores), np.float32)


@pytest.mark.parametrize("setting", random_settings(180))
def test_the_hypotheses_are_those_of_generate(setting):
    expected_rows, expected_scores = by_generate(setting)
    hypotheses = by_beam_search(setting)
    assert [hypothesis.tokens for hypothesis in hypotheses] == expected_rows
    if expected_scores is not None:
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == pytest.approx(expected_scores, abs=1e-4)
    for hypothesis in hypotheses:
        assert hypothesis.has_ended == (hypothesis.tokens[-1] in setting.eos)


def test_the_golden_cases_are_those_of_generate():
    import golden_beams  # noqa: PLC0415 - it needs torch

    kept = json.loads(golden_beams.PATH.read_text())
    for case, expected in zip(kept, golden_beams.cases(), strict=True):
        assert case.pop("scores") == pytest.approx(expected.pop("scores"), abs=1e-5)
        assert case == expected
