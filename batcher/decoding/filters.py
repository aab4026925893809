"""Sampling settings and their effect on logits: bad words, bias, penalties, guidance, filters.

Rows with equal settings form a group.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.decoding.logprobs import Floats, log_softmax
from batcher.decoding.stops import END, Exit, StopAutomaton, StopReader
from batcher.models.base import HIGHEST, FloatArray, IntArray, bytes_of
from batcher.request import REQUEST_FIELDS, SAMPLING_FIELDS, PromptInput, Request

# Bad words, however they are cut into tokens: the automaton of a trie over bytes, lifted to the
# tokens of a vocabulary for the states that rows reach.  The state of a row is one number.

MAX_LINES = 256  # of states, least recently used dropped


class Vocabulary:
    """The bytes of all tokens; ids beyond the tokenizer's up to vocab_size are U+FFFD."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int) -> None:
        self.token_bytes, self.size = token_bytes, vocab_size

    @cached_property
    def columns(self) -> list[tuple[IntArray, NDArray[np.uint8]]]:
        """For each j, the ids of the tokens that have a byte j, and these bytes."""
        tokens = [bytes_of(token, self.token_bytes) for token in range(self.size)]
        lengths = np.array([len(token) for token in tokens])
        ends = lengths.cumsum()
        joined = np.frombuffer(b"".join(tokens), np.uint8)
        columns = []
        for place in range(lengths.max(initial=0)):
            (token_ids,) = (lengths > place).nonzero()
            columns.append((token_ids, joined[ends[token_ids] - lengths[token_ids] + place]))
        return columns


