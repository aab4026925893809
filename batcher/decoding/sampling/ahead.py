"""A Sampler that also tells what rows would be given in steps to come, for drafts and by drafts.

Rows may be given tokens that are taken back; and many tokens of a row, each by logits of its own,
are chosen at once where nothing but the position tells them apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.filters import Group, SamplingParams
from batcher.decoding.sampling import (
    DrawnDrafts,
    DrawnTokens,
    DrawStates,
    Sampler,
    SamplingRow,
    draft_keys,
    draw,
    probabilities,
)
from batcher.models.base import FloatArray, IntArray, Tokenizer


class AheadSampler(Sampler):
    """Chooses the tokens of the rows that are open, and those that may follow them."""

    def __init__(self, num_slots: int, vocab_size: int, tokenizer: Tokenizer) -> None:
        super().__init__(num_slots, vocab_size, tokenizer)
        self._is_memoryless = np.zeros(num_slots, np.bool_)
        self._drafts = DrawnDrafts()  # that are to be verified
        self._drafted: DrawnDrafts | None = None  # while they are drawn

    def close(self, slot: int) -> None:
        """Forget the row in `slot`, its partner and its drafts."""
        super().close(slot)
        self._is_memoryless[slot] = False
        self._drafts.forget(slot)

    def _enter(self, slot: int, row: SamplingRow) -> Group:
        group = super()._enter(slot, row)
        self._is_memoryless[slot] = group.is_memoryless
        return group

    def are_memoryless(self, slots: IntArray) -> NDArray[np.bool_]:
        """Return which rows are given tokens that follow from logits and position alone."""
        return self._is_memoryless[slots]

    def choose_ahead(
        self, slots: IntArray, numbers: IntArray, logits: FloatArray
    ) -> IntArray | None:
        """Return what memoryless rows are given so many tokens later, without moving them on.

        slots, numbers: [rows].  logits: [rows, vocab].  None if some of these are of no use.
        """
        tokens: IntArray = logits.argmax(axis=-1)  # of a NaN, if there is any
        if not np.isfinite(logits[np.arange(len(tokens)), tokens]).all():
            return None
        for group in self._groups.values():
            if group.key.params.is_greedy:
                continue
            is_member = np.zeros(len(self._rows), np.bool_)
            is_member[group.slots] = True
            rows = is_member[slots].nonzero()[0]
            if len(rows):
                at, own = slots[rows], logits if len(rows) == len(slots) else logits[rows]
                states = DrawStates(
                    self._keys[at], self._positions[at] + numbers[rows], self._mu[at]
                )
                drafts = self._drafts.of(at, states.positions)
                tokens[rows] = draw(own, states, group.key.params, drafts).tokens
        return tokens

    def move_on(self, slots: IntArray, numbers: IntArray) -> None:
        """Let memoryless rows have been given so many tokens; slots, numbers: [rows]."""
        self._positions[slots] += numbers

    @contextmanager
    def undone(self, slots: IntArray) -> Iterator[None]:
        """Let rows move on inside, and stand where they stood afterwards; slots: [rows]."""
        numbers = [state[slots] for state in self._states]
        seen = {
            slot: self._seen.read(slot)
            for slot in slots.tolist()
            if (entry := self._rows[slot]) is not None and entry[0].params.has_penalties
        }
        try:
            yield
        finally:
            for state, before in zip(self._states, numbers, strict=True):
                state[slots] = before
            for slot, before_seen in seen.items():
                self._seen.resume(slot, *before_seen)

    @contextmanager
    def drafting(self, slots: IntArray) -> Iterator[None]:
        """Let what rows are given inside be drafts, which they have not been given afterwards.

        Those that are drawn have noise of their own, and `sample` and `choose_ahead` accept or
        replace them, until `forget_drafts`: see batcher/decoding/sampling.py.

        slots: [rows].
        """
        self.forget_drafts()
        drafted = DrawnDrafts()
        with self.undone(slots):
            self._keys[slots] = draft_keys(self._keys[slots], self._positions[slots])
            self._drafted = drafted
            try:
                yield
            finally:
                self._drafted = None
        self._drafts = drafted

    def forget_drafts(self) -> None:
        """Forget what was drafted: it is verified, or will never be."""
        self._drafts = DrawnDrafts()

    def _drawn(
        self, params: SamplingParams, slots: IntArray, logits: FloatArray, states: DrawStates
    ) -> DrawnTokens:
        """Return what is drawn of such logits in such states: drafts, or what becomes of drafts."""
        drawn = draw(logits, states, params, self._drafts.of(slots, states.positions))
        if self._drafted is not None:
            drawn_from = probabilities(logits, states.mu, params)
            self._drafted.add(slots, states.positions, drawn.tokens, drawn_from)
        return drawn
