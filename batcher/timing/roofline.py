"""The roofline of a model on GPUs: how fast a step could be at best, and how many tokens fit.

Rule: nothing is assumed to cost more than the data sheets say, and a link no more than was measured
at best, so no real engine is faster.  Each weight is read once a step, each cached token of a
decoding row once; of experts, those that tokens hit who choose at random.  What prompts read of
their context is left out, as is all that is small.  Of GPUs that share the work each has a part of
every layer, and all wait for two all-reduces a layer.
"""

import re

import msgspec

from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import RooflineStepTime, of_experts
from batcher.timing.hardware import GPU, bytes_sent, link_of, load_gpu
from batcher.timing.model_shape import ModelShape, load_model_shape
from batcher.timing.step_time import TICKS_PER_SECOND

USABLE_MEMORY = 0.9  # the part of a GPU's memory that engines take by default
MAX_GPUS = 1024


def roofline(name: str, shape: ModelShape, gpu: GPU, tensor_parallel: int = 1) -> RooflineStepTime:
    """Return the least that steps can take on so many GPUs that share every layer evenly.

    Raises:
        CatalogError: there are several, and nothing is known of the link between them.
    """
    flops = gpu.tflops * 1e12 * tensor_parallel
    bandwidth = gpu.bandwidth_gb_s * 1e9 * tensor_parallel
    per_read, per_pair = shape.operations_per_pair
    kv_bytes = shape.kv_bytes_per_token * shape.kv_copies(tensor_parallel)
    settings = {
        "model": msgspec.to_builtins(shape),
        "gpu": msgspec.to_builtins(gpu),
        "tensor_parallel": tensor_parallel,
    }
    return RooflineStepTime(
        name,
        settings,
        compute=(
            _ticks(2 * shape.weights_per_token, flops),
            _ticks(2 * shape.output_weights, flops),
            _ticks(per_read, flops),
            _ticks(per_pair / 2, flops),  # P * (2 * context + P) is twice the number of pairs
        ),
        memory=(
            max(_ticks(shape.weight_bytes_read, bandwidth), 1),
            _ticks(kv_bytes, bandwidth),
            _ticks(kv_bytes, bandwidth),
        ),
        communication=_communication(shape, gpu, tensor_parallel),
        experts=shape.experts and of_experts(*shape.experts, _ticks(shape.expert_bytes, bandwidth)),
    )


def _communication(shape: ModelShape, gpu: GPU, tensor_parallel: int) -> tuple[int, int]:
    """Return the ticks of the all-reduces of a step, and of each token in them."""
    if tensor_parallel == 1:
        return 0, 0
    link = link_of(gpu)
    num_bytes = shape.reduced_bytes_per_token * bytes_sent(tensor_parallel)
    return (
        _ticks(shape.num_all_reduces * link.seconds(tensor_parallel), 1),
        _ticks(num_bytes, link.bandwidth_gb_s * 1e9),
    )


def num_kv_tokens(shape: ModelShape, gpu: GPU, tensor_parallel: int = 1) -> int:
    """Return how many tokens fit beside the weights, in USABLE_MEMORY; 0 if not even these do.

    What else an engine keeps is left out; what a real one reports is the better number.
    """
    memory = gpu.memory_gb * 1e9 * USABLE_MEMORY * tensor_parallel
    num_bytes = shape.kv_bytes_per_token * shape.kv_copies(tensor_parallel)
    return max(int((memory - shape.weight_bytes) // num_bytes), 0)


def parts_of(text: str) -> tuple[ModelShape, GPU, int]:
    """Return the model, the GPU and the number of GPUs that MODEL:GPU or MODEL:GPU:TP names.

    Raises:
        CatalogError: a part is missing, unknown or wrong.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise CatalogError(f"roofline:{text}: expected roofline:MODEL:GPU or roofline:MODEL:GPU:TP")
    num_gpus = num_gpus_of(parts[2] if parts[2:] else "1", f"roofline:{text}")
    return load_model_shape(parts[0]), load_gpu(parts[1]), num_gpus


def num_gpus_of(text: str, place: str) -> int:
    """Return the number of GPUs that `text` says, or raise a CatalogError that says where."""
    if re.fullmatch("[1-9][0-9]{0,3}", text) is None or int(text) > MAX_GPUS:
        raise CatalogError(f"{place}: expected 1 to {MAX_GPUS} GPUs, not {text}")
    return int(text)


def _ticks(amount: float, per_second: float) -> int:
    return round(amount / per_second * TICKS_PER_SECOND)
