"""Rooflines: counted by hand for known models, and checked against what GPUs can do."""

import json

import pytest
from msgspec.structs import replace

from batcher.timing.catalog import CatalogError, shipped
from batcher.timing.profiles import (
    EXAMPLE_STEPS,
    GPU,
    Physics,
    Profile,
    check_physics,
    link_of,
    load_gpu,
    load_model_shape,
    num_kv_tokens,
    roofline,
    shipped_profiles,
)

GPU_OF_ONE = GPU(tflops=1.0, bandwidth_gb_s=1.0, memory_gb=1.0)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llama-3.1-8b", 8.03, 131072),
        ("llama-3.1-70b", 70.55, 327680),
        ("mixtral-8x7b", 46.70, 131072),
        ("qwen3-30b-a3b", 30.53, 98304),
    ],
)
def test_shipped_models_have_their_published_size(name, billions, kv_bytes):
    shape = load_model_shape(name).sizes
    weights = shape.weight_bytes / shape.bytes_per_number  # norms are less than a millionth
    assert weights / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.kv_bytes_per_token == kv_bytes


def test_a_step_is_counted_by_hand(tmp_path):
    path = tmp_path / "config.json"
    config = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
        "torch_dtype": "float16",
        "model_type": "anything",
    }
    path.write_text(json.dumps(config, indent="\t"))  # which is no YAML
    shape = load_model_shape(str(path))
    # a layer: queries and outputs 8 x 8 each, keys and values 8 x 4 each, MLP 3 x 8 x 16
    assert shape.sizes.layer_weights == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert (
        shape.sizes.kv_bytes_per_token == 2 * 2 * 4 * 2
    )  # keys and values, layers, numbers, bytes
    step_time = roofline("test", shape, GPU_OF_ONE)
    # 3 decoding rows that read 50 tokens; an operation lasts 10^3 ticks, a byte 10^6
    operations = 2 * (3 * shape.sizes.layer_weights + 3 * 80) + 4 * 2 * 8 * 50
    num_bytes = 2 * (shape.sizes.layer_weights + 80) + 32 * (50 + 3)
    assert step_time.compute_ticks(3, 3, 50, 0) == operations * 10**3
    assert step_time.memory_ticks(3, 50) == num_bytes * 10**6
    # a prompt of 7 on top of 5: pairs of queries and keys are 7 * (5 + 7/2)
    prompt = step_time.compute_ticks(7, 1, 0, 7 * (10 + 7)) - step_time.compute_ticks(7, 1, 0, 0)
    assert prompt == 4 * 2 * 8 * 7 * (5 + 3.5) * 10**3


def test_gpus_share_the_work_and_stages_the_layers():
    shape, gpu = load_model_shape("llama-3.1-70b"), load_gpu("h100-sxm")
    alone, four = (roofline("test", shape, gpu, n) for n in (1, 4))
    # two all-reduces a layer of 4.75 µs each, and of 8 tokens: each of four GPUs sends 3/2 of
    # 8,192 numbers of 2 bytes, at 450 GB/s
    waiting = 160 * 4.75e-6 + 160 * 8 * 1.5 * 8192 * 2 / 450e9
    expected = alone.ticks(8, 8, 9000, 0) / 4 + waiting * 10**15
    assert four.ticks(8, 8, 9000, 0) == pytest.approx(expected, rel=1e-9)
    shape, gpu = load_model_shape("llama-3.1-70b"), load_gpu("h100-sxm")
    alone, two = (roofline("test", shape, gpu, 4, n) for n in (1, 2))
    sent = (4.75e-6 + 8192 * 2 / 450e9) * 1e15  # of a token, from one stage to the next
    assert two.ticks(1, 1, 1000, 0) == pytest.approx(alone.ticks(1, 1, 1000, 0) + sent, rel=1e-9)
    assert two.ticks(64, 64, 64_000, 0) == pytest.approx(
        alone.ticks(32, 32, 32_000, 0) + (4.75e-6 + 32 * 8192 * 2 / 450e9) * 1e15, rel=1e-6
    )
    assert num_kv_tokens(shape, gpu, 4, 2) == num_kv_tokens(shape, gpu, 8, 1)


