"""Profiles: how long a step of a real engine takes, its names, and what its hardware allows."""

import re
from contextlib import suppress
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batcher.fields import read_number
from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import (
    ConstantStepTime,
    LeastStepTime,
    PipelineStepTime,
    ProfileStepTime,
    RooflineStepTime,
)
from batcher.timing.roofline import (
    ModelShape,
    load_gpu,
    load_model_shape,
    num_kv_tokens,
    parts_of,
    roofline,
)
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

TERMS = ("t0", "w", "f", "g", "d", "h", "e")
MORE_TERMS = ("c", "x")
"""Terms that only some profiles have: 0 where they are not stated."""

YAML_SUFFIXES = (".yaml", ".yml")
MAX_STEP_SECONDS = 1e6
FORMS = (
    "constant, constant:SECONDS, the name of a profile, FILE.yaml, FILE.yaml:NAME, "
    "roofline:MODEL:GPU or roofline:MODEL:GPU:GPUS; all but a constant with @ENGINE"
)


class Profile(Struct, frozen=True, kw_only=True):
    """What a step takes, in milliseconds; see ProfileStepTime, and docs/timing.md for each term.

    by_tokens: (tokens of a step, what they take), in place of max(w, f*T).
    num_experts, num_experts_per_tok: those of a layer, of which x is the cost; None without them.
    least: no step takes less; see Overhead.
    hardware, model: names of hardware.yaml and models.yaml, or of something not there.
    tensor_parallel: the GPUs that share every layer.  pipeline_parallel: the stages of so many GPUs
    that have some of the layers each; the terms are those of all in one part.  kv_tokens: how many
    tokens the engine had room for.  error: how far it is from what was measured.
    """

    t0: catalog.Amount
    w: catalog.Amount
    f: catalog.Amount
    g: catalog.Amount
    d: catalog.Amount
    h: catalog.Amount
    e: catalog.Amount
    c: catalog.Amount = 0.0
    x: catalog.Amount = 0.0
    by_tokens: catalog.Points = ()
    num_experts: catalog.OptionalCount = None
    num_experts_per_tok: catalog.OptionalCount = None
    least: catalog.Amount = 0.0
    hardware: catalog.OptionalText = None
    model: catalog.OptionalText = None
    tensor_parallel: catalog.Count = 1
    pipeline_parallel: catalog.Stages = 1
    kv_tokens: catalog.OptionalCount = None
    error: catalog.Text = "not stated"
    source: catalog.Text = "not stated"

    @property
    def terms(self) -> dict[str, float]:
        more = [term for term in MORE_TERMS if getattr(self, term)]
        return {term: getattr(self, term) for term in (*TERMS, *more)}

    @property
    def experts(self) -> tuple[int, int] | None:
        if self.num_experts is None or self.num_experts_per_tok is None:
            return None
        return self.num_experts, self.num_experts_per_tok

    def step_time(self, name: str) -> StepTime:
        passes = [
            ProfileStepTime(name, self.terms, self.by_tokens, self.experts, parts)
            for parts in range(1, self.pipeline_parallel + 1)
        ]
        step_time: StepTime = passes[0]
        if len(passes) > 1:
            settings = passes[0].settings | {"pipeline_parallel": self.pipeline_parallel}
            step_time = PipelineStepTime(name, settings, passes)
        return LeastStepTime(step_time, self.least) if self.least else step_time


@cache
def shipped_profiles() -> dict[str, Profile]:
    return _as_profiles(catalog.shipped("profiles.yaml"), "profiles.yaml")


def read_profiles(path: str) -> dict[str, Profile]:
    content = catalog.read_mapping(path)
    named = content.keys() - set(Profile.__struct_fields__)
    if any(isinstance(content[name], dict) for name in named):
        return _as_profiles(content, path)
    return _as_profiles({Path(path).stem: content}, path)


