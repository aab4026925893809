"""A profile carried to another number of GPUs: what was measured, with the work shared otherwise.

Rule: only what the shape of the model and the data sheets tell is changed; all else that a step
costs stays as it was measured.
"""

from msgspec.structs import replace

from batcher.timing.catalog import CatalogError
from batcher.timing.hardware import GPU, bytes_sent, link_of, load_gpu
from batcher.timing.model_shape import ModelShape, load_model_shape
from batcher.timing.profiles import Profile, find_profile
from batcher.timing.roofline import num_gpus_of

_MS = 1000.0
_DIGITS = 6


def load_profile(text: str) -> tuple[str, Profile]:
    """Return the name and the profile that `text` names, as `find_profile`, or as that and ":GPUS".

    Raises:
        CatalogError: there is none, or it cannot be carried to so many GPUs.
    """
    measured, colon, num_gpus = text.rpartition(":")
    if not colon or not num_gpus.isdecimal():
        return find_profile(text)
    name, profile = find_profile(measured)
    return f"{name}:{num_gpus}", on_gpus(profile, num_gpus_of(num_gpus, text))


def on_gpus(profile: Profile, tensor_parallel: int) -> Profile:
    """Return `profile` with the work of each layer shared by so many GPUs.

    The reading of weights, arithmetic and attention are divided among them; a step waits for the
    all-reduces of all layers, and they take time for each token.  What `profile` itself has of
    those is taken off first.

    Raises:
        CatalogError: it names no known GPU and model, or nothing is known of the GPU's link.
    """
    if tensor_parallel == profile.tensor_parallel:
        return profile
    if profile.model is None or profile.hardware is None:
        raise CatalogError("a profile on another number of GPUs has to name its hardware and model")
    shape, gpu = load_model_shape(profile.model), load_gpu(profile.hardware)
    before, after = profile.tensor_parallel, tensor_parallel
    waited, sent = _all_reduces(shape, gpu, before)
    waits, sends = _all_reduces(shape, gpu, after)
    share = before / after
    reading = _MS * shape.weight_bytes_read / (gpu.bandwidth_gb_s * 1e9)
    w = profile.w * share
    # A step takes t0 + w at least, of which the GPUs divide the reading of weights, at full speed.
    least = profile.t0 + profile.w - waited - reading * (1 / before - 1 / after) + waits
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
        kv_tokens=None,
        error=f"carried by formula from {before} to {after} GPUs, not measured there",
    )


def _all_reduces(shape: ModelShape, gpu: GPU, num_gpus: int) -> tuple[float, float]:
    """Return the milliseconds a step waits for its all-reduces, and those of a token in them."""
    if num_gpus == 1:
        return 0.0, 0.0
    link = link_of(gpu)
    sent = shape.reduced_bytes_per_token * bytes_sent(num_gpus)
    waiting = shape.num_all_reduces * link.seconds(num_gpus)
    return _MS * waiting, _MS * sent / (link.measured_gb_s * 1e9)
