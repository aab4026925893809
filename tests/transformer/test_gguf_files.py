"""GGUF files: what is in them, and what is said of damaged and hostile ones."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_checkpoints import config_json, random_tensors, write_folder, write_gguf

from batcher.errors import BatchdecodeError
from batcher.models.checkpoints import open_checkpoint
from batcher.transformer.config import FrequencyFactors, LinearScaling, RopeSettings
from batcher.transformer.stored import MAX_HEADER, read_gguf

HUGE = 2**60
U32, U64, TEXT, ARRAY = 4, 10, 8, 9


def text(string):
    return struct.pack("<Q", len(string)) + string.encode()


def header(num_tensors=0, num_fields=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_fields)


ONE_FIELD, NUMBER = header(num_fields=1) + text("a"), struct.pack("<II", U32, 1)


def tensor(name=b"a", shape=(32,), kind=0, offset=0):
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape)) + sizes
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


EPS = 2.0**-17  # the same as float32
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma3": {
        "sliding_window": 16,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mixtral": {"num_local_experts": 4, **EXPERTS, "head_dim": None},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, **EXPERTS},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_gives_what_the_folder_gives_that_it_is_made_of(tmp_path, family, kind):
    """But for the order of q and k in llama's family, which is another."""
    fields = config_json(family, rms_norm_eps=EPS, **FAMILIES[family])
    tensors = random_tensors(fields)
    folder = open_checkpoint(write_folder(tmp_path / "folder", fields, tensors)).config
    changes = {**FAMILIES[family], "rms_norm_eps": EPS, "head_dim": folder.head_dim}
    path = write_gguf(tmp_path / "a.gguf", family, kind, tensors, **changes)
    checkpoint = open_checkpoint(path)
    style = "interleaved" if family in {"llama", "mixtral"} else "half-split"
    rope = replace(folder.rope, style=style)
    assert checkpoint.config == replace(folder, rope=rope, has_offset_norms=False)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        is_offset = folder.has_offset_norms and name.endswith("norm.weight")
        expected = tensor + np.float32(is_offset)
        is_exact = kind == "F32" or tensor.ndim == 1
        tolerance = 0 if is_exact else 0.01 * np.abs(expected).max()
        assert np.abs(checkpoint.tensors[name].read() - expected).max() <= tolerance


def test_gemma_says_which_of_its_layers_attend_to_all_and_the_largest_has_its_scale(tmp_path):
    def read(add, **changes):
        path = write_gguf(
            tmp_path / "a.gguf", "gemma3", with_fields=add, sliding_window=16, **changes
        )
        return open_checkpoint(path).config

    def each(writer):
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False])
        writer.add_float32("gemma3.rope.freq_base_swa", 500.0)
        writer.add_final_logit_softcapping(30.0)

    config = read(each)
    assert config.full_layers == (1,)
    assert config.local_rope == RopeSettings(500.0)
    assert config.logit_softcap == 30
    every = read(lambda writer: writer.add_uint32("gemma3.attention.sliding_window_pattern", 1))
    assert every.full_layers == (0, 1)
    with pytest.raises(BatchdecodeError, match="sliding_window_pattern is not one of 3 layers"):
        read(each, num_hidden_layers=3)
    path = write_gguf(tmp_path / "a.gguf", "gemma3", num_hidden_layers=62, hidden_size=32)
    assert open_checkpoint(path).config.attention_scale == (32 / 4) ** -0.5