def _as_profiles(content: dict[str, Any], place: str) -> dict[str, Profile]:
    profiles = {}
    for name, values in content.items():
        where = f"{place}: profile {name}"
        profile = profiles[name] = catalog.as_record(values, Profile, where)
        for (before, _), (after, _) in pairwise(profile.by_tokens):
            if after <= before:
                raise CatalogError(
                    f"{where}: by_tokens: {after} comes after {before}: expected tokens that ascend"
                )
        if (profile.x > 0) != (profile.experts is not None):
            needed = "num_experts and num_experts_per_tok"
            raise CatalogError(f"{where}: x is for experts: it needs {needed}, and they need it")
        if profile.experts is not None and profile.experts[1] > profile.experts[0]:
            expected = f"expected 1 to {profile.num_experts}"
            raise CatalogError(f"{where}: num_experts_per_tok: {expected}")
        if not profile.step_time("it").ticks(1, 1, 0, 0):
            raise CatalogError(f"{where}: t0, w, f and g are 0: a step takes time")
    return profiles


def is_profile_file(text: str) -> bool:
    return text.endswith(YAML_SUFFIXES)


def load_profile(text: str) -> tuple[str, Profile]:
    """Return the name and the profile that `text` names: a shipped one, FILE.yaml, FILE.yaml:NAME.

    "@ENGINE" at its end adds the overhead of that engine.
    """
    kernels, overhead = split_overhead(text)
    path, colon, name = kernels.rpartition(":")
    if not colon or not is_profile_file(path):
        path, name = kernels, ""
    if not is_profile_file(path):
        name, profile = path, catalog.find(path, shipped_profiles(), "profile")
    else:
        profiles = read_profiles(path)
        if not name and len(profiles) != 1:
            known = ", ".join(profiles)
            raise CatalogError(f"{path} has {len(profiles)} profiles: {path}:NAME; known: {known}")
        name = name or next(iter(profiles))
        profile = catalog.find(name, profiles, f"profile in {path}:")
    if overhead is None:
        return name, profile
    if profile.model is None:
        raise CatalogError(
            "what an engine takes is counted by layer: a profile has to name its model"
        )
    num_layers = load_model_shape(profile.model).num_hidden_layers
    return f"{name}{text.removeprefix(kernels)}", replace(
        profile,
        t0=round(profile.t0 + _US_PER_MS * overhead.gap_seconds(num_layers), 9),
        least=max(profile.least, overhead.least_ms(num_layers)),
        error=f"without what the engine takes: {profile.error}",
        source=f"{profile.source}; the engine: {overhead.source}",
    )


# What an engine takes beside its kernels is counted by layer, for each layer is as many kernels;
# it does not depend on what a step computes.

_US_PER_MS = 1000.0
# A folder may have an @ in its name: what has a / before the @ has to be a file already.
_AT_ENGINE = re.compile(r"([^/]+|.*\.(?:ya?ml|json)\b.*)@([^@]+)")


class Overhead(Struct, frozen=True, kw_only=True):
    """Microseconds for each layer of a model, in each step.

    gap_us: between kernels, on top of their times; it remains with CUDA graphs.  launch_us: of the
    host to launch them one by one, while those before run: a step takes no less.
    """

    gap_us: catalog.Amount = 0.0
    launch_us: catalog.Amount = 0.0
    source: catalog.Text = "not stated"

    def gap_seconds(self, num_layers: int) -> float:
        return self.gap_us * num_layers / 1e6

    def least_ms(self, num_layers: int) -> float:
        return self.launch_us * num_layers / _US_PER_MS


def split_overhead(text: str) -> tuple[str, Overhead | None]:
    """Return what stands before "@ENGINE", and its overhead; None without such an end.

    ENGINE is a name of overheads.yaml, or a file with the fields of an Overhead.
    """
    found = _AT_ENGINE.fullmatch(text)
    if found is None:
        return text, None
    kernels, engine = found.groups()
    return kernels, catalog.load(engine, Overhead, "overheads.yaml", "engine")


# What --profile names: a step time, and where it runs.


