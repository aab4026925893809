"""The roofline of a model on GPUs: how fast a step could be at best, and how many tokens fit.

Rule: nothing is assumed to cost more than the data sheets say, and a link no more than was measured
at best, so no real engine is faster.  Each weight is read once a step, each cached token of a
decoding row once; of experts, those that tokens hit who choose at random.  What prompts read of
their context is left out, as is all that is small.  Of GPUs that share the work each has a part of
every layer, and all wait for two all-reduces a layer.
"""

import re
from typing import Any

import msgspec

from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import PipelineStepTime, RooflineStepTime, of_experts
from batcher.timing.hardware import GPU, bytes_sent, link_of, load_gpu
from batcher.timing.model_shape import FP8, ModelShape, load_model_shape
from batcher.timing.step_time import TICKS_PER_SECOND

USABLE_MEMORY = 0.9  # the part of a GPU's memory that engines take by default
MAX_GPUS = 1024


def roofline(
    name: str,
    shape: ModelShape,
    gpu: GPU,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    overhead: float = 0.0,
) -> RooflineStepTime | PipelineStepTime[RooflineStepTime]:
    """Return the least that steps can take on GPUs that share the work.

    tensor_parallel: how many share every layer evenly.  pipeline_parallel: how many stages of so
    many GPUs have some of the layers each.  overhead: seconds that each step takes on top.

    Raises:
        CatalogError: there are several, and nothing is known of the link between them.
    """
    settings = {
        "model": msgspec.to_builtins(shape),
        "gpu": msgspec.to_builtins(gpu),
        "tensor_parallel": tensor_parallel,
    }
    if overhead:
        settings["overhead"] = overhead
    if pipeline_parallel == 1:
        return roofline_of_part(name, settings, shape, gpu, (tensor_parallel, 1), overhead=overhead)
    settings["pipeline_parallel"] = pipeline_parallel
    stages = tensor_parallel, pipeline_parallel
    parts = range(1, pipeline_parallel + 1)
    passes = [
        roofline_of_part(name, settings, shape, gpu, stages, part, overhead) for part in parts
    ]
    return PipelineStepTime(name, settings, passes)


def roofline_of_part(
    name: str,
    settings: dict[str, Any],
    shape: ModelShape,
    gpu: GPU,
    stages: tuple[int, int],
    parts: int = 1,
    overhead: float = 0.0,
) -> RooflineStepTime:
    """Return what one of so many parts of a step takes through all stages.

    stages: the GPUs of a stage, and how many stages there are.  overhead: seconds on top.
    """
    tensor_parallel, _ = stages
    flops = gpu.tflops * 1e12 * tensor_parallel
    fast = flops
    if shape.weight_dtype == FP8 and gpu.fp8_tflops is not None:
        fast = gpu.fp8_tflops * 1e12 * tensor_parallel
    bandwidth = gpu.bandwidth_gb_s * 1e9 * tensor_parallel
    per_read, per_pair = shape.operations_per_pair
    kv_bytes = shape.kv_bytes_per_token * shape.kv_copies(tensor_parallel) / parts
    per_step, per_token = communication_seconds(shape, gpu, stages)
    computed = _ticks(2 * shape.weights_per_token / parts, fast)
    return RooflineStepTime(
        name,
        settings,
        compute=(
            computed,
            _ticks(2 * shape.output_weights / parts, flops),
            _ticks(per_read / parts, flops),
            _ticks(per_pair / parts / 2, flops),  # P * (2 * context + P) is twice their number
        ),
        memory=(
            max(_ticks(shape.weight_bytes_read, bandwidth), 1),
            _ticks(kv_bytes, bandwidth),
            _ticks(kv_bytes, bandwidth),
        ),
        communication=(_ticks(per_step + overhead, 1), _ticks(per_token / parts, 1)),
        experts=shape.experts
        and of_experts(*shape.experts, _ticks(shape.expert_bytes, bandwidth), parts),
        expert_work=computed - _ticks(2 * shape.layer_weights / parts, fast),
    )


def communication_seconds(
    shape: ModelShape, gpu: GPU, stages: tuple[int, int]
) -> tuple[float, float]:
    """Return what a step waits for its messages, and what each token in them takes.

    stages: the GPUs of a stage, which reduce twice a layer, and how many stages there are, between
    which the tokens are sent.

    Raises:
        CatalogError: there are several GPUs, and nothing is known of the link between them.
    """
    tensor_parallel, num_stages = stages
    if tensor_parallel * num_stages == 1:
        return 0.0, 0.0
    link, waiting, num_bytes = link_of(gpu), 0.0, 0.0
    if tensor_parallel > 1:
        waiting = shape.num_all_reduces * link.seconds(tensor_parallel)
        num_bytes = shape.num_all_reduces * bytes_sent(tensor_parallel)
    waiting += (num_stages - 1) * link.seconds(2)
    num_bytes += num_stages - 1
    per_token = num_bytes * shape.hidden_size * shape.bytes_per_number
    return waiting, per_token / (link.bandwidth_gb_s * 1e9)


def num_kv_tokens(
    shape: ModelShape,
    gpu: GPU,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int:
    """Return how many tokens fit beside the weights, in USABLE_MEMORY; 0 if not even these do.

    What else an engine keeps is left out; what a real one reports is the better number.
    """
    memory = gpu.memory_gb * 1e9 * USABLE_MEMORY * tensor_parallel * pipeline_parallel
    num_bytes = shape.kv_bytes_per_token * shape.kv_copies(tensor_parallel)
    return max(int((memory - shape.weight_bytes) // num_bytes), 0)


def parts_of(text: str) -> tuple[ModelShape, GPU, int, int]:
    """Return the model, the GPU and the GPUs that MODEL:GPU or MODEL:GPU:GPUS names.

    Raises:
        CatalogError: a part is missing, unknown or wrong.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise CatalogError(
            f"roofline:{text}: expected roofline:MODEL:GPU or roofline:MODEL:GPU:GPUS"
        )
    stages = stages_of(parts[2] if parts[2:] else "1", f"roofline:{text}")
    return load_model_shape(parts[0]), load_gpu(parts[1]), *stages


def stages_of(text: str, place: str) -> tuple[int, int]:
    """Return the GPUs that share every layer, and the stages, of TP or TPxPP.

    Raises:
        CatalogError: it says something else, or too many; `place` says where.
    """
    found = re.fullmatch("([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,3}))?", text)
    tensor_parallel, num_stages = (int(count or 1) for count in found.groups()) if found else (0, 0)
    if not 0 < tensor_parallel * num_stages <= MAX_GPUS:
        raise CatalogError(
            f"{place}: expected 1 to {MAX_GPUS} GPUs, or 4x2 for two stages of 4, not {text}"
        )
    return tensor_parallel, num_stages


def _ticks(amount: float, per_second: float) -> int:
    return round(amount / per_second * TICKS_PER_SECOND)
