"""Packs texts of any length into rows of one length, without padding, in another order each epoch.

A row may hold the end of one text and the beginning of the next.  No token attends to another text
or is predicted from one, so that a row is worth what the texts in it are worth one by one.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError
from batcher.training.settings import TrainingSettings

IntArray = NDArray[np.int64]
NO_TARGET = -100  # which cross-entropy in torch leaves out


class PackedRows(Struct, frozen=True, eq=False):
    """Rows to train on, all [rows, seq_length].

    targets: the token after each one; NO_TARGET where that is of another text.
    documents: the number of the text that each token is of.
    """

    tokens: IntArray
    targets: IntArray
    documents: IntArray

    @property
    def num_targets(self) -> int:
        """How many tokens are predicted."""
        return int(np.count_nonzero(self.targets != NO_TARGET))

    def batches(self, batch_size: int) -> "list[PackedRows]":
        """Return the same rows, so many at a time; the last batch has what is left."""
        cuts = range(batch_size, len(self.tokens), batch_size)
        parts = (np.split(array, cuts) for array in (self.tokens, self.targets, self.documents))
        return [PackedRows(*part) for part in zip(*parts, strict=True)]


class Packing:
    """Texts one after the other, cut into rows.

    num_tokens: of all texts.  num_rows: of an epoch; what does not fill a row is left out.

    Raises:
        BatchdecodeError: they do not fill a single row.
    """

    def __init__(self, texts: Sequence[Sequence[int]], seq_length: int) -> None:
        self.num_tokens = sum(map(len, texts))
        self.num_rows = (self.num_tokens - seq_length) // seq_length
        if self.num_rows < 1:
            raise BatchdecodeError(
                f"{self.num_tokens:,} tokens are too few for rows of seq_length {seq_length}: "
                f"{2 * seq_length:,} make one in every epoch"
            )
        self._seq_length = seq_length
        self._tokens = np.concatenate([np.asarray(text, np.int64) for text in texts])
        self._documents = np.repeat(np.arange(len(texts)), [len(text) for text in texts])

    def in_order(self) -> PackedRows:
        """Return the rows from the beginning, as they are evaluated."""
        return self._rows(np.arange(self.num_rows) * self._seq_length)

    def epoch(self, number: int, seed: int) -> PackedRows:
        """Return the rows of an epoch: cut at places of its own, and shuffled.

        It depends on nothing but the number and the seed, so no state has to be kept of it.
        """
        draw = np.random.default_rng([seed, number])
        first = draw.integers(self._seq_length)
        return self._rows(first + draw.permutation(self.num_rows) * self._seq_length)

    def _rows(self, starts: IntArray) -> PackedRows:
        """Return the rows that begin at `starts` [rows]."""
        cells = starts[:, None] + np.arange(self._seq_length)
        tokens, documents = self._tokens[cells], self._documents[cells]
        is_same = self._documents[cells + 1] == documents
        return PackedRows(tokens, np.where(is_same, self._tokens[cells + 1], NO_TARGET), documents)


class BatchGroups:
    """The batches of each step of a run, whose gradients make one update.

    A step has `accumulate` batches; the last step of an epoch has those that are left, the last of
    which has the rows that are left.  The epoch that is asked for is kept.
    """

    def __init__(self, packing: Packing, settings: TrainingSettings) -> None:
        self._packing, self._settings = packing, settings
        self._rows_per_step = settings.batch_size * settings.accumulate
        self.steps_per_epoch = -(-packing.num_rows // self._rows_per_step)
        self._epoch: tuple[int, list[PackedRows]] | None = None

    def of_step(self, step: int) -> list[PackedRows]:
        """Return the batches of a step, the first of which is 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            rows = self._packing.epoch(epoch, self._settings.seed)
            self._epoch = epoch, rows.batches(self._rows_per_step)
        return self._epoch[1][place].batches(self._settings.batch_size)
