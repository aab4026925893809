"""PriorityShares of synthetic requests, as text names them: `0:0.9,1:0.1`, each with its share."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
from numpy.random import Generator

from batcher.fields import read_number
from batcher.planning.entries import WorkloadError
from batcher.request import MAX_INT

MAX_SHARE = 1e9
_BLOCK = 1024  # drawn at once

PriorityShares = dict[int, float]
"""The share of each priority: weights, which need not add up to 1.  Without any, all are 0."""


def draw_priorities(shares: PriorityShares, generator: Generator) -> Iterator[int]:
    """Yield priorities without end, each as often as `shares` say."""
    priorities = list(shares)
    if len(priorities) <= 1:
        yield from repeat(priorities[0] if priorities else 0)
    weights = np.array([*shares.values()])
    while True:
        drawn = generator.choice(priorities, size=_BLOCK, p=weights / weights.sum())
        yield from drawn.tolist()


def parse_priorities(text: str, place: str) -> PriorityShares:
    """Return the shares that `text` states; a colon may stand for each comma.

    Raises:
        WorkloadError: it states none; `place` says where it is.
    """
    parts = text.replace(",", ":").split(":")
    shares: PriorityShares = {}
    try:
        for priority, share in zip(parts[::2], parts[1::2], strict=True):
            shares[read_number(priority, int)] = read_number(share, float)
    except ValueError:
        shares = {}
    is_allowed = all(
        abs(priority) <= MAX_INT and 0 < share <= MAX_SHARE for priority, share in shares.items()
    )
    if not (shares and is_allowed and 2 * len(shares) == len(parts)):
        raise WorkloadError(
            f"{place} {text!r}: expected PRIORITY:SHARE,..., whole numbers, each once, with shares "
            f"above 0, as 0:0.9,1:0.1"
        )
    return shares