def test_experts_and_tensors_lie_where_they_are(tmp_path):
    fields = config_json("mixtral", **FAMILIES["mixtral"])
    path = tmp_path / "a.gguf"
    with pytest.raises(BatchdecodeError, match=r"blk.0.ffn_gate_exps.weight is \[4, 96, 64\], and"):
        open_checkpoint(
            write_gguf(
                path,
                "mixtral",
                tensors=random_tensors(fields),
                **{**FAMILIES["mixtral"], "num_local_experts": 5, "head_dim": 16},
            )
        )
    # Else a small file could claim any number of experts.
    both = tensor(b"a") + tensor(b"b")
    data = header(2) + both
    path = tmp_path / "a.gguf"
    path.write_bytes(data + bytes(-len(data) % 32 + 128))
    with pytest.raises(BatchdecodeError, match="take more bytes than it has"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.factor": 2.0}, LinearScaling(2.0)),
        ({"rope.scale_linear": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, LinearScaling(2.0)),
        ({"rope.scale_linear": 0.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
    ],
)
def test_rope_is_scaled_as_old_files_say(tmp_path, fields, scaling):
    def add(writer):
        for name, value in fields.items():
            writer.add_float32(f"llama.{name}", value)

    path = write_gguf(tmp_path / "a.gguf", with_fields=add)
    assert open_checkpoint(path).config.rope.scaling == scaling


def test_rope_is_scaled_as_the_file_says_and_all_ends_are_known(tmp_path):
    tensors = random_tensors(config_json())
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", tensors={**tensors, "rope_freqs.weight": factors})
    assert open_checkpoint(path).config.rope.scaling == FrequencyFactors(tuple(factors.tolist()))
    path = write_gguf(tmp_path / "a.gguf", with_fields=lambda writer: writer.add_eot_token_id(5))
    assert open_checkpoint(path).config.eos_token_ids == (1, 5)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda writer: writer.add_uint32("llama.expert_count", 8),
            "expert_used_count is 0, of 8 experts",
        ),
        (lambda writer: writer.add_value_length(8), "attention.value_length 8 is not supported"),
        (lambda writer: writer.add_rope_dimension_count(8), "rope.dimension_count 8 is not suppo"),
        (
            lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"),
            "RoPE scaled by 'yarn' is not supported, known: none, linear",
        ),
        (lambda writer: writer.add_uint16("split.count", 3), "one part of several"),
        (
            lambda writer: writer.add_uint32("general.alignment", 24),
            "alignment 24 is not a power of",
        ),
        (lambda writer: writer.add_uint32("general.alignment", 0), "alignment 0 is not a power of"),
        (lambda writer: writer.add_eot_token_id(10**6), "EOS is 1000000, and the vocabulary ends"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, add, message):
    path = write_gguf(tmp_path / "odd.gguf", with_fields=add)
    with pytest.raises(BatchdecodeError, match=rf"^{path}: .*{message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "4 heads do not divide into 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_hidden_layers": 3}, r"the tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, r"unexpected tensor 'blk.1.attn_k.weight'"),
        ({"intermediate_size": 95}, r"gate_proj.weight is \[96, 64\], but .* require \[95, 64\]"),
        ({"hidden_size": 2**24}, r"embed_tokens.weight is \[262, 64\], but .* \[262, 16777216\]"),
        ({"hidden_size": 2**31}, r"metadata: .* at `\$.embedding_length`"),
        ({"rope_theta": float("inf")}, "rope.freq_base"),
    ],
)
def test_sizes_that_disagree_with_the_tensors(tmp_path, fields, message):
    path = write_gguf(tmp_path / "odd.gguf", tensors=random_tensors(config_json()), **fields)
    with pytest.raises(BatchdecodeError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("factors", "message"),
    [([1.0] * 7, "not one factor for each pair"), ([0.0] * 8, "factors that no frequency is")],
)
def test_factors_of_rope_are_checked(tmp_path, factors, message):
    odd = {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", tensors=random_tensors(config_json()) | odd)
    with pytest.raises(BatchdecodeError, match=message):
        open_checkpoint(path)


def test_a_file_cut_off_anywhere_is_said_to_be(tmp_path):
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 64, 5), *range(64, len(whole), 9973), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(BatchdecodeError, match=rf"^{path}: .*(cut off|not a GGUF file)"):
            open_checkpoint(path)


