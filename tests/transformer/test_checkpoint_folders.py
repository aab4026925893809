"""Folders of safetensors: what is in them, and what is said of damaged and hostile ones."""

import json
import os
import struct
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import CLASSES, config_json, random_tensors, write_folder

from batcher.errors import BatchdecodeError
from batcher.models.checkpoints import open_checkpoint
from batcher.transformer.stored import KINDS, StoredTensor, stored_size

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_is_what_was_written(tmp_path, architecture, num_shards):
    fields = config_json(architecture, num_experts=4, num_experts_per_tok=2)
    tensors = random_tensors(fields)
    checkpoint = open_checkpoint(write_folder(tmp_path, fields, tensors, num_shards))
    assert checkpoint.config.architecture == architecture
    assert checkpoint.config.rope.style == "half-split"
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        read = checkpoint.tensors[name].read()
        assert read.flags.c_contiguous
        assert np.array_equal(read, expected)
        assert not read.flags.writeable  # it lies in the file
        assert not read.flags.owndata


@pytest.mark.parametrize(
    ("given", "ends"),
    [({"eos_token_id": [5, 1]}, (5, 1)), ({"eos_token_id": 5}, (5,)), ({"top_p": 0.9}, (1,))],
)
def test_generation_config_says_what_ends_a_text(tmp_path, given, ends):
    (write_folder(tmp_path) / "generation_config.json").write_text(json.dumps(given))
    assert open_checkpoint(tmp_path).config.eos_token_ids == ends


def test_what_is_of_no_use_is_let_be(tmp_path):
    fields = config_json(tie_word_embeddings=True)
    more = {
        "lm_head.weight": np.zeros((2, 2), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "mtp.fc.weight": np.zeros((2, 2), np.float32),
    }
    checkpoint = open_checkpoint(write_folder(tmp_path, fields, random_tensors(fields) | more))
    assert not set(more) & set(checkpoint.tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", "config.json: Input data was truncated"),
        (b"[1]", "config.json: Expected `object`, got `array`"),
        (b'{"architectures": ["\xff"]}', "config.json: .*utf-8"),
        (b"[" * 100_000, "config.json: "),
        (b'{"a": ' * 100_000, "config.json: it is nested too deeply"),
        (b'{"vocab_size": NaN}', "config.json: JSON is malformed"),
        (b"{}", "config.json: architecture None is not supported"),
        (b'{"architectures": ["BambaForCausalLM"]}', "config.json: .*; for others use hf:FOLDER"),
    ],
)
def test_a_config_that_is_none(tmp_path, config, message):
    (write_folder(tmp_path) / "config.json").write_bytes(config)
    with pytest.raises(BatchdecodeError, match=rf"^{tmp_path}/{message}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "model.gguf"]
)
def test_a_pointer_of_git_lfs_is_known_as_one(tmp_path, name):
    path = write_folder(tmp_path) / name
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4665b0\nsize 44671488\n"
    )
    message = f"^{path}: it is a Git LFS pointer, not the data: run `git lfs pull`$"
    with pytest.raises(BatchdecodeError, match=message):
        _ = open_checkpoint(path if name.endswith(".gguf") else tmp_path).tokenizer


def test_a_config_without_an_end_is_not_read(tmp_path):
    os.truncate(write_folder(tmp_path) / "config.json", 2**33)  # holes: it takes no room
    with pytest.raises(BatchdecodeError, match=r"config.json: it has more than 268,435,456 bytes"):
        open_checkpoint(tmp_path)
    (write_folder(tmp_path) / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BatchdecodeError, match=r"config.json: there is no such file"):
        open_checkpoint(tmp_path)


def test_without_safetensors_no_pickle_is_read(tmp_path):
    (write_folder(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(BatchdecodeError, match=r"neither model.safetensors nor .* pickles, are"):
        open_checkpoint(tmp_path)


def safetensors(entries, data=b"", size=None):
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def entry(kind="F32", shape=(2,), places=(0, 8)):
    return {"dtype": kind, "shape": shape, "data_offsets": places}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off or damaged: "),
        (safetensors({}, size=2**60), "cut off or damaged: .*too large"),
        (safetensors(b"\x80\x04pickle"), "cut off or damaged: "),
        (safetensors(b"[" * 9999), "cut off or damaged: "),
        (safetensors({"a": entry()}, bytes(7)), "cut off or damaged: "),
        (safetensors({"a": entry(places=(8, 0))}, bytes(8)), "cut off or damaged: "),
        (safetensors({"a": entry(shape=(2**40, 2**40))}, bytes(8)), "cut off or damaged: "),
        (safetensors({"a": entry(shape=(-2,))}, bytes(8)), "cut off or damaged: "),
        (safetensors({"a": entry(), "b": entry()}, bytes(8)), "cut off or damaged: "),
        (safetensors({"a": entry("F64", (1,))}, bytes(8)), "a: F64 is not supported, known: F32"),
        (safetensors({"a": entry(shape=(0, 1), places=(0, 0))}), r"a: the shape \[0, 1\] has a s"),
        (safetensors({"a": entry(shape=(), places=(0, 4))}, bytes(4)), r"a: the shape \[\] has a"),
    ],
)
def test_a_damaged_file_is_said_to_be(tmp_path, data, message):
    path = write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(BatchdecodeError, match=rf"^{path}: (it is )?{message}"):
        open_checkpoint(tmp_path)