class BadWords:
    """Finds non-empty `words` in tokens of `vocabulary`; state 0 is the start."""

    def __init__(self, words: Iterable[str], vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        exits = tuple(Exit(word.encode(), END, word) for word in words)
        [(_, trie)] = StopReader(StopAutomaton((exits,)), self._token_bytes).tries
        self._next_states = next_states = trie.next_nodes()  # [states, 256] by byte
        is_end = np.array([way is not None for way in trie.best])

        @lru_cache(MAX_LINES)
        def line_of(state: int) -> NDArray[np.bool_]:
            """Return [vocab]: which tokens complete a word after `state`."""
            states = np.full(vocabulary.size, state)
            line = np.zeros(vocabulary.size, np.bool_)
            for token_ids, values in vocabulary.columns:
                states[token_ids] = next_states[states[token_ids], values]
                line[token_ids] |= is_end[states[token_ids]]
            return line

        self._line = line_of

    def completes(self, states: Iterable[int]) -> NDArray[np.bool_]:
        """Return [states, vocab]: whether a word ends at any byte of a token."""
        return np.stack([self._line(state) for state in states])

    def next_state(self, state: int, token: int) -> int:
        for byte in bytes_of(token, self._token_bytes):
            state = int(self._next_states[state, byte])
        return state


# Numbers that choose tokens; those that need no logits only matter for a draw.
_NUMBERS = {
    name: REQUEST_FIELDS[name]
    for name in SAMPLING_FIELDS
    if REQUEST_FIELDS[name].range is not None and name != "seed"
}


class SamplingParams(Request, frozen=True, kw_only=True, eq=True, cache_hash=True):
    """The fields of a request that choose its tokens; rows with equal ones form a group.

    A field without effect has its default, so that more rows are equal. cfg_scale alone shows
    whether a row has a negative prompt.
    logit_bias: (token id, bias), ids ascending, as in allowed_token_ids.
    """

    prompt: PromptInput = ""
    logit_bias: tuple[tuple[int, float], ...] = ()  # type: ignore[assignment]  # to be hashed
    allowed_token_ids: tuple[int, ...] | None = None  # type: ignore[assignment]  # to be hashed
    bad_words: tuple[str, ...] = ()  # type: ignore[assignment]  # to be hashed
    num_logprobs: int | None = None  # None: none at all; 0: of the chosen token only
    has_processed_logprobs: bool = False
    needs_cumulative: bool = False  # whether the sum of the raw log-probabilities is kept

    __eq__ = Struct.__eq__
    __hash__ = Struct.__hash__

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0)

    @property
    def needs_raw(self) -> bool:
        has_raw = self.num_logprobs is not None and not self.has_processed_logprobs
        return has_raw or self.needs_cumulative

    def is_narrow(self, num_top: int, *, is_constrained: bool = False) -> bool:
        """Return whether the `num_top` largest logits are nearly always enough."""
        if (self.num_logprobs or 0) > num_top or self.mirostat or self.cfg_scale != 1:
            return False
        edits = (self.logit_bias, self.bad_words, self.min_tokens, self.has_penalties)
        is_edited = is_constrained or any(edits) or self.allowed_token_ids is not None
        if is_edited and self.num_logprobs and not self.has_processed_logprobs:
            return False  # the largest edited logits may lack the largest raw ones
        if self.is_greedy:
            return not self.has_processed_logprobs
        if self.top_k:
            return self.top_k < num_top
        has_top_p = self.top_p < 1 and self.temperature <= 1
        return self.typical_p == 1 and (has_top_p or (self.min_p > 0 and self.top_p == 1))

    def needs_more(self, logits: FloatArray, log_sums: Floats) -> NDArray[np.bool_]:
        """Return [rows] whether tokens beyond the largest `logits` [rows, width] may matter.

        log_sums: [rows], as in TopLogits.
        """
        lowest = logits.min(axis=-1)
        needs: NDArray[np.bool_] = np.zeros(len(logits), np.bool_)
        if self.top_k and not self.is_greedy:  # ties at the end included
            needs = lowest >= np.partition(logits, -self.top_k, axis=-1)[:, -self.top_k]
            needs &= lowest > -np.inf  # or no others are left
        elif self.top_p < 1 and not self.is_greedy:
            # the nucleus is certain if it is the same for the least and the most mass of all tokens
            weights = np.exp(temper(logits.astype(np.float64), self.temperature))
            sums = -np.sort(-weights, axis=-1).cumsum(axis=-1)
            beyond = self.mass_beyond(logits, log_sums)[:, None]
            most = sums[:, -1:] + beyond
            least = most if self.temperature == 1 else sums[:, -1:]
            num_kept = (sums < self.top_p * most + most * DOUBT).sum(axis=-1)
            num_least = (sums < self.top_p * least - most * DOUBT).sum(axis=-1)
            needs = (num_kept != num_least) | (num_kept >= logits.shape[-1])
        elif not self.is_greedy:
            falls = lowest.astype(np.float64) - logits.max(axis=-1)
            needs = falls / self.temperature >= np.log(self.min_p)
        return needs

    def mass_beyond(self, logits: FloatArray, log_sums: Floats) -> Floats:
        """Return [rows] the most that tokens beyond the largest logits have, if the first has 1."""
        if self.top_k or self.top_p == 1 or self.is_greedy:
            return np.zeros(len(logits))
        raw = temper(logits.astype(np.float64), 1)
        highest = logits.max(axis=-1).astype(np.float64)
        beyond = np.maximum(np.exp(log_sums - highest) - np.exp(raw).sum(axis=-1), 0)
        lowest = np.maximum(raw.min(axis=-1), LOWEST)  # not infinite
        sharpened: Floats = beyond * np.exp(lowest * (1 / self.temperature - 1))
        return sharpened


def needs_cumulative(request: Request) -> bool:
    return request.logprobs is not None or (request.best_of or 1) > 1


def sampling_params(request: Request) -> SamplingParams:
    values = {name: getattr(request, name) for name in _NUMBERS}
    fields = {
        name: value
        for name, value in values.items()
        if _NUMBERS[name].asks(value) and (request.temperature > 0 or _NUMBERS[name].needs_logits)
    }
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(sorted(set(request.allowed_token_ids)))
    if request.logprobs is not None:
        fields["has_processed_logprobs"] = request.logprobs_mode == "processed"
    bias = sorted((int(token_id), value) for token_id, value in (request.logit_bias or {}).items())
    return SamplingParams(
        logit_bias=tuple(bias),
        bad_words=tuple(request.bad_words or ()),
        num_logprobs=request.logprobs,
        needs_cumulative=needs_cumulative(request),
        **fields,
    )


