"""A simulated model that drafts for another: as often right as it is told to be.

After a share of all prefixes it has the logits of the other model, and after the rest those of
another choice.  Which prefixes these are is a function of their hash, so its drafts are the same in
every batch.
"""

import msgspec
import numpy as np

from batcher.errors import BatchdecodeError
from batcher.models.base import Batch, ModelOutput
from batcher.models.simulated import (
    HASH_SHIFT,
    NUM_CHOICES,
    Rate,
    SimulatedModel,
    SimulatedSettings,
)
from batcher.models.simulated_logits import scramble


class SimulatedDraft(SimulatedModel):
    """Drafts for the simulated model of the same settings.

    agreement: after which share of prefixes it has the logits of that.
    """

    scores_prompts = False
    verifies_drafts = verifies_trees = False

    def __init__(self, settings: SimulatedSettings, agreement: float) -> None:
        super().__init__(settings)
        self.name = f"simulated:{agreement:g}"
        self._agreement = agreement

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute one token for every slot; what an empty slot gets means nothing."""
        output, slots = super().forward(batch), batch.slots
        bits = scramble(self._hashes[slots])
        differs = (bits >> np.uint64(11)) * 2.0**-53 >= self._agreement
        slots, bits = slots[differs], scramble(bits[differs])
        lines, tokens = self._lines[slots], output.tokens[slots]
        others = self.choices[(bits >> np.uint64(HASH_SHIFT)).view(np.int64) + lines]
        is_same = others == tokens
        others[is_same] = (others[is_same] + 1) % self.vocab_size
        output.tokens[slots] = others
        if output.logits is None:
            return output
        own = np.isin(slots, batch.logit_slots)
        output.logits[np.isin(batch.logit_slots, slots)] = self._logit_table.gather_into(
            np.empty((own.sum(), self.vocab_size), np.float32),
            lines[own] // NUM_CHOICES,
            bits[own],
            others[own],
        )
        return output


def simulated_draft(name: str, settings: SimulatedSettings) -> SimulatedDraft:
    """Return what `simulated:RATE` names, for the simulated model of these settings.

    Raises:
        BatchdecodeError: RATE is no number from 0 to 1.
    """
    _, colon, rate = name.partition(":")
    try:
        agreement = msgspec.convert(rate if colon else "1", Rate, strict=False)
    except msgspec.ValidationError:
        raise BatchdecodeError(
            f"{name}: RATE says how often it is right, from 0 to 1, not {rate}"
        ) from None
    return SimulatedDraft(settings, agreement)
