"""Log-probabilities: of whole rows, and of the tokens that a result tells about."""

import numpy as np
from numpy.typing import NDArray

from batcher.models.base import FloatArray, IntArray
from batcher.result import (
    LOWEST_LOGPROB,
    NUM_DIGITS,
    TokenLogprob,
    TopLogprob,
)

Floats = NDArray[np.float64]


def log_softmax(logits: FloatArray | Floats) -> Floats:
    """Return the log-probabilities of `logits` [rows, width]; each row has a finite one."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprob(logprobs: Floats, token_ids: IntArray, column: int, num_top: int) -> TokenLogprob:
    """Return what a result tells about the token at `column`, and the `num_top` most likely.

    logprobs: [width], of the tokens token_ids, [width] ascending.  Those that cannot be chosen are
    not among the top ones, so there may be fewer; of equal ones the lower ids come first.
    """
    top: list[TopLogprob] = []
    if num_top:
        place = max(0, len(logprobs) - num_top)
        bound = max(np.partition(logprobs, place)[place], np.finfo(np.float64).min)
        (columns,) = (logprobs >= bound).nonzero()
        columns = columns[np.argsort(-logprobs[columns], kind="stable")][:num_top]
        top = [TopLogprob(int(token_ids[at]), as_told(logprobs[at])) for at in columns]
    return TokenLogprob(int(token_ids[column]), as_told(logprobs[column]), top)


def as_told(logprob: float) -> float:
    """Return `logprob` as a result states it: never below LOWEST_LOGPROB, to six digits.

    Further digits are not the same on every processor.
    """
    return round(max(float(logprob), LOWEST_LOGPROB), NUM_DIGITS)
