"""Spans put in the order of time, so that a recurrence goes through many of them at once.

The spans of a step are computed one after the other, as far as one starts from what another
leaves; those between which nothing passes are a wave.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from batcher.errors import InvariantError
from batcher.transformer.attention import NOWHERE
from batcher.transformer.layers import IntArray
from batcher.transformer.span import Span


class Kept(NamedTuple):
    """States to be kept at some time: of these spans [snapshots], in these cells [snapshots]."""

    spans: IntArray
    cells: IntArray


class Wave:
    """Spans of which none starts from what another leaves, nor leaves anything in the same cell.

    The longest is the first: at any time, those that have a token are the first so many.

    sources: [spans] the cells of the states that they start from.
    rows: [tokens] their tokens' places in the step: the first of all spans, the second, and so on.
    bounds: [times + 1] where in `rows` the tokens of each time begin.
    kept: after how many tokens, and then which states.
    inputs: [kernel_size, tokens] what the convolution of each token is of, the oldest first: rows
    of the past of all spans, [kernel_size - 1, spans], and then those of the tokens.
    kept_inputs: [snapshots, kernel_size - 1] the past of what is kept, and in which cells.
    """

    def __init__(self, spans: Sequence[Span], firsts: Sequence[int], kernel_size: int) -> None:
        order = sorted(range(len(spans)), key=lambda number: -len(spans[number].token_ids))
        spans = [spans[number] for number in order]
        sizes = np.array([len(span.token_ids) for span in spans])
        self.sources: IntArray = np.array([span.source for span in spans])
        num_times = int(sizes[0])
        num_active = len(spans) - np.bincount(sizes, minlength=num_times + 1).cumsum()[:-1]
        bounds = np.concatenate([[0], num_active.cumsum()])
        self.bounds: list[int] = bounds.tolist()
        times = np.repeat(np.arange(num_times), num_active)
        numbers = np.arange(len(times)) - bounds[times]
        self.rows: IntArray = np.array([firsts[number] for number in order])[numbers] + times
        past = np.arange(kernel_size - 1)
        starts = np.concatenate([past * len(spans), (kernel_size - 1) * len(spans) + bounds])
        self.inputs: IntArray = starts[times + np.arange(kernel_size)[:, None]] + numbers
        snapshots = [
            (snapshot.num_tokens, number, snapshot.cell)
            for number, span in enumerate(spans)
            for snapshot in span.snapshots
        ]
        after, kept_spans, cells = np.array(snapshots, np.int64).reshape(-1, 3).T
        self.kept = {
            num_tokens: Kept(kept_spans[after == num_tokens], cells[after == num_tokens])
            for num_tokens in {*after.tolist()}
        }
        self.kept_inputs: IntArray = starts[after[:, None] + past] + kept_spans[:, None]
        self.kept_cells: IntArray = cells


def waves_of(spans: Sequence[Span], kernel_size: int, max_spans: int) -> Iterator[Wave]:
    """Yield the spans of a step in waves, in order; none has more than `max_spans`.

    Raises:
        InvariantError: a span would keep nothing before its drafts, or something NOWHERE, or
            something behind them.
    """
    written: set[int] = set()
    begun: list[Span] = []
    firsts: list[int] = []
    first = 0
    for span in spans:
        cells = {snapshot.cell for snapshot in span.snapshots}
        kept = [snapshot.num_tokens for snapshot in span.snapshots]
        is_ascending = all(first < second for first, second in pairwise([0, *kept]))
        num_known = len(span.token_ids) - span.num_drafts
        if NOWHERE in cells or not is_ascending or kept[-1:] != [num_known]:
            raise InvariantError(f"a span of {num_known} tokens keeps {span.snapshots}")
        if written & {span.source, *cells} or len(begun) == max_spans:
            yield Wave(begun, firsts, kernel_size)
            written, begun, firsts = set(), [], []
        written |= cells
        begun.append(span)
        firsts.append(first)
        first += len(span.token_ids)
    yield Wave(begun, firsts, kernel_size)
