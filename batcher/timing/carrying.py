"""A profile carried to another number of GPUs: what was measured, with the work shared otherwise.

Rule: only what the shape of the model and the data sheets tell is changed; all else that a step
costs stays as it was measured.
"""

import re

from msgspec.structs import replace

from batcher.timing.catalog import CatalogError
from batcher.timing.hardware import GPU, load_gpu
from batcher.timing.model_shape import ModelShape, load_model_shape
from batcher.timing.overhead import split_overhead, with_overhead
from batcher.timing.profiles import Profile, find_profile
from batcher.timing.roofline import communication_seconds, stages_of

_MS = 1000.0
_DIGITS = 6
_REACHED = 0.85
"""The part of a GPU's bandwidth with which weights are read: it makes the error least of carrying
Llama-3.1-8B to 2, 4 and 8 GPUs, H100 and A100, by the times of operations that NVIDIA measured
(aiconfigurator-core 0.12.0).
"""


def load_profile(text: str) -> tuple[str, Profile]:
    """Return the name and the profile that `text` names: as `find_profile`, and its ends.

    These are ":GPUS", which carries it to so many, and "@ENGINE", which adds what that takes.

    Raises:
        CatalogError: there is none, it cannot be carried, or nothing can be added to it.
    """
    kernels, overhead = split_overhead(text)
    name, profile = _find_carried(kernels)
    if overhead is None:
        return name, profile
    return f"{name}{text.removeprefix(kernels)}", with_overhead(profile, overhead)


def _find_carried(text: str) -> tuple[str, Profile]:
    """Return the profile that `text` names, carried to other GPUs if it says so, or raise."""
    measured, colon, gpus = text.rpartition(":")
    if not colon or re.fullmatch("[0-9]+(x[0-9]+)?", gpus) is None:
        return find_profile(text)
    name, profile = find_profile(measured)
    return f"{name}:{gpus}", on_gpus(profile, *stages_of(gpus, text))


def on_gpus(profile: Profile, tensor_parallel: int, pipeline_parallel: int = 1) -> Profile:
    """Return `profile` with the work of each layer shared by so many GPUs, in so many stages.

    The reading of weights, arithmetic and attention are divided among the GPUs of a stage; a step
    waits for the messages of all layers and stages, and they take time for each token.  What
    `profile` itself has of those is taken off first.

    Raises:
        CatalogError: it names no known GPU and model, or nothing is known of the GPU's link.
    """
    before, after = profile.tensor_parallel, tensor_parallel
    stages = profile.pipeline_parallel, pipeline_parallel
    if (before, stages[0]) == (after, stages[1]):
        return profile
    if profile.model is None or profile.hardware is None:
        raise CatalogError("a profile on another number of GPUs has to name its hardware and model")
    shape, gpu = load_model_shape(profile.model), load_gpu(profile.hardware)
    waited, sent = _messages(shape, gpu, (before, stages[0]))
    waits, sends = _messages(shape, gpu, (after, stages[1]))
    share = before / after
    w = profile.w * share
    # A step takes t0 + w at least, of which the GPUs divide what they read of the weights.
    alone = max(profile.t0 + profile.w - waited, 0.0)
    reading = _MS * shape.weight_bytes_read / (gpu.bandwidth_gb_s * 1e9 * before) / _REACHED
    least = alone - min(reading, alone) * (1 - share) + waits
    kept = 0.0 if profile.c else sent  # what was fitted without c has it in f and g
    shared = {
        "t0": max(least - w, 0.0),
        "w": w,
        "f": max(profile.f - kept, 0.0) * share,
        "g": max(profile.g - kept, 0.0) * share,
        "d": profile.d * share * shape.kv_copies(after) / shape.kv_copies(before),
        "h": profile.h * share * shape.kv_copies(after) / shape.kv_copies(before),
        "e": profile.e * share,
        "c": sends,
        "x": profile.x * share,
    }
    return replace(
        profile,
        **{term: float(f"{value:.{_DIGITS}g}") for term, value in shared.items()},
        by_tokens=tuple((tokens, ms * share) for tokens, ms in profile.by_tokens),
        tensor_parallel=after,
        pipeline_parallel=stages[1],
        kv_tokens=None,
        error=f"carried by formula from {_gpus(before, stages[0])} to {_gpus(after, stages[1])}, "
        "not measured there",
    )


def _gpus(tensor_parallel: int, pipeline_parallel: int) -> str:
    num_gpus = tensor_parallel * pipeline_parallel
    in_stages = f" in {pipeline_parallel} stages" if pipeline_parallel > 1 else ""
    return f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}{in_stages}"


def _messages(shape: ModelShape, gpu: GPU, stages: tuple[int, int]) -> tuple[float, float]:
    """Return the milliseconds a step waits for messages, and those of a token in them."""
    waiting, sent = communication_seconds(shape, gpu, stages, is_measured=True)
    return _MS * waiting, _MS * sent
