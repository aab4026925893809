"""What a step takes a data-parallel rank: alone that of an engine, else less of the experts."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.timing.hardware import load_gpu
from batcher.timing.loading import KvRoom, kv_room_of, step_time_of
from batcher.timing.model_shape import load_model_shape
from batcher.timing.roofline import num_kv_tokens
from batcher.timing.step_time import StepTime

WITH_EXPERTS = [
    "h100_qwen3-30b-a3b",
    "h100_mixtral-8x7b_tp2:4x2",
    "rtxpro6000_qwen3-30b-a3b@vllm-2025",
    "roofline:qwen3-30b-a3b:h100-sxm",
    "roofline:mixtral-8x7b:h100-sxm:2x3",
    "roofline:deepseek-v3:h200-sxm:8@samples/timing/eager.yaml",
]
STEPS = st.tuples(
    st.integers(0, 9000), st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 10**8)
)


@pytest.mark.parametrize(
    "name", ["constant", "h100_llama3.1-8b_tp1", "roofline:llama-3.1-8b:h100-sxm:1x2@vllm-2025"]
)
def test_without_experts_there_is_nothing_to_share(name: str) -> None:
    assert step_time_of(name).of_rank(4) is None


@examples(200)
@given(st.sampled_from(WITH_EXPERTS), STEPS)
def test_a_rank_alone_takes_what_an_engine_takes(name: str, step: tuple[int, ...]) -> None:
    step_time: StepTime = step_time_of(name)
    tokens, *others = step
    ticks = step_time.of_rank(1)
    assert ticks is not None
    assert ticks(tokens, *others, tokens) == step_time.ticks(tokens, *others)  # type: ignore[call-arg]


@examples(200)
@given(st.sampled_from(WITH_EXPERTS), STEPS, st.integers(1, 64), st.integers(0, 10**5))
def test_the_more_share_the_experts_the_less_and_the_more_tokens_hit_them_the_more(
    name: str, step: tuple[int, ...], num_ranks: int, num_more: int
) -> None:
    fewer, more = step_time_of(name).of_rank(num_ranks), step_time_of(name).of_rank(num_ranks + 1)
    assert fewer is not None
    assert more is not None
    num_all = step[0] + num_more
    assert more(*step, num_all) <= fewer(*step, num_all) <= fewer(*step, num_all + 1)  # type: ignore[call-arg]


def test_a_step_of_a_rank_is_counted_by_hand() -> None:
    ticks = step_time_of("h100_qwen3-30b-a3b").of_rank(4)
    assert ticks is not None
    hit = 1 - (1 - 8 / 128) ** 10  # by ten tokens of all ranks
    expected = 3.727 + 0.1889 + 2 * 0.01809 + 30 * 3.097e-5 + 15.71 * hit / 4
    assert ticks(2, 2, 30, 0, 10) / 1e12 == pytest.approx(expected, rel=1e-3)
    shape, gpu = load_model_shape("qwen3-30b-a3b"), load_gpu("h100-sxm")
    ticks = step_time_of("roofline:qwen3-30b-a3b:h100-sxm").of_rank(4)
    assert ticks is not None
    dense, experts = 2 * shape.layer_weights, 2 * shape.expert_weights * 8
    seconds = (4000 * dense + 7000 / 4 * experts + 8 * shape.output_weights * 2) / gpu.tflops / 1e12
    assert ticks(4000, 8, 0, 0, 7000) / 1e15 == pytest.approx(seconds, rel=1e-6)
    read = shape.weight_bytes_read + shape.expert_bytes * hit / 4
    read += (30 + 2) * shape.kv_bytes_per_token
    assert ticks(2, 2, 30, 0, 10) / 1e15 == pytest.approx(read / gpu.bandwidth_gb_s / 1e9, rel=1e-6)


def test_a_rank_has_room_for_what_others_have_of_the_experts() -> None:
    shape, gpu = load_model_shape("qwen3-30b-a3b"), load_gpu("h100-sxm")
    more = num_kv_tokens(shape, gpu, num_ranks=4) - num_kv_tokens(shape, gpu)
    assert more == pytest.approx(shape.expert_bytes * 3 / 4 / shape.kv_bytes_per_token, abs=1)
    for name in ("roofline:qwen3-30b-a3b:h100-sxm", "h100_qwen3-30b-a3b"):
        assert kv_room_of(name, 4) == KvRoom(
            num_kv_tokens(shape, gpu, num_ranks=4), is_reported=False
        )
    assert kv_room_of("rtx4090_llama3.1-8b", 4) == kv_room_of("rtx4090_llama3.1-8b")
