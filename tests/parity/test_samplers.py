"""Samplers against the list of processors that transformers' `generate` makes of the same settings.

`python tests/parity/test_samplers.py` writes the golden vectors anew that the default tests use.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from sampling_rows import Letters, drawn_from, language_like

from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import Sampler, SamplingRow, row_key

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
stats = pytest.importorskip("scipy.stats")

GOLDEN = Path(__file__).parent.parent / "golden" / "samplers.json"
SIZES = [5, 512, 32_000]
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.9},
    *({"top_k": k} for k in (1, 2, 50, 10**9)),
    *({"top_p": p} for p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0)),
    *({"min_p": p} for p in (0.001, 0.1, 0.5, 1.0)),
    *({"typical_p": p} for p in (0.05, 0.2, 0.5, 0.9, 0.99)),
    *({"repetition_penalty": r} for r in (0.5, 1.3, 5.0)),
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.1},
    {"logit_bias": ((0, 3.5), (2, -100.0), (4, 1.0))},
    {"allowed_token_ids": (1, 2, 4)},
    {"bad_words": ("Ă", "ĄĂ")},  # tokens 2, and 4 2
    {"min_tokens": 6},
    {"min_tokens": 2},
    {"cfg_scale": 1.5},
    {"cfg_scale": 0.0},
    {"cfg_scale": 7.5},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.3},  # the one that comes first decides what the other sees
    {"top_p": 0.5, "min_p": 0.1, "typical_p": 0.7},
    {"temperature": 0.6, "min_p": 0.02, "typical_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "typical_p": 0.8, "top_p": 0.95},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4, "top_p": 0.8},
    {"logit_bias": ((1, 2.0),), "repetition_penalty": 1.5, "temperature": 0.5, "top_k": 4},
    {"cfg_scale": 2.0, "bad_words": ("Ă",), "min_tokens": 9, "repetition_penalty": 1.1},
    {"cfg_scale": 3.0, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
]
PROMPT, GENERATED, STOPS = [3, 1, 3], [2, 4, 2, 4], (0,)


def settings(fields):
    return SamplingParams(**{"temperature": 1.0, **fields})


class Telling(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model that gives the same logits [vocab] whatever it is asked: those of a negative row."""

    config_class = transformers.PreTrainedConfig
    device = torch.device("cpu")  # which it would take from its weights

    def __init__(self, logits):
        super().__init__(transformers.PreTrainedConfig())
        self.logits = logits

    def forward(self, input_ids, **_):
        logits = self.logits.expand(*input_ids.shape, -1)
        return transformers.utils.ModelOutput(logits=logits, past_key_values=None)


class CountPenalties(transformers.LogitsProcessor):
    """vLLM's frequency and presence penalties, which transformers has not."""

    def __init__(self, params):
        self.params = params

    def __call__(self, _, scores):
        counts = torch.bincount(torch.tensor(GENERATED), minlength=scores.shape[1])
        frequency = self.params.frequency_penalty * counts
        return scores - frequency - self.params.presence_penalty * (counts > 0)


def theirs(logits, fields):
    """The log-probabilities [vocab] by the list of processors that `generate` makes and applies.

    In double precision: in single, their sums over a large vocabulary miss a cut by a token or two.
    """
    params = settings(fields)
    ids = torch.tensor([PROMPT + GENERATED])
    own, negative = torch.tensor(logits).double()
    model = Telling(negative)
    config = their_config(params)
    model._prepare_special_tokens(config)
    allowed = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(PROMPT),
        prefix_allowed_tokens_fn=None if allowed is None else lambda *_: allowed,
        logits_processor=transformers.LogitsProcessorList([CountPenalties(params)]),
        negative_prompt_ids=torch.tensor([[1]]),
    )
    return torch.log_softmax(processors(ids, own[None]), dim=-1)[0].numpy()