class Group:
    """Rows with equal settings, all beams or none, and the arrays made of their settings.

    is_narrow: see SamplingRow.
    slots: of its rows, ascending.
    is_allowed: [vocab], None if all ids are allowed.
    can_edit: whether the settings may change any logit.
    remembers: whether earlier tokens of a row change its logits.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        is_beam: bool,
        is_narrow: bool,
        vocab_size: int,
        bad_words: BadWords | None,
    ) -> None:
        self.params, self.is_beam, self.bad_words = params, is_beam, bad_words
        self.is_narrow = is_narrow
        self.slots: IntArray = np.zeros(0, np.int64)
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.bias = np.array([value for _, value in params.logit_bias], np.float32)
        self.is_allowed: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self.is_allowed = np.zeros(vocab_size, np.bool_)
            self.is_allowed[list(params.allowed_token_ids)] = True
        self.remembers = params.has_penalties or bad_words is not None
        self.can_edit = bool(
            self.remembers
            or params.logit_bias
            or params.min_tokens
            or params.allowed_token_ids is not None
        )


def guide(logits: FloatArray, negative: FloatArray, scale: float) -> FloatArray:
    """Return log-probabilities [rows, vocab] guided away from those of `negative`, same shape.

    Classifier-free guidance (Sanchez et al. 2023, section 2.2): l_n + scale * (l - l_n). A token
    without probability in either stays out. Changes neither argument.
    """
    away = log_softmax(negative)
    with np.errstate(invalid="ignore"):
        guided = away + scale * (log_softmax(logits) - away)
    guided[np.isneginf(logits) | np.isneginf(negative)] = -np.inf
    with np.errstate(over="ignore"):
        return np.minimum(guided, HIGHEST).astype(np.float32)


# Temperature and the filters of the sampling literature.
#
# `logits` is [rows, width] float64, of the vocabulary or of candidates in the order of their ids.
# A filter sets dropped logits to -inf, in place, and keeps at least one of each row.
#
# Mirostat controls the surprise of the output (Basu et al. 2021): every row has a bound mu [rows]
# in bits, 2 * tau at first, which moves after each token towards the one for a surprise of tau.

LOWEST = np.finfo(np.float32).min
DOUBT = 1e-9  # share of a sum, more than rounding changes
BLOCK = 1 << 14  # numbers that fit into a processor's cache
CHUNKS_PER_CANDIDATE = 4  # more take longer to find the bound, fewer make it looser
WIDE = 1 << 12  # numbers from which only those near a cut are sorted
ROUNDING = 2.0**-50  # bound of all rounding errors of a sum, per number

TINY = 1e-9
NUM_ESTIMATED = 100  # m of the paper: tokens from which the tail is estimated


class Candidates(NamedTuple):
    """Some tokens of some rows.

    rows: [n]. token_ids: [n, width], ascending in each row. logits: [n, width] float64, -inf where
    there is no candidate.
    """

    rows: IntArray
    token_ids: IntArray
    logits: Floats


def all_candidates(logits: FloatArray) -> Iterator[Candidates]:
    """Yield every token of every row, some rows at a time; the logits are copies."""
    num_rows, vocab_size = logits.shape
    num_together = max(1, BLOCK // vocab_size)
    ids = np.arange(vocab_size)
    for first in range(0, num_rows, num_together):
        floats = logits[first : first + num_together].astype(np.float64)
        rows = np.arange(first, first + len(floats))
        yield Candidates(rows, np.broadcast_to(ids, floats.shape), floats)


def top_candidates(logits: FloatArray, top_k: int) -> Iterator[Candidates]:
    """Yield the tokens of each row that are among its `top_k` largest, ties at the end included.

    Rounding depends on the width, so the width of a row depends on this row alone: top_k, or, if
    ties make it more, the next power of two.
    """
    num_rows, vocab_size = logits.shape
    top_k = min(top_k, vocab_size)
    (flat,) = (logits >= _lower_bound(logits, top_k)).reshape(-1).nonzero()
    rows = flat // vocab_size
    token_ids = flat - rows * vocab_size  # a third of what divmod takes
    values = logits.reshape(-1)[flat]
    counts = np.bincount(rows, minlength=num_rows)
    width = max(top_k, int(counts.max()))
    table = np.full((num_rows, width), -np.inf, np.float32)
    table[rows, _columns(rows, counts)] = values
    kth_largest = np.sort(table, axis=-1)[:, width - top_k]  # of a row with fewer -inf
    (tops,) = (values >= kth_largest[rows]).nonzero()
    rows, token_ids, values = rows[tops], token_ids[tops], values[tops]
    counts = np.bincount(rows, minlength=num_rows)
    if (counts == top_k).all():  # nearly always
        shape = num_rows, top_k
        floats = values.astype(np.float64).reshape(shape)
        yield Candidates(np.arange(num_rows), token_ids.reshape(shape), floats)
        return
    widths = np.where(counts <= top_k, top_k, 2 ** np.ceil(np.log2(np.maximum(counts, 1))))
    for width in np.unique(widths).tolist():
        (chosen,) = (widths == width).nonzero()
        shape = len(chosen), int(width)
        packed = Candidates(chosen, np.zeros(shape, np.int64), np.full(shape, -np.inf))
        is_here = np.isin(rows, chosen)
        at = chosen.searchsorted(rows[is_here]), _columns(rows, counts)[is_here]
        packed.token_ids[at], packed.logits[at] = token_ids[is_here], values[is_here]
        yield packed


def _columns(rows: IntArray, counts: IntArray) -> IntArray:
    return np.arange(len(rows)) - (counts.cumsum() - counts)[rows]


def _lower_bound(logits: FloatArray, top_k: int) -> FloatArray:
    """Return [rows, 1]: a finite bound near the top_k-th largest of each row, and at most that.

    It is the top_k-th largest of the maxima of many chunks.
    """
    num_rows, vocab_size = logits.shape
    size = vocab_size // (CHUNKS_PER_CANDIDATE * top_k)
    if size < 1:
        return np.full((num_rows, 1), LOWEST)
    num_chunks = vocab_size // size
    chunks = logits[:, : size * num_chunks].reshape(num_rows, size, num_chunks)
    place = num_chunks - top_k
    maxima = np.sort(chunks.max(axis=1), axis=-1)  # faster than np.partition for so few
    bound: FloatArray = np.maximum(maxima[:, place : place + 1], LOWEST)
    return bound


def temper(logits: Floats, temperature: float) -> Floats:
    """Return (logits - the row's largest) / temperature: no temperature overflows."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        shifted /= temperature
    return shifted


def keep_top_k(logits: Floats, top_k: int | IntArray) -> None:
    """Keep the `top_k` most likely, an int or [rows, 1], with ties (Fan et al. 2018, 5.1)."""
    width = logits.shape[-1]
    place = np.broadcast_to(width - np.minimum(top_k, width), (len(logits), 1))
    cut = np.take_along_axis(np.sort(logits, axis=-1), place, axis=-1)
    np.copyto(logits, -np.inf, where=logits < cut)


def keep_top_p(logits: Floats, top_p: float, beyond: Floats | None = None) -> None:
    """Keep the fewest that have `top_p` of the probability (Holtzman et al. 2020, 3.1).

    beyond: [rows] the mass of less likely tokens that are not among `logits`, if the first has 1.
    """
    if top_p >= 1:
        return
    if logits.shape[-1] < WIDE or beyond is not None:
        _keep_sorted_top_p(logits, top_p, beyond)
        return
    for row in logits:
        weights = np.exp(row - row.max())
        total = weights.sum()
        # all others together have less than is to be dropped
        (head,) = (weights >= (1 - top_p) * total / len(row)).nonzero()
        scores = row[head]
        descending = -np.sort(-scores)
        sums, mass = np.exp(descending - descending[0]).cumsum(), top_p * total
        if np.abs(sums - mass).min() <= total * len(row) * ROUNDING:
            _keep_sorted_top_p(row[None], top_p)  # the order of the sum matters
            continue
        num_kept = int(sums.searchsorted(mass)) + 1
        cut = descending[num_kept - 1]
        (kept,) = (scores > cut).nonzero()
        (equal,) = (scores == cut).nonzero()  # the lower ids stay
        kept = np.concatenate([kept, equal[: num_kept - len(kept)]])
        row.fill(-np.inf)
        row[head[kept]] = scores[kept]


def _keep_sorted_top_p(logits: Floats, top_p: float, beyond: Floats | None = None) -> None:
    ascending = np.sort(logits, axis=-1)
    mass = np.exp(ascending - ascending[:, -1:]).cumsum(axis=-1)
    if beyond is not None:
        mass += beyond[:, None]
    num_dropped = (mass[:, :-1] <= (1 - top_p) * mass[:, -1:]).sum(axis=-1)
    rows = np.arange(len(logits))
    cut = ascending[rows, num_dropped]
    is_tied = (ascending[rows, num_dropped - 1] == cut) & (num_dropped > 0)
    for row in is_tied.nonzero()[0].tolist():
        (ties,) = (logits[row] == cut[row]).nonzero()
        num_below = int(ascending[row].searchsorted(cut[row]))
        logits[row, ties[num_below - num_dropped[row] :]] = -np.inf
    np.copyto(logits, -np.inf, where=logits < cut[:, None])


def keep_typical(logits: Floats, typical_p: float) -> None:
    """Keep tokens near the expected surprise, up to `typical_p` (Meister et al. 2022, 5)."""
    if typical_p >= 1:
        return
    for row in logits:
        logprobs = row - row.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        probabilities = np.exp(logprobs)
        terms = np.multiply(
            probabilities, logprobs, where=probabilities > 0, out=np.zeros(len(row))
        )
        distances = np.abs(logprobs + -terms.sum())
        nearest = distances.argsort(kind="stable")  # the order of the sum matters
        last = np.count_nonzero(probabilities[nearest].cumsum()[:-1] < typical_p)
        row[distances > distances[nearest[last]]] = -np.inf


def surprises(logits: Floats) -> Floats:
    """Return -log2 of the probability [rows, width] of every token."""
    bits: Floats = -log_softmax(logits) / np.log(2)
    return bits


def zipf_sizes(logprobs: Floats, mu: Floats) -> IntArray:
    """Return k [rows], at least 1; logprobs: [rows, width], descending.

    Under Zipf's law k tokens have a surprise below mu: version 1 of Mirostat, algorithm 1 of the
    paper. With the exponent s and e = s - 1, k = (e * 2^mu / (1 - width^-e))^(1/s), computed in
    logarithms, since an even distribution has an s near 0.
    """
    width = logprobs.shape[-1]
    if width == 1:
        return np.ones(len(logprobs), np.int64)
    top = logprobs[:, :NUM_ESTIMATED]
    ranks = np.arange(1, top.shape[-1])
    steps = np.log((ranks + 1) / ranks)
    is_finite = np.isfinite(top[:, 1:])
    falls = np.subtract(top[:, :-1], top[:, 1:], where=is_finite, out=np.zeros_like(top[:, 1:]))
    squares = np.where(is_finite, steps * steps, 0).sum(axis=-1)
    exponent = (steps * falls).sum(axis=-1) / np.maximum(squares, TINY)
    excess = exponent - 1
    excess[np.abs(excess) < TINY] = TINY  # the formula has a limit at 0
    with np.errstate(over="ignore"):
        scale = np.log(excess / -np.expm1(-excess * np.log(width)))
        log_size = (scale + mu * np.log(2)) / np.maximum(exponent, TINY)
    sizes: IntArray = np.rint(np.exp(np.clip(log_size, 0, np.log(width)))).astype(np.int64)
    return sizes


def keep_below(logits: Floats, mu: Floats) -> None:
    """Keep surprises up to mu, or the most likely (github.com/basusourya/mirostat, v2)."""
    bits = surprises(logits)
    cut = np.maximum(mu[:, None], bits.min(axis=-1, keepdims=True))
    np.copyto(logits, -np.inf, where=bits > cut)