def test_weights_of_8_bits_are_half_as_large_and_a_latent_is_cached_for_all_heads():
    shape, fp8 = load_model_shape("llama-3.1-70b"), load_model_shape("llama-3.1-70b-fp8")
    assert fp8.sizes.layer_weights == shape.sizes.layer_weights
    assert shape.sizes.weight_bytes - fp8.sizes.weight_bytes == shape.sizes.layer_weights
    gpu = load_gpu("h100-sxm")
    per_token = [
        roofline("test", each, gpu).compute_ticks(1, 0, 0, 0) for each in (shape, fp8)
    ]  # fmt: skip
    assert per_token[0] == pytest.approx(2 * per_token[1], rel=1e-3)
    a100 = load_gpu("a100-sxm-80gb")  # which has no arithmetic of 8 bits
    assert roofline("test", fp8, a100).compute_ticks(1, 0, 0, 0) == roofline(
        "test", shape, a100
    ).compute_ticks(1, 0, 0, 0)
    shape = load_model_shape("deepseek-v3")
    assert shape.sizes.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert shape.sizes.operations_per_read == 61 * 2 * 128 * (2 * 512 + 64)
    assert shape.sizes.operations_per_pair == 61 * 2 * 128 * (192 + 128)
    one, eight = (roofline("test", shape, load_gpu("h200-sxm"), n) for n in (1, 8))
    read = [each.memory_ticks(1, 10**6) - each.memory_ticks(1, 0) for each in (one, eight)]
    assert read[0] == pytest.approx(read[1], rel=1e-4)  # each GPU keeps and reads all of it


def shape_of(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(shipped("models.yaml")["llama-3.1-8b"] | change))
    return load_model_shape(str(path))


@pytest.mark.parametrize(
    ("change", "weight", "kv"),
    [
        ({}, 2, 2),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, 1, 2),
        ({"quantization_config": {"format": "float-quantized"}}, 1, 2),
        ({"weight_dtype": "float8_e4m3fn", "kv_cache_dtype": "float8_e4m3fn"}, 1, 1),
        ({"quantization_config": {"quant_method": "awq"}, "weight_dtype": "float16"}, 2, 2),
    ],
)
def test_a_config_says_what_is_quantized(tmp_path, change, weight, kv):
    shape = shape_of(tmp_path, change)
    assert shape.sizes.layer_weights * weight == shape.sizes.weight_bytes_read - 2 * 128256 * 4096
    assert shape.sizes.kv_bytes_per_token == 65536 * kv


@pytest.mark.parametrize(("num_gpus", "copies"), [(1, 1), (8, 1), (16, 2)])
def test_heads_of_keys_are_not_divided(num_gpus, copies):
    shape, gpu = load_model_shape("llama-3.1-70b"), load_gpu("h100-sxm")
    step_time = roofline("test", shape, gpu, num_gpus)
    read = step_time.memory_ticks(1, 10**6) - step_time.memory_ticks(1, 0)
    assert read == pytest.approx(copies * 327680 / num_gpus / 3350e9 * 1e21, rel=1e-5)
    room = 80e9 * 0.9 * num_gpus - shape.sizes.weight_bytes
    assert num_kv_tokens(shape, gpu, num_gpus) == max(int(room / (327680 * copies)), 0)


def test_gpus_that_share_work_have_a_link(tmp_path):
    shape = load_model_shape("llama-3.2-1b")
    with pytest.raises(CatalogError, match=r"need a link .*one of nvlink4, nvlink3, pcie5, pcie4"):
        roofline("test", shape, GPU_OF_ONE, 2)
    with pytest.raises(CatalogError, match=r"unknown link nvlink \(did you mean nvlink"):
        roofline("test", shape, replace(GPU_OF_ONE, link="nvlink"), 2)
    path = tmp_path / "link.yaml"
    path.write_text("{bandwidth_gb_s: 1, latency_us: 1000}")
    step_time = roofline("test", shape, replace(GPU_OF_ONE, link=str(path)), 2)
    assert step_time.compute_ticks(0, 0, 0, 0) == 32 * 10**12
    sheet = tmp_path / "gpu.yaml"
    sheet.write_text("{tflops: 1, bandwidth_gb_s: 1, memory_gb: 1}")
    physics, _ = check_physics(profile_of(hardware=str(sheet), tensor_parallel=2))
    assert physics.verdict == "unchecked"


