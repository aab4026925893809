"""Profiles: the duration of a step of a real engine, and the least that its hardware allows."""

import re
from contextlib import suppress
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.fields import read_number
from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.step_time import (
    TICKS_PER_SECOND,
    ConstantStepTime,
    PipelineStepTime,
    ProfileStepTime,
    RooflineStepTime,
    StepTime,
    of_experts,
)

# The roofline of a model on GPUs: the least time of a step, and the number of tokens that fit.
#
# Rule: costs are those of the data sheets, and of a link the best that was measured, so no real
# engine is faster. A step reads each weight once, each cached token of a decoding row once, and the
# experts that its tokens hit at random. What prompts read of their context is left out. GPUs with
# tensor parallelism each have a part of every layer and wait for two all-reduces a layer.
#
# The shape of a model is that of its config.json. The MLPs are gated. In all layers but the first
# few, experts replace the MLP; each token is multiplied with some of them and with the shared ones.
# With a kv_lora_rank the cache holds one latent for all heads (DeepSeek-AI 2024, DeepSeek-V2,
# section 2.1), which decoding reads directly.

FP8 = "float8_e4m3fn"
USABLE_MEMORY = 0.9  # of a GPU's memory, the default of engines
MAX_GPUS = 1024
_BYTES_OF_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ZERO_IS_NONE = ("n_shared_experts", "first_k_dense_replace", "shared_expert_intermediate_size")


class ModelShape(Struct, frozen=True, kw_only=True):
    """The shape of a transformer, under the names of a config.json.

    torch_dtype: of weights and cache, unless weight_dtype (of layers) or kv_cache_dtype is given.
    """

    hidden_size: catalog.Count
    intermediate_size: catalog.Count
    num_hidden_layers: catalog.Count
    num_attention_heads: catalog.Count
    num_key_value_heads: catalog.Count | None = None
    vocab_size: catalog.Count
    head_dim: catalog.Count | None = None
    torch_dtype: catalog.Text = "bfloat16"
    weight_dtype: catalog.Text | None = None
    kv_cache_dtype: catalog.Text | None = None
    tie_word_embeddings: catalog.Flag = False
    num_experts: catalog.Count | None = None
    num_experts_per_tok: catalog.Count | None = None
    moe_intermediate_size: catalog.Count | None = None
    n_shared_experts: catalog.Count | None = None
    shared_expert_intermediate_size: catalog.Count | None = None
    first_k_dense_replace: catalog.Count | None = None
    kv_lora_rank: catalog.Count | None = None
    q_lora_rank: catalog.Count | None = None
    qk_nope_head_dim: catalog.Count | None = None
    qk_rope_head_dim: catalog.Count | None = None
    v_head_dim: catalog.Count | None = None

    @property
    def experts(self) -> tuple[int, int] | None:
        if self.num_experts is None or self.num_experts_per_tok is None:
            return None
        return self.num_experts, self.num_experts_per_tok

    @property
    def latent(self) -> tuple[int, int, int, int] | None:
        """MLA sizes: latent, rotary part, head keys, head values; None without MLA."""
        sizes = self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim
        return None if None in sizes else sizes  # type: ignore[return-value]  # none is None

    @property
    def sizes(self) -> "RooflineSizes":
        layers, hidden, heads = (self.num_hidden_layers, self.hidden_size, self.num_attention_heads)
        kv_heads = self.num_key_value_heads or heads
        per_number = _BYTES_OF_TYPES[self.torch_dtype]
        per_weight = _BYTES_OF_TYPES[self.weight_dtype or self.torch_dtype]
        per_cached = _BYTES_OF_TYPES[self.kv_cache_dtype or self.torch_dtype]
        head = self.head_dim or hidden // heads
        if self.latent is None:
            attention, cached = hidden * 2 * head * (heads + kv_heads), 2 * head * kv_heads
            per_read = per_pair = 4 * layers * head * heads
        else:  # decoding reads the latent, prompts the keys and values computed from it
            latent, rotary, keys, values = self.latent
            queries, cached = heads * (keys + rotary), latent + rotary
            attention = hidden * queries
            if self.q_lora_rank is not None:
                attention = self.q_lora_rank * (hidden + queries)
            attention += hidden * cached + heads * (latent * (keys + values) + values * hidden)
            per_read = 2 * layers * heads * (2 * latent + rotary)
            per_pair = 2 * layers * heads * (keys + rotary + values)
        num_experts, num_chosen = self.experts or (0, 0)
        with_experts = layers - (self.first_k_dense_replace or 0) if num_experts else 0
        wide = self.moe_intermediate_size or self.intermediate_size
        shared = self.shared_expert_intermediate_size or wide * (self.n_shared_experts or 0)
        dense = (
            layers * attention
            + (layers - with_experts) * 3 * hidden * self.intermediate_size
            + with_experts * hidden * (3 * shared + num_experts)  # a router row for each expert
        )
        expert, output = with_experts * 3 * hidden * wide, hidden * self.vocab_size
        read = dense * per_weight + output * per_number
        embedding = 0 if self.tie_word_embeddings else output * per_number
        expert_bytes = expert * num_experts * per_weight
        return RooflineSizes(
            bytes_per_number=per_number,
            layer_weights=dense,
            expert_weights=expert,
            weights_per_token=dense + expert * num_chosen,
            output_weights=output,
            weight_bytes_read=read,
            expert_bytes=expert_bytes,
            weight_bytes=read + embedding + expert_bytes,
            operations_per_read=per_read,
            operations_per_pair=per_pair,
            kv_bytes_per_token=layers * cached * per_cached,
        )

    def kv_copies(self, num_gpus: int) -> float:
        """Return the KV copies per token under tensor parallelism, which never splits a head."""
        if self.latent is not None:
            return num_gpus
        return max(num_gpus / (self.num_key_value_heads or self.num_attention_heads), 1)