@given(st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255)), min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_an_error_or_another_model(tmp_path, changes):
    path = tmp_path / "tiny.gguf"
    if not path.exists():
        write_gguf(path)
    damaged = bytearray(path.read_bytes())
    for place, byte in changes:
        damaged[place] = byte
    other = tmp_path / "damaged.gguf"
    other.write_bytes(damaged)
    with suppress(BatchdecodeError):
        checkpoint = open_checkpoint(other)
        [*checkpoint.tensors.values()][-1].read()
        checkpoint.tokenizer.encode("the end")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4" + bytes(60), "not a GGUF file: it does not begin with GGUF"),
        (header(version=1), "GGUF version 1 is not supported, known: 2, 3"),
        (header(version=3 << 24), "version 50331648 is not supported, known: 2, 3, little-endian"),
        (header(num_fields=HUGE), "cut off or damaged"),
        (header(num_fields=1) + struct.pack("<Q", HUGE) + bytes(99), "cut off or damaged"),
        (ONE_FIELD + struct.pack("<I", 99), "of kind 99, which is unknown"),
        (ONE_FIELD + struct.pack("<IIQ", ARRAY, U64, HUGE), "cut off or damaged"),
        (ONE_FIELD + struct.pack("<IIQ", ARRAY, TEXT, HUGE), "cut off or damaged"),
        (ONE_FIELD + struct.pack("<IIQ", ARRAY, ARRAY, 1), "of kind 9, which is unknown"),
        (ONE_FIELD.replace(b"a", b"\xff") + NUMBER, "is not UTF-8"),
        (header(num_fields=2) + 2 * (text("a") + NUMBER), "'a' occurs twice in its metadata"),
        (header(num_tensors=1) + tensor(shape=(1,) * 5), "'a' has 5 dimensions"),
        (header(num_tensors=1) + tensor(shape=(0, 4)), r"'a': the shape \[4, 0\] has a size of z"),
        (header(num_tensors=1) + tensor(kind=17), "'a': IQ2_XS is not supported, known: F32, F16"),
        (header(num_tensors=1) + tensor(kind=999), "'a': kind 999 is not supported, known: F32"),
        (header(num_tensors=1) + tensor(shape=(HUGE,) * 4), "'a': .* cut off or damaged"),
        (header(num_tensors=1) + tensor(offset=2**64 - 1), "'a': .* cut off or damaged"),
        (header(num_tensors=1) + tensor() + bytes(127), "'a': 128 bytes are needed"),
        (header(num_tensors=2) + 2 * tensor() + bytes(256), "two tensors 'a'"),
        (header() + bytes(64), "architecture None is not supported, known: llama, qwen2, qwen3"),
    ],
)
def test_what_lies_in_a_header_is_an_error_at_once(tmp_path, data, message):
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    with pytest.raises(BatchdecodeError, match=rf"^{path}: .*{message}"):
        open_checkpoint(path)


def test_neither_gigabytes_nor_what_is_opened_is_read(tmp_path):
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.write(header(num_fields=1) + text("a"))
        file.write(struct.pack("<IIQ", ARRAY, TEXT, 2**28))
        file.truncate(2**34)  # holes: it takes no room
    with pytest.raises(BatchdecodeError, match=f"its header is longer than {MAX_HEADER:,} bytes"):
        open_checkpoint(path)
    path = write_gguf(tmp_path / "tiny.gguf")
    tensor = read_gguf(path)[1]["token_embd.weight"]
    assert isinstance(tensor.data.base, np.memmap | np.ndarray)
    assert not tensor.data.flags.owndata
    assert not tensor.read().flags.writeable


@pytest.mark.parametrize("name", ["no.gguf", "no"])
def test_a_path_to_nothing_is_said_to_be(tmp_path, name):
    with pytest.raises(BatchdecodeError, match=f"{name}: there is no such file or folder"):
        open_checkpoint(tmp_path / name)
