"""What a file about a real run says of its limits, under vLLM's names."""

import json

import pytest

from batcher.errors import BatchdecodeError
from batcher.planning.replay import read_run_meta


def read(meta):
    return read_run_meta(json.dumps(meta).encode(), "m.json")


@pytest.mark.parametrize(
    ("meta", "values"),
    [
        ({}, {}),
        (  # wherever it stands
            {
                "model": "m",
                "max_num_seqs": 256,
                "max_num_batched_tokens": 2048,
                "kv_cache": {
                    "num_gpu_blocks": 2588,
                    "block_size": 16,
                    "enable_prefix_caching": True,
                },
                "scheduler": {
                    "long_prefill_token_threshold": 512,
                    "scheduler_reserve_full_isl": False,
                },
            },
            {
                "batch": 256,
                "max_batch_tokens": 2048,
                "kv_blocks": 2587,
                "block_size": 16,
                "prefix_cache": True,
                "long_prefill_threshold": 512,
                "capacity": "on-demand",
            },
        ),
        (  # what vLLM came to counts more than what it was asked for
            {
                "engine_kwargs": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
                "block_size": 32,
                "resolved_config": {"a": {"max_num_seqs": 128}, "b": {"block_size": 16}},
                "num_gpu_blocks": None,
                "long_prefill_token_threshold": 0,
            },
            {
                "batch": 128,
                "max_batch_tokens": 512,
                "block_size": 16,
                "long_prefill_threshold": None,
            },
        ),
        # tokens of memory are put into blocks
        ({"num_kv_tokens": 41408}, {"kv_blocks": 2587}),
        ({"num_kv_tokens": 41408, "num_gpu_blocks": 7}, {"kv_blocks": 6}),
        ({"num_kv_tokens": 5}, {"kv_blocks": 1}),
        ({"num_kv_tokens": 2**31 - 1, "block_size": 1}, {"kv_blocks": 2**24 - 1, "block_size": 1}),
    ],
)
def test_each_name_is_a_setting(meta, values):
    assert {setting: limit.value for setting, limit in read(meta).limits.items()} == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "m.json:1:1: not JSON: expecting value"),
        (b'{"a": 1,\n "max_num_seqs": }', "m.json:2:18: not JSON: expecting value"),
        (b"[1]", "m.json: expected a JSON object with max_num_seqs,"),
        (b"\xff\xfe", "m.json: "),
        (b'{"a":' * 200_000, "m.json: "),
        (b'{"max_num_seqs":"256"}', "m.json: max_num_seqs: expected a whole number from 1 to "),
        (b'{"max_num_seqs":1048577}', "1,048,576, not 1048577"),
        (b'{"max_num_seqs":true}', "max_num_seqs: expected a whole number"),
        (b'{"enable_prefix_caching":1}', "expected true or false, not 1"),
        (b'{"long_prefill_token_threshold":-1}', "expected a whole number"),
    ],
)
def test_what_a_file_cannot_be(content, message):
    with pytest.raises(BatchdecodeError) as caught:
        read_run_meta(content, "m.json")
    assert message in str(caught.value)


def test_what_would_change_the_schedule_and_is_not_simulated():
    meta = {
        "scheduler_config": {"policy": "priority", "enable_chunked_prefill": False},
        "pipeline_parallel_size": 2,
        "data_parallel_size": 1,
        "speculative_config": None,
    }
    assert sorted(read(meta).not_simulated) == [
        "pipeline_parallel_size 2",
        "scheduler_config.enable_chunked_prefill false",
        'scheduler_config.policy "priority"',
    ]