class KvRoom(Struct, frozen=True):
    """Room for so many tokens; 0 if not even the weights fit.

    is_reported: by an engine; else it is the memory of the data sheet less the weights.
    """

    num_tokens: int
    is_reported: bool

    def num_blocks(self, block_size: int) -> int:
        return usable_blocks(self.num_tokens // block_size)


class Setup(Struct, frozen=True, kw_only=True):
    """Where one engine runs, and what; None, or 1 GPU: not known.

    model, gpu: names, or files of a config and of a data sheet.  kv_tokens: reported by an engine.
    """

    model: str | None = None
    gpu: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_tokens: int | None = None

    @property
    def shape(self) -> ModelShape | None:
        with suppress(CatalogError):
            return None if self.model is None else load_model_shape(self.model)
        return None

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_tokens_that_fit(self) -> int | None:
        shape = self.shape
        if shape is None or self.gpu is None:
            return None
        with suppress(CatalogError):
            gpu = load_gpu(self.gpu)
            return num_kv_tokens(shape, gpu, self.tensor_parallel, self.pipeline_parallel)
        return None

    @property
    def kv_room(self) -> KvRoom | None:
        if self.kv_tokens is not None:
            return KvRoom(self.kv_tokens, is_reported=True)
        fit = self.num_tokens_that_fit
        return None if fit is None else KvRoom(fit, is_reported=False)


def step_time_of(text: str) -> StepTime:
    """Return the step time that `text` names, in one of FORMS, or raise a CatalogError."""
    kind, colon, rest = text.partition(":")
    if text == "wall":
        raise CatalogError("wall, the time that steps really take, is for run; give " + FORMS)
    if kind == "constant":
        try:
            seconds = read_number(rest, float) if colon else 1.0
        except ValueError:
            seconds = -1.0
        if not (isfinite(seconds) and 1 / TICKS_PER_SECOND <= seconds <= MAX_STEP_SECONDS):
            raise CatalogError(f"{text}: expected the seconds of a step, above 0 and up to 1e6")
        return ConstantStepTime(seconds)
    if kind == "roofline" and colon:
        kernels, overhead = split_overhead(text)
        named = parts_of(kernels.partition(":")[2])
        overhead, num_layers = overhead or Overhead(), named[0].num_hidden_layers
        best = roofline(text, *named, overhead.gap_seconds(num_layers))
        least = overhead.least_ms(num_layers)
        return LeastStepTime(best, least) if least else best
    if not text:
        raise CatalogError(f"no step time is named; give {FORMS}")
    name, profile = load_profile(text)
    return profile.step_time(name)


def usable_blocks(num_blocks: int) -> int:
    """Return how many of the blocks sequences get: vLLM keeps the first, the null block, empty."""
    return max(num_blocks - 1, 0)


def setup_of_profile(profile: Profile) -> Setup:
    return Setup(
        model=profile.model,
        gpu=profile.hardware,
        tensor_parallel=profile.tensor_parallel,
        pipeline_parallel=profile.pipeline_parallel,
        kv_tokens=profile.kv_tokens,
    )


def setup_of(text: str) -> Setup:
    kind, colon, rest = text.partition(":")
    if kind == "constant":
        return Setup()
    if kind != "roofline" or not colon:
        return setup_of_profile(load_profile(text)[1])
    kernels = split_overhead(rest)[0]
    *_, tensor_parallel, num_stages = parts_of(kernels)
    model, gpu, *_ = kernels.split(":")
    return Setup(
        model=model, gpu=gpu, tensor_parallel=tensor_parallel, pipeline_parallel=num_stages
    )


# Whether hardware allows what a profile says: no measured engine beats its roofline.

_CONTEXT = 1024  # tokens before the one that a row decodes
EXAMPLE_STEPS = {
    f"decode {n} x {_CONTEXT:,}": (n, n, n * _CONTEXT, 0) for n in (1, 8, 32, 128, 256)
} | {f"prefill {tokens:,}": (tokens, 1, 0, tokens * tokens) for tokens in (512, 2048)}
"""The arguments of StepTime.ticks, by a name for such a step."""


class Prediction(Struct, frozen=True):
    """The duration of an example of a step, and the least that hardware allows, in seconds.

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
    """Return the durations of EXAMPLE_STEPS; with the least if `best` is the roofline."""
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
    """Return whether a profile beats the peak of its hardware for its model, and predictions."""
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
