"""Rows with equal settings: what they have in common, who they are, and what it does to logits."""

from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.decoding.sampling.bad_words import BadWords
from batcher.models.base import FloatArray, IntArray
from batcher.request import REQUEST_FIELDS, SAMPLING_FIELDS, PromptInput, Request

# The numbers that choose tokens; those that need no logits only say how one is drawn.
_NUMBERS = {
    name: REQUEST_FIELDS[name]
    for name in SAMPLING_FIELDS
    if REQUEST_FIELDS[name].range is not None and name != "seed"
}


class SamplingParams(Request, frozen=True, kw_only=True, eq=True, cache_hash=True):
    """A request reduced to what chooses its tokens; rows with equal ones form a group.

    What has no effect stands at its default, so that rows of requests that differ in nothing else
    are equal.  Whether a row has a negative prompt's row beside it is told by cfg_scale alone.
    logit_bias: (token id, what is added), ids ascending; allowed_token_ids are, too.
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
        """Whether the most likely token is chosen, after what may change which that is."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens count that the row has already."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0)

    @property
    def needs_raw(self) -> bool:
        """Whether log-probabilities of the model's own logits are wanted."""
        has_raw = self.num_logprobs is not None and not self.has_processed_logprobs
        return has_raw or self.needs_cumulative


def needs_cumulative(request: Request) -> bool:
    """Return whether the log-probability of the whole output is told, or ranks it."""
    return request.logprobs is not None or (request.best_of or 1) > 1


def sampling_params(request: Request) -> SamplingParams:
    """Return the settings of a valid `request`."""
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


class GroupKey(NamedTuple):
    """What is equal in the rows of a group."""

    params: SamplingParams
    is_beam: bool
    is_constrained: bool


class Group:
    """The slots of the rows, and what is made of their settings once.

    bad_words: None if there are none.
    can_edit: whether the settings may change any logit.
    remembers: whether what a row has counts for what it is given.
    is_memoryless: whether a token follows from logits and position, and nothing is told of it.
    """

    def __init__(self, key: GroupKey, vocab_size: int, bad_words: BadWords | None) -> None:
        self.key, self.bad_words = key, bad_words
        self._members: set[int] = set()
        self._slots: IntArray | None = None  # until somebody asks
        params = key.params
        self._bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self._bias = np.array([value for _, value in params.logit_bias], np.float32)
        self._is_refused: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._is_refused = np.ones(vocab_size, np.bool_)
            self._is_refused[list(params.allowed_token_ids)] = False
        self.remembers = params.has_penalties or bad_words is not None
        self.can_edit = bool(
            self.remembers
            or params.logit_bias
            or params.min_tokens
            or params.allowed_token_ids is not None
        )
        tells = params.needs_raw or params.num_logprobs is not None
        is_edited = self.can_edit or key.is_constrained or params.cfg_scale != 1
        self.is_memoryless = not (tells or is_edited or key.is_beam or params.mirostat)

    def join(self, slot: int) -> None:
        """Take in a row."""
        self._members.add(slot)
        self._slots = None

    def leave(self, slot: int) -> bool:
        """Leave out a row; return whether there is none left."""
        self._members.discard(slot)
        self._slots = None
        return not self._members

    @property
    def slots(self) -> IntArray:
        """The slots of the rows, ascending."""
        if self._slots is None:
            self._slots = np.array(sorted(self._members), np.int64)
        return self._slots

    def ban(self, logits: FloatArray, bad_word_states: IntArray) -> None:
        """Set to -inf in `logits` [rows, vocab] what the settings rule out.

        bad_word_states: [rows].
        """
        if self._is_refused is not None:
            logits[:, self._is_refused] = -np.inf
        if self.bad_words is not None:
            np.copyto(logits, -np.inf, where=self.bad_words.completes(bad_word_states.tolist()))

    def add_bias(self, logits: FloatArray) -> None:
        """Add the bias to `logits` [rows, vocab]."""
        if len(self._bias):
            logits[:, self._bias_ids] += self._bias
