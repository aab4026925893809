"""Sampler: the sampling state of all running rows; one call per step chooses their tokens.

Arrays are indexed by slot. Rows with equal settings form a group, and a step samples group by
group. Only log-probabilities, bad words and min_tokens are handled row by row.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.decoding import filters
from batcher.decoding.filters import BadWords, Candidates, Group, SamplingParams, Vocabulary, guide
from batcher.decoding.logprobs import Floats, as_told, log_softmax, token_logprob
from batcher.errors import Failure, InvariantError
from batcher.models.base import FloatArray, IntArray, LogitEdits, Tokenizer, TopLogits
from batcher.result import TokenLogprob
from batcher.splitmix64 import GAMMA, MASK, Bits, mix, mix_in_place
from batcher.tokens import Tokens

# Noise is a hash of row, position and token, and so independent of the batch.  Sums and products of
# hashes are modulo 2^64.

_BITS = 52
_HIGHEST = np.float32(_BITS * np.log(2) + 1e-3)  # more than float32 rounding takes off

# instead of positions, which no row reaches
_ACCEPTANCE, _DRAFTS = (np.uint64(number * GAMMA & MASK) for number in (2**63, 2**63 + 1))


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64-bit random key of one sample of a request."""
    name = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    key = int.from_bytes(name, "little")
    for number in (seed, sample):
        key = mix(key + (number + 1) * GAMMA)
    return key


def token_hashes(keys: Bits, positions: IntArray, token_ids: IntArray) -> Bits:
    """Return the hashes [rows, width] of `token_ids`; keys, positions: [rows]."""
    starts = _at(keys, positions)
    hashes = token_ids.astype(np.uint64)
    hashes *= np.uint64(GAMMA)
    hashes += (starts + np.uint64(GAMMA))[:, None]
    return mix_in_place(hashes)


def draft_keys(keys: Bits, positions: IntArray) -> Bits:
    """Return keys [rows] for drafts; no two drafts and no token share their noise."""
    return _at(mix_in_place(keys + _DRAFTS), positions)


def acceptance_noise(keys: Bits, positions: IntArray) -> Floats:
    """Return numbers [rows], uniform in (0, 1), independent of other noise of the rows."""
    return _uniform(_at(mix_in_place(keys + _ACCEPTANCE), positions))


def gumbel_noise(hashes: Bits) -> Floats:
    noise: Floats = -np.log(-np.log(_uniform(hashes)))
    return noise


def highest_noise(hashes: Bits) -> NDArray[np.float32]:
    """Return a tight upper bound of the noise of `hashes`: -log(u) is not below 1 - u."""
    rest = _places(~hashes).astype(np.float32)  # of 1 - u
    rest += np.float32(0.5)
    noise = np.log(rest, out=rest)
    return np.subtract(_HIGHEST, noise, out=noise)


def _at(keys: Bits, positions: IntArray) -> Bits:
    return mix_in_place(keys + (positions.astype(np.uint64) + 1) * np.uint64(GAMMA))


def _uniform(hashes: Bits) -> Floats:
    """Return the middle of each hash's interval of (0, 1): never 0 or 1, and exact."""
    uniform: Floats = _places(hashes) + np.float64(0.5)
    uniform *= 2.0**-_BITS
    return uniform


def _places(hashes: Bits) -> IntArray:
    return (hashes >> np.uint64(64 - _BITS)).view(np.int64)  # far faster to convert to floats


# Speculative sampling (Leviathan et al. 2023, section 2.3; Chen et al. 2023, algorithm 2): a draft
# drawn from q is accepted with probability min(1, p / q), where p is the distribution of the token.
# Otherwise another token is drawn from max(p - q, 0).  The result is a sample of p, if the noise of
# the draft, of its acceptance and of the other token are independent.


class DrawnDraft(NamedTuple):
    """A draft; probabilities: [vocab] float32, the distribution it was drawn from."""

    token: int
    probabilities: FloatArray


