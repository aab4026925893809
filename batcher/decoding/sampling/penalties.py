"""What tokens that a row has, or that were asked for, do to its logits before a draw.

Penalties for repeating, and how often each row generated each token; guidance by a negative prompt.
"""

import numpy as np

from batcher.decoding.logprobs import log_softmax
from batcher.decoding.sampling.group import SamplingParams
from batcher.models.base import FloatArray, IntArray
from batcher.tokens import Tokens

NONE = -1  # where a row has no further token
MIN_WIDTH = 64
HIGHEST = np.finfo(np.float32).max  # what no penalty goes beyond, since inf is no logit


def penalize(
    logits: FloatArray, seen: tuple[IntArray, IntArray, IntArray], params: SamplingParams
) -> None:
    """Make tokens that a row has already less likely, or more if a penalty is below its neutral.

    logits: [rows, vocab], changed in place.
    seen: row, token id and how often it was generated of every token that a row has; 0 for those
    in its prompt only.  Repetition (Keskar et al. 2019, CTRL, section 4.1) looks at all of them,
    frequency and presence (OpenAI) at what was generated.
    """
    rows, token_ids, counts = seen
    values = logits[rows, token_ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny repetition makes it infinite, which HIGHEST cuts
        repetition = params.repetition_penalty
        values = np.where(values < 0, values * repetition, values / repetition)
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits[rows, token_ids] = np.minimum(values, HIGHEST)


def guide(logits: FloatArray, negative: FloatArray, scale: float) -> FloatArray:
    """Return log-probabilities [rows, vocab] led away from those of `negative`, same shape.

    Classifier-free guidance (Sanchez et al. 2023, section 2.2): l_n + scale * (l - l_n).  A token
    that has no probability in either stays out.  Changes neither argument.
    """
    away = log_softmax(negative)
    with np.errstate(invalid="ignore"):
        guided = away + scale * (log_softmax(logits) - away)
    guided[np.isneginf(logits) | np.isneginf(negative)] = -np.inf
    with np.errstate(over="ignore"):
        return np.minimum(guided, HIGHEST).astype(np.float32)


class SeenTokens:
    """The distinct tokens of every slot's row, in the order in which they came.

    A token is looked for along the row: far less memory than a count of the whole vocabulary.
    """

    def __init__(self, num_slots: int) -> None:
        self._token_ids: IntArray = np.zeros((num_slots, 0), np.int64)  # wider when needed
        self._counts: IntArray = np.zeros((num_slots, 0), np.int64)
        self._sizes: IntArray = np.zeros(num_slots, np.int64)

    def open(self, slot: int, prompt_tokens: Tokens) -> None:
        """Let `slot` begin a new row with this prompt, of which nothing was generated."""
        token_ids = np.array(list(dict.fromkeys(prompt_tokens)), np.int64)
        self.resume(slot, token_ids, np.zeros_like(token_ids))

    def read(self, slot: int) -> tuple[IntArray, IntArray]:
        """Return the token ids that the row in `slot` has, and how often it generated each."""
        size = self._sizes[slot]
        return self._token_ids[slot, :size].copy(), self._counts[slot, :size].copy()

    def resume(self, slot: int, token_ids: IntArray, counts: IntArray) -> None:
        """Let `slot` go on with a row of which `read` told these."""
        size = len(token_ids)
        self._widen(size)
        self._token_ids[slot] = NONE
        self._token_ids[slot, :size] = token_ids
        self._counts[slot] = 0
        self._counts[slot, :size] = counts
        self._sizes[slot] = size

    def fork(self, source: int, target: int) -> None:
        """Let `target` have what `source` has."""
        for table in (self._token_ids, self._counts, self._sizes):
            table[target] = table[source]

    def add(self, slots: IntArray, tokens: IntArray) -> None:
        """Count one generated token for each of `slots`, tokens: [slots]."""
        sizes = self._sizes[slots]
        width = int(sizes.max()) + 1
        self._widen(width)
        is_same = self._token_ids[slots, :width] == tokens[:, None]
        is_known = is_same.any(axis=1)
        columns = sizes.copy()
        columns[is_known] = is_same[is_known].argmax(axis=1)
        self._token_ids[slots, columns] = tokens
        self._counts[slots, columns] += 1
        self._sizes[slots] = np.maximum(sizes, columns + 1)

    def of(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return (place in `slots`, token id, how often it was generated) of every seen token."""
        width = int(self._sizes[slots].max())
        rows, columns = (self._token_ids[slots, :width] != NONE).nonzero()
        at = slots[rows], columns
        return rows, self._token_ids[at], self._counts[at]

    def _widen(self, width: int) -> None:
        missing = width - self._token_ids.shape[1]
        if missing > 0:
            more = ((0, 0), (0, max(MIN_WIDTH, missing + width)))
            self._token_ids = np.pad(self._token_ids, more, constant_values=NONE)
            self._counts = np.pad(self._counts, more)
