"""`--acceptance leviathan`: outputs are drawn from what they are drawn from without drafts."""

from collections import Counter
from itertools import count

import numpy as np
import pytest
from control_requests import control_requests
from engine_runs import drained
from examples import examples, mostly_heavy
from hypothesis import given, settings
from hypothesis import strategies as st
from markov import DRAFTED, LETTERS, WANTED, Good, Target, Weak
from reference import english_requests
from sampling_rows import drawn_from
from test_scheduling_invariance import alone, cases, engine_of, run

from batcher import Engine, Request, SimulatedModel
from batcher.decoding.filters import sampling_params
from batcher.decoding.logprobs import log_softmax
from batcher.decoding.sampling import (
    Masks,
    acceptance_noise,
    draft_keys,
    gumbel_noise,
    row_key,
    token_hashes,
)
from batcher.engine.speculating import Speculator
from batcher.events import AcceptEvent, DraftEvent, PreemptEvent
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.speculation.settings import SpeculationSettings

PROMPT, LENGTH, NUM_OUTPUTS = [*range(len(LETTERS)), 0], 3, 2000
RULES = ["exact", "leviathan"]
LIMIT = 3.09  # standard normal deviations; one is above it in a thousand times
AS_ROWS_HAVE_THEM = str.maketrans(LETTERS, "".join(map(chr, range(256, 256 + len(LETTERS)))))
Output = tuple[int, ...]


def decoded(
    draft,
    fields,
    num_drafts=3,
    *,
    rule="leviathan",
    batch_size=200,
    limits=DEFAULT_SCHEDULING,
    num_outputs=NUM_OUTPUTS,
):
    """Decode two tokens more than are looked at, so that drafts go beyond."""
    speculation = SpeculationSettings(draft=draft, draft_tokens=num_drafts, acceptance=rule)
    engine = Engine(Target(), batch_size, settings=limits, speculation=speculation)
    for number in range(num_outputs):
        name, most = str(number), LENGTH + 2
        engine.enqueue(Request(id=name, prompt=PROMPT, max_tokens=most, **fields))
    return drained(engine)


def expected(fields, allowed=None):
    """Return how likely the first tokens of an output are, one after the other, without drafts."""
    words = [word.translate(AS_ROWS_HAVE_THEM) for word in fields.get("bad_words", ())]
    params = sampling_params(Request(prompt=PROMPT, **{**fields, "bad_words": words}))
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, probability in found.items():
            masks = None
            if allowed is not None:
                masks = Masks(np.array([0]), np.isin(range(len(LETTERS)), allowed(output))[None])
            logits = Target.logits[[*PROMPT, *output][-1]]
            logprobs = drawn_from(logits, params, masks, prompt=PROMPT, generated=output)
            for token in np.flatnonzero(logprobs > -np.inf).tolist():
                longer[*output, token] = probability * float(np.exp(logprobs[token]))
        found = longer
    return found


def surprise(run, probabilities):
    """Return by how many normal deviations the outputs are not what they are to be drawn from.

    Pearson's chi-square, whose cube root is nearly normal (Wilson and Hilferty 1931); what is to
    come fewer than five times counts together.
    """
    counts = Counter(tuple(result.tokens[:LENGTH]) for result in run.results)
    assert counts.keys() <= probabilities.keys()
    seen = np.array([counts[output] for output in probabilities])
    wanted = np.array([*probabilities.values()]) * counts.total()
    is_rare = wanted < 5
    seen = np.array([*seen[~is_rare], seen[is_rare].sum()])
    wanted = np.array([*wanted[~is_rare], wanted[is_rare].sum() or 1e-9])
    freedom = len(wanted) - 1 - (not is_rare.any())
    spread = 2 / (9 * freedom)
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def share_accepted(run):
    drafted = sum(event.tokens for event in run.events if isinstance(event, DraftEvent))
    return sum(event.tokens for event in run.events if isinstance(event, AcceptEvent)) / drafted


SETTINGS = {
    "plain": {},
    "top-p": {"top_p": 0.5},
    "penalties": {"temperature": 1.3, "repetition_penalty": 1.4, "frequency_penalty": 0.4},
    "bad words": {"bad_words": ["ad", "bb"], "logit_bias": {2: 3}},
}
HEAVY = pytest.mark.heavy  # thousands of outputs each


@pytest.mark.parametrize(
    ("draft", "num_drafts", "setting"),
    [
        ("Weak", 3, "plain"),
        pytest.param("Weak", 3, "top-p", marks=HEAVY),
        pytest.param("Weak", 3, "penalties", marks=HEAVY),
        pytest.param("Good", 3, "plain", marks=HEAVY),
        pytest.param("Fair", 1, "plain", marks=HEAVY),
        pytest.param("Hot", 3, "plain", marks=HEAVY),
        pytest.param("Weak", 3, "bad words", marks=HEAVY),
    ],
)
def test_outputs_follow_the_distribution(draft, num_drafts, setting):
    fields = {"temperature": 1.0, **SETTINGS[setting]}
    run = decoded(f"markov:{draft}", fields, num_drafts)
    assert surprise(run, expected(fields)) < LIMIT
    assert 0.1 < share_accepted(run) < 0.9


@pytest.mark.heavy
def test_they_do_under_a_constraint():
    fields = {"temperature": 1.0, "regex": "([abc][cdef])*"}
    run = decoded("markov:Weak", fields)

    def allowed(output):
        return [2, 3, 4, 5] if len(output) % 2 else [0, 1, 2]

    assert surprise(run, expected(fields, allowed)) < LIMIT
    assert 0.1 < share_accepted(run) < 0.9