def test_a_step_of_experts_is_counted_by_hand(tmp_path):
    path = tmp_path / "config.json"
    config = {
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 10,
        "num_attention_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    shape = load_model_shape(str(path))
    # all three layers: attention 4 x 8 x 8; the first an MLP; the others two shared experts as one
    # MLP of 10, and a router with a row for each expert
    assert shape.sizes.layer_weights == 3 * 256 + 3 * 8 * 16 + 2 * (3 * 8 * 10 + 8 * 4)
    assert shape.sizes.expert_weights == 2 * 3 * 8 * 5
    step_time = roofline("test", shape, GPU_OF_ONE)
    operations = 2 * 3 * (shape.sizes.layer_weights + 2 * shape.sizes.expert_weights + 80)
    assert step_time.compute_ticks(3, 3, 0, 0) == operations * 10**3
    # 4 experts, of which 3 tokens miss 1/8
    num_bytes = (
        2 * (shape.sizes.layer_weights + 80 + shape.sizes.expert_weights * 4 * 7 / 8) + 3 * 96
    )
    assert step_time.memory_ticks(3, 0) == num_bytes * 10**6


def test_all_data_sheets_can_be_used_and_leave_room_beside_weights():
    shape, gpu = load_model_shape("llama-3.1-8b"), load_gpu("rtx-4090")
    assert num_kv_tokens(shape, gpu) == pytest.approx(41408, rel=0.03)  # what vLLM found there
    assert num_kv_tokens(load_model_shape("llama-3.1-70b"), load_gpu("h100-sxm")) == 0
    for name in shipped("hardware.yaml"):
        gpu = load_gpu(name)
        assert gpu.source.startswith("NVIDIA")
        assert link_of(gpu).bandwidth_gb_s > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok: expected 1 to 8"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 33},
            "first_k_dense_replace: expected 0 to 32",
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
            "decoder_sparse_step: expected experts in all layers but the first ones",
        ),
        ({"kv_lora_rank": 512}, "kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_"),
        ({"hidden_size": 0}, "hidden_size: expected a whole number of at least 1, not 0"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: only fp8"),
        ({"torch_dtype": "int3"}, "torch_dtype: expected float32, bfloat16"),
        ({"num_attention_heads": 5000}, "num_attention_heads: expected at most hidden_size"),
    ],
)
def test_a_config_of_another_kind_is_refused(tmp_path, change, message):
    with pytest.raises(CatalogError, match=message):
        shape_of(tmp_path, change)


def profile_of(**changes):
    values = {
        "t0": 9.0, "w": 8.0, "f": 0.1, "g": 0.1, "d": 2e-4, "h": 0.0, "e": 6e-6,
        "hardware": "rtx-4090", "model": "llama-3.1-8b",
    }  # fmt: skip
    return Profile(**values | changes)


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_no_shipped_profile_beats_its_hardware(name):
    physics, predictions = check_physics(shipped_profiles()[name])
    assert physics == Physics("possible")
    assert [prediction.step for prediction in predictions] == list(EXAMPLE_STEPS)
    assert all(prediction.least_seconds for prediction in predictions)


def test_a_profile_that_beats_the_memory_is_flagged():
    # 16 GB of weights at 1,008 GB/s take 15 ms, so 3 ms are 5 times too fast
    physics, predictions = check_physics(profile_of(t0=1.0, w=2.0, f=0.08, g=0.0, d=1.4e-4))
    worst = max(predictions, key=lambda prediction: prediction.advantage)
    assert (worst.step, worst.limit) == ("decode 1 x 1,024", "memory bandwidth")
    assert worst.advantage == pytest.approx(15.02 / 3.143, rel=0.01)
    assert physics.verdict == "too fast"
    assert physics.reason is not None
    assert physics.reason.startswith("decode 1 x 1,024: 4.7")


@pytest.mark.parametrize("changes", [{"hardware": None}, {"model": None}, {"hardware": "b-300"}])
def test_what_is_not_known_is_not_checked(changes):
    physics, predictions = check_physics(profile_of(**changes))
    assert physics.verdict == "unchecked"
    assert physics.reason
    assert all(prediction.least_seconds is None for prediction in predictions)
