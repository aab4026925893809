"""Rows with equal settings: who they are, and what those settings do to their logits."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.sampling.bad_words import BadWords
from batcher.decoding.sampling.params import SamplingParams
from batcher.decoding.sampling.penalties import penalize
from batcher.models.base import FloatArray, IntArray


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

    def penalize(self, logits: FloatArray, seen: tuple[IntArray, IntArray, IntArray]) -> None:
        """Apply the penalties to `logits` [rows, vocab]; seen: see penalties.penalize."""
        params = self.key.params
        penalize(
            logits,
            seen,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
