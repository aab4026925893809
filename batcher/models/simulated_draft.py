"""A simulated model that drafts for another: as often right as it is told to be.

After a share of all prefixes it has the logits of the other model, and after the rest those of
another choice; there its next best token is right as often.  Which prefixes these are is a function
of their hash, so its drafts are the same in every batch.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError
from batcher.models.base import Batch, FloatArray, IntArray, ModelOutput
from batcher.models.simulated import (
    HASH_SHIFT,
    NUM_CHOICES,
    Hashes,
    Rate,
    SimulatedModel,
    SimulatedSettings,
)
from batcher.splitmix64 import scramble

_NEXT_BEST = np.float32(0.95)  # of the largest logit: more than any other is


class SimulatedDraft(SimulatedModel):
    """Drafts for the simulated model of the same settings.

    agreement: after which share of prefixes it has the logits of that.
    """

    scores_prompts = False

    def __init__(self, settings: SimulatedSettings, agreement: float) -> None:
        super().__init__(settings)
        self.name = f"simulated:{agreement:g}"
        self._agreement = agreement

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute one token for every slot; what an empty slot gets means nothing."""
        output, slots, at = super().forward(batch), batch.slots, batch.logit_slots
        if output.logits is not None:
            self._mistake(output.logits, self._hashes[at], self._lines[at])
        if output.draft_logits is not None and self._pages is not None:
            drafts = self._pages.drafts
            if drafts is not None:
                self._mistake(output.draft_logits, drafts.hashes, self.lines[drafts.tokens])
        rows, _, _, others = self._wrong(self._hashes[slots], self._lines[slots])
        output.tokens[slots[rows]] = others
        return output

    def _mistake(self, logits: FloatArray, hashes: Hashes, lines: IntArray) -> None:
        """Put the logits of another choice into the rows that are not to agree.

        logits: [rows, vocab].  hashes, lines: [rows] of the prefix, and of its last token.
        """
        rows, bits, tokens, others = self._wrong(hashes, lines)
        parts, which = lines[rows] // NUM_CHOICES, np.arange(len(rows))
        own = np.empty((len(rows), self.vocab_size), np.float32)
        self._logit_table.gather(parts, bits, others, own)
        is_next = _uniform(scramble(bits)) < self._agreement
        own[which[is_next], tokens[is_next]] = _NEXT_BEST * own[which, others][is_next]
        logits[rows] = own

    def _wrong(
        self, hashes: Hashes, lines: IntArray
    ) -> tuple[IntArray, Hashes, IntArray, IntArray]:
        """Return which rows are not to agree, their bits, and what either model chooses for them.

        Arguments: as above.
        """
        bits = scramble(hashes)
        (rows,) = (_uniform(bits) >= self._agreement).nonzero()
        bits, lines = scramble(bits[rows]), lines[rows]
        tokens, others = (
            self.choices[(own >> np.uint64(HASH_SHIFT)).view(np.int64) + lines]
            for own in (hashes[rows], bits)
        )
        is_same = others == tokens
        others[is_same] = (others[is_same] + 1) % self.vocab_size
        return rows, bits, tokens, others


def _uniform(bits: Hashes) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that random bits stand for."""
    uniform: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53, dtype=np.float64)
    return uniform


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