def verify(
    scores: Floats, token_ids: IntArray, drafts: Sequence[DrawnDraft | None], noise: Floats
) -> Floats:
    """Return scores [rows, width] to draw from, so that the drafts of rows are accepted or not.

    A row whose draft is accepted has that token alone. A row whose draft is rejected has the part
    of its probabilities above those of the draft.

    scores: their softmax is the distribution of the token of each row; rows without a draft keep
    it.
    token_ids: [rows, width]. noise: [rows], uniform in (0, 1).
    """
    here = {row: draft for row, draft in enumerate(drafts) if draft is not None}
    if not here:
        return scores
    rows = np.array([*here])
    tokens = np.array([draft.token for draft in here.values()])
    drawn_from = np.stack([draft.probabilities for draft in here.values()]).astype(np.float64)
    wanted = np.exp(log_softmax(scores[rows]))
    is_draft = token_ids[rows] == tokens[:, None]
    of_draft = np.where(is_draft, wanted, 0.0)
    is_accepted = noise[rows] * drawn_from[np.arange(len(rows)), tokens] < of_draft.sum(axis=-1)
    above = np.maximum(wanted - np.take_along_axis(drawn_from, token_ids[rows], axis=-1), 0.0)
    is_empty = ~above.any(axis=-1)  # both are equal except for rounding
    above[is_empty] = wanted[is_empty]
    verified = scores.copy()
    with np.errstate(divide="ignore"):
        verified[rows] = np.log(np.where(is_accepted[:, None], of_draft, above))
    return verified


# One token for each row of a group, after penalties and masks.  The Gumbel-max trick draws: the
# largest of logit + noise is a sample of the softmax (Gumbel 1954; Maddison, Tarlow, Minka 2014).


class DrawStates(NamedTuple):
    """Inputs of a draw besides the logits; each is [rows]."""

    keys: Bits
    positions: IntArray
    mu: Floats


class DrawnTokens(NamedTuple):
    """tokens, mu: [rows]. logprobs: row -> of the distribution it was drawn from, if requested."""

    tokens: IntArray
    mu: Floats
    logprobs: dict[int, TokenLogprob]


def draw(
    logits: FloatArray,
    states: DrawStates,
    params: SamplingParams,
    drafts: Sequence[DrawnDraft | None] = (),
    top: TopLogits | None = None,
) -> DrawnTokens:
    """Return one token of each row of `logits` [rows, vocab].

    drafts: those to verify. top: set if `logits` are only its largest ones.
    """
    drawn = DrawnTokens(np.zeros(len(logits), np.int64), states.mu.copy(), {})
    for candidates in _narrow(logits, params):
        rows, token_ids, scores = candidates
        beyond: Floats | None = None
        if top is not None:
            token_ids = np.take_along_axis(top.token_ids[rows], token_ids, axis=-1)
            beyond = params.mass_beyond(top.logits[rows], top.log_sums[rows])
        own = DrawStates(states.keys[rows], states.positions[rows], states.mu[rows])
        if params.is_greedy:
            columns: IntArray = scores.argmax(axis=-1)
        else:
            scores = filters.temper(scores, params.temperature)
            tempered = scores.copy() if params.mirostat else scores
            _filter(scores, own.mu, params, beyond)
            drawn_from = scores
            if drafts:
                noise = acceptance_noise(own.keys, own.positions)
                drawn_from = verify(scores, token_ids, [drafts[row] for row in rows], noise)
            columns = _choose(drawn_from, token_ids, own)
            if params.mirostat:
                surprise = filters.surprises(tempered)[np.arange(len(rows)), columns]
                moved = own.mu - params.mirostat_eta * (surprise - params.mirostat_tau)
                # Without limits mu would drift away where tau is out of reach.  At 0 it leaves one
                # token, at twice the bits of an even distribution all that matter.
                drawn.mu[rows] = np.clip(moved, 0, 2 * np.log2(max(logits.shape[-1], 2)))
        drawn.tokens[rows] = token_ids[np.arange(len(rows)), columns]
        if params.num_logprobs is not None and params.has_processed_logprobs:
            told = zip(log_softmax(scores), token_ids, columns.tolist(), strict=True)
            for row, (logprobs, ids, column) in zip(rows.tolist(), told, strict=True):
                drawn.logprobs[row] = token_logprob(logprobs, ids, column, params.num_logprobs)
    return drawn


