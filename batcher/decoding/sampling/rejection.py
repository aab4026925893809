"""Drafts that are drawn from one distribution, and verified so that samples of another come of it.

Speculative sampling (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023, section 2.3; Chen et al., "Accelerating Large Language Model Decoding with Speculative
Sampling", 2023, algorithm 2).  A draft that was drawn from q is accepted with the probability
min(1, p / q), where p is what the token is to be drawn from; else another token is drawn from what
of p is above q.  What comes of both is a sample of p, if the noise of the draft, that of its
acceptance and that of the other token know nothing of each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from batcher.decoding.logprobs import Floats, log_softmax
from batcher.models.base import FloatArray, IntArray


class DrawnDraft(NamedTuple):
    """A draft; probabilities: [vocab] float32, what it was drawn from."""

    token: int
    probabilities: FloatArray


class DrawnDrafts:
    """The drafts of rows, by slot and by how many tokens the row has before."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, DrawnDraft]] = {}

    def add(
        self, slots: IntArray, positions: IntArray, tokens: IntArray, probabilities: Floats
    ) -> None:
        """Take in drafts; slots, positions, tokens: [rows], probabilities: [rows, vocab]."""
        places = zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True)
        drawn_from = probabilities.astype(np.float32)
        for (slot, position, token), row in zip(places, drawn_from, strict=True):
            self._rows.setdefault(slot, {})[position] = DrawnDraft(token, row)

    def of(self, slots: IntArray, positions: IntArray) -> Sequence[DrawnDraft | None]:
        """Return what there is for each row; slots, positions: [rows]; empty if there is none."""
        rows = self._rows
        if not rows:
            return ()
        return [
            rows[slot].get(position) if slot in rows else None
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
        ]

    def forget(self, slot: int) -> None:
        """Forget the drafts of a row, if there are any."""
        self._rows.pop(slot, None)


def verify(
    scores: Floats, token_ids: IntArray, drafts: Sequence[DrawnDraft | None], noise: Floats
) -> Floats:
    """Return scores [rows, width] to draw from, so that the drafts of rows are accepted or not.

    A row whose draft is accepted has that alone, and another what of its probabilities is above
    those that the draft was drawn from.

    scores: their softmax is what the token of each row is to be drawn from, and that of a row
    without a draft still is; token_ids: [rows, width].  noise: [rows], even in (0, 1).
    """
    here = {row: draft for row, draft in enumerate(drafts) if draft is not None}
    if not here:
        return scores
    rows = np.array([*here])
    tokens = np.array([draft.token for draft in here.values()])
    drawn_from = np.stack([draft.probabilities for draft in here.values()]).astype(np.float64)
    wanted = np.exp(log_softmax(scores[rows]))
    is_draft = token_ids[rows] == tokens[:, None]
    of_draft = np.where(is_draft, wanted, 0.0)
    is_accepted = noise[rows] * drawn_from[np.arange(len(rows)), tokens] < of_draft.sum(axis=-1)
    above = np.maximum(wanted - np.take_along_axis(drawn_from, token_ids[rows], axis=-1), 0.0)
    is_empty = ~above.any(axis=-1)  # both are the same but for rounding
    above[is_empty] = wanted[is_empty]
    verified = scores.copy()
    with np.errstate(divide="ignore"):
        verified[rows] = np.log(np.where(is_accepted[:, None], of_draft, above))
    return verified
