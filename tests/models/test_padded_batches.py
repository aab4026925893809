"""Batches: padded, they have what the ragged ones have; and chunks with a tree of drafts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import Batch, BatchdecodeError, Chunk
from batcher.models.base import Pages, draft_parents, moves_along, node_paths

TOKENS = st.lists(st.integers(0, 500), max_size=9)
KINDS = st.sampled_from(["last", "part", "decode"])
ROWS = st.lists(st.none() | st.tuples(TOKENS, KINDS), max_size=8)


def batch_of(rows):
    """A batch with these rows, None for an empty slot, and the tokens that it computes."""
    batch, computed = Batch(len(rows)), {}
    for slot, row in reversed([*enumerate(rows)]):
        if row is None:
            continue
        token_ids, kind = row
        if kind == "last":
            batch.join(Chunk(slot, token_ids, 0))
        elif kind == "part":
            batch.add_part(Chunk(slot, token_ids, 3))
        else:
            batch.enter(slot)
            token_ids = [sum(token_ids)]
            batch.tokens[slot] = token_ids[0]
        computed[slot] = token_ids
    return batch, computed


@given(ROWS, st.sampled_from(["left", "right"]))
def test_a_padded_batch_has_the_tokens_of_the_ragged_one(rows, side):
    batch, computed = batch_of(rows)
    slots, input_ids, mask, lengths = batch.padded(side)
    longest = max(map(len, computed.values()), default=0)
    assert slots.tolist() == sorted(computed)
    assert lengths.tolist() == [len(computed[slot]) for slot in sorted(computed)]
    expected = []
    for slot in sorted(computed):
        fill = [None] * (longest - len(computed[slot]))
        expected.append(fill + computed[slot] if side == "left" else computed[slot] + fill)
    assert input_ids.shape == mask.shape == (len(computed), longest)
    assert input_ids.tolist() == [[token or 0 for token in row] for row in expected]
    assert mask.tolist() == [[token is not None for token in row] for row in expected]
    assert (input_ids.dtype, mask.dtype, lengths.dtype) == (np.int64, np.bool_, np.int64)


def test_there_are_two_sides():
    with pytest.raises(BatchdecodeError, match="on the left or on the right, not 'both'"):
        Batch(1).padded("both")


LINE = Chunk(1, [5, 6, 7, 8], 3, num_drafts=2)
#         7 - 10 - 11
# 5, 6 <      9
#         8 <
TREE = Chunk(1, [5, 6, 7, 8, 9, 10, 11], 3, num_drafts=5, draft_parents=(1, 1, 3, 2, 5))
PAGES = Pages(4, [[], [20, 9, 30]], [[[], [-1, 8, 31]]])


def test_each_node_has_a_way_along_which_what_is_accepted_is_moved():
    assert draft_parents(LINE) == range(1, 3)
    assert node_paths(LINE) == [[2], [2, 3]]
    assert draft_parents(TREE) == (1, 1, 3, 2, 5)
    assert node_paths(TREE) == [[2], [3], [3, 4], [2, 5], [2, 5, 6]]
    assert moves_along([], TREE, PAGES) == []
    assert moves_along([2], TREE, PAGES) == []
    # The token at index i of the chunk is at position 3 + i.
    assert moves_along([3], TREE, PAGES) == [(9 * 4 + 2, 9 * 4 + 1), (8 * 4 + 2, 8 * 4 + 1)]
    assert moves_along([2, 5, 6], TREE, PAGES) == [
        (30 * 4, 9 * 4 + 2),
        (31 * 4, 8 * 4 + 2),
        (30 * 4 + 1, 9 * 4 + 3),
        (31 * 4 + 1, 8 * 4 + 3),
    ]
    assert moves_along([2, 3], LINE, PAGES) == []
