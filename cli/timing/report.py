"""What is said of a step time: its terms, what it predicts, and whether hardware allows that."""

from typing import Any

from msgspec import Struct

from batcher.settings import DEFAULT_BLOCK_SIZE
from batcher.timing.physics import (
    LOADS,
    PhysicsVerdict,
    check_physics,
    num_tokens_that_fit,
    usable_blocks,
)
from batcher.timing.profiles import Profile
from batcher.timing.roofline import (
    num_kv_tokens,
    parts_of,
    roofline,
)
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime


class Prediction(Struct, frozen=True):
    """How long a step with this load takes, and the least that hardware allows, in seconds."""

    load: str
    seconds: float
    least_seconds: float | None = None
    limit: str | None = None


class Physics(Struct, frozen=True):
    """verdict: "possible", "too fast" or "unchecked".  reason: what is beaten, or not known."""

    verdict: str
    reason: str | None = None


class StepTimeReport(Struct, frozen=True, kw_only=True):
    """A step time as `profiles --json` shows it.

    kv_tokens: what an engine reported.  kv_tokens_that_fit: memory less weights.
    """

    name: str
    settings: dict[str, Any]
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int | None = None
    kv_tokens: int | None = None
    kv_tokens_that_fit: int | None = None
    kv_blocks: int | None = None
    error: str | None = None
    source: str | None = None
    physics: Physics | None = None
    predictions: list[Prediction]


def report_of_profile(name: str, profile: Profile) -> StepTimeReport:
    """Return what is said of a profile."""
    verdict = check_physics(profile)
    step_time = profile.step_time(name)
    predictions = [
        Prediction(bound.load, bound.predicted, bound.least, bound.limit)
        for bound in verdict.bounds
    ]
    fit = num_tokens_that_fit(profile)
    num_tokens = profile.kv_tokens or fit
    return StepTimeReport(
        name=name,
        settings=step_time.settings,
        hardware=profile.hardware,
        model=profile.model,
        tensor_parallel=profile.tensor_parallel,
        kv_tokens=profile.kv_tokens,
        kv_tokens_that_fit=fit,
        kv_blocks=None if num_tokens is None else _num_blocks(num_tokens),
        error=profile.error,
        source=profile.source,
        physics=physics_of(verdict),
        predictions=predictions or predictions_of(step_time),
    )


def _num_blocks(num_tokens: int) -> int:
    return usable_blocks(num_tokens // DEFAULT_BLOCK_SIZE)


def physics_of(verdict: PhysicsVerdict) -> Physics:
    """Return a verdict in words."""
    worst = verdict.worst
    if worst is not None:
        return Physics(
            "too fast",
            f"{worst.load}: {worst.least / worst.predicted:.2f} times as fast as the peak "
            f"{worst.limit} allows ({worst.predicted * 1000:.3g} ms, at least "
            f"{worst.least * 1000:.3g} ms)",
        )
    return Physics("unchecked", verdict.unchecked) if verdict.unchecked else Physics("possible")


def predictions_of(step_time: StepTime) -> list[Prediction]:
    """Return how long steps take under LOADS."""
    return [
        Prediction(
            load.name,
            step_time.ticks(load.num_tokens, load.num_sequences, load.kv_read, load.prefill_work)
            / TICKS_PER_SECOND,
        )
        for load in LOADS
    ]


def report_of_roofline(name: str) -> StepTimeReport:
    """Return what is said of roofline:MODEL:GPU:TP.

    Raises:
        CatalogError: a part of the name is missing, unknown or wrong.
    """
    shape, gpu, tensor_parallel = parts_of(name.partition(":")[2])
    step_time = roofline(name, shape, gpu, tensor_parallel)
    num_tokens = num_kv_tokens(shape, gpu, tensor_parallel)
    return StepTimeReport(
        name=name,
        settings=step_time.settings,
        tensor_parallel=tensor_parallel,
        kv_tokens_that_fit=num_tokens,
        kv_blocks=_num_blocks(num_tokens),
        error="a bound, not an estimate: real engines take longer",
        source=gpu.source,
        predictions=predictions_of(step_time),
    )
