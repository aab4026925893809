"""Rows of unequal length as one rectangle, filled up on one side."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError
from batcher.tokens import Tokens

Side = Literal["left", "right"]

PAD = 0  # the token id where there is no token


class PaddedRows(NamedTuple):
    """Rows of tokens, each as long as the longest.

    input_ids: [rows, longest] int64, PAD where there is no token.
    attention_mask: [rows, longest] bool, whether there is one.
    sequence_lengths: [rows] int64, how many tokens each row has.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]
    sequence_lengths: NDArray[np.int64]


def pad_rows(rows: Sequence[Tokens], side: Side) -> PaddedRows:
    """Return `rows`, filled up on `side` to the length of the longest.

    Raises:
        BatchdecodeError: there is no such side.
    """
    if side not in get_args(Side):
        raise BatchdecodeError(f"rows are padded on the left or on the right, not {side!r}")
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    if side == "left":
        mask = mask[:, ::-1]
    input_ids = np.full(mask.shape, PAD, np.int64)
    for line, row, is_token in zip(input_ids, rows, mask, strict=True):
        line[is_token] = row
    return PaddedRows(input_ids, mask, lengths)