def probabilities(logits: FloatArray, mu: Floats, params: SamplingParams) -> Floats:
    """Return [rows, vocab] the distribution from which `draw` draws; mu: [rows]."""
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
    # top_k and temperature commute
    if params.top_k:
        return filters.top_candidates(logits, params.top_k)
    return filters.all_candidates(logits)


def _filter(
    scores: Floats, mu: Floats, params: SamplingParams, beyond: Floats | None = None
) -> None:
    """Drop tokens in the order of transformers; vLLM applies min_p first."""
    if params.mirostat == 1:
        logprobs = -np.sort(filters.surprises(scores), axis=-1) * np.log(2)
        filters.keep_top_k(scores, filters.zipf_sizes(logprobs, mu)[:, None])
    elif params.mirostat:
        filters.keep_below(scores, mu)
    else:
        filters.keep_top_p(scores, params.top_p, beyond)
        if params.min_p > 0:  # Nguyen et al. 2024
            cut = scores.max(axis=-1, keepdims=True) + np.log(params.min_p)
            np.copyto(scores, -np.inf, where=scores < cut)
        filters.keep_typical(scores, params.typical_p)


def _choose(scores: Floats, token_ids: IntArray, states: DrawStates) -> IntArray:
    """Return the column of a sample of the softmax of every row of `scores`.

    Noise is expensive, so only tokens that could win with the largest possible noise get it.
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


MAX_BAD_WORDS = 32  # lists, least recently used dropped
NONE_LEFT = "the settings of the request allow no token"
NONE = -1  # no partner, or no mask
KEPT_MEMORY = 1 << 24  # bytes, more than a step allocates for one row


class SamplingRow(NamedTuple):
    """A row as the sampler opens it.

    key: see row_key. stop_token_ids: ids held off until min_tokens, EOS included.
    partner: the slot of the negative prompt's row; set exactly if params.cfg_scale is not 1.
    is_narrow: whether the largest logits are enough, see SamplingParams.is_narrow.
    """

    params: SamplingParams
    key: int
    prompt_tokens: Tokens
    stop_token_ids: tuple[int, ...] = ()
    partner: int | None = None
    is_beam: bool = False
    is_narrow: bool = False


class SuspendedSampling(NamedTuple):
    """A row outside the sampler: its entries in the arrays by slot, and its seen tokens."""

    row: SamplingRow
    numbers: list[float]
    seen: dict[int, int] | None

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the raw log-probabilities of its tokens; kept if params.needs_cumulative."""
        return self.numbers[-1]


class Masks(NamedTuple):
    """Allowed tokens by constraints in a step; slots: [k]; allowed: [k, vocab] bool."""

    slots: IntArray
    allowed: NDArray[np.bool_]


class Sampled(NamedTuple):
    """The choices of a step.

    tokens: [num_slots], 0 where nothing was chosen; a partner's slot has the token of the sample.
    failed: slot -> why its row has no token, without partners.
    logprobs: slot -> of its token, if requested.
    beam_scores: slot -> [vocab] float32 log-probabilities of beams after bias, penalties and masks;
    -inf for impossible tokens.
    """

    tokens: IntArray
    failed: dict[int, Failure]
    logprobs: dict[int, TokenLogprob]
    beam_scores: dict[int, FloatArray]


