"""A Model that somebody else wrote, with its answers looked at before the engine believes them."""

from collections.abc import Mapping

import numpy as np

from batcher.errors import BatchdecodeError, ModelError, describe
from batcher.models.base import Batch, IntArray, Model, ModelOutput
from batcher.request import MAX_INT


class CheckedModel:
    """Passes everything on to `inner`; an answer that is none fails the rows it is about."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.name, self.settings, self.tokenizer = inner.name, inner.settings, inner.tokenizer
        self.vocab_size, self.eos_token_id = inner.vocab_size, inner.eos_token_id
        self._num_slots = 0

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows.

        Raises:
            BatchdecodeError: the model raised.
        """
        self._num_slots = num_slots
        try:
            self.inner.allocate(num_slots)
        except (Exception, SystemExit) as error:  # as in forward
            message = f"{self.name} cannot make room for {num_slots} rows: {describe(error)}"
            raise BatchdecodeError(message) from error

    def release(self, slot: int) -> None:
        """Forget the row in `slot`.

        Raises:
            BatchdecodeError: the model raised; nobody knows what its rows hold now.
        """
        try:
            self.inner.release(slot)
        except (Exception, SystemExit) as error:  # as in forward
            message = f"{self.name} cannot release slot {slot}: {describe(error)}"
            raise BatchdecodeError(message) from error

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the model's answer, with token ids out of range among its failures.

        Raises:
            ModelError: the model raised, or did not return one integer for each slot.
        """
        try:
            output = self.inner.forward(batch)
            tokens = np.asarray(output.tokens)
            failed = dict(output.failed)
        except ModelError:
            raise
        except (Exception, SystemExit) as error:  # whatever another's code raises is its failure
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if tokens.shape != (self._num_slots,) or tokens.dtype.kind not in "iu":
            shape = f"{tokens.dtype} {list(tokens.shape)}"
            raise ModelError(f"{self.name} returned {shape}, not integers [{self._num_slots}]")
        slots = batch.slots
        if not failed.keys() <= set(slots.tolist()):
            raise ModelError(f"{self.name} failed rows that it was not asked for: {list(failed)}")
        return self._without_bad_rows(tokens, failed, slots)

    def _without_bad_rows(
        self, tokens: IntArray, failed: Mapping[int, str], slots: IntArray
    ) -> ModelOutput:
        largest = MAX_INT if self.vocab_size is None else self.vocab_size - 1
        is_good = (tokens[slots] >= 0) & (tokens[slots] <= largest)
        good = np.zeros(self._num_slots, np.int64)
        good[slots[is_good]] = tokens[slots[is_good]]
        problems = {
            slot: f"{self.name} returned {tokens[slot]}, which is no token id from 0 to {largest}"
            for slot in slots[~is_good].tolist()
        }
        return ModelOutput(good, problems | dict(failed))
