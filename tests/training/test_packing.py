"""Rows hold every token once, say which text it is of, and predict nothing across texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError
from batcher.training.data import NO_TARGET, BatchGroups, Packing, TrainingSettings

TEXTS = st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1).filter(
    lambda texts: sum(map(len, texts)) >= 12
)
LENGTHS = st.integers(2, 6)


def flat(texts):
    """The tokens of all texts, with the number of the text, and the token after each one in it."""
    return [
        (token, number, text[place + 1] if place + 1 < len(text) else NO_TARGET)
        for number, text in enumerate(texts)
        for place, token in enumerate(text)
    ]


def cells(rows):
    arrays = (rows.tokens, rows.documents, rows.targets)
    return [list(zip(*(a.tolist() for a in row), strict=True)) for row in zip(*arrays, strict=True)]


@given(TEXTS, LENGTHS)
def test_rows_in_order_are_the_texts_one_after_the_other(texts, seq_length):
    packing = Packing(texts, seq_length)
    found = [cell for row in cells(packing.in_order()) for cell in row]
    assert len(found) == packing.num_rows * seq_length
    assert found == flat(texts)[: len(found)]
    assert packing.num_tokens - len(found) < 2 * seq_length


@given(TEXTS, LENGTHS, st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_each_of_its_rows_once_in_any_order(texts, seq_length, number, seed):
    packing = Packing(texts, seq_length)
    rows = cells(packing.epoch(number, seed))
    first = next(
        first
        for first in range(seq_length)
        if sorted(rows)
        == sorted(
            flat(texts)[start : start + seq_length]
            for start in range(first, first + packing.num_rows * seq_length, seq_length)
        )
    )
    assert first < seq_length
    assert cells(packing.epoch(number, seed)) == rows


def test_epochs_differ_and_so_do_seeds():
    packing = Packing([list(range(1000))], 10)
    orders = [
        packing.epoch(number, seed).tokens.tolist() for number, seed in [(0, 0), (1, 0), (0, 1)]
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert len({order[0][0] % 10 for order in orders}) > 1  # they are cut at other places


def test_the_number_of_targets_leaves_out_what_is_of_another_text():
    rows = Packing([[1, 2, 3], [4, 5, 6, 7], [8, 9]], 3).in_order()
    assert rows.num_targets == 5
    assert rows.targets.tolist() == [[2, 3, NO_TARGET], [5, 6, 7]]


def test_texts_that_do_not_fill_a_row_are_refused():
    with pytest.raises(BatchdecodeError, match="7 tokens are too few for rows of seq_length 4: 8"):
        Packing([[1, 2, 3], [4, 5, 6, 7]], 4)


@given(st.integers(20, 200), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30))
def test_the_steps_of_an_epoch_have_all_its_rows(num_tokens, batch_size, accumulate, step):
    settings = TrainingSettings(seq_length=5, batch_size=batch_size, accumulate=accumulate)
    packing = Packing([range(num_tokens)], 5)
    groups = BatchGroups(packing, settings)
    epoch = step // groups.steps_per_epoch
    steps = range(epoch * groups.steps_per_epoch, (epoch + 1) * groups.steps_per_epoch)
    sizes = [[len(batch.tokens) for batch in groups.of_step(n)] for n in steps]
    assert all(size == [batch_size] * accumulate for size in sizes[:-1])
    assert len(sizes[-1]) <= accumulate
    assert all(size == batch_size for size in sizes[-1][:-1])
    assert 0 < sizes[-1][-1] <= batch_size
    tokens = np.concatenate([batch.tokens for n in steps for batch in groups.of_step(n)])
    assert (tokens == packing.epoch(epoch, settings.seed).tokens).all()