def test_a_file_cut_off_anywhere_is_said_to_be(tmp_path):
    path = write_folder(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 9973), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(BatchdecodeError, match=rf"^{path}: it is cut off or damaged"):
            open_checkpoint(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_an_error_or_another_model(tmp_path, changes):
    folder = write_folder(tmp_path)
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    for place, byte in changes:
        damaged[place] = byte
    (folder / "model.safetensors").write_bytes(damaged)
    with suppress(BatchdecodeError):
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.tensors:
            checkpoint.tensors[name].read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "the tensor model.norm.weight is missing"),
        (
            {"model.norm.weight": np.zeros(63, np.float32)},
            r"model.norm.weight is \[63\], but the model's sizes require \[64\]",
        ),
        (
            {"model.layers.0.mlp.gate_proj.bias": np.zeros(96, np.float32)},
            "unexpected tensor 'model.layers.0.mlp.gate_proj.bias'",
        ),
    ],
)
def test_tensors_that_disagree_with_the_config(tmp_path, changes, message):
    tensors = random_tensors(config_json()) | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(BatchdecodeError, match=rf"^{tmp_path}: {message}"):
        open_checkpoint(write_folder(tmp_path, tensors=tensors))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"vocab_size": 10**7}),
        ("llama", {"num_hidden_layers": 4096}),
        ("llama", {"hidden_size": 2**23}),
        ("mixtral", {"num_local_experts": 2**24, "num_hidden_layers": 4096}),
    ],
)
def test_huge_claims_are_errors(tmp_path, architecture, changes):
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(config_json(architecture, **changes)))
    with pytest.raises(BatchdecodeError, match=r"is missing|the model's sizes require"):
        open_checkpoint(folder)


def write_parts(folder, **changes):
    """Write a checkpoint in three files; changes: to what its index says of where a tensor is."""
    write_folder(folder, num_shards=3)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "model.bin", "a\0b"],
)
def test_a_shard_is_a_file_of_the_folder(tmp_path, shard):
    write_folder(tmp_path)  # what ../model.safetensors would lead to
    folder = write_parts(tmp_path / "parts", a=shard)
    with pytest.raises(BatchdecodeError, match=rf"{INDEX}: .* is not the name of a .safetensors"):
        open_checkpoint(folder)


