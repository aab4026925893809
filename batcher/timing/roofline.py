"""The roofline of a model on GPUs: how fast a step could be at best, and how many tokens fit.

Rule: nothing is assumed to cost more than the data sheets say, and a link no more than was measured
at best, so no real engine is faster.  Each weight is read once a step, each cached token of a
decoding row once; of experts, those that tokens hit who choose at random.  What prompts read of
their context is left out, as is all that is small.  Of GPUs that share the work each has a part of
every layer, and all wait for two all-reduces a layer.

The shape of a model is what its config.json says.  The MLPs are gated.  Experts take the place of
those of all layers but the first few; of them each token is multiplied with some, and with the
shared ones.  With a kv_lora_rank the cache holds one latent for all heads (DeepSeek-AI 2024,
DeepSeek-V2, section 2.1), which decoding reads as it is.
"""

import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import PipelineStepTime, RooflineStepTime, of_experts
from batcher.timing.step_time import TICKS_PER_SECOND

FP8 = "float8_e4m3fn"
USABLE_MEMORY = 0.9  # the part of a GPU's memory that engines take by default
MAX_GPUS = 1024
_BYTES_OF_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ZERO_IS_NONE = ("n_shared_experts", "first_k_dense_replace", "shared_expert_intermediate_size")


class ModelShape(Struct, frozen=True, kw_only=True):
    """The shape of a transformer, under the names of a config.json.

    head_dim: hidden_size / num_attention_heads if None.  torch_dtype: of weights and cache, unless
    weight_dtype (of layers) or kv_cache_dtype is given.  moe_intermediate_size: of an expert,
    intermediate_size if None.  first_k_dense_replace: layers with an MLP in place of experts.
    """

    hidden_size: catalog.Count
    intermediate_size: catalog.Count
    num_hidden_layers: catalog.Count
    num_attention_heads: catalog.Count
    num_key_value_heads: catalog.OptionalCount = None
    vocab_size: catalog.Count
    head_dim: catalog.OptionalCount = None
    torch_dtype: catalog.Text = "bfloat16"
    weight_dtype: catalog.OptionalText = None
    kv_cache_dtype: catalog.OptionalText = None
    tie_word_embeddings: catalog.Flag = False
    num_experts: catalog.OptionalCount = None
    num_experts_per_tok: catalog.OptionalCount = None
    moe_intermediate_size: catalog.OptionalCount = None
    n_shared_experts: catalog.OptionalCount = None
    shared_expert_intermediate_size: catalog.OptionalCount = None
    first_k_dense_replace: catalog.OptionalCount = None
    kv_lora_rank: catalog.OptionalCount = None
    q_lora_rank: catalog.OptionalCount = None
    qk_nope_head_dim: catalog.OptionalCount = None
    qk_rope_head_dim: catalog.OptionalCount = None
    v_head_dim: catalog.OptionalCount = None

    @property
    def experts(self) -> tuple[int, int] | None:
        if self.num_experts is None or self.num_experts_per_tok is None:
            return None
        return self.num_experts, self.num_experts_per_tok

    @property
    def latent(self) -> tuple[int, int, int, int] | None:
        """The latent of a token, its rotary part, and the keys and values of a head, if any."""
        sizes = self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim
        return None if None in sizes else sizes  # type: ignore[return-value]  # none is None

    @property
    def sizes(self) -> "RooflineSizes":
        layers, hidden, heads = (
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
        )
        kv_heads = self.num_key_value_heads or heads
        per_number = _BYTES_OF_TYPES[self.torch_dtype]
        per_weight = _BYTES_OF_TYPES[self.weight_dtype or self.torch_dtype]
        head = self.head_dim or hidden // heads
        if self.latent is None:
            attention, cached = hidden * 2 * head * (heads + kv_heads), 2 * head * kv_heads
            per_read = per_pair = 4 * layers * head * heads
        else:  # decoding reads all of it; prompts the keys and values that are made of it
            latent, rotary, keys, values = self.latent
            queries, cached = heads * (keys + rotary), latent + rotary
            asked = hidden * queries
            if self.q_lora_rank is not None:
                asked = self.q_lora_rank * (hidden + queries)
            attention = (
                asked + hidden * cached + heads * (latent * (keys + values) + values * hidden)
            )
            per_read = 2 * layers * heads * (2 * latent + rotary)
            per_pair = 2 * layers * heads * (keys + rotary + values)
        num_experts, num_chosen = self.experts or (0, 0)
        with_experts = layers - (self.first_k_dense_replace or 0) if num_experts else 0
        wide = self.moe_intermediate_size or self.intermediate_size
        shared = self.shared_expert_intermediate_size or wide * (self.n_shared_experts or 0)
        dense = (
            layers * attention
            + (layers - with_experts) * 3 * hidden * self.intermediate_size
            + with_experts * hidden * (3 * shared + num_experts)  # a router has one row for each
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
            kv_bytes_per_token=layers
            * cached
            * _BYTES_OF_TYPES[self.kv_cache_dtype or self.torch_dtype],
        )

    def kv_copies(self, num_gpus: int) -> float:
        """Return how often GPUs that share the layers keep a token: heads are not divided."""
        if self.latent is not None:
            return num_gpus
        return max(num_gpus / (self.num_key_value_heads or self.num_attention_heads), 1)


