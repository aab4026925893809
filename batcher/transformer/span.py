"""A span: tokens on end of one sequence, and where all that is kept of that sequence is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from batcher.transformer.attention import NOWHERE
from batcher.transformer.layers import IntArray


class Snapshot(NamedTuple):
    """The cell in which the states after so many tokens of a span are kept."""

    num_tokens: int
    cell: int


class Span(NamedTuple):
    """Tokens on end of one sequence.

    start: the position of the first.  cells: for each group of layers with attention, those of the
    keys and values of all positions up to the last of them; NOWHERE of such that are not read.  A
    model with recurrent layers also needs
    source: the cell of the states before the first; NOWHERE if that is the first of all.
    snapshots: which states are kept, ascending; the last are those after all tokens but drafts.  A
    span may start from what one before it in the same step has kept.
    num_drafts: how many of the last tokens are drafts.
    num_prompt: how many tokens of the sequence are its prompt.
    """

    token_ids: Sequence[int]
    start: int
    cells: Sequence[IntArray]
    source: int = NOWHERE
    snapshots: Sequence[Snapshot] = ()
    num_drafts: int = 0
    num_prompt: int = 0


def spans_of_tree(span: Span, paths: Sequence[Sequence[int]]) -> list[Span]:
    """Return the spans of tokens whose last ones are drafts that are a tree.

    Each draft is a span of its own, behind those on its way; its keys and values are kept where its
    place among the tokens says.

    span: of all these tokens, as if they were on end.
    paths: for each draft, the indices of the drafts on its way, its own the last.
    """
    num_known = len(span.token_ids) - len(paths)
    known = span.start + num_known
    past = [cells[:known] for cells in span.cells]
    drafts = [
        Span(
            [span.token_ids[path[-1]]],
            known + len(path) - 1,
            [
                np.concatenate([own, cells[span.start + np.array(path)]])
                for own, cells in zip(past, span.cells, strict=True)
            ],
            num_prompt=span.num_prompt,
        )
        for path in paths
    ]
    first = Span(span.token_ids[:num_known], span.start, past, num_prompt=span.num_prompt)
    return [first, *drafts]