def test_a_missing_shard_or_tensor_is_named(tmp_path):
    folder = write_parts(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = rf"{INDEX}: 'model-00002-of-00003.safetensors' is missing"
    with pytest.raises(BatchdecodeError, match=message):
        open_checkpoint(folder)
    folder = write_parts(tmp_path, **{"model.norm.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(BatchdecodeError, match=r"00001-of-00003.safetensors: 'model.norm.weight' "):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": {"a": 3}}', b"\xff"])
def test_an_index_that_is_none(tmp_path, index):
    (write_parts(tmp_path) / INDEX).write_bytes(index)
    with pytest.raises(BatchdecodeError, match=rf"^{tmp_path}/{INDEX}: "):
        open_checkpoint(tmp_path)


def test_a_shard_may_lie_elsewhere_if_the_folder_links_to_it(tmp_path):
    folder = write_folder(tmp_path / "snapshot")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")  # as in the cache of the Hub
    open_checkpoint(folder)


@pytest.mark.parametrize("module", ["gguf", "jinja2", "safetensors", "tokenizers"])
def test_what_is_not_installed_is_said(tmp_path, monkeypatch, module):
    monkeypatch.setattr(
        "batcher.models.checkpoints.find_spec",
        lambda name: None if name == module else find_spec(name),
    )
    with pytest.raises(BatchdecodeError, match=r"pip install 'batchdecode\[models\]'"):
        open_checkpoint(write_folder(tmp_path))


# Tensors as they lie in files, as float32.


def test_float32_is_copied_only_where_it_is_not_aligned():
    numbers = np.arange(6, dtype=np.float32)
    data = numbers.view(np.uint8)
    read = StoredTensor("F32", (2, 3), data).read()
    assert np.shares_memory(read, numbers)
    assert read.tolist() == [[0, 1, 2], [3, 4, 5]]
    data = np.zeros(25, np.uint8)
    data[1:] = np.arange(6, dtype=np.float32).view(np.uint8)
    read = StoredTensor("F32", (2, 3), data[1:]).read()
    assert read.flags.aligned
    assert read.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_1", "Q3_K"])
def test_some_rows_are_what_they_are_among_all(kind):
    size = stored_size(kind, (5, 256))
    data = np.random.default_rng(0).integers(0, 60, size, np.uint8)
    tensor = StoredTensor(kind, (5, 256), data)
    rows = np.array([3, 0, 3])
    assert tensor.read_rows(rows).tobytes() == tensor.read()[rows].tobytes()


@pytest.mark.parametrize("number", [0.0, -1.0, 1.5, 3.0e38, float("inf"), 1e-40])
def test_bfloat16_is_the_upper_half_of_float32(number):
    upper = np.array([number], np.float32).view("<u4") >> 16
    read = StoredTensor("BF16", (1,), upper.astype("<u2").view(np.uint8)).read()
    assert read.view("<u4") == upper << 16


def test_float16_is_widened():
    halves = np.array([[1.5, -2], [65504, 6e-8]], np.float16)
    read = StoredTensor("F16", (2, 2), halves.view(np.uint8).ravel()).read()
    assert read.dtype == np.float32
    assert np.array_equal(read, halves.astype(np.float32))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "_" in kind])
def test_blocks_are_those_of_gguf(kind):
    data = np.random.default_rng(0).integers(0, 60, stored_size(kind, (2, 3, 512)), np.uint8)
    read = StoredTensor(kind, (2, 3, 512), data).read()
    rows = data.reshape(6, -1)
    expected = dequantize(rows, GGMLQuantizationType[kind]).reshape(2, 3, 512)
    assert np.isfinite(expected).all()
    assert np.array_equal(read, expected)


ONE, TWO = [0, 0x3C], [0, 0x40]  # in half precision
BLOCKS = [
    # a scale, the fifth bits, the lower four: 0 stands for -16
    ("Q5_0", [*ONE, *[0] * 4, *[0] * 16], -16),
    ("Q5_0", [*ONE, *[255] * 4, *[0x11] * 16], 1),
    # a scale, the least, the fifth bits, the lower four
    ("Q5_1", [*ONE, *TWO, *[0] * 4, *[0x33] * 16], 5),
    # scales and minima of 4 bits for each 16, two bits a number, the scale of each
    ("Q2_K", [*[0x12] * 16, *[0x55] * 64, *ONE, *TWO], 0),
    # third bits, of which 0 stands for -4, lower two, scales of 6 bits minus 32, a scale
    ("Q3_K", [*[0] * 32, *[0x55] * 64, *[0] * 12, *ONE], 96),
    # a scale, that of the minima, 6 bits of each for each 32, fifth bits, the lower four
    ("Q5_K", [*ONE, *TWO, *[3] * 4, *[1] * 4, *[0x13] * 4, *[255] * 32, *[0x22] * 128], 52),
    # lower four and upper two bits, 0 stands for -32; a scale for each 16, a scale
    ("Q6_K", [*[0] * 192, *[1] * 16, *ONE], -32),
]


@pytest.mark.parametrize(("kind", "block", "number"), BLOCKS)
def test_a_block_is_what_its_definition_says(kind, block, number):
    data = np.array(block, np.uint8)
    size = KINDS[kind][0]
    assert StoredTensor(kind, (size,), data).read().tolist() == [number] * size


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("IQ2_XS", (256,), f"IQ2_XS is not supported, known: {', '.join(KINDS)}"),
        ("Q4_K", (128,), r"rows of 128 do not divide into blocks of 256 \(Q4_K\)"),
        ("F32", (4, 0), r"the shape \[4, 0\] has a size of zero"),
        ("F32", (), r"the shape \[\] has a size of zero"),
        ("F32", (2**40, 2**40), "bytes are needed for .* 24 are there: the file is cut off or dam"),
        ("F32", (7,), "28 bytes are needed"),
    ],
)
def test_bytes_are_those_of_the_shape(kind, shape, message):
    with pytest.raises(BatchdecodeError, match=message):
        StoredTensor(kind, shape, np.zeros(24, np.uint8))