class Sampler:
    """Chooses the tokens of open rows."""

    def __init__(self, num_slots: int, vocab_size: int, tokenizer: Tokenizer) -> None:
        self._slots: tuple[IntArray, IntArray] | None = None  # computed when needed
        self._vocab_size = vocab_size
        # glibc returns a block to the system at once if it is larger than all freed before, up to
        # 32 MB (mallopt(3), M_MMAP_THRESHOLD), and mapping it again takes longer than using it.
        # Freeing a large one here makes it keep arrays of a vocabulary.
        np.empty(KEPT_MEMORY, np.uint8)
        vocabulary = Vocabulary(tokenizer.token_bytes, vocab_size)
        self._bad_words = lru_cache(MAX_BAD_WORDS)(partial(BadWords, vocabulary=vocabulary))
        self._groups: dict[tuple[SamplingParams, bool, bool], Group] = {}
        self._rows: list[tuple[SamplingRow, Group] | None] = [None] * num_slots
        self._is_wanted, self._is_narrow = (np.zeros(num_slots, np.bool_) for _ in range(2))
        # where in `slots` or `narrow_slots` a slot is
        self._logit_rows: IntArray = np.zeros(num_slots, np.int64)
        self._partners: IntArray = np.full(num_slots, NONE)
        self._keys = np.zeros(num_slots, np.uint64)
        self._positions: IntArray = np.zeros(num_slots, np.int64)
        self._mu = np.zeros(num_slots)
        self._bad_word_states: IntArray = np.zeros(num_slots, np.int64)
        self._cumulative = np.zeros(num_slots)
        # By slot, how often a row has generated each of its tokens; 0 for prompt tokens.
        self._seen: dict[int, dict[int, int]] = {}
        # by slot and position: drafts to verify, and drafts drawn now
        self._drafts: dict[tuple[int, int], DrawnDraft] = {}
        self._drafted: dict[tuple[int, int], DrawnDraft] | None = None
        self._states = (
            self._keys,
            self._positions,
            self._mu,
            self._bad_word_states,
            self._cumulative,
        )

    @property
    def is_idle(self) -> bool:
        return not self._groups

    @property
    def slots(self) -> IntArray:
        """[logit rows] the slots, ascending, whose logits `sample` needs: of rows and partners."""
        return self._wanted_slots()[0]

    @property
    def narrow_slots(self) -> IntArray:
        """[rows] the slots, ascending, whose largest logits `sample` needs."""
        return self._wanted_slots()[1]

    def _wanted_slots(self) -> tuple[IntArray, IntArray]:
        if self._slots is None:
            whole, narrow = self._is_wanted & ~self._is_narrow, self._is_wanted & self._is_narrow
            self._slots = whole.nonzero()[0], narrow.nonzero()[0]
            for slots in self._slots:
                slots.flags.writeable = False  # models receive it
                self._logit_rows[slots] = np.arange(len(slots))
        return self._slots

    def edits(self, masks: Masks | None) -> LogitEdits | None:
        """Return the edits of rows in `narrow_slots`, before their step, or None."""
        self._wanted_slots()
        found = []
        for group in self._groups.values():
            if group.is_narrow and (group.can_edit or masks is not None):
                edits = self._edits_of(group, group.slots, masks)
                if edits is not None:
                    found.append(edits.at(self._logit_rows[group.slots]))
        return LogitEdits(*map(np.concatenate, zip(*found, strict=True))) if found else None

    def open(self, slot: int, row: SamplingRow) -> None:
        """Open a row in `slot`, and its partner's slot."""
        if (row.partner is None) != (row.params.cfg_scale == 1):
            raise InvariantError(f"cfg_scale {row.params.cfg_scale}, partner {row.partner}")
        self._enter(slot, row)
        self._keys[slot] = row.key
        self._positions[slot] = 0
        self._mu[slot] = 2 * row.params.mirostat_tau
        self._bad_word_states[slot] = 0
        self._cumulative[slot] = 0
        if row.params.has_penalties:
            self._seen[slot] = dict.fromkeys(row.prompt_tokens, 0)

    def close(self, slot: int) -> None:
        """Forget the row in `slot` and its partner; do nothing for an empty or a partner's slot."""
        if self._drafts:
            self._drafts = {at: draft for at, draft in self._drafts.items() if at[0] != slot}
        entry = self._rows[slot]
        if entry is not None:
            row, group = entry
            group.slots = group.slots[group.slots != slot]
            if not len(group.slots):
                del self._groups[row.params, row.is_beam, row.is_narrow]
            self._rows[slot] = None
            self._partners[slot] = NONE
            self._seen.pop(slot, None)
            self._set_wanted(slot, row, is_wanted=False)

    def suspend(self, slot: int) -> SuspendedSampling | None:
        """Forget the row in `slot` and its partner; return it, or None."""
        entry = self._rows[slot]
        if entry is None:
            return None
        [row, _] = entry
        numbers = [state.item(slot) for state in self._states]
        seen = self._seen.get(slot)
        self.close(slot)
        return SuspendedSampling(row, numbers, seen)

    def resume(self, slot: int, suspended: SuspendedSampling, partner: int | None) -> None:
        """Resume a row in `slot`; partner: the current slot of its partner."""
        self._enter(slot, suspended.row._replace(partner=partner))
        for state, number in zip(self._states, suspended.numbers, strict=True):
            state[slot] = number
        if suspended.seen is not None:
            self._seen[slot] = suspended.seen

    def fork(self, source: int, target: int) -> None:
        """Copy the row in `source` to `target`, whose row is forgotten."""
        entry = self._rows[source]
        if entry is None or entry[0].partner is not None:
            raise InvariantError(f"slot {source} cannot be forked")
        self.close(target)
        self._enter(target, entry[0])
        for state in self._states:
            state[target] = state[source]
        if source in self._seen:
            self._seen[target] = self._seen[source].copy()

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Append tokens that `sample` has not chosen; given: slot -> its tokens."""
        self._positions[[*given]] += [len(tokens) for tokens in given.values()]
        for slot, tokens in given.items():
            entry = self._rows[slot]
            if entry is not None and entry[1].remembers:
                for token in tokens:
                    self._remember(entry[1], slot, token)

    def sample(
        self,
        logits: FloatArray,
        masks: Masks | None = None,
        skip: Collection[int] = (),
        some: IntArray | None = None,
        top: TopLogits | None = None,
    ) -> Sampled:
        """Choose a token for every open row and advance the rows; beams wait for `extend`.

        logits: [len(self.slots), vocab] in the order of `slots`; unchanged.
        skip: slots whose rows have no usable logits, because the model failed them.
        some: [rows] the only slots to sample, without partners; the logits are [rows, vocab] then.
        top: of `narrow_slots`, after their `edits`.
        """
        wanted = self.slots if some is None else some
        places = self._logit_rows
        if some is not None:
            places = np.empty_like(places)
            places[some] = np.arange(len(some))
        logits = np.ascontiguousarray(logits, np.float32)
        if logits.shape != (len(wanted), self._vocab_size):
            raise InvariantError(f"logits {logits.shape} for {len(wanted)} rows")
        tokens: IntArray = np.zeros(len(self._rows), np.int64)
        maxima = logits.max(axis=-1) if len(logits) else np.zeros(0, np.float32)  # NaN if any is
        if top is not None:
            maxima = np.concatenate([maxima, top.raw_log_sums])  # as finite as the largest
            wanted = np.concatenate([wanted, self.narrow_slots])
        sampled = Sampled(tokens, self._failures(maxima, wanted, skip), {}, {})
        out = [*skip, *sampled.failed]
        for group, of_slots, of_raw, of_top in self._parts(logits, places, out, some, top):
            params, slots, raw, own = group.params, of_slots, of_raw, of_top
            if group.is_beam:
                with np.errstate(over="ignore"):
                    raw = log_softmax(raw).astype(np.float32)
            edited = raw
            if params.cfg_scale != 1:
                edited = guide(raw, logits[places[self._partners[slots]]], params.cfg_scale)
            if own is not None:
                edited = own.logits
            elif (edits := self._edits_of(group, slots, masks)) is not None:
                edited = edits.apply(edited)
            if group.is_beam:  # all may be impossible
                sampled.beam_scores.update(zip(slots.tolist(), edited, strict=True))
                continue
            chosen: IntArray | None = None
            if params.is_greedy and not params.has_processed_logprobs:
                chosen = edited.argmax(axis=-1)
            if edited is not raw:
                at = np.arange(len(edited))
                largest = edited.max(-1) if chosen is None else edited[at, chosen]
                is_left = largest > -np.inf
                if not is_left.all():
                    failure = Failure("constraint-error", NONE_LEFT)
                    sampled.failed.update(dict.fromkeys(slots[~is_left].tolist(), failure))
                    slots, raw, edited = slots[is_left], raw[is_left], edited[is_left]
                    chosen = None if chosen is None else chosen[is_left]
                    own = None if own is None else own.of(is_left.nonzero()[0])
            if not len(slots):
                continue
            if chosen is not None and own is not None:
                chosen = own.token_ids[np.arange(len(slots)), chosen]
            if chosen is None:
                states = DrawStates(self._keys[slots], self._positions[slots], self._mu[slots])
                cells = [*zip(slots.tolist(), states.positions.tolist(), strict=True)]
                drafts = [self._drafts.get(cell) for cell in cells] if self._drafts else ()
                drawn = draw(edited, states, params, drafts, own)
                if self._drafted is not None:
                    drawn_from = probabilities(edited, states.mu, params).astype(np.float32)
                    made = map(DrawnDraft, drawn.tokens.tolist(), drawn_from)
                    self._drafted.update(zip(cells, made, strict=True))
                chosen, self._mu[slots] = drawn.tokens, drawn.mu
                for row, logprob in drawn.logprobs.items():
                    sampled.logprobs[int(slots[row])] = logprob
            if params.needs_raw:
                num_top, token_ids = params.num_logprobs, np.arange(self._vocab_size)
                pairs = zip(slots.tolist(), chosen.tolist(), strict=True)
                for place, (slot, token) in enumerate(pairs):
                    column = token
                    if own is not None:
                        logprobs = raw[place].astype(np.float64) - own.raw_log_sums[place]
                        token_ids = own.token_ids[place]
                        column = int(token_ids.searchsorted(token))
                    else:
                        [logprobs] = log_softmax(raw[place : place + 1])
                    self._cumulative[slot] += as_told(logprobs[column])
                    if num_top is not None and not params.has_processed_logprobs:
                        sampled.logprobs[slot] = token_logprob(logprobs, token_ids, column, num_top)
            tokens[slots] = chosen
            if params.cfg_scale != 1:
                tokens[self._partners[slots]] = chosen
            self._positions[slots] += 1
            if group.remembers:
                for slot, token in zip(slots.tolist(), chosen.tolist(), strict=True):
                    self._remember(group, slot, token)
        return sampled

    def _parts(
        self,
        logits: FloatArray,
        places: IntArray,
        out: list[int],
        some: IntArray | None,
        top: TopLogits | None,
    ) -> Iterator[tuple[Group, IntArray, FloatArray, TopLogits | None]]:
        """Yield rows of a group: their slots and logits, and those of `top` if these are enough.

        Arguments as in `sample`; places: by slot; out: slots without a token.
        """
        for group in self._groups.values():
            slots = group.slots[~np.isin(group.slots, out)] if out else group.slots
            if some is not None:
                slots = slots[np.isin(slots, some)]
            if not len(slots):
                continue
            if not (top and group.is_narrow):
                whole = len(slots) == len(logits)
                yield group, slots, logits if whole else logits[places[slots]], None
                continue
            at = places[slots]
            needs_more = np.zeros(len(slots), np.bool_)
            if top.logits.shape[-1] < self._vocab_size:
                with np.errstate(invalid="ignore"):  # of rows without any token
                    needs_more = group.params.needs_more(top.logits[at], top.log_sums[at])
            if needs_more.any():
                yield group, slots[needs_more], top.whole(at[needs_more]), None
            if not needs_more.all():
                own = top.of(at[~needs_more])
                yield group, slots[~needs_more], own.raw_logits, own

    def probabilities(self, slot: int, logits: FloatArray) -> Floats:
        """Return [vocab] the distribution of the next token of the row in `slot`; logits: [vocab].

        The row has neither a partner nor a mask, and does not advance.
        """
        entry = self._rows[slot]
        if entry is None:
            raise InvariantError(f"slot {slot} has no row")
        [row, group] = entry
        slots, raw = np.array([slot]), np.asarray(logits[None], np.float32)
        edits = self._edits_of(group, slots, None)
        edited = raw if edits is None else edits.apply(raw)
        found: Floats = probabilities(edited, self._mu[slots], row.params)[0]
        return found

    # -- ahead of a step, for drafts and by drafts: rows are given tokens that are taken back ----

    @contextmanager
    def undone(self, slots: IntArray) -> Iterator[None]:
        """Undo inside changes of rows at the end; slots: [rows]."""
        numbers = [state[slots] for state in self._states]
        kept = {slot: self._seen[slot].copy() for slot in slots.tolist() if slot in self._seen}
        try:
            yield
        finally:
            for state, before in zip(self._states, numbers, strict=True):
                state[slots] = before
            self._seen |= kept

    @contextmanager
    def drafting(self, slots: IntArray) -> Iterator[None]:
        """Treat tokens chosen inside as drafts, and undo them at the end; slots: [rows].

        Drafts that are drawn have noise of their own; `sample` accepts or replaces them, until
        `forget_drafts`: see `verify`.
        """
        self.forget_drafts()
        drafted: dict[tuple[int, int], DrawnDraft] = {}
        with self.undone(slots):
            self._keys[slots] = draft_keys(self._keys[slots], self._positions[slots])
            self._drafted = drafted
            try:
                yield
            finally:
                self._drafted = None
        self._drafts = drafted

    def forget_drafts(self) -> None:
        self._drafts = {}

    # -- parts of the above ----------------------------------------------------------------------

    def _enter(self, slot: int, row: SamplingRow) -> None:
        kind = row.params, row.is_beam, row.is_narrow
        group = self._groups.get(kind)
        if group is None:
            words = row.params.bad_words
            group = self._groups[kind] = Group(
                row.params,
                is_beam=row.is_beam,
                is_narrow=row.is_narrow,
                vocab_size=self._vocab_size,
                bad_words=self._bad_words(words) if words else None,
            )
        group.slots = np.union1d(group.slots, [slot])
        self._rows[slot] = row, group
        self._partners[slot] = NONE if row.partner is None else row.partner
        self._set_wanted(slot, row, is_wanted=True)

    def _set_wanted(self, slot: int, row: SamplingRow, *, is_wanted: bool) -> None:
        slots = [slot] if row.partner is None else [slot, row.partner]
        self._is_wanted[slots], self._is_narrow[slots] = is_wanted, row.is_narrow
        self._slots = None

    def _failures(
        self, maxima: FloatArray, wanted: IntArray, skip: Collection[int]
    ) -> dict[int, Failure]:
        unusable = {}
        for row in (~np.isfinite(maxima)).nonzero()[0]:
            why = "every logit is -inf, so that no token has a probability"
            if np.isnan(maxima[row]):
                why = "a logit is not a number"
            elif maxima[row] > 0:
                why = "a logit is infinite"
            unusable[int(wanted[row])] = Failure("model-error", why)
        for slot in skip:
            unusable[slot] = Failure("model-error", "the model gave the row no logits")
        if not unusable:
            return {}
        failed = {}
        for slot in wanted.tolist():
            own, partner = unusable.get(slot), unusable.get(int(self._partners[slot]))
            if self._rows[slot] is None or slot in skip:
                continue
            if own is not None:
                failed[slot] = own
            elif partner is not None:
                failed[slot] = Failure(partner.code, f"negative prompt: {partner.message}")
        return failed

    def _edits_of(self, group: Group, slots: IntArray, masks: Masks | None) -> LogitEdits | None:
        """Return the edits of rows of the group, numbered as in `slots`, or None.

        The order is that of Hugging Face and vLLM: constraint, allowed ids, bad words, min_tokens,
        bias, then the penalties. Repetition (Keskar et al. 2019, CTRL, section 4.1) counts all
        tokens of a row, frequency and presence (OpenAI) only generated ones.
        """
        mask_rows = np.full(len(slots), NONE)
        if masks is not None:
            places = np.full(len(self._rows), NONE)
            places[masks.slots] = np.arange(len(masks.slots))
            mask_rows = places[slots]
        params, is_masked = group.params, mask_rows != NONE
        if not group.can_edit and not is_masked.any():
            return None
        always = group.is_allowed is not None or group.bad_words is not None
        (masked,) = (is_masked | always).nonzero()
        if masks is not None and is_masked[masked].all():
            allowed = masks.allowed.take(mask_rows[masked], 0)
        else:
            allowed = np.ones((len(masked), self._vocab_size), np.bool_)
            if masks is not None:
                allowed[is_masked[masked]] = masks.allowed[mask_rows[is_masked]]
        if group.is_allowed is not None:
            allowed &= group.is_allowed
        if group.bad_words is not None:
            allowed &= ~group.bad_words.completes(self._bad_word_states[slots].tolist())
        # the stop ids of rows below min_tokens, unless a constraint leaves only those
        refused: list[tuple[int, int]] = []
        for at in (self._positions[slots] < params.min_tokens).nonzero()[0].tolist():
            entry, row = self._rows[slots[at]], masked.searchsorted(at)
            stop_ids = entry[0].stop_token_ids if entry else ()
            stops = [id_ for id_ in stop_ids if id_ < self._vocab_size]
            if is_masked[at]:
                num_allowed = np.count_nonzero(allowed[row])
                if num_allowed == np.count_nonzero(allowed[row, stops]):
                    continue
            refused += [(at, stop) for stop in stops]
        refused_rows, refused_ids = np.array(refused, np.int64).reshape(-1, 2).T
        num_biases = len(slots) * len(group.bias)
        bias_rows = np.arange(len(slots)).repeat(len(group.bias))
        penalized = slots if params.has_penalties else slots[:0]
        seen = [self._seen[slot] for slot in penalized.tolist()]
        rows = np.arange(len(seen)).repeat([len(own) for own in seen])
        token_ids = np.fromiter((token for own in seen for token in own), np.int64, len(rows))
        times = (count for own in seen for count in own.values())
        counts = np.fromiter(times, np.int64, len(rows))
        repetition = np.full(len(rows), params.repetition_penalty, np.float64)
        reduction = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return LogitEdits(
            masked,
            allowed,
            refused_rows,
            refused_ids,
            bias_rows,
            np.resize(group.bias_ids, num_biases),
            np.resize(group.bias, num_biases),
            rows,
            token_ids,
            repetition,
            reduction.astype(np.float64),
        )

    def _remember(self, group: Group, slot: int, token: int) -> None:
        if group.params.has_penalties:
            counts = self._seen[slot]
            counts[token] = counts.get(token, 0) + 1
        if group.bad_words is not None:
            state = int(self._bad_word_states[slot])
            self._bad_word_states[slot] = group.bad_words.next_state(state, token)
