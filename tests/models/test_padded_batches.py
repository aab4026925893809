"""A padded batch has what the ragged one has, in rows as long as the longest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import Batch, BatchdecodeError, Chunk

TOKENS = st.lists(st.integers(0, 500), max_size=9)
KINDS = st.sampled_from(["last", "part", "decode"])
ROWS = st.lists(st.none() | st.tuples(TOKENS, KINDS), max_size=8)


def batch_of(rows: list[tuple[list[int], str] | None]) -> tuple[Batch, dict[int, list[int]]]:
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
def test_a_padded_batch_has_the_tokens_of_the_ragged_one(rows, side) -> None:
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


def test_there_are_two_sides() -> None:
    with pytest.raises(BatchdecodeError, match="on the left or on the right, not 'both'"):
        Batch(1).padded("both")  # type: ignore[arg-type]
