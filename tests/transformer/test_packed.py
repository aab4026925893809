"""Packed weights give what others give to the last bit, and take a quarter of the memory."""

import tracemalloc

import numpy as np
import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import config_json, random_tensors, write_gguf

from batcher import BatchdecodeError, Request, decode
from batcher.models.checkpoints import load_transformer
from batcher.transformer.config import TransformerSettings
from batcher.transformer.linear import WholeLinears


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("batcher.transformer.linear.UNPACKED", 2048)


@given(
    st.integers(1, 70),
    st.sampled_from([1, 16, 1039, 1041, 2300]),
    st.integers(1, 20),
    st.sampled_from(["int8", "int8-channel"]),
    st.booleans(),
    st.booleans(),
)
def test_products_are_the_same_to_the_last_bit(num_out, num_in, num_rows, kind, has_bias, is_large):
    draw = np.random.default_rng(num_out)
    weight = draw.standard_normal((num_out, num_in), np.float32)
    weight = np.sign(weight) if is_large else weight  # all as large as can be, so there are slices
    weight[0] *= 100
    bias = draw.standard_normal(num_out, np.float32) if has_bias else None
    x = draw.standard_normal((num_rows, num_in), np.float32)
    linears = WholeLinears(kind, table=weight.__getitem__)
    product = linears.linear(weight, bias)(x)
    assert product.tobytes() == WholeLinears(kind).linear(weight, bias)(x).tobytes()


REQUESTS = [
    Request(prompt="the cat", max_tokens=8, logprobs=2, prompt_logprobs=1),
    Request(prompt=" the the", max_tokens=5, temperature=1.0, seed=1, logprobs=1),
    Request(prompt="x", num_beams=2, max_tokens=4),
]


@pytest.mark.parametrize("weights", ["int8", "int8-channel"])
@pytest.mark.parametrize("kind", mostly_heavy(["F32", "F16", "Q8_0"], "F32", "Q8_0"))
@pytest.mark.parametrize("ties", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_results_are_the_same_and_so_is_what_resumes_them(tmp_path, weights, kind, ties):
    path = str(write_gguf(tmp_path / "a.gguf", "qwen2", kind, tie_word_embeddings=ties))
    whole = load_transformer(path, TransformerSettings(weights=weights))
    low = load_transformer(path, TransformerSettings(weights=weights, low_memory=True))
    assert decode(REQUESTS, model=low) == decode(REQUESTS, model=whole)
    assert low.settings == whole.settings


def num_bytes(path, **settings):
    made = TransformerSettings(weights="int8-channel", **settings)
    load_transformer(path, made)  # which may import something
    tracemalloc.start()
    model = load_transformer(path, made)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert model.vocab_size
    return size


def test_weights_take_a_quarter_of_float32(tmp_path):
    fields = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    path = str(write_gguf(tmp_path / "a.gguf", kind="F16", tie_word_embeddings=True, **fields))
    tensors = random_tensors(config_json(tie_word_embeddings=True, **fields))
    all_as_float32 = sum(tensor.nbytes for tensor in tensors.values())
    assert num_bytes(path) > all_as_float32
    assert num_bytes(path, low_memory=True) <= 0.28 * all_as_float32  # the rest: Python objects


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "--low-memory keeps integers packed: give --weights int8-channel, too"),
        ({"weights": "int8", "tensor_parallel": 2}, "--low-memory is for one process"),
    ],
)
def test_what_it_is_not_for_is_said(tmp_path, settings, why):
    path = str(write_gguf(tmp_path / "a.gguf"))
    with pytest.raises(BatchdecodeError, match=why):
        load_transformer(path, TransformerSettings(low_memory=True, **settings))
