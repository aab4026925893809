"""Beam search finds what `generate` finds, and the best where it can look at everything."""

import json
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st

from batcher.decoding.beams import BeamSearch, BeamStep, Hypothesis

EOS, START = 0, 1
IMPOSSIBLE = -np.inf
CASES = json.loads((Path(__file__).parents[1] / "golden" / "beams.json").read_text())

Model = Callable[[list[int]], np.ndarray]  # the log probs [vocab] after a row
Ends = Callable[[list[int]], bool]  # of a row with its new token


class Run(NamedTuple):
    search: BeamSearch
    steps: list[BeamStep]
    rows: list[list[int]]  # by place


def log_softmax(logits):
    rows = np.asarray(logits, np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    return (rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))).astype(np.float32)


def ends_with_eos(row):
    return row[-1] == EOS


def markov(table):
    """Return the model whose log probs after the token t are table[t]."""
    rows = np.asarray(table, np.float32)
    return lambda row: rows[row[-1] if row else START]


def run(model, *, ends=ends_with_eos, max_steps=99, **settings):
    search = a_search(**settings)
    rows = [[]]
    steps = []
    while len(steps) < max_steps:
        step = advance(search, model, rows, ends)
        if step is None:
            break
        steps.append(step)
        rows = [
            [*rows[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)
        ]
    return Run(search, steps, rows)


def advance(search, model, rows, ends):
    log_probs = np.stack([model(row) for row in rows])
    return search.advance(log_probs, lambda place, token: ends([*rows[place], token]))


def a_search(**settings):
    defaults = {
        "num_beams": 3,
        "length_penalty": 1.0,
        "early_stopping": False,
        "max_tokens": 4,
        "num_eos": 1,
    }
    settings = defaults | settings
    return BeamSearch(**{"num_results": settings["num_beams"], **settings})


def found(table, **settings):
    return [hypothesis.tokens for hypothesis in run(markov(table), **settings).search.results()]


@pytest.mark.parametrize("case", CASES)
def test_the_hypotheses_are_those_of_generate(case):
    settings = ("num_beams", "length_penalty", "early_stopping", "max_tokens")
    logits = np.array(case["logits"])

    def model(row):  # as in tests/parity/golden_beams.py
        return log_softmax(logits[row[-1] if row else START] * (1 + len(row) / 10))

    results = run(model, **{name: case[name] for name in settings}).search.results()
    assert [hypothesis.tokens for hypothesis in results] == case["tokens"]
    assert [hypothesis.score for hypothesis in results] == pytest.approx(case["scores"], abs=1e-5)


@st.composite
def tables(draw):
    """Log probs [vocab, vocab] of a Markov model; some tokens are impossible, all of them maybe."""
    vocab_size = draw(st.integers(2, 4))
    log_prob = st.floats(-5, -0.125, width=32) | st.just(IMPOSSIBLE)
    row = st.lists(log_prob, min_size=vocab_size, max_size=vocab_size)
    return np.array(draw(st.lists(row, min_size=vocab_size, max_size=vocab_size)), np.float32)


penalties = st.sampled_from([-1.0, 0.0, 0.7, 2.0])
stoppings = st.sampled_from([False, True, "never"])


@given(tables(), st.integers(1, 3), penalties, stoppings)
def test_enough_beams_find_the_best_of_all_sequences(
    table, max_tokens, length_penalty, early_stopping
):
    vocab_size = len(table)
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    search = run(
        markov(table), num_beams=vocab_size**max_tokens, max_tokens=max_tokens, **settings
    ).search
    expected = all_hypotheses(table, max_tokens, length_penalty)
    if not expected:
        assert search.has_failed
        return
    results = search.results()
    assert {tuple(h.tokens) for h in results} == {tuple(h.tokens) for h in expected}
    scores = [h.score for h in results]
    assert scores == pytest.approx([h.score for h in expected], rel=1e-5)
    assert scores == sorted(scores, reverse=True)
    assert all(h.has_ended == (h.tokens[-1] == EOS) for h in results)


def all_hypotheses(table, max_tokens, length_penalty):
    hypotheses = []
    for length in range(1, max_tokens + 1):
        for tokens in product(range(len(table)), repeat=length):
            has_ended = tokens[-1] == EOS
            if EOS in tokens[:-1] or not (has_ended or length == max_tokens):
                continue
            total = sum_of(table, tokens)
            if total > IMPOSSIBLE:
                hypotheses.append(Hypothesis([*tokens], total / length**length_penalty, has_ended))
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def sum_of(table, tokens):
    return float(sum(table[before, token] for before, token in pairwise([START, *tokens])))


@given(tables(), st.integers(1, 6), st.integers(1, 6), penalties, stoppings)
def test_few_beams_find_possible_sequences_each_once_and_score_them(
    table, num_beams, max_tokens, length_penalty, early_stopping
):
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    search = run(markov(table), num_beams=num_beams, max_tokens=max_tokens, **settings).search
    results = search.results()
    assert len({tuple(h.tokens) for h in results}) == len(results)
    assert results
    for hypothesis in results:
        length = max(1, len(hypothesis.tokens))
        score = sum_of(table, hypothesis.tokens) / length**length_penalty
        assert hypothesis.score == pytest.approx(score, rel=1e-5)
        assert EOS not in hypothesis.tokens[:-1]
        is_whole = hypothesis.has_ended or len(hypothesis.tokens) == max_tokens
        assert is_whole != search.has_failed


@given(tables(), st.integers(1, 6), st.integers(1, 6))
def test_only_places_without_a_child_are_copied_to(table, num_beams, max_tokens):
    for step in run(markov(table), num_beams=num_beams, max_tokens=max_tokens).steps:
        assert len(step.tokens) == len(step.parents) == num_beams
        targets = {place for place, parent in enumerate(step.parents) if parent != place}
        assert targets.isdisjoint(step.parents)


@given(tables(), st.integers(1, 6), st.integers(0, 4))
def test_breaking_off_gives_the_beams_as_they_are(table, num_beams, num_steps):
    search, steps, rows = run(markov(table), num_beams=num_beams, max_tokens=9, max_steps=num_steps)
    if len(steps) < num_steps:
        return  # it was done before
    results = search.results()
    running = [h for h in results if not h.has_ended]
    assert results[len(results) - len(running) :] == running
    assert all(h.tokens in rows for h in running)
    scores = [h.score for h in running]
    assert scores == sorted(scores, reverse=True)


@given(tables(), st.integers(1, 6), stoppings)
def test_one_beam_is_greedy(table, max_tokens, early_stopping):
    tokens = []
    while len(tokens) < max_tokens and EOS not in tokens:
        log_probs = table[tokens[-1] if tokens else START]
        if log_probs.max() == IMPOSSIBLE:
            break
        tokens.append(int(log_probs.argmax()))
    settings = {"length_penalty": 2.0, "early_stopping": early_stopping}
    assert found(table, num_beams=1, max_tokens=max_tokens, **settings) == [tokens]


def test_of_equals_the_better_beam_and_the_lower_token_come_first():
    equal = np.full((40, 40), -1.0)
    first = [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert found(equal, num_beams=4, max_tokens=2, ends=lambda _: False) == first


@pytest.mark.parametrize("vocab_size", mostly_heavy([3, 50, 1000, 4321], 3, 50, 1000))
@pytest.mark.parametrize("num_beams", [2, 5])
def test_the_best_of_many_go_on(vocab_size, num_beams):
    table = np.random.default_rng(1).integers(-99, 0, (vocab_size, vocab_size)) / 8
    search, _, _ = run(
        markov(table), num_beams=num_beams, max_tokens=9, max_steps=2, ends=lambda _: False
    )
    firsts = best_of({(token,): value for token, value in enumerate(table[START])}, num_beams)
    seconds = {
        (first, second): table[START, first] + table[first, second]
        for (first,) in firsts
        for second in range(vocab_size)
    }
    assert [tuple(h.tokens) for h in search.results()] == best_of(seconds, num_beams)


def best_of(sums, count):
    """Return the best keys; of equals, those that are listed first."""
    return sorted(sums, key=lambda tokens: -sums[tokens])[:count]


def test_where_no_token_is_eos_a_stop_leaves_enough_beams_too():
    table = [[-1, -1, -1, -1], [-0.1, -0.2, -0.3, -0.4]]
    settings = {"num_beams": 2, "num_eos": 0, "max_steps": 1}
    steps = run(markov(table), ends=lambda row: row[-1] == 0, **settings).steps
    assert steps == [BeamStep(tokens=[1, 2], parents=[0, 0])]


def test_a_place_that_no_beam_needs_doubles_the_best_beam():
    search, steps, _ = run(
        markov([[-1, -1], [-1.5, -0.5]]), num_beams=5, max_steps=1, ends=lambda _: False
    )
    assert steps == [BeamStep(tokens=[1, 0, 1, 1, 1], parents=[0, 0, 0, 0, 0])]
    assert [h.tokens for h in search.results()] == [[1], [0]]


def test_a_search_all_of_whose_beams_die_has_failed_and_says_how_far_it_came():
    no = IMPOSSIBLE
    search = run(markov([[no, no, no], [no, no, -2.0], [no, no, no]]), num_beams=2).search
    assert search.has_failed
    [(tokens, score, has_ended)] = search.results()
    assert (tokens, score, has_ended) == ([2], -2.0, False)


@pytest.mark.parametrize("length_penalty", [-1e6, -400.0, 400.0, 1e6])
@pytest.mark.parametrize("log_prob", [-0.5, -1e37, float(np.finfo(np.float32).min)])
def test_every_score_is_a_number(length_penalty, log_prob):
    table = np.full((3, 3), log_prob, np.float32)
    results = run(markov(table), length_penalty=length_penalty).search.results()
    assert results
    assert all(np.isfinite(h.score) for h in results)
