"""The n-gram model that trained ones are compared with is that of the paper."""

from collections import Counter
from math import exp, log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kneser_ney import KneserNey

VOCABULARY = 4
TEXTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), min_size=1)


def probability(model, context, token):
    return exp(model.log_probabilities([[*context, token]])[-1])


@given(TEXTS, st.lists(st.integers(0, VOCABULARY - 1), max_size=5))
def test_what_may_follow_a_context_adds_up_to_one(texts, context):
    model = KneserNey(texts, VOCABULARY, order=3)
    assert sum(probability(model, context, token) for token in range(VOCABULARY)) == pytest.approx(
        1
    )


def grams_of(texts, order):
    """Each n-gram of texts that begin with tokens of no text, and how often it is there."""
    padded = [(VOCABULARY,) * (order - 1) + tuple(text) for text in texts]
    return Counter(
        text[start : start + order] for text in padded for start in range(len(text) - order + 1)
    )


def slow(grams, order, gram):
    """The probability of the last token of an n-gram, as the paper has it, one by one."""
    if not gram:
        return 1 / VOCABULARY
    counts = (
        grams
        if len(gram) == order
        else Counter(longer[-len(gram) :] for longer in {g[-len(gram) - 1 :] for g in grams})
    )
    n1, n2, n3, n4 = (sum(c == n for c in counts.values()) for n in (1, 2, 3, 4))
    taken = [0, 0.5, 0.5, 0.5]
    if n1 and n2 and n3 and n4:
        share = n1 / (n1 + 2 * n2)
        said = [1 - 2 * share * n2 / n1, 2 - 3 * share * n3 / n2, 3 - 4 * share * n4 / n3]
        if min(said) > 0:
            taken = [0, *said]
    following = {g: c for g, c in counts.items() if g[:-1] == gram[:-1]}
    shorter = slow(grams, order, gram[1:])
    if not following:
        return shorter
    total = sum(following.values())
    left = sum(taken[min(c, 3)] for c in following.values()) / total
    own = counts[gram]
    return max(own - taken[min(own, 3)], 0) / total + left * shorter


@given(TEXTS, st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=3))
@example(
    [
        [0, 0, 3, 2, 3, 1, 0, 3, 1, 2, 3, 2, 0, 1, 2, 0, 3, 0],
        [1, 2, 3, 0, 0, 0, 2, 3],
        [2, 0, 0],
    ],
    [0, 3, 3],
).via("nothing would be taken off a count of 3, and so nothing left for what was not seen")
def test_it_is_the_model_of_the_paper(texts, gram):
    model, grams = KneserNey(texts, VOCABULARY, order=3), grams_of(texts, 3)
    said = model.log_probabilities([gram])
    padded = (VOCABULARY, VOCABULARY, *gram)
    for place in range(3):
        wanted = slow(grams, 3, padded[place : place + 3])
        assert said[place] == pytest.approx(log(wanted)), place


def test_what_was_seen_is_likelier_after_what_it_was_seen_after():
    model = KneserNey([[0, 1, 2, 3] * 20], VOCABULARY)
    assert probability(model, [0, 1, 2], 3) > 0.9
