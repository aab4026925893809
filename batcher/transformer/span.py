"""A span: tokens on end of one sequence, and where all that is kept of that sequence is."""

from collections.abc import Sequence
from typing import NamedTuple

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
    snapshots: which states are kept, ascending; the last are those after all tokens.  A span may
    start from what one before it in the same step has kept.
    """

    token_ids: Sequence[int]
    start: int
    cells: Sequence[IntArray]
    source: int = NOWHERE
    snapshots: Sequence[Snapshot] = ()