@HEAVY
def test_they_do_with_drafts_from_nothing_and_where_rows_are_preempted():
    fields = {"temperature": 1.0}
    run = decoded("ngram", fields)
    assert surprise(run, expected(fields)) < LIMIT
    assert share_accepted(run) > 0.05
    exact = decoded("ngram", fields, rule="exact")
    assert exact.results == run.results
    fields = {"temperature": 1.0}
    limits = SchedulingSettings(block_size=2, kv_blocks=300, max_batch_tokens=512)
    run = decoded("markov:Weak", fields, limits=limits)
    assert any(isinstance(event, PreemptEvent) for event in run.events)
    lengths = {event.tokens for event in run.events if isinstance(event, DraftEvent)}
    assert lengths == {1, 2, 3}
    assert surprise(run, expected(fields)) < LIMIT


@HEAVY
def test_they_do_with_mirostat():
    fields = {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.2}
    plain = decoded("markov:Weak", fields | {"speculate": False, "seed": 1}, num_outputs=8000)
    counts = Counter(tuple(result.tokens[:LENGTH]) for result in plain.results)
    probabilities = {output: count / counts.total() for output, count in counts.items()}
    assert surprise(decoded("markov:Weak", fields), probabilities) < LIMIT


@pytest.mark.parametrize("draft", mostly_heavy(["Good", "Fair", "Weak"], "Fair"))
def test_drafts_are_accepted_as_often_as_both_overlap(draft):
    fields = {"temperature": 1.0}
    share = {"Good": 0.255, "Fair": 0.581, "Weak": 1.0}[draft]
    overlap = np.minimum(WANTED, (1 - share) * WANTED + share * DRAFTED).sum()
    by_rule = {
        rule: share_accepted(decoded(f"markov:{draft}", fields, 1, rule=rule)) for rule in RULES
    }
    assert by_rule["leviathan"] == pytest.approx(overlap, abs=0.015)
    assert overlap / (2 - overlap) - 0.015 < by_rule["exact"] < by_rule["leviathan"]


def slow_output(request_id, draft, is_drafting):
    """Return an output token by token, of a row that is given three drafts in some steps."""
    key, output = np.array([row_key(0, request_id, 0)], np.uint64), list[int]()

    def drawn(weights, its_key, position):
        ids = np.arange(len(weights))
        noise = gumbel_noise(token_hashes(its_key, np.array([position]), ids[None]))[0]
        with np.errstate(divide="ignore"):
            return int((np.log(weights) + noise).argmax())

    def after(model, tokens):
        return np.exp(log_softmax(model.logits[[*PROMPT, *tokens][-1]]))

    for step in count():
        start, left = len(output), LENGTH + 2 - len(output)
        if not left:
            return output
        drafts = []
        for _ in range(min(3, left - 1) if start and is_drafting(step) else 0):
            own_key, position = draft_keys(key, np.array([start])), start + len(drafts)
            drafts.append(drawn(after(draft, output + drafts), own_key, position))
        for number in range(len(drafts) + 1):
            position, wanted = len(output), after(Target(), output)
            if number == len(drafts):
                output.append(drawn(wanted, key, position))
                break
            drawn_from = after(draft, output)
            token, chance = drafts[number], acceptance_noise(key, np.array([position])).item()
            if chance * drawn_from[token] >= wanted[token]:
                token = drawn(np.maximum(wanted - drawn_from, 0), key, position)
            output.append(token)
            if token != drafts[number]:
                break
    raise AssertionError


@pytest.mark.parametrize("draft", [Good, Weak])
def test_each_output_is_that_of_the_rule_word_by_word(monkeypatch, draft):
    wanted, steps = Speculator.wanted, count()

    def now_and_then(self):
        return wanted(self) if next(steps) % 2 else {}

    monkeypatch.setattr(Speculator, "wanted", now_and_then)
    run = decoded(f"markov:{draft.__name__}", {"temperature": 1.0}, num_outputs=200)
    for result in run.results:
        assert result.tokens == slow_output(result.id, draft(), lambda step: step % 2 == 1)


def test_greedy_outputs_are_those_of_the_exact_rule():
    fields = {"temperature": 0.0, "presence_penalty": 0.7, "logprobs": 2}
    runs = [decoded("markov:Weak", fields, rule=rule, num_outputs=50) for rule in RULES]
    assert runs[0].results == runs[1].results
    assert runs[0].events == runs[1].events


@given(
    case=cases(st.one_of(english_requests(), control_requests())),
    draft=st.sampled_from(["simulated:0.5", "simulated:0.9", "ngram"]),
    num_drafts=st.sampled_from([1, 4]),
)
@settings(examples(8), derandomize=True)
def test_whatever_is_asked_for_every_request_ends_and_greedy_ones_as_alone(case, draft, num_drafts):
    speculation = SpeculationSettings(draft=draft, draft_tokens=num_drafts, acceptance="leviathan")
    found = run(engine_of(case, SimulatedModel(), speculation=speculation))
    for request in case.requests:
        by_itself = alone(SimulatedModel, request)
        if request.temperature == 0 or draft == "ngram":
            assert {key: found[key] for key in by_itself} == by_itself
        else:
            assert sum(name == request.id for name, _ in found) == len(by_itself)


def test_the_logprobs_told_are_those_of_the_distribution():
    fields = {"temperature": 1.0, "top_k": 4, "logprobs": 3, "logprobs_mode": "processed"}
    params = sampling_params(Request(prompt=PROMPT, **fields))
    for result in decoded("markov:Weak", fields, num_outputs=40).results:
        for place, told in enumerate(result.logprobs):
            logits = Target.logits[[*PROMPT, *result.tokens[:place]][-1]]
            wanted = drawn_from(logits, params, prompt=PROMPT)
            assert told.logprob == pytest.approx(wanted[told.token], abs=1e-5)