def their_config(params):
    words = [Letters(0).encode(word) for word in params.bad_words]
    return transformers.GenerationConfig(
        do_sample=True,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=STOPS[0],
        guidance_scale=params.cfg_scale,
        sequence_bias={(token_id,): value for token_id, value in params.logit_bias} or None,
        bad_words_ids=words or None,
        min_new_tokens=params.min_tokens or None,
        repetition_penalty=params.repetition_penalty,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        typical_p=params.typical_p,
        renormalize_logits=False,
    )


def ours(logits, fields):
    params = settings(fields)
    own = logits if params.cfg_scale != 1 else logits[0]
    return drawn_from(own, params, prompt=PROMPT, generated=GENERATED, stop_token_ids=STOPS)


def logits_of(kind, seed, vocab_size):
    """[2, vocab]: of a row, and of its negative prompt's."""
    rng = np.random.default_rng(seed)
    logits = language_like(rng, 2, vocab_size)
    if kind == "flat":
        logits = rng.normal(0, 0.3, logits.shape).astype(np.float32)
    if kind == "sharp":
        logits *= 5
    return logits


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("kind", ["language", "flat", "sharp"])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_the_same_tokens_stay_and_are_as_likely(fields, kind, vocab_size):
    for seed in range(2 if vocab_size > 1000 else 20):
        logits = logits_of(kind, seed, vocab_size)
        own, other = ours(logits, fields), theirs(logits, fields)
        differs = np.isfinite(own) != np.isfinite(other)
        assert np.exp(np.maximum(own, other)[differs]).sum() < 1e-6  # what lies on a cut
        both = np.isfinite(own) & np.isfinite(other)
        np.testing.assert_allclose(own[both], other[both], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_as_many_stay_where_logits_are_equal(fields):
    for seed in range(40):
        logits = logits_of("language", seed, 64 if seed % 2 else 5).round()
        own, other = ours(logits, fields), theirs(logits, fields)
        np.testing.assert_allclose(np.sort(own), np.sort(other), rtol=1e-5, atol=1e-5)


def golden_cases():
    """A small case of every setting, with Hugging Face's answer; None for what is dropped."""
    cases = []
    for number, fields in enumerate(SETTINGS):
        logits = logits_of("language", number, 12).round(3)
        expected = [None if np.isinf(x) else round(x, 6) for x in theirs(logits, fields).tolist()]
        rows = [[round(value, 3) for value in row] for row in logits.tolist()]
        cases.append({"settings": fields, "logits": rows, "expected": expected})
    return cases


def test_the_golden_vectors_are_those_of_this_version():
    kept = json.loads(GOLDEN.read_text())
    for case, fresh in zip(kept["cases"], golden_cases(), strict=True):
        assert case == json.loads(json.dumps(fresh))


@pytest.mark.parametrize("fields", SETTINGS[:1] + SETTINGS[-8:], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(fields):
    num_draws = 4000
    params = settings(fields)
    logits = logits_of("language", 3, 40)
    counts = draws(logits, params, num_draws)
    expected = np.exp(theirs(logits, fields)) * num_draws
    assert not counts[expected == 0].any()
    rare = expected < 5  # which a test takes together
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def draws(logits, params, num_draws):
    """How often each token is chosen, of samples of one request."""
    num_rows, counts = 100, np.zeros(logits.shape[1])
    is_guided = params.cfg_scale != 1
    for first in range(0, num_draws, num_rows):
        sampler = Sampler(2 * num_rows, len(counts), Letters(len(counts)))
        for row in range(num_rows):
            key = row_key(11, "draws", first + row)
            partner = 2 * row + 1 if is_guided else None
            sampler.open(2 * row, SamplingRow(params, key, PROMPT, STOPS, partner))
            for token in GENERATED:
                sampler.extend({2 * row: [token]})
        given = np.tile(logits if is_guided else logits[:1], (num_rows, 1))
        np.add.at(counts, sampler.sample(given).tokens[::2], 1)
    return counts


if __name__ == "__main__":
    about = "written by tests/parity/test_samplers.py with transformers " + transformers.__version__
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in golden_cases())
    GOLDEN.write_text(f'{{"about": "{about}", "cases": [\n{lines}\n]}}\n')
