"""One token for each row of one group, from logits that penalties and masks have been through.

Nothing here knows of slots; the state of Mirostat comes in and goes out.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from batcher.decoding.sampling import filters, mirostat
from batcher.decoding.sampling.filters import Candidates
from batcher.decoding.sampling.logprobs import Floats, log_softmax, token_logprob
from batcher.decoding.sampling.noise import UnsignedArray, gumbel_noise
from batcher.decoding.sampling.params import SamplingParams
from batcher.models.base import FloatArray, IntArray
from batcher.result import TokenLogprob


class DrawStates(NamedTuple):
    """What a draw depends on beside the logits, [rows] each: see noise.py and mirostat.py."""

    keys: UnsignedArray
    positions: IntArray
    mu: Floats

    def take(self, rows: IntArray) -> "DrawStates":
        """Return the states of some rows."""
        return DrawStates(self.keys[rows], self.positions[rows], self.mu[rows])


class DrawnTokens(NamedTuple):
    """tokens, mu: [rows].  logprobs: of each row, what it was drawn from; empty if not asked."""

    tokens: IntArray
    mu: Floats
    logprobs: dict[int, TokenLogprob]


def draw(logits: FloatArray, states: DrawStates, params: SamplingParams) -> DrawnTokens:
    """Return one token of each row of `logits` [rows, vocab], whose rows are all usable."""
    drawn = DrawnTokens(np.zeros(len(logits), np.int64), states.mu.copy(), {})
    for candidates in _narrow(logits, params):
        rows, token_ids, scores = candidates
        own = states.take(rows)
        if params.is_greedy:
            columns: IntArray = scores.argmax(axis=-1)
        else:
            tempered = filters.temper(scores, params.temperature)
            scores = tempered.copy()
            _filter(scores, own, params)
            columns = _choose(scores, token_ids, own)
            if params.mirostat:
                drawn.mu[rows] = mirostat.move(
                    own.mu,
                    mirostat.surprises(tempered)[np.arange(len(rows)), columns],
                    tau=params.mirostat_tau,
                    eta=params.mirostat_eta,
                    vocab_size=logits.shape[-1],
                )
        drawn.tokens[rows] = token_ids[np.arange(len(rows)), columns]
        if params.num_logprobs is not None and params.has_processed_logprobs:
            told = zip(log_softmax(scores), token_ids, columns.tolist(), strict=True)
            for row, (logprobs, ids, column) in zip(rows.tolist(), told, strict=True):
                drawn.logprobs[row] = token_logprob(logprobs, ids, column, params.num_logprobs)
    return drawn


def _narrow(logits: FloatArray, params: SamplingParams) -> Iterator[Candidates]:
    """Yield all that can be drawn, as few as top_k allows.

    top_k and the temperature commute: the temperature does not change which are largest.
    """
    if params.top_k:
        return filters.top_candidates(logits, params.top_k)
    return filters.all_candidates(logits)


def _filter(scores: Floats, states: DrawStates, params: SamplingParams) -> None:
    """Drop what is not to be drawn, in the order of transformers' `generate`.

    The order counts: vLLM, which applies min_p before top_p, may keep fewer.
    """
    if params.mirostat == 1:
        mirostat.keep_zipf(scores, states.mu)
    elif params.mirostat:
        mirostat.keep_below(scores, states.mu)
    else:
        filters.keep_top_p(scores, params.top_p)
        filters.keep_min_p(scores, params.min_p)
        filters.keep_typical(scores, params.typical_p)


def _choose(scores: Floats, token_ids: IntArray, states: DrawStates) -> IntArray:
    """Return the column of a sample of the softmax of every row of `scores`."""
    (kept,) = (scores > -np.inf).reshape(-1).nonzero()
    rows = kept // scores.shape[-1]
    noise = gumbel_noise(states.keys, states.positions, rows, token_ids.reshape(-1)[kept])
    noisy = np.full_like(scores, -np.inf)
    noisy.reshape(-1)[kept] = scores.reshape(-1)[kept] + noise
    chosen: IntArray = noisy.argmax(axis=-1)
    return chosen
