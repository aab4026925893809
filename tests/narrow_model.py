"""Models that return only the largest logits of some rows, as one on another device does."""

import numpy as np

from batcher import ModelOutput, SimulatedModel
from batcher.models.base import TopLogits


def top_logits(logits, num, edits=None):
    """Return the largest edited logits of rows, of equal ones those of the lower ids."""
    edited = logits if edits is None else edits.apply(logits)
    ids = np.sort(np.argsort(-edited, axis=1, kind="stable")[:, :num], axis=1)
    parts = []
    for each in (edited, logits):
        with np.errstate(invalid="ignore"):
            sums = np.logaddexp.reduce(each.astype(np.float64), axis=1)
        parts += [np.take_along_axis(each, ids, 1), sums]
    return TopLogits(ids, *parts, lambda rows: logits[rows])


class NarrowModel(SimulatedModel):
    """The simulated model; it counts the rows with all logits, and those with the largest."""

    def __init__(self, num_top):
        super().__init__()
        self.num_top_logits, self.num_rows = num_top, np.zeros(2, int)

    def forward(self, batch):
        whole, top = asked = batch.logit_slots, batch.top_slots
        batch.logit_slots = every = np.union1d(whole, top)
        output = super().forward(batch)
        batch.logit_slots = whole
        self.num_rows += [len(slots) for slots in asked]
        if not len(top):
            return output
        of_top = output.logits[every.searchsorted(top)]
        largest = top_logits(of_top, self.num_top_logits, batch.edits)
        logits = output.logits[every.searchsorted(whole)]
        return ModelOutput(
            output.tokens, output.failed, logits, output.chunk_logits, output.draft_logits, largest
        )
