"""One token for each row of one group, from logits that penalties and masks have been through.

Nothing here knows of slots; the state of Mirostat comes in and goes out.  The Gumbel-max trick
makes a draw of noise: the largest of logit + noise is a sample of the softmax (Gumbel 1954;
Maddison, Tarlow, Minka 2014).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from batcher.decoding import filters
from batcher.decoding.filters import Candidates
from batcher.decoding.logprobs import Floats, log_softmax, token_logprob
from batcher.decoding.sampling.group import SamplingParams
from batcher.decoding.sampling.noise import (
    acceptance_noise,
    gumbel_noise,
    highest_noise,
    token_hashes,
)
from batcher.decoding.sampling.rejection import DrawnDraft, verify
from batcher.models.base import FloatArray, IntArray
from batcher.result import TokenLogprob
from batcher.splitmix64 import Bits


class DrawStates(NamedTuple):
    """What a draw depends on beside the logits, [rows] each."""

    keys: Bits
    positions: IntArray
    mu: Floats


class DrawnTokens(NamedTuple):
    """tokens, mu: [rows].  logprobs: of each row, what it was drawn from; empty if not asked."""

    tokens: IntArray
    mu: Floats
    logprobs: dict[int, TokenLogprob]


def draw(
    logits: FloatArray,
    states: DrawStates,
    params: SamplingParams,
    drafts: Sequence[DrawnDraft | None] = (),
) -> DrawnTokens:
    """Return one token of each row of `logits` [rows, vocab], whose rows are all usable.

    drafts: the draft of each row that is to be verified, if there is any of any.
    """
    drawn = DrawnTokens(np.zeros(len(logits), np.int64), states.mu.copy(), {})
    for candidates in _narrow(logits, params):
        rows, token_ids, scores = candidates
        own = DrawStates(states.keys[rows], states.positions[rows], states.mu[rows])
        if params.is_greedy:
            columns: IntArray = scores.argmax(axis=-1)
        else:
            scores = filters.temper(scores, params.temperature)
            tempered = scores.copy() if params.mirostat else scores
            _filter(scores, own.mu, params)
            drawn_from = scores
            if drafts:
                noise = acceptance_noise(own.keys, own.positions)
                drawn_from = verify(scores, token_ids, [drafts[row] for row in rows], noise)
            columns = _choose(drawn_from, token_ids, own)
            if params.mirostat:
                drawn.mu[rows] = filters.move_mu(
                    own.mu,
                    filters.surprises(tempered)[np.arange(len(rows)), columns],
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


def probabilities(logits: FloatArray, mu: Floats, params: SamplingParams) -> Floats:
    """Return [rows, vocab] what `draw` draws a token of each row from; mu: [rows]."""
    found: Floats = np.zeros(logits.shape)
    if params.is_greedy:
        found[np.arange(len(found)), logits.argmax(axis=-1)] = 1.0
        return found
    for rows, token_ids, values in _narrow(logits, params):
        scores = filters.temper(values, params.temperature)
        _filter(scores, mu[rows], params)
        at, columns = (scores > -np.inf).nonzero()
        found[rows[at], token_ids[at, columns]] = np.exp(log_softmax(scores))[at, columns]
    return found


def _narrow(logits: FloatArray, params: SamplingParams) -> Iterator[Candidates]:
    """Yield all that can be drawn, as few as top_k allows.

    top_k and the temperature commute: the temperature does not change which are largest.
    """
    if params.top_k:
        return filters.top_candidates(logits, params.top_k)
    return filters.all_candidates(logits)


def _filter(scores: Floats, mu: Floats, params: SamplingParams) -> None:
    """Drop what is not to be drawn, in the order of transformers' `generate`.

    The order counts: vLLM, which applies min_p before top_p, may keep fewer.
    """
    if params.mirostat == 1:
        filters.keep_zipf(scores, mu)
    elif params.mirostat:
        filters.keep_below(scores, mu)
    else:
        filters.keep_top_p(scores, params.top_p)
        filters.keep_min_p(scores, params.min_p)
        filters.keep_typical(scores, params.typical_p)


def _choose(scores: Floats, token_ids: IntArray, states: DrawStates) -> IntArray:
    """Return the column of a sample of the softmax of every row of `scores`.

    Noise takes the longest, so it is made only for the tokens that would win with the most that
    theirs can be.
    """
    is_left = np.logical_or.reduce(scores > -np.inf)
    chosen: IntArray
    if not is_left.all():
        (columns,) = is_left.nonzero()
        left = scores.take(columns, axis=-1), token_ids.take(columns, axis=-1)
        chosen = columns[_choose(*left, states)]
        return chosen
    hashes = token_hashes(states.keys, states.positions, token_ids)
    most = scores + highest_noise(hashes)
    rows = np.arange(len(scores))
    likely = most.argmax(axis=-1)
    least = scores[rows, likely] + gumbel_noise(hashes[rows, likely])
    contenders = np.flatnonzero(most >= least[:, None])
    noisy = scores.take(contenders) + gumbel_noise(hashes.take(contenders))
    most.fill(-np.inf)
    most.put(contenders, noisy)
    chosen = most.argmax(axis=-1)
    return chosen
