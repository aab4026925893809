"""A second tier of the KV cache in deployments: how soon it is read, and what it comes to."""

from fractions import Fraction

import pytest
from msgspec.structs import replace

from batcher import Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.planning.deployments import Deployment
from batcher.planning.measure import Question, measure
from batcher.planning.offloading import check_offload, offload_of
from batcher.planning.workload import workload_of
from batcher.settings import SchedulingSettings
from batcher.timing.loading import ticks_of_loading
from batcher.timing.step_time import TICKS_PER_SECOND

TIER = Deployment(
    batch=1,
    profile="h100_llama3.1-8b_tp1",
    scheduling=SchedulingSettings(kv_blocks=9, block_size=4),
    kv_offload_blocks=100,
)
QUESTION = Question(
    workload_of(
        [Request(prompt=[kind] * 32, max_tokens=4, ignore_eos=True) for kind in (5, 6, 5)],
        SimulatedModel(),
    )
)


@pytest.mark.parametrize(
    ("profile", "gb_s", "bytes_on_each"),
    [
        ("h100_llama3.1-8b_tp1", 64, 2 * 32 * 8 * 128 * 2),
        ("h100_llama3.1-8b_tp1:2@vllm-2025", 64, 2 * 32 * 4 * 128 * 2),
        ("h100_llama3.1-8b_tp1:2x2", 64, 2 * 16 * 4 * 128 * 2),
        ("h100_llama3.1-8b_tp1:16", 64, 2 * 32 * 1 * 128 * 2),  # no less than one head of keys
        ("roofline:llama-3.1-8b:a100-sxm-80gb", 32, 2 * 32 * 8 * 128 * 2),
    ],
)
def test_a_block_takes_what_each_gpu_keeps_of_it_at_the_bandwidth_of_its_link(
    profile: str, gb_s: int, bytes_on_each: int
) -> None:
    expected = Fraction(16 * bytes_on_each, gb_s * 10**9) * TICKS_PER_SECOND
    assert ticks_of_loading(profile, 16) == pytest.approx(float(expected))


@pytest.mark.parametrize("profile", ["constant", "samples/timing/profiles.yaml:our-gpu"])
def test_what_tells_no_gpu_and_model_tells_no_time(profile: str) -> None:
    assert ticks_of_loading(profile, 16) is None
    with pytest.raises(BatchdecodeError, match="--kv-offload-blocks needs a --profile"):
        check_offload(["kv_offload_blocks"], [replace(TIER, profile=profile)])


@pytest.mark.parametrize(
    "scheduling", [SchedulingSettings(), SchedulingSettings(kv_blocks=9, prefix_cache=False)]
)
def test_a_tier_without_a_prefix_cache_to_run_out_of_is_refused(
    scheduling: SchedulingSettings,
) -> None:
    with pytest.raises(BatchdecodeError, match="has no effect without --kv-blocks"):
        check_offload(["kv_offload_blocks"], [replace(TIER, scheduling=scheduling)])


def test_the_outcome_tells_how_many_blocks_were_read_and_in_which_share_of_the_time() -> None:
    tier, alone = (
        measure(QUESTION, each) for each in (TIER, replace(TIER, kv_offload_blocks=None))
    )
    assert alone.offload is None
    assert tier.offload is not None
    assert tier.offload.loaded_blocks == 7
    offload = offload_of(TIER)
    assert offload is not None
    seconds = 7 * offload.ticks_per_block / TICKS_PER_SECOND
    assert tier.offload.loading == pytest.approx(seconds / tier.makespan, rel=0.1)
    assert tier.prefix_hits == pytest.approx(28 / 96, abs=1e-6)


def test_replicas_of_a_fleet_have_a_tier_each() -> None:
    two = measure(QUESTION, replace(TIER, replicas=2))
    assert two.offload is not None
    assert two.offload.loaded_blocks == 0, "the first and the third are on the same replica"
