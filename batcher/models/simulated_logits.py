"""The simulated model's logits: a few likely words about its greedy choice, then a long tail.

The tokens are ranked: those that the grammar allows come first, in a random order in which what is
frequent tends to be early; then come all the others.  The logit falls with the logarithm of the
rank, as in Zipf's law, and by a gap where the grammar ends.  The greedy choice comes before the
first.  Bits of the prefix's hash select one of several rankings, and how sharp it is: how sure the
model seems to be.

`reference_logits` in simulated.py is the same, slowly and for one prefix.
"""

import numpy as np

from batcher.models.base import FloatArray, IntArray
from batcher.splitmix64 import Bits, BitsOrInt, scramble

NUM_RANKINGS = 16  # of each part of speech
SHARPNESSES = tuple(0.8 * 2.5 ** (step / 15) for step in range(16))
SHAPE_SHIFT = 46  # where a hash has the bits for both, below those that choose the token
TOP_LOGIT = 8.0
ZIPF_EXPONENT = 1.2
GRAMMAR_GAP = 4.5

_BEYOND_THE_GRAMMAR = 100.0  # no follower comes up as late: -ln(2^-53) is 37


class LogitTable:
    """All logits but those of the greedy choices, and the sharpnesses to multiply them with."""

    def __init__(self, choices: IntArray, vocab_size: int) -> None:
        """Take the choices: [parts of speech, choices] what follows, as often as it does."""
        self._logits = _ranked_logits(choices, vocab_size)
        self._sharpnesses = np.array(SHARPNESSES, np.float32)[:, None]
        self._buffer = np.empty((0, vocab_size), np.float32)

    def gather(self, parts: IntArray, hashes: Bits, tokens: IntArray) -> FloatArray:
        """Return the logits of some rows: [rows, vocab], good until the next call.

        parts, hashes, tokens: [rows] the part of speech of the last token, the hash of the prefix,
        the greedy choice.
        """
        num_rows = len(tokens)
        if num_rows > len(self._buffer):
            self._buffer = np.empty((num_rows, self._logits.shape[1]), np.float32)
        return self.gather_into(self._buffer[:num_rows], parts, hashes, tokens)

    def gather_into(
        self, logits: FloatArray, parts: IntArray, hashes: Bits, tokens: IntArray
    ) -> FloatArray:
        """Return `logits` [rows, vocab] with what `gather` would return written into it."""
        shapes = (hashes >> np.uint64(SHAPE_SHIFT)).view(np.int64)
        rankings = shapes // len(SHARPNESSES) % NUM_RANKINGS
        self._logits.take(parts * NUM_RANKINGS + rankings, 0, logits, "clip")
        logits[np.arange(len(tokens)), tokens] = TOP_LOGIT
        logits *= self._sharpnesses[shapes % len(SHARPNESSES)]
        return logits


def uniform_bits(part: BitsOrInt, ranking: BitsOrInt, token: BitsOrInt) -> BitsOrInt:
    """Return 52 random bits: where in (0, 1) the token's number for this ranking lies."""
    bits = scramble((part << 32) + (ranking << 16) + token)
    return bits >> 12  # type: ignore[return-value]  # numpy's stubs lose the sign, numpy does not


def _ranked_logits(choices: IntArray, vocab_size: int) -> FloatArray:
    """Return [parts * NUM_RANKINGS, vocab] the logits by rank, from 1 on.

    A token comes up after an exponential time whose rate is its frequency, and ranks are the order
    of these (Efraimidis and Spirakis, Information Processing Letters 97(5), 2006).
    """
    counts = np.stack([np.bincount(line, minlength=vocab_size) for line in choices])[:, None]
    sizes = len(choices), NUM_RANKINGS, vocab_size
    part, ranking, token = (np.arange(size, dtype=np.uint64) for size in sizes)
    bits = uniform_bits(part[:, None, None], ranking[:, None], token)
    times = -np.log((bits + 0.5) / 2**52) / counts.clip(1)
    times[np.broadcast_to(counts == 0, sizes)] += _BEYOND_THE_GRAMMAR
    by_rank = TOP_LOGIT - ZIPF_EXPONENT * np.log(np.arange(2, vocab_size + 2))
    logits = np.empty(sizes)
    np.put_along_axis(logits, times.argsort(axis=-1), by_rank[None, None], -1)
    logits -= np.where(counts == 0, GRAMMAR_GAP, 0)
    return logits.astype(np.float32).reshape(-1, vocab_size)
