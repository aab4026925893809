"""config.json of transformers 4 and 5, and what is said of those that are not supported."""

import pytest
from tiny_checkpoints import config_json

from batcher.errors import BatchdecodeError
from batcher.transformer.config import (
    DeltaNetSettings,
    ExpertSettings,
    LinearScaling,
    Llama3Scaling,
    RopeSettings,
    config_from_json,
)

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, RopeSettings(5e5)),
        ({"rope_theta": None}, RopeSettings(1e4)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeSettings(5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeSettings(1e4, scaling=LinearScaling(2.0)),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeSettings(5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeSettings(5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
    ],
)
def test_rope_is_read_as_either_version_of_transformers_writes_it(fields, rope):
    assert config_from_json(config_json(**fields)).rope == rope


def test_what_is_left_out_follows_from_the_rest():
    config = config_from_json(
        config_json(head_dim=None, num_key_value_heads=None, eos_token_id=None, rms_norm_eps=None)
    )
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (16, 4, ())
    assert config.rms_norm_eps == 1e-6
    assert config_from_json(config_json("qwen3", head_dim=None)).head_dim == 128
    assert config_from_json(config_json(eos_token_id=[3, 1, 3])).eos_token_ids == (3, 1)


@pytest.mark.parametrize(
    ("architecture", "fields", "window"),
    [
        ("llama", {"sliding_window": 8}, None),
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {}, None),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, None),  # from layer 28 on
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
        ("qwen3", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
        ("qwen3", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_a_window_is_that_of_all_layers(architecture, fields, window):
    assert config_from_json(config_json(architecture, **fields)).sliding_window == window


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": None}, "architecture None is not supported, known: LlamaForCausalLM, "),
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported, known: "),
        ({"architectures": [{}]}, r"architecture \{\} is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, known: silu"),
        ({"attention_bias": True}, "attention_bias is not supported; known: biases of q, k and v"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported; known: F32"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' is not supported, known: default, linear, ll"),
        ({"rope_parameters": {"rope_type": 3}}, "got `int` - at `..rope_parameters.rope_type`"),
        ({"rope_scaling": {"type": "linear"}}, "required field `factor` - at `..rope_scaling`"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "at `..rope_scaling.factor`"),
        ({"rope_parameters": {"rope_theta": "x"}}, "at `..rope_parameters.rope_theta`"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4}},
            "not below high_fre",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "layers with a RoPE of their own are not su"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported, known: 1"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"vocab_size": None}, "missing required field `vocab_size`"),
        ({"vocab_size": 10**12}, r"at `\$.vocab_size`"),
        ({"hidden_size": 0}, r"`int` >= 1 - at `\$.hidden_size`"),
        ({"hidden_size": 65, "head_dim": None}, "65 does not divide into 4 heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads do not divide into 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, r"at `\$.rms_norm_eps`"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"eos_token_id": 10**6}, "EOS is 1000000, and the vocabulary ends before it"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_said(fields, message):
    with pytest.raises(BatchdecodeError, match=message):
        config_from_json(config_json(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_layers_may_differ_in_what_they_see(fields):
    config = config_from_json(config_json("qwen2", **fields))
    assert [config.window_of(layer) for layer in range(2)] == [None, 8]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention, but there is no sliding"),
        ({"layer_types": ["linear_attention"] * 2}, "known: full_attention, sliding_attention"),
        ({"layer_types": []}, "layer_types are not one for each of 2 layers"),
    ],
)
def test_kinds_of_layers_that_make_no_sense(fields, message):
    with pytest.raises(BatchdecodeError, match=message):
        config_from_json(config_json("qwen2", **fields))


def test_qwen3_next_has_what_its_config_or_transformers_says():
    config = config_from_json(config_json("qwen3_next", num_hidden_layers=4))
    net = DeltaNetSettings((0, 2), 2, 4, key_head_dim=8, value_head_dim=6, kernel_size=4)
    assert config.delta_net == net
    assert (net.key_size, net.value_size, net.num_channels) == (16, 24, 56)
    assert config.attention_layers == (1, 3)
    assert config.rope.rotary_dim(config.head_dim) == 4
    assert config.experts == ExpertSettings(
        (0, 1, 2, 3), 4, 2, 24, normalises=True, shared_intermediate_size=20
    )
    assert (config.has_output_gate, config.has_offset_norms, config.has_qk_norm) == (True,) * 3
    assert not config.has_post_norms
    fields = {"layer_types": ["full_attention"] * 2, "num_experts": 0, "linear_key_head_dim": None}
    config = config_from_json(config_json("qwen3_next", **fields))
    assert (config.delta_net, config.experts) == (None, None)
    own = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim")
    unsaid = dict.fromkeys([*own, "shared_expert_intermediate_size"])
    config = config_from_json(config_json("qwen3_next", **unsaid))
    assert config.experts == ExpertSettings(
        (0, 1), 512, 10, 512, normalises=True, shared_intermediate_size=512
    )
    assert (config.head_dim, config.rope.partial_rotary_factor) == (256, 0.25)
    said = {"partial_rotary_factor": 0.5, "norm_topk_prob": False}
    config = config_from_json(config_json("qwen3_next", **said))
    assert (config.rope.partial_rotary_factor, config.experts.normalises) == (0.5, False)
    rope = {"rope_theta": 1e6, "partial_rotary_factor": 1.0}
    config = config_from_json(config_json("qwen3_next", rope_parameters=rope))
    assert config.rope == RopeSettings(1e6)


@pytest.mark.parametrize(
    ("fields", "recurrent"),
    [
        ({"full_attention_interval": None}, (0, 1, 2)),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, (1, 3)),
        ({"layer_types": ["linear_attention"] * 4}, (0, 1, 2, 3)),
    ],
)
def test_some_layers_of_qwen3_next_are_recurrent(fields, recurrent):
    config = config_from_json(config_json("qwen3_next", num_hidden_layers=4, **fields))
    assert config.delta_net.layers == recurrent
    assert {*config.attention_layers} == {0, 1, 2, 3} - {*recurrent}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"mlp_only_layers": [1]}, (0, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
    ],
)
def test_some_layers_of_qwen3_next_are_dense(fields, layers):
    config = config_from_json(config_json("qwen3_next", num_hidden_layers=4, **fields))
    assert config.experts.layers == layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_key_heads": None}, "missing required field `linear_num_key_heads`"),
        ({"linear_conv_kernel_dim": 0}, r"at `\$.linear_conv_kernel_dim`"),
        ({"linear_num_key_heads": 3}, "4 value heads of linear attention do not divide into 3 gro"),
        ({"layer_types": ["linear_attention"]}, "layer_types are not one for each of 2 layers"),
        ({"layer_types": ["mamba"] * 2}, "known: full_attention, linear_attention$"),
        ({"layer_types": ["sliding_attention"] * 2}, "known: full_attention, linear_attention$"),
        ({"full_attention_interval": 0}, r"at `\$.full_attention_interval`"),
        ({"partial_rotary_factor": 0.2}, "0.2 of head_dim 16 is 3, and RoPE turns pairs"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"num_experts": 1}, "2 experts for a token, of 1"),
        ({"shared_expert_intermediate_size": 0}, r"at `\$.shared_expert_intermediate_size`"),
    ],
)
def test_a_qwen3_next_that_makes_no_sense_is_one_clear_error(fields, message):
    with pytest.raises(BatchdecodeError, match=message) as error:
        config_from_json(config_json("qwen3_next", **fields))
    assert "\n" not in str(error.value)
