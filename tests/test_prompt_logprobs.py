"""Log-probabilities of prompts: those of every prefix computed from scratch, however it is run."""

import math
import re
from collections import Counter

import numpy as np
import pytest
from engine_runs import drained, run, traced
from examples import mostly_heavy
from reference_logits import reference_logits

from batcher import Engine, ModelOutput, Request, SimulatedModel, decode
from batcher.events import AdmitEvent, PreemptEvent
from batcher.metrics.summary import RunMetrics
from batcher.models.loading import CheckedModel
from batcher.result import PromptLogprob, TopLogprob
from batcher.settings import SchedulingSettings

MODEL = SimulatedModel()
PROMPT = MODEL.tokenizer.encode("Once upon a time the brave fox found every letter.")


def scored(tokens, num_top):
    """Return what is told of a prompt, each prefix computed by itself and by the definition."""
    told = [PromptLogprob(tokens[0], None, [])]
    for place in range(1, len(tokens)):
        logits = reference_logits(MODEL, tokens[:place])
        total = math.log(sum(math.exp(logit) for logit in logits))
        ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
        top = [TopLogprob(token, logits[token] - total) for token in ranked[:num_top]]
        told.append(PromptLogprob(tokens[place], logits[tokens[place]] - total, top))
    return told


def same(told, expected):
    """Whether two are equal but for the last digits: the definition adds in another order."""
    pairs = list(zip(told, expected, strict=True))
    return all(
        a.token == b.token
        and (a.logprob is b.logprob or math.isclose(a.logprob, b.logprob, abs_tol=2e-5))
        and [top.token for top in a.top] == [top.token for top in b.top]
        and np.allclose([top.logprob for top in a.top], [top.logprob for top in b.top], atol=2e-5)
        for a, b in pairs
    )


EXPECTED = scored(PROMPT, 2)
ALONE = decode([Request(prompt=PROMPT, prompt_logprobs=2)])[0].prompt_logprobs


def test_each_token_is_told_as_its_prefix_from_scratch_has_it():
    assert same(ALONE, EXPECTED)


SETTINGS = [
    SchedulingSettings(),
    SchedulingSettings(long_prefill_threshold=3),
    SchedulingSettings(max_batch_tokens=7, prefill_order="prefill-first"),
    SchedulingSettings(kv_blocks=24, block_size=4, max_batch_tokens=9),
    SchedulingSettings(kv_blocks=64, block_size=4, prefix_cache=False),
]