class RooflineSizes(NamedTuple):
    """What follows from the shape of a model.

    layer_weights: those of all layers that every token is multiplied with.
    expert_weights: one expert of each layer.  weights_per_token: both, as far as a token needs it.
    weight_bytes_read: by each step, without experts and embedding.  weight_bytes: of all.
    operations_per_read, operations_per_pair: for a cached token that is read, and for one of a
    prompt before another: two products over the numbers of all heads, multiply and add.
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
    if text.endswith(catalog.FILE_SUFFIXES):
        return _as_shape(catalog.read_mapping(text), text)
    config = catalog.find(text, catalog.shipped("models.yaml"), "model")
    return _as_shape(config, f"models.yaml: {text}")


def _as_shape(config: dict[str, Any], place: str) -> ModelShape:
    names = {field.name for field in msgspec.structs.fields(ModelShape)}
    given = {key: value for key, value in config.items() if key in names}
    given["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    quantized = config.get("quantization_config")
    if quantized and not given.get("weight_dtype"):
        kinds = ("quant_method", "fp8"), ("format", "float-quantized")
        if not isinstance(quantized, dict) or all(quantized.get(k) != v for k, v in kinds):
            raise CatalogError(
                f"{place}: quantization_config: only fp8 is known; without it, say weight_dtype"
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
        raise CatalogError(f"{place}: num_attention_heads: at most hidden_size, or give head_dim")
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

    Dense: without sparsity; with sums in float32.  fp8_tflops: those on 8 bits, if they are faster.
    link: a name of links.yaml, or a file like it.
    """

    tflops: catalog.Positive
    bandwidth_gb_s: catalog.Positive
    memory_gb: catalog.Positive
    fp8_tflops: catalog.OptionalPositive = None
    link: catalog.OptionalText = None
    source: catalog.Text = "not stated"


class Link(Struct, frozen=True, kw_only=True):
    """What joins the GPUs of a host, in 10^9 B/s for each of them, one way.

    latency_us: the least that an all-reduce takes on two GPUs.  peer_us: what each further GPU
    adds.
    """

    bandwidth_gb_s: catalog.Positive
    latency_us: catalog.Positive
    peer_us: catalog.Amount = 0.0
    source: catalog.Text = "not stated"

    def seconds(self, num_gpus: int) -> float:
        """Return the duration of an all-reduce of next to nothing."""
        return (self.latency_us + self.peer_us * (num_gpus - 2)) / 1e6


def load_gpu(text: str) -> GPU:
    return catalog.load(text, GPU, "hardware.yaml", "GPU")


def link_of(gpu: GPU) -> Link:
    if gpu.link is None:
        raise CatalogError(
            "GPUs that share work need a link on their data sheet, a file or one of "
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
    """Return the least that steps can take on GPUs that share the work.

    tensor_parallel: GPUs that share every layer evenly.  pipeline_parallel: stages of so many GPUs
    with some of the layers each.  overhead: seconds on top of each step.
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
    # The GPUs of a stage reduce twice a layer, each sending what it does in a ring, in which all is
    # scattered and then gathered (Patarasuk and Yuan 2009); between stages the tokens are sent.
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
    for parts in range(1, pipeline_parallel + 1):  # of a step, that go through all stages
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
    """Return how many tokens fit beside the weights, in USABLE_MEMORY; at least 0.

    What else an engine keeps is left out; what a real one reports is the better number.
    """
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
