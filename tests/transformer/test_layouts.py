"""A padded layout computes its padding, counts it, and shows it in no bit of the results."""

import numpy as np
import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from test_transformer_model import KINDS, run
from tiny import attention_by_definition, tiny_model

from batcher.transformer.layers import batched_attention_with_padding, create_causal_mask
from batcher.transformer.step import PADDING

SCHEDULES = [
    {},
    {"max_batch_tokens": 40},
    {"kv_blocks": 48, "block_size": 4, "max_batch_tokens": 30},
    {"kv_blocks": 90, "block_size": 4, "prefill_order": "prefill-first"},
]


@pytest.mark.parametrize("kind", mostly_heavy(KINDS, "plain", "gemma3"))
def test_padding_shows_in_no_bit(kind):
    ragged, _ = run(tiny_model(**KINDS[kind]), 9)
    for settings in SCHEDULES[::3]:
        padded, _ = run(tiny_model(**KINDS[kind], layout="padded"), 9, **settings)
        assert padded == ragged, settings


@pytest.mark.parametrize("kind", ["plain", "qwen3-next"])
def test_padding_that_is_not_a_number_shows_nowhere(kind, monkeypatch):
    ragged, _ = run(tiny_model(**KINDS[kind]), 9, max_batch_tokens=40)
    model = tiny_model(**KINDS[kind], layout="padded")
    decoder = model._decoder
    inputs_of, num_padding = decoder._inputs, 0

    def inputs(step):
        nonlocal num_padding
        given = inputs_of(step)
        is_padding = step.own_cells[0] == PADDING
        given["x"][is_padding] = np.nan
        num_padding += is_padding.sum()
        return given

    monkeypatch.setattr(decoder, "_inputs", inputs)
    with np.errstate(invalid="ignore"):
        padded, _ = run(model, 9, max_batch_tokens=40)
    assert padded == ragged
    assert num_padding > 100


@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 9))
def test_attention_with_padding_is_its_definition(lengths, num_queries, seed):
    draw, longest = np.random.default_rng(seed), max(lengths)
    query = draw.standard_normal((len(lengths), num_queries, 6, 8), np.float32)
    key = draw.standard_normal((len(lengths), longest, 2, 8), np.float32)
    value = draw.standard_normal((len(lengths), longest, 2, 8), np.float32)
    for number, length in enumerate(lengths):
        key[number, length:] = value[number, length:] = np.nan
    found = batched_attention_with_padding(query, key, value, np.array(lengths))
    alone = [
        batched_attention_with_padding(
            query[n : n + 1], key[n : n + 1, :length], value[n : n + 1, :length], np.array([length])
        )[0]
        for n, length in enumerate(lengths)
    ]
    assert np.array_equal(found, np.stack(alone))
    for number, length in enumerate(lengths):
        own = key[number, :length], value[number, :length]
        for place in range(num_queries):
            expected = attention_by_definition(query[number, place : place + 1], *own)
            assert_allclose(found[number, place], expected[0], atol=2e-6, rtol=2e-5)


def test_attention_with_padding_takes_one_head_and_masks_the_future():
    draw = np.random.default_rng(0)
    query, key, value = draw.standard_normal((3, 2, 5, 8), np.float32)
    found = batched_attention_with_padding(query, key, value, np.array([5, 3]))
    heads = [x[:, :, None] for x in (query, key, value)]
    assert found.shape == (2, 5, 8)
    assert np.array_equal(found, batched_attention_with_padding(*heads, np.array([5, 3]))[:, :, 0])
    hidden = float("-inf")
    mask = create_causal_mask(3, 2)
    assert mask.tolist() == [[[0, hidden, hidden], [0, 0, hidden], [0, 0, 0]]] * 2
    assert create_causal_mask(0, 2).shape == (2, 0, 0)