class RooflineSizes(NamedTuple):
    """Sizes that follow from the shape of a model.

    expert_weights: one expert of each layer.  layer_weights, weights_per_token: of the layers,
    without experts, and with those that a token hits.  weight_bytes_read: by each
    step, without experts and embedding.  operations_per_read, operations_per_pair: for each cached
    token that decoding reads, and each pair of tokens of a prompt.
    """

    bytes_per_number: int
    layer_weights: int
    expert_weights: int
    weights_per_token: int
    output_weights: int
    weight_bytes_read: int
    expert_bytes: int
    weight_bytes: int
    operations_per_read: int
    operations_per_pair: int
    kv_bytes_per_token: int


def load_model_shape(text: str) -> ModelShape:
    """Return the shape of a model of models.yaml, or of a file like a config.json."""
    if text.endswith(catalog.FILE_SUFFIXES):
        config, place = catalog.read_mapping(text), text
    else:
        config = catalog.find(text, catalog.shipped("models.yaml"), "model")
        place = f"models.yaml: {text}"
    names = {field.name for field in msgspec.structs.fields(ModelShape)}
    given = {key: value for key, value in config.items() if key in names}
    given["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    quantized = config.get("quantization_config")
    if quantized and not given.get("weight_dtype"):
        kinds = ("quant_method", "fp8"), ("format", "float-quantized")
        if not isinstance(quantized, dict) or all(quantized.get(k) != v for k, v in kinds):
            raise CatalogError(
                f"{place}: quantization_config: only fp8 is supported; otherwise set weight_dtype"
            )
        given["weight_dtype"] = FP8
    given["num_experts"] = next((config[key] for key in _NAMES_OF_EXPERTS if config.get(key)), None)
    given |= {key: given.get(key) or None for key in _ZERO_IS_NONE}
    shape = catalog.as_record(given, ModelShape, place)
    for name in ("torch_dtype", "weight_dtype", "kv_cache_dtype"):
        dtype = getattr(shape, name) or shape.torch_dtype
        if dtype not in _BYTES_OF_TYPES:
            known = ", ".join(_BYTES_OF_TYPES)
            raise CatalogError(f"{place}: {name}: expected {known}, not {dtype}")
    if shape.hidden_size < shape.num_attention_heads and shape.head_dim is None:
        raise CatalogError(
            f"{place}: num_attention_heads: expected at most hidden_size; otherwise set head_dim"
        )
    if shape.num_experts is not None:
        if shape.num_experts_per_tok is None or shape.num_experts_per_tok > shape.num_experts:
            expected = f"expected 1 to {shape.num_experts}"
            raise CatalogError(f"{place}: num_experts_per_tok: {expected}")
        if (shape.first_k_dense_replace or 0) > shape.num_hidden_layers:
            expected = f"expected 0 to {shape.num_hidden_layers}"
            raise CatalogError(f"{place}: first_k_dense_replace: {expected}")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            expected = "expected experts in all layers but the first ones"
            raise CatalogError(f"{place}: decoder_sparse_step: {expected}")
    if shape.kv_lora_rank is not None and shape.latent is None:
        raise CatalogError(
            f"{place}: kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
        )
    return shape


class GPU(Struct, frozen=True, kw_only=True):
    """A data sheet: dense bfloat16 operations in 10^12/s, bandwidth in 10^9 B/s, memory in 10^9 B.

    fp8_tflops: dense 8-bit operations, if they are faster.  link: a name of links.yaml, or a file
    like it.
    """

    tflops: catalog.Positive
    bandwidth_gb_s: catalog.Positive
    memory_gb: catalog.Positive
    fp8_tflops: catalog.Positive | None = None
    link: catalog.Text | None = None
    source: catalog.Text = "not stated"


class Link(Struct, frozen=True, kw_only=True):
    """The link between the GPUs of a host, in 10^9 B/s for each GPU, one way.

    latency_us: the least time of an all-reduce on two GPUs.  peer_us: added by each further GPU.
    """

    bandwidth_gb_s: catalog.Positive
    latency_us: catalog.Positive
    peer_us: catalog.Amount = 0.0
    source: catalog.Text = "not stated"

    def seconds(self, num_gpus: int) -> float:
        """Return the latency of an all-reduce."""
        return (self.latency_us + self.peer_us * (num_gpus - 2)) / 1e6


def load_gpu(text: str) -> GPU:
    return catalog.load(text, GPU, "hardware.yaml", "GPU")


def link_of(gpu: GPU) -> Link:
    if gpu.link is None:
        raise CatalogError(
            "several GPUs need a link on their data sheet, a file or one of "
            + ", ".join(catalog.shipped("links.yaml"))
        )
    return catalog.load(gpu.link, Link, "links.yaml", "link")


def roofline(
    name: str,
    shape: ModelShape,
    gpu: GPU,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    overhead: float = 0.0,
) -> RooflineStepTime | PipelineStepTime[RooflineStepTime]:
    """Return the least time of steps on tensor_parallel * pipeline_parallel GPUs.

    overhead: seconds added to each step.
    """
    settings = {
        "model": msgspec.to_builtins(shape),
        "gpu": msgspec.to_builtins(gpu),
        "tensor_parallel": tensor_parallel,
    }
    if overhead:
        settings["overhead"] = overhead
    if pipeline_parallel > 1:
        settings["pipeline_parallel"] = pipeline_parallel
    flops = fast = gpu.tflops * 1e12 * tensor_parallel
    if shape.weight_dtype == FP8 and gpu.fp8_tflops is not None:
        fast = gpu.fp8_tflops * 1e12 * tensor_parallel
    bandwidth = gpu.bandwidth_gb_s * 1e9 * tensor_parallel
    sizes = shape.sizes
    # The GPUs of a stage reduce twice a layer, in a ring that scatters and then gathers (Patarasuk
    # and Yuan 2009).  Tokens are sent from stage to stage.
    per_step = per_token = 0.0
    if tensor_parallel * pipeline_parallel > 1:
        link, num_sent = link_of(gpu), 0.0
        if tensor_parallel > 1:
            per_step = 2 * shape.num_hidden_layers * link.seconds(tensor_parallel)
            num_sent = 2 * shape.num_hidden_layers * (2 * (tensor_parallel - 1) / tensor_parallel)
        per_step += (pipeline_parallel - 1) * link.seconds(2)
        num_sent += pipeline_parallel - 1
        num_bytes = num_sent * shape.hidden_size * sizes.bytes_per_number
        per_token = num_bytes / (link.bandwidth_gb_s * 1e9)
    passes = []
    for parts in range(1, pipeline_parallel + 1):  # microbatches
        kv_bytes = sizes.kv_bytes_per_token * shape.kv_copies(tensor_parallel) / parts
        passes.append(
            RooflineStepTime(
                name,
                settings,
                compute=(
                    _ticks(2 * sizes.weights_per_token / parts, fast),
                    _ticks(2 * sizes.output_weights / parts, flops),
                    _ticks(sizes.operations_per_read / parts, flops),
                    _ticks(sizes.operations_per_pair / parts / 2, flops),  # prefill_work is twice
                ),
                memory=(
                    max(_ticks(sizes.weight_bytes_read, bandwidth), 1),
                    _ticks(kv_bytes, bandwidth),
                    _ticks(kv_bytes, bandwidth),
                ),
                communication=(_ticks(per_step + overhead, 1), _ticks(per_token / parts, 1)),
                experts=shape.experts
                and of_experts(*shape.experts, _ticks(sizes.expert_bytes, bandwidth), parts),
            )
        )
    return passes[0] if len(passes) == 1 else PipelineStepTime(name, settings, passes)


def num_kv_tokens(
    shape: ModelShape, gpu: GPU, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """Return how many tokens fit into USABLE_MEMORY next to the weights; at least 0."""
    memory = gpu.memory_gb * 1e9 * USABLE_MEMORY * tensor_parallel * pipeline_parallel
    sizes = shape.sizes
    num_bytes = sizes.kv_bytes_per_token * shape.kv_copies(tensor_parallel)
    return max(int((memory - sizes.weight_bytes) // num_bytes), 0)


def parts_of(text: str) -> tuple[ModelShape, GPU, int, int]:
    """Return the model, the GPU, the GPUs of a stage and the stages of MODEL:GPU[:GPUS]."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise CatalogError(
            f"roofline:{text}: expected roofline:MODEL:GPU or roofline:MODEL:GPU:GPUS"
        )
    gpus = parts[2] if parts[2:] else "1"
    found = re.fullmatch("([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,3}))?", gpus)
    tensor_parallel, num_stages = (int(count or 1) for count in found.groups()) if found else (0, 0)
    if not 0 < tensor_parallel * num_stages <= MAX_GPUS:
        raise CatalogError(
            f"roofline:{text}: expected 1 to {MAX_GPUS} GPUs, or 4x2 for two stages of 4, "
            f"not {gpus}"
        )
    return load_model_shape(parts[0]), load_gpu(parts[1]), tensor_parallel, num_stages


def _ticks(amount: float, per_second: float) -> int:
    return round(amount / per_second * TICKS_PER_SECOND)


TERMS = ("t0", "w", "f", "g", "d", "h", "e")
MORE_TERMS = ("c", "x")  # optional, 0 by default

YAML_SUFFIXES = (".yaml", ".yml")
MAX_STEP_SECONDS = 1e6
FORMS = (
    "constant, constant:SECONDS, the name of a profile, FILE.yaml, FILE.yaml:NAME, "
    "roofline:MODEL:GPU or roofline:MODEL:GPU:GPUS; all but a constant with @ENGINE"
)


class Profile(Struct, frozen=True, kw_only=True):
    """The terms of a step time in milliseconds, as docs/guide/timing.md explains them.

    hardware, model: names of hardware.yaml and models.yaml, or unknown ones.  kv_tokens: the KV
    capacity of the engine.  error: the deviation from what was measured.
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
    num_experts: catalog.Count | None = None
    num_experts_per_tok: catalog.Count | None = None
    hardware: catalog.Text | None = None
    model: catalog.Text | None = None
    tensor_parallel: catalog.Count = 1
    pipeline_parallel: catalog.Stages = 1
    kv_tokens: catalog.Count | None = None
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
        if len(passes) == 1:
            return passes[0]
        settings = passes[0].settings | {"pipeline_parallel": self.pipeline_parallel}
        return PipelineStepTime(name, settings, passes)


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
                    f"{where}: by_tokens: {after} comes after {before}: expected ascending tokens"
                )
        if (profile.x > 0) != (profile.experts is not None):
            needed = "num_experts and num_experts_per_tok"
            raise CatalogError(f"{where}: x, {needed} need each other")
        if profile.experts is not None and profile.experts[1] > profile.experts[0]:
            expected = f"expected 1 to {profile.num_experts}"
            raise CatalogError(f"{where}: num_experts_per_tok: {expected}")
        if not profile.step_time("it").ticks(1, 1, 0, 0):
            raise CatalogError(f"{where}: t0, w, f and g are 0: a step needs a duration")
    return profiles


def is_profile_file(text: str) -> bool:
    return text.endswith(YAML_SUFFIXES)


def load_profile(text: str) -> tuple[str, Profile]:
    """Return the name and the profile of `text`: a shipped one, FILE.yaml or FILE.yaml:NAME.

    "@ENGINE" at the end adds the overhead of that engine.
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
        raise CatalogError("@ENGINE adds time per layer: the profile must name its model")
    num_layers = load_model_shape(profile.model).num_hidden_layers
    return f"{name}{text.removeprefix(kernels)}", replace(
        profile,
        t0=round(profile.t0 + 1000 * overhead.gap_seconds(num_layers), 9),
        error=f"without the engine: {profile.error}",
        source=f"{profile.source}; the engine: {overhead.source}",
    )


# The overhead of an engine is counted per layer, since each layer is as many kernels; it does not
# depend on what a step computes.

# A folder may have an @ in its name: text with a / before the @ must be a file.
_AT_ENGINE = re.compile(r"([^/]+|.*\.(?:ya?ml|json)\b.*)@([^@]+)")


class Overhead(Struct, frozen=True, kw_only=True):
    """gap_us: microseconds between the kernels of a layer, in each step, with CUDA graphs too."""

    gap_us: catalog.Amount = 0.0
    source: catalog.Text = "not stated"

    def gap_seconds(self, num_layers: int) -> float:
        return self.gap_us * num_layers / 1e6


def split_overhead(text: str) -> tuple[str, Overhead | None]:
    """Return the text before "@ENGINE" and the overhead, None without one.

    ENGINE is a name of overheads.yaml, or a file with the fields of an Overhead.
    """
    found = _AT_ENGINE.fullmatch(text)
    if found is None:
        return text, None
    kernels, engine = found.groups()
    return kernels, catalog.load(engine, Overhead, "overheads.yaml", "engine")


# The values of --profile: a step time, and where it runs.


class KvRoom(Struct, frozen=True):
    """KV capacity in tokens; 0 if the weights do not fit.

    is_reported: by an engine; else it is the memory of the data sheet less the weights.
    """

    num_tokens: int
    is_reported: bool

    def num_blocks(self, block_size: int) -> int:
        return usable_blocks(self.num_tokens // block_size)


class Setup(Struct, frozen=True, kw_only=True):
    """The model and the GPUs of one engine; None, or 1 GPU: not known."""

    model: str | None = None
    hardware: str | None = None
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
        if shape is None or self.hardware is None:
            return None
        with suppress(CatalogError):
            gpu = load_gpu(self.hardware)
            return num_kv_tokens(shape, gpu, self.tensor_parallel, self.pipeline_parallel)
        return None

    @property
    def kv_room(self) -> KvRoom | None:
        if self.kv_tokens is not None:
            return KvRoom(self.kv_tokens, is_reported=True)
        fit = self.num_tokens_that_fit
        return None if fit is None else KvRoom(fit, is_reported=False)


def step_time_of(text: str) -> StepTime:
    """Return the step time of `text`, in one of FORMS, or raise a CatalogError."""
    kind, colon, rest = text.partition(":")
    if text == "wall":
        raise CatalogError("wall, the measured time, works only with run; use " + FORMS)
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
        gap = (overhead or Overhead()).gap_seconds(named[0].num_hidden_layers)
        return roofline(text, *named, gap)
    if not text:
        raise CatalogError(f"the name is empty; use {FORMS}")
    name, profile = load_profile(text)
    return profile.step_time(name)


def usable_blocks(num_blocks: int) -> int:
    """Return the number of blocks less one: vLLM keeps the first, the null block, empty."""
    return max(num_blocks - 1, 0)


def setup_of_profile(profile: Profile) -> Setup:
    return msgspec.convert(profile, Setup, from_attributes=True)


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
        model=model, hardware=gpu, tensor_parallel=tensor_parallel, pipeline_parallel=num_stages
    )


# Check of a profile against its hardware: no measured engine beats its roofline.

_CONTEXT = 1024  # tokens before the one that a row decodes
EXAMPLE_STEPS = {  # name -> arguments of StepTime.ticks
    f"decode {n} x {_CONTEXT:,}": (n, n, n * _CONTEXT, 0) for n in (1, 8, 32, 128, 256)
} | {f"prefill {tokens:,}": (tokens, 1, 0, tokens * tokens) for tokens in (512, 2048)}


class Prediction(Struct, frozen=True):
    """The duration of an example step, and the least that hardware allows, in seconds."""

    step: str
    seconds: float
    least_seconds: float | None = None
    limit: str | None = None

    @property
    def advantage(self) -> float:
        """The speed as a multiple of what hardware allows; 0 if that is unknown."""
        return (self.least_seconds or 0.0) / self.seconds


class Physics(Struct, frozen=True):
    """verdict: "possible", "too fast" or "unchecked".  reason: the limit beaten, or unknown."""

    verdict: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def predictions_of(
    step_time: StepTime, best: RooflineStepTime | PipelineStepTime[RooflineStepTime] | None = None
) -> list[Prediction]:
    """Return the durations of EXAMPLE_STEPS, with the least by the roofline `best`."""
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
    """Return whether a profile is possible on its hardware, and predictions."""
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
