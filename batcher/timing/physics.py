"""What steps take, and whether hardware allows that: no measured engine beats its roofline."""

from msgspec import Struct

from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import PipelineStepTime, RooflineStepTime
from batcher.timing.hardware import load_gpu
from batcher.timing.model_shape import load_model_shape
from batcher.timing.profiles import Profile
from batcher.timing.roofline import roofline
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

_CONTEXT = 1024  # tokens before the one that a row decodes

EXAMPLE_STEPS = {
    f"decode {n} x {_CONTEXT:,}": (n, n, n * _CONTEXT, 0) for n in (1, 8, 32, 128, 256)
} | {f"prefill {tokens:,}": (tokens, 1, 0, tokens * tokens) for tokens in (512, 2048)}
"""What a step computes, as StepTime.ticks is told, by a name for it."""


class Prediction(Struct, frozen=True):
    """How long an example of a step takes, and the least that hardware allows, in seconds.

    limit: what makes that the least: "compute" or "memory bandwidth".
    """

    step: str
    seconds: float
    least_seconds: float | None = None
    limit: str | None = None

    @property
    def advantage(self) -> float:
        """How many times as fast as hardware allows; 0 if that is not known."""
        return (self.least_seconds or 0.0) / self.seconds


class Physics(Struct, frozen=True):
    """verdict: "possible", "too fast" or "unchecked".  reason: what is beaten, or not known."""

    verdict: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def predictions_of(
    step_time: StepTime, best: RooflineStepTime | PipelineStepTime[RooflineStepTime] | None = None
) -> list[Prediction]:
    """Return how long steps take under EXAMPLE_STEPS; at least, if `best` is the roofline."""
    predictions = []
    for name, stats in EXAMPLE_STEPS.items():
        seconds = step_time.ticks(*stats) / TICKS_PER_SECOND
        if best is None:
            predictions.append(Prediction(name, seconds))
            continue
        num_tokens, rows, kv_read, _ = stats
        bound = best.pass_of(rows) if isinstance(best, PipelineStepTime) else best
        compute, memory = bound.compute_ticks(*stats), bound.memory_ticks(num_tokens, kv_read)
        limit = "compute" if compute > memory else "memory bandwidth"
        least = max(compute, memory) / TICKS_PER_SECOND
        predictions.append(Prediction(name, seconds, least, limit))
    return predictions


def check_physics(profile: Profile) -> tuple[Physics, list[Prediction]]:
    """Return whether a profile beats the peak of its hardware, for its model, and what it says."""
    step_time = profile.step_time("profile")
    if profile.hardware is None or profile.model is None:
        unchecked = Physics("unchecked", "it names no hardware or no model")
        return unchecked, predictions_of(step_time)
    try:
        shape, gpu = load_model_shape(profile.model), load_gpu(profile.hardware)
        stages = profile.tensor_parallel, profile.pipeline_parallel
        best = roofline("best", shape, gpu, *stages)
    except CatalogError as error:
        return Physics("unchecked", str(error)), predictions_of(step_time)
    predictions = predictions_of(step_time, best)
    worst = max(predictions, key=lambda prediction: prediction.advantage)
    if worst.least_seconds is None or worst.seconds >= worst.least_seconds:
        return Physics("possible"), predictions
    reason = (
        f"{worst.step}: {worst.advantage:.2f} times as fast as the peak {worst.limit} allows "
        f"({worst.seconds * 1000:.3g} ms, at least {worst.least_seconds * 1000:.3g} ms)"
    )
    return Physics("too fast", reason), predictions
