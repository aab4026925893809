"""Settings that make no sense are refused, and the message says what would."""

import pytest

from batcher import Engine, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.scheduling.scheduler import check_effects, check_settings
from batcher.settings import SchedulingSettings

CASES = [
    ({"kv_blocks": 2.5}, "kv_blocks must be an integer, not 2.5"),
    ({"capacity": "optimistic"}, "capacity must be watermark, on-demand or no-evict, not 'optim"),
    ({"preempt_for": "size"}, "preempt_for must be priority or deadline, not 'size'"),
    ({"prefix_cache": "off"}, "prefix_cache must be true or false, not 'off'"),
    ({"policy": None}, "policy must be text, in quotes if need be, not None"),
    ({"kv_blocks": 0}, "kv_blocks must be at least 1, not 0"),
    ({"aging": 0.0}, "--aging must be more than 0 seconds, not 0.0"),
    ({"aging": float("nan")}, "--aging must be more than 0 seconds, not nan"),
    ({"watermark": 1.0}, "--watermark must be a share from 0 to less than 1, not 1.0"),
    ({"watermark": -0.1}, "--watermark must be a share"),
    ({"policy": "fifo"}, "unknown policy 'fifo'"),
    ({"max_batch_tokens": 7}, "--max-batch-tokens 7 is less than the 8 slots"),
    (
        {"max_batch_tokens": 9, "kv_blocks": 5},
        "--max-batch-tokens 9 is less than a block of 16 tokens",
    ),
    ({"policy": "lpm"}, "the policy lpm needs a prefix cache"),
    ({"capacity": "no-evict"}, "--capacity no-evict has no effect without --kv-blocks"),
    ({"capacity": "on-demand", "prefix_cache": True}, "--capacity on-demand has no effect without"),
]


@pytest.mark.parametrize(("fields", "message"), CASES)
def test_settings_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(BatchdecodeError) as caught:
        Engine(SimulatedModel(), 8, settings=SchedulingSettings(**fields))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_batch_tokens": 8},
        {"max_batch_tokens": 16, "kv_blocks": 1},
        {"policy": "lpm", "kv_blocks": 9},
        {"policy": "lpm", "prefix_cache": True},
        {"capacity": "no-evict", "kv_blocks": 1, "watermark": 0.0},
        {"aging": float("inf")},
    ],
)
def test_settings_at_their_limits_are_fine(fields):
    check_settings(8, SchedulingSettings(**fields))


@pytest.mark.parametrize(
    ("name", "without", "settings"),
    [
        ("block_size", {}, {"kv_blocks": 9}),
        ("block_size", {"kv_blocks": None}, {"prefix_cache": True}),
        ("capacity", {"prefix_cache": True}, {"kv_blocks": 9}),
        ("watermark", {}, {"kv_blocks": 9}),
        ("watermark", {"kv_blocks": 9, "capacity": "no-evict"}, {"kv_blocks": 9}),
        ("aging", {"kv_blocks": 9}, {"policy": "sjf"}),
        ("aging", {"kv_blocks": 9}, {"kv_blocks": 9, "policy": "lpm"}),
    ],
)
def test_what_is_given_has_an_effect(name, without, settings):
    none, some = SchedulingSettings(**without), SchedulingSettings(**settings)
    check_effects([name], [some])
    check_effects([name], [none, some])
    check_effects([], [none])
    with pytest.raises(BatchdecodeError, match=f"--{name.replace('_', '-')} has no effect without"):
        check_effects([name], [none])
