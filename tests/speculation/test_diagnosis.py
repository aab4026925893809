"""Faults that are planted in drafts, each named rightly; and what is no fault is none."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from examples import mostly_heavy

from batcher import Request, decode
from batcher.errors import BatchdecodeError
from batcher.models.base import FloatArray
from batcher.models.loading import as_model
from batcher.speculation.diagnosis import Side, TargetOutput, can_be_compared, diagnose

VOCAB_SIZE = 24
Logits = Callable[[list[int]], FloatArray]


class Letters:
    """A tokenizer: the letters from `first` on."""

    def __init__(self, first="a"):
        self.token_bytes = [bytes([ord(first) + place]) for place in range(VOCAB_SIZE)]

    def encode(self, text):
        return [self.token_bytes.index(letter.encode()) for letter in text]


class Asked:
    """A callable model: the logits after each prefix."""

    gives, vocab_size = "logits", VOCAB_SIZE

    def __init__(self, logits, tokenizer=None, eos=None):
        self.logits, self.tokenizer = logits, tokenizer or Letters()
        self.eos_token_id = eos

    def __call__(self, prefixes):
        return [self.logits(prefix) for prefix in prefixes]


def target(prefix):
    return 2.5 * drawn(1, prefix)


def good(prefix):
    return target(prefix) + 0.4 * drawn(2, prefix)


def weak(prefix):
    return 1.0 * target(prefix) + 2.5 * drawn(3, prefix)


def drawn(seed, prefix):
    """Return normal numbers [vocab] that depend on the last three tokens."""
    normal = np.random.default_rng([seed, *prefix[-3:]]).normal(size=VOCAB_SIZE)
    return normal.astype(np.float32)


def colder(prefix):
    return good(prefix) * 2


def late(prefix):
    return good(prefix[:-1])


def early(prefix):
    """Guess one token further than it is asked for: what a chunk that is one off would give."""
    return good([*prefix, int(target(prefix).argmax())])


class Stale:
    """A model whose cache misses every third token of those that come one by one."""

    def __init__(self):
        self.before = []
        self.kept = []

    def __call__(self, prefix):
        is_next = prefix[:-1] == self.before and len(self.before) > 0
        if not is_next:
            self.kept = prefix.copy()
        elif len(prefix) % 3:
            self.kept.append(prefix[-1])
        self.before = prefix.copy()
        return good(self.kept)


def rows_of(num_rows=5, length=24, **fields):
    """Return prompts and what the target writes after each."""
    rows = []
    random = np.random.default_rng(7)
    for number in range(num_rows):
        prompt = [number, 1, 2, 3]
        tokens = prompt.copy()
        for _ in range(length):
            chances = np.exp(target(tokens).astype(np.float64))
            tokens.append(int(random.choice(VOCAB_SIZE, p=chances / chances.sum())))
        rows.append(TargetOutput(Request(prompt=prompt, **fields), prompt, tokens[4:]))
    return rows


def model_of(logits, **more):
    return as_model(Asked(logits, **more), "a model")


def found(draft, draft_fields=None, **fields):
    fields = {"temperature": 1.0, **fields}
    return diagnose(rows_of(**fields), model_of(target), draft, draft_fields or {})


def test_a_draft_that_is_the_target_overlaps_wholly():
    diagnosis = found(model_of(target))
    assert diagnosis.overlap == pytest.approx(1, abs=1e-6)
    assert diagnosis.agreement == 1
    assert (diagnosis.num_rows, diagnosis.num_positions) == (5, 120)
    assert diagnosis.by_position == pytest.approx([1] * 24)
    assert diagnosis.cause == "none"
    assert not any(check.is_fault for check in diagnosis.checks)


FAULTS = {
    "weak": ("weak", partial(model_of, weak), {}, {}),
    "colder": ("temperature", partial(model_of, colder), {}, {}),
    "a setting": ("temperature", partial(model_of, good), {"temperature": 2.5}, {}),
    "no penalty": (
        *("processor", partial(model_of, good), {"repetition_penalty": 1.0}),
        {"repetition_penalty": 2.5},
    ),
    "no top_k": ("processor", partial(model_of, good), {"top_k": 0}, {"top_k": 2}),
    "no bias": (
        *("processor", partial(model_of, good), {"logit_bias": None}),
        {"logit_bias": {"3": 9.0}},
    ),
    "stale": ("cache", lambda: model_of(Stale()), {}, {}),
    "late": ("positions", partial(model_of, late), {}, {}),
    "other letters": ("tokenizer", partial(model_of, good, tokenizer=Letters("A")), {}, {}),
    "another end": ("tokenizer", partial(model_of, good, eos=5), {}, {}),
}


QUICK = ("weak", "a setting", "stale", "late", "other letters")  # one of each cause


@pytest.mark.parametrize("fault", mostly_heavy(FAULTS, *QUICK))
def test_a_planted_fault_is_named(fault):
    cause, make_draft, draft_fields, fields = FAULTS[fault]
    diagnosis = found(make_draft(), draft_fields, **fields)
    assert diagnosis.cause == cause
    others = {check.cause for check in diagnosis.checks if check.is_fault} - {cause}
    assert others <= {"temperature"}, "flatter is a bit better with many faults"


def test_a_draft_that_guesses_one_token_further_is_told():
    diagnosis = found(model_of(early), temperature=0.3)
    assert diagnosis.cause == "positions"
    [check] = [check for check in diagnosis.checks if check.cause == "positions"]
    assert "at the next position" in check.text


def test_drafts_without_logits_or_the_tokens_of_the_target_are_not_asked():
    class Few(Asked):
        vocab_size = 3

    draft = as_model(Few(lambda _prefix: np.zeros(3, np.float32)), "few")
    diagnosis = diagnose(rows_of(temperature=1.0), model_of(target), draft, {})
    assert (diagnosis.cause, diagnosis.overlap, diagnosis.num_positions) == ("tokenizer", None, 0)
    plain = as_model(lambda prefixes: [1 for _ in prefixes])
    with pytest.raises(BatchdecodeError, match="has no logits"):
        diagnose(rows_of(1, 2), model_of(target), plain, {})


def test_the_overlap_is_that_of_the_probabilities_drawn_from():
    """By hand: of three tokens, with a temperature of 0.5 and the likeliest two of them."""
    request = Request(prompt=[0], temperature=0.5, top_k=2)
    p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])

    class Three(Asked):
        vocab_size = 3

    models = [
        as_model(Three(lambda _prefix, logits=logits: logits.astype(np.float32)), "three")
        for logits in (p, q)
    ]
    diagnosis = diagnose([TargetOutput(request, [0], [1])], *models, {})
    # p is 25/34, 9/34, 0 and q 0, 25/34, 9/34
    assert diagnosis.overlap == pytest.approx(9 / 34, abs=1e-6)


SETTINGS = {
    "greedy": {},
    "warm": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.4, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "typical": {"temperature": 1.0, "typical_p": 0.6},
    "all": {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.6,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
    },
    "bias": {"temperature": 1.0, "logit_bias": {"4": 3.0, "7": -50.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [1, 5, 9, 11]},
    "bad words": {"temperature": 1.0, "bad_words": ["a", "cd", "fgh"]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 9, "stop_token": [2, 3, 5, 8]},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_probabilities_are_those_that_the_engine_draws_from(setting):
    prompt = [0, 1, 2]
    asked = {"max_tokens": 20, "seed": 4, **SETTINGS[setting]}
    request = Request(prompt=prompt, logprobs=20, logprobs_mode="processed", **asked)
    [result] = decode([request], model=model_of(target))
    assert result.logprobs is not None
    side = Side(model_of(target), [TargetOutput(request, prompt, result.tokens)])
    places = [(0, place) for place in range(len(result.tokens))]
    found = side.probabilities([request], places)
    for probabilities, told in zip(found, result.logprobs, strict=True):
        if setting == "greedy":
            assert probabilities[told.token] == 1
            continue
        expected = {top.token: np.exp(top.logprob) for top in told.top}
        some = {token: probabilities[token] for token in expected}
        assert some == pytest.approx(expected, abs=1e-5)
        if len(expected) < 20:
            assert sum(some.values()) == pytest.approx(1), "no other is left"


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 2},
        {"regex": "a+"},
        {"mirostat": 2, "temperature": 1.0},
        {"cfg_scale": 2.0},
        {"heal": True},
        {"session": "s"},
    ],
)
def test_what_is_more_than_a_sample_is_not_compared(fields):
    assert not can_be_compared(Request(prompt="a", **fields))