@pytest.mark.parametrize(
    "settings", mostly_heavy(SETTINGS, SETTINGS[0], SETTINGS[2], SETTINGS[3]), ids=str
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 0},
        {"n": 3, "temperature": 1.0, "logprobs": 1},
        {"num_beams": 3, "n": 2},
        {"cfg_scale": 1.5, "negative_prompt": "Never"},
        {"cfg_scale": 1.5, "max_tokens": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_paged", [True, False])
def test_the_same_is_told_whatever_the_schedule(settings, more, is_paged):
    model = SimulatedModel(is_attentive=is_paged)
    model.is_paged = is_paged
    engine = Engine(model, 4, settings=settings, is_checked=True)
    fields = {"max_tokens": 6, "ignore_eos": True}
    engine.add(Request(id="like it", prompt=PROMPT[:-2], **fields))
    engine.add(Request(id="a", prompt=PROMPT, prompt_logprobs=2, **(fields | more)))
    engine.add(Request(id="b", prompt=PROMPT[:6], prompt_logprobs=2, **fields))
    engine.add(Request(id="c", prompt=PROMPT, prompt_logprobs=2, arrival_time=9, **fields))
    results = drained(engine).results
    told = {(result.id, result.index): result.prompt_logprobs for result in results}
    for (request_id, _), found in told.items():
        expected = {"like it": None, "b": ALONE[:6]}.get(request_id, ALONE)
        assert found == expected
    assert len(told) == 3 + more.get("n", 1)


def test_a_row_that_was_preempted_tells_nothing_twice():
    settings = SchedulingSettings(kv_blocks=9, block_size=4, max_batch_tokens=6)
    engine = Engine(SimulatedModel(is_attentive=True), 2, settings=settings, is_checked=True)
    for name in "ab":
        fields = {"max_tokens": 16, "ignore_eos": True, "prompt_logprobs": 2}
        engine.add(Request(id=name, prompt=PROMPT[:16], **fields))
    done = drained(engine)
    told = [result.prompt_logprobs for result in done.results]
    assert any(type(event) is PreemptEvent for event in done.events)
    assert told == [ALONE[:16]] * 2


class CountingModel(SimulatedModel):
    """Counts the tokens whose logits are looked at."""

    num_scored = 0

    def forward(self, batch):
        output = super().forward(batch)
        counted = {slot: self.count(pieces) for slot, pieces in output.chunk_logits.items()}
        return ModelOutput(output.tokens, output.failed, output.logits, counted)

    def count(self, pieces):
        for piece in pieces:
            self.num_scored += len(piece)
            yield piece


@pytest.mark.parametrize("settings", [{}, {"kv_blocks": 64, "block_size": 4}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_many_samples_have_their_prompt_told_once(settings, batch_size):
    model = CountingModel()
    engine = Engine(model, batch_size, settings=SchedulingSettings(**settings))
    engine.add(Request(prompt=PROMPT, prompt_logprobs=2, n=4, temperature=1.0, max_tokens=3))
    results = drained(engine).results
    assert [result.prompt_logprobs for result in results] == [ALONE] * 4
    assert model.num_scored == len(PROMPT)


def test_plain_requests_score_nothing_and_what_is_scored_is_only_written():
    model = CountingModel()
    run([Request(id="a", prompt=PROMPT), Request(id="b", prompt=PROMPT, logprobs=1)], model=model)
    assert model.num_scored == 0
    engine = Engine(MODEL, 1, settings=SchedulingSettings(kv_blocks=64, block_size=4))
    fields = {"prompt": PROMPT, "max_tokens": 2, "cache_salt": "s"}
    engine.add(Request(id="first", prompt_logprobs=0, **fields))
    engine.add(Request(id="again", prompt_logprobs=0, **fields))
    engine.add(Request(id="plain", **fields))
    events = drained(engine).events
    cached = {event.id: event.cached for event in events if type(event) is AdmitEvent}
    assert cached["first"] == cached["again"] == 0
    assert cached["plain"] == (len(PROMPT) - 1) // 4 * 4


def test_a_prompt_alone_is_computed_and_nothing_is_generated_or_measured():
    requests = [
        Request(id="a", prompt=PROMPT, prompt_logprobs=0, max_tokens=0, logprobs=1, stop="a"),
        Request(id="b", prompt="", prompt_logprobs=0, max_tokens=0),
        Request(id="c", prompt=PROMPT, max_tokens=0),
    ]
    done = run(requests, 2)
    results = {result.id: result for result in done.results}
    whole = results["a"]
    assert [found.logprob for found in whole.prompt_logprobs] == [t.logprob for t in ALONE]
    assert (whole.tokens, whole.text, whole.logprobs) == ([], "", [])
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    assert whole.slot is not None
    assert whole.steps.first_token is None
    assert results["b"].prompt_logprobs == []
    assert (results["c"].slot, results["c"].prompt_logprobs) == (None, None)
    assert not done.tokens
    metrics = RunMetrics(None)
    engine = Engine(MODEL, 2, settings=SchedulingSettings(max_batch_tokens=9), is_measured=True)
    engine.add(Request(id="alone", prompt=PROMPT, prompt_logprobs=0, max_tokens=0))
    engine.add(Request(id="b", prompt=PROMPT, max_tokens=3, ignore_eos=True))
    metrics.observe(traced(engine))
    summary = metrics.summary()
    assert summary.generated_tokens == 3
    assert summary.latencies.ttft.count == summary.first_token.count == 1


# Models of others


class Scorer:
    """A Model that scores prompts as it is told to."""

    name, settings, gives, vocab_size, eos_token_id = "scorer", {}, "logits", 4, None
    tokenizer = MODEL.tokenizer

    def __init__(self, pieces=None, *, scores_prompts=True):
        self.pieces, self.scores_prompts = pieces, scores_prompts
        self.asked = Counter()

    def allocate(self, num_slots):
        self.num_slots = num_slots

    def forward(self, batch):
        self.asked.update(chunk.slot for chunk in batch.chunks if chunk.is_scored)
        scored = {}
        if self.pieces is not None:
            scored = {chunk.slot: self.pieces(chunk) for chunk in batch.chunks if chunk.is_scored}
        logits = np.zeros((batch.logit_slots.size, 4), np.float32)
        return ModelOutput(np.zeros(self.num_slots, np.int64), logits=logits, chunk_logits=scored)

    def fork(self, source, target):
        pass

    def release(self, slot):
        pass


def uniform(chunk):
    for _ in chunk.token_ids:
        yield np.zeros((1, 4))


def test_any_model_can_score_prompts():
    request = {"prompt": [0, 1, 2], "max_tokens": 1}
    model = Scorer(uniform)
    results = decode([{**request, "prompt_logprobs": 1}, request], model=model)
    quarter = round(math.log(1 / 4), 6)
    assert [found.logprob for found in results[0].prompt_logprobs] == [None, quarter, quarter]
    assert results[1].prompt_logprobs is None
    assert sum(model.asked.values()) == 1


def raising(_):
    yield np.zeros((1, 4))
    raise OSError("no")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (None, "returned logits of 0 tokens, not of the [23] of the chunk"),
        (lambda _: [np.zeros((1, 4))], "returned logits of 1 tokens, not of the [23] of the chunk"),
        (lambda _: [np.zeros((3, 5))], r"returned logits float64 \[3, 5\], not numbers \[3, 4\]"),
        (lambda _: 5, "raised TypeError"),
        (lambda _: [np.full((3, 4), np.nan)], "no usable logits after token 0 of the prompt"),
        (raising, "raised OSError: no"),
    ],
)
@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_a_model_that_does_not_score_what_it_should_fails_that_row(pieces, message, order):
    engine = Engine(Scorer(pieces), 4, settings=SchedulingSettings(prefill_order=order))
    engine.add(Request(id="bad", prompt=[0, 1, 2], prompt_logprobs=1, max_tokens=2))
    engine.add(Request(id="good", prompt=[0, 1, 2], max_tokens=2))
    results = {result.id: result for result in drained(engine).results}
    assert results["bad"].error.code == "model-error"
    assert re.search(message, results["bad"].error.message)
    assert results["bad"].prompt_logprobs is None
    assert results["good"].finish_reason == "length"


@pytest.mark.parametrize(
    "model",
    [lambda prefixes: [0] * len(prefixes), CheckedModel(Scorer(scores_prompts=False))],
    ids=["function", "model"],
)
def test_a_model_that_cannot_score_says_so(model):
    with pytest.raises(Exception, match="needs logits after every token"):
        decode([{"prompt": [1, 2], "prompt_logprobs": 0}], model=model)
