"""Log-probabilities of rows, and of the output and prompt tokens in a result."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from batcher.models.base import FloatArray, IntArray
from batcher.prompts import Prompt
from batcher.result import LOWEST_LOGPROB, NUM_DIGITS, PromptLogprob, TokenLogprob, TopLogprob

Floats = NDArray[np.float64]


def log_softmax(logits: FloatArray | Floats) -> Floats:
    """Return the log-probabilities of `logits` [rows, width]; each row has a finite one."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprob(logprobs: Floats, token_ids: IntArray, column: int, num_top: int) -> TokenLogprob:
    """Return the log-probability of the token at `column`, and the `num_top` most likely.

    logprobs: [width], of token_ids [width], ascending. Impossible tokens are not among the top
    ones, so there may be fewer; of equal ones the lower ids come first.
    """
    top: list[TopLogprob] = []
    if num_top:
        surprises = -logprobs  # of which few are equal where many tokens cannot be chosen
        place = min(num_top, len(logprobs)) - 1
        bound = min(np.partition(surprises, place)[place], np.finfo(np.float64).max)
        (columns,) = (surprises <= bound).nonzero()
        columns = columns[np.argsort(surprises[columns], kind="stable")][:num_top]
        top = [TopLogprob(int(token_ids[at]), as_told(logprobs[at])) for at in columns]
    return TokenLogprob(int(token_ids[column]), as_told(logprobs[column]), top)


def as_told(logprob: float) -> float:
    """Return `logprob` as in results: rounded to digits that every processor agrees on."""
    return round(max(float(logprob), LOWEST_LOGPROB), NUM_DIGITS)


class PromptLogprobs:
    """The log-probabilities of the prompt of one request, whichever of its samples computes them.

    Each token is recorded once, in order; recomputed tokens are skipped.
    """

    __slots__ = ("_num_tokens", "_num_top", "_prompt", "_told")

    def __init__(self, prompt: Prompt, num_top: int) -> None:
        self._prompt, self._num_top = prompt, num_top
        self._num_tokens = prompt.num_tokens
        self._told: list[PromptLogprob] = []

    @property
    def told(self) -> list[PromptLogprob]:
        """The records of the tokens so far; the first one has no log-probability."""
        if self._num_tokens and not self._told:
            self._told.append(PromptLogprob(self._prompt.tokens[0], None, []))
        return self._told

    @property
    def is_complete(self) -> bool:
        return max(len(self._told), 1) >= self._num_tokens

    def wants(self, start: int, stop: int) -> bool:
        return not self.is_complete and start < len(self.told) <= stop

    def take(self, start: int, pieces: Iterable[FloatArray]) -> str | None:
        """Record `pieces` of logits [tokens, vocab] from `start` on; return an error, or None."""
        position = start  # of the token after which the next row of logits stands
        for piece in pieces:
            end = min(position + len(piece), self._num_tokens - 1)
            for place in range(max(position, len(self.told) - 1), end):
                logits = piece[place - position : place - position + 1]
                if not np.isfinite(logits.max()):
                    return f"no usable logits after token {place} of the prompt"
                [logprobs] = log_softmax(logits)
                token = self._prompt.tokens[len(self.told)]
                found = token_logprob(logprobs, np.arange(len(logprobs)), token, self._num_top)
                self.told.append(PromptLogprob(token, found.logprob, found.top))
            position += len(piece)
            if self.is_complete:
                break
        return None
