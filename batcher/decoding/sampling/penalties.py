"""What raises or lowers logits by what a row has: penalties for repeating, guidance by a prompt."""

import numpy as np

from batcher.decoding.sampling.logprobs import log_softmax
from batcher.models.base import FloatArray, IntArray

HIGHEST = np.finfo(np.float32).max  # what no penalty goes beyond, since inf is no logit


def penalize(
    logits: FloatArray,
    seen: tuple[IntArray, IntArray, IntArray],
    *,
    repetition: float,
    frequency: float,
    presence: float,
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
        values = np.where(values < 0, values * repetition, values / repetition)
        values -= frequency * counts + presence * (counts > 0)
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
