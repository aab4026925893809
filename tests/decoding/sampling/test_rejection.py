"""Verified drafts: what is drawn from afterwards, and whose they are."""

import numpy as np
import pytest
from sampling_rows import Letters

from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import DrawnDraft, Sampler, SamplingRow, verify

WANTED, DRAWN_FROM = np.array([0.5, 0.2, 0.3]), np.array([0.2, 0.5, 0.3])


def left(wanted: np.ndarray, token: int, noise: float, token_ids=(0, 1, 2)) -> list[float]:
    """Return the probabilities that a row with a draft is drawn from."""
    proposal = DrawnDraft(token, DRAWN_FROM.astype(np.float32))
    with np.errstate(divide="ignore"):
        scores = np.log(wanted)[None]
    verified = np.exp(verify(scores, np.array([token_ids]), [proposal], np.array([noise])))[0]
    return (verified / verified.sum()).round(6).tolist()


@pytest.mark.parametrize(
    ("token", "noise", "weights"),
    [
        (0, 0.999, [1, 0, 0]),  # what is likelier than it was drafted is always accepted
        (1, 0.399, [0, 1, 0]),  # p / q is 0.4
        (1, 0.401, [1, 0, 0]),
        (2, 0.999, [0, 0, 1]),
    ],
)
def test_a_draft_is_accepted_as_often_as_p_is_of_q(
    token: int, noise: float, weights: list[float]
) -> None:
    assert left(WANTED, token, noise) == weights


def test_a_draft_that_is_not_among_the_candidates_is_refused() -> None:
    assert left(np.array([0.4, 0.6]), 1, 1e-9, (0, 2)) == [0.4, 0.6]


def test_candidates_that_only_fill_up_are_not_drawn() -> None:
    assert left(np.array([0.6, 0.4, 0.0]), 0, 0.1, (0, 2, 0)) == [1, 0, 0]


def test_where_both_differ_by_rounding_alone_nothing_else_is_left() -> None:
    assert left(DRAWN_FROM * 0.5, 2, 1.0 + 1e-6) == DRAWN_FROM.tolist()


def test_rows_without_drafts_are_left_as_they_are() -> None:
    scores = np.log(np.stack([WANTED, WANTED]))
    drafts = [None, DrawnDraft(0, DRAWN_FROM.astype(np.float32))]
    verified = verify(scores, np.array([[0, 1, 2]] * 2), drafts, np.array([0.5, 0.5]))
    assert (verified[0] == scores[0]).all()
    assert (verified[1] != scores[1]).any()


def opened(key: int, *, after: bool) -> Sampler:
    """A sampler with a row of two tokens; after: in the slot of one that was drafted for."""
    sampler = Sampler(1, 3, Letters(3))
    if after:
        sampler.open(0, SamplingRow(SamplingParams(temperature=1.0), 7, []))
        sampler.extend({0: [1]})
        with sampler.drafting(np.array([0])):
            for _ in range(3):
                sampler.sample(np.log(DRAWN_FROM)[None])
        sampler.close(0)
    sampler.open(0, SamplingRow(SamplingParams(temperature=1.0), key, []))
    sampler.extend({0: [1, 2]})
    return sampler


def test_the_drafts_of_a_row_that_is_gone_count_for_no_other() -> None:
    logits = np.log(WANTED)[None]
    for key in range(40):
        tokens = [opened(key, after=after).sample(logits).tokens.item(0) for after in (0, 1)]
        assert tokens[0] == tokens[1]
