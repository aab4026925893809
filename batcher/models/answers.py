"""What somebody else's code answered for a row: its logits or a token id, if it is that."""

import reprlib
from operator import index as to_index
from typing import Any

import numpy as np

from batcher.errors import writable
from batcher.models.base import FloatArray
from batcher.request import MAX_INT


def read_logits(vocab_size: int | None, answer: Any) -> FloatArray:
    """Return `answer` as logits [vocab] float32; what is not finite is left in.

    vocab_size: how many there must be; None if any number from 1 on will do.

    Raises:
        ValueError: it is no sequence of so many numbers; the message says what it is.
    """
    is_list = isinstance(answer, list | tuple)
    if is_list and bool in set(map(type, answer)):  # numpy takes True among numbers for 1
        raise ValueError(f"{shown(answer)}, which is no list of logits")
    try:
        logits = np.asarray(answer)
    except Exception:  # noqa: BLE001 - whatever its own __array__ raises, it is none
        raise ValueError(f"{shown(answer)}, which is no list of logits") from None
    if logits.ndim == 1 and logits.size == 0:
        raise ValueError("no logits")
    if logits.ndim != 1 or logits.dtype.kind not in "iuf":
        raise ValueError(f"{shown(answer)}, which is no list of logits")
    if vocab_size is not None and logits.size != vocab_size:
        raise ValueError(f"{logits.size} logits, not {vocab_size}")
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        return logits.astype(np.float32)


def read_token_id(vocab_size: int | None, answer: Any) -> int:
    """Return `answer` as a token id.

    vocab_size: one more than the largest; None if any will do.

    Raises:
        ValueError: it is none; the message says what it is.
    """
    largest = MAX_INT if vocab_size is None else vocab_size - 1
    try:
        token_id = -1 if isinstance(answer, bool) else to_index(answer)
    except Exception:  # noqa: BLE001 - whatever its own __index__ raises, it is none
        token_id = -1
    if not 0 <= token_id <= largest:
        message = f"{shown(answer)}, which is not a token id, an integer from 0 to {largest}"
        raise ValueError(message)
    return token_id


def shown(answer: Any) -> str:
    """Return a few words that tell what a callable gave, whatever it is."""
    is_huge = isinstance(answer, int) and abs(answer) > MAX_INT  # too long for repr
    return "a huge integer" if is_huge else writable(" ".join(reprlib.repr(answer).split()))
