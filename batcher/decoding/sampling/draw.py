"""One token for each row of one group, from logits that penalties and masks have been through.

Nothing here knows of slots; the state of Mirostat comes in and goes out.  Randomness depends on who
asks, never on when: it is a hash of row, position and token.  The Gumbel-max trick makes a draw of
it: the largest of logit + noise is a sample of the softmax (Gumbel 1954; Maddison, Tarlow, Minka
2014).  Sums and products of hashes are modulo 2^64.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.sampling import filters
from batcher.decoding.sampling.filters import Candidates
from batcher.decoding.sampling.group import SamplingParams
from batcher.decoding.sampling.logprobs import Floats, log_softmax, token_logprob
from batcher.models.base import FloatArray, IntArray
from batcher.result import TokenLogprob

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 52
_HIGHEST = np.float32(_BITS * np.log(2) + 1e-3)  # more than what rounding takes of it in float32

UnsignedArray = NDArray[np.uint64]


class DrawStates(NamedTuple):
    """What a draw depends on beside the logits, [rows] each."""

    keys: UnsignedArray
    positions: IntArray
    mu: Floats


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
        own = DrawStates(states.keys[rows], states.positions[rows], states.mu[rows])
        if params.is_greedy:
            columns: IntArray = scores.argmax(axis=-1)
        else:
            scores = filters.temper(scores, params.temperature)
            tempered = scores.copy() if params.mirostat else scores
            _filter(scores, own, params)
            columns = _choose(scores, token_ids, own)
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
        filters.keep_zipf(scores, states.mu)
    elif params.mirostat:
        filters.keep_below(scores, states.mu)
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


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64 bits that all the randomness of one sample of a request comes from."""
    name = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    key = int.from_bytes(name, "little")
    for number in (seed, sample):
        key = _splitmix64(key + (number + 1) * _GAMMA)
    return key


def token_hashes(keys: UnsignedArray, positions: IntArray, token_ids: IntArray) -> UnsignedArray:
    """Return the hashes [rows, width] of `token_ids`, same shape.

    keys, positions: [rows]; how many tokens each row has generated.
    """
    starts = _scramble(keys + (positions.astype(np.uint64) + 1) * np.uint64(_GAMMA))
    hashes = token_ids.astype(np.uint64)
    hashes *= np.uint64(_GAMMA)
    hashes += (starts + np.uint64(_GAMMA))[:, None]
    return _scramble(hashes)


def gumbel_noise(hashes: UnsignedArray) -> Floats:
    """Return the noise that each of `hashes` stands for."""
    # in the middle of one of 2^52 equal parts of (0, 1): never 0, never 1, both exact in float64
    uniform = (_places(hashes) + 0.5) * 2.0**-_BITS
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def highest_noise(hashes: UnsignedArray) -> NDArray[np.float32]:
    """Return what the noise of each of `hashes` is not above, and near to where it is high.

    -log(u) is not below 1 - u.
    """
    rest = _places(~hashes).astype(np.float32)  # of 1 - u
    rest += np.float32(0.5)
    noise = np.log(rest, out=rest)
    return np.subtract(_HIGHEST, noise, out=noise)


def _places(hashes: UnsignedArray) -> IntArray:
    """Return which of the 2^52 equal parts of (0, 1) each of `hashes` falls into."""
    return (hashes >> np.uint64(64 - _BITS)).view(np.int64)  # turned into floats far faster


def _splitmix64(number: int) -> int:
    """Return the output function of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    number &= _MASK
    number = (number ^ (number >> 30)) * _MULTIPLIERS[0] & _MASK
    number = (number ^ (number >> 27)) * _MULTIPLIERS[1] & _MASK
    return number ^ (number >> 31)


def _scramble(numbers: UnsignedArray) -> UnsignedArray:
    """Return _splitmix64 of every number; changes them in place."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(multiplier)
    numbers ^= numbers >> np.uint64(31)
    return numbers
