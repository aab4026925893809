"""The roofline of a model on GPUs: how fast a step could be at best, and how many tokens fit.

Rule: nothing is assumed to cost more than the data sheet says, so no real engine is faster.  The
model is dense, with gated MLPs: each weight is read once a step, each cached token of a decoding
row once; what prompts read of their context is left out, as is all that is small.
"""

import re
from typing import Any

import msgspec
from msgspec import Struct

from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import RooflineStepTime
from batcher.timing.step_time import TICKS_PER_SECOND

USABLE_MEMORY = 0.9  # the part of a GPU's memory that engines take by default
FILE_SUFFIXES = (".yaml", ".yml", ".json")
MAX_GPUS = 1024
_BYTES_OF_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_NOT_DENSE = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")


class GPU(Struct, frozen=True, kw_only=True):
    """A data sheet: dense bfloat16 operations in 10^12/s, bandwidth in 10^9 B/s, memory in 10^9 B.

    Dense: without sparsity; with sums in float32.
    """

    tflops: catalog.Positive
    bandwidth_gb_s: catalog.Positive
    memory_gb: catalog.Positive
    source: catalog.Text = "not stated"


class ModelShape(Struct, frozen=True, kw_only=True):
    """The shape of a dense transformer, under the names of a config.json.

    head_dim: hidden_size / num_attention_heads if None.  torch_dtype: of weights and cache.
    """

    hidden_size: catalog.Count
    intermediate_size: catalog.Count
    num_hidden_layers: catalog.Count
    num_attention_heads: catalog.Count
    num_key_value_heads: catalog.OptionalCount = None
    vocab_size: catalog.Count
    head_dim: catalog.OptionalCount = None
    torch_dtype: catalog.Text = "bfloat16"
    tie_word_embeddings: catalog.Flag = False

    @property
    def bytes_per_number(self) -> int:
        """The size of a weight, and of a number in the cache."""
        return _BYTES_OF_TYPES[self.torch_dtype]

    @property
    def attention_size(self) -> int:
        """The length of the queries of a token, all heads of a layer together."""
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        return head * self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """The length of the keys of a token, all heads of a layer together."""
        heads = self.num_key_value_heads or self.num_attention_heads
        return self.attention_size // self.num_attention_heads * heads

    @property
    def layer_weights(self) -> int:
        """The weights of all layers, each of which every token is multiplied with."""
        attention = self.hidden_size * 2 * (self.attention_size + self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * (attention + mlp)

    @property
    def output_weights(self) -> int:
        """The weights between the last layer and the vocabulary."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, those of the embedding included."""
        embeddings = self.output_weights * (1 if self.tie_word_embeddings else 2)
        return (self.layer_weights + embeddings) * self.bytes_per_number

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes that the cache holds for a token."""
        return 2 * self.num_hidden_layers * self.kv_size * self.bytes_per_number


def load_gpu(text: str) -> GPU:
    """Return the data sheet that `text` names: a shipped one, or a YAML file with one.

    Raises:
        CatalogError: there is none.
    """
    if text.endswith(FILE_SUFFIXES):
        return catalog.as_record(catalog.read_mapping(text), GPU, text)
    values = catalog.find(text, catalog.shipped("hardware.yaml"), "GPU")
    return catalog.as_record(values, GPU, f"hardware.yaml: {text}")


def load_model_shape(text: str) -> ModelShape:
    """Return the shape that `text` names: a shipped one, or a config.json or YAML file like it.

    Raises:
        CatalogError: there is none, or it is not that of a dense transformer.
    """
    if text.endswith(FILE_SUFFIXES):
        return _as_shape(catalog.read_mapping(text), text)
    return _as_shape(
        catalog.find(text, catalog.shipped("models.yaml"), "model"), f"models.yaml: {text}"
    )


def _as_shape(config: dict[str, Any], place: str) -> ModelShape:
    """Return the shape that a config says, of a dense transformer, or raise a CatalogError."""
    for key in _NOT_DENSE:
        if config.get(key):
            raise CatalogError(f"{place}: {key}: only dense models with plain attention are known")
    names = {field.name for field in msgspec.structs.fields(ModelShape)}
    given = {key: value for key, value in config.items() if key in names}
    given["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    shape = catalog.as_record(given, ModelShape, place)
    if shape.torch_dtype not in _BYTES_OF_TYPES:
        known = ", ".join(_BYTES_OF_TYPES)
        raise CatalogError(f"{place}: torch_dtype: expected {known}, not {shape.torch_dtype}")
    if shape.hidden_size < shape.num_attention_heads and shape.head_dim is None:
        raise CatalogError(f"{place}: num_attention_heads: at most hidden_size, or give head_dim")
    return shape


def roofline(name: str, shape: ModelShape, gpu: GPU, tensor_parallel: int = 1) -> RooflineStepTime:
    """Return the least that steps can take on so many GPUs that share the work evenly, for free."""
    flops = gpu.tflops * 1e12 * tensor_parallel
    bandwidth = gpu.bandwidth_gb_s * 1e9 * tensor_parallel
    # A pair of a query and a key: two products over the numbers of all heads, multiply and add.
    per_pair = 4 * shape.num_hidden_layers * shape.attention_size
    weights = (shape.layer_weights + shape.output_weights) * shape.bytes_per_number
    settings = {
        "model": msgspec.to_builtins(shape),
        "gpu": msgspec.to_builtins(gpu),
        "tensor_parallel": tensor_parallel,
    }
    return RooflineStepTime(
        name,
        settings,
        compute=(
            _ticks(2 * shape.layer_weights, flops),
            _ticks(2 * shape.output_weights, flops),
            _ticks(per_pair, flops),
            _ticks(per_pair / 2, flops),  # P * (2 * context + P) is twice the number of pairs
        ),
        memory=(
            max(_ticks(weights, bandwidth), 1),
            _ticks(shape.kv_bytes_per_token, bandwidth),
            _ticks(shape.kv_bytes_per_token, bandwidth),
        ),
    )


def num_kv_tokens(shape: ModelShape, gpu: GPU, tensor_parallel: int = 1) -> int:
    """Return how many tokens fit beside the weights, in USABLE_MEMORY; 0 if not even these do.

    What else an engine keeps is left out; what a real one reports is the better number.
    """
    memory = gpu.memory_gb * 1e9 * USABLE_MEMORY * tensor_parallel
    return max(int(memory - shape.weight_bytes) // shape.kv_bytes_per_token, 0)


def parts_of(text: str) -> tuple[ModelShape, GPU, int]:
    """Return the model, the GPU and the number of GPUs that MODEL:GPU or MODEL:GPU:TP names.

    Raises:
        CatalogError: a part is missing, unknown or wrong.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise CatalogError(f"roofline:{text}: expected roofline:MODEL:GPU or roofline:MODEL:GPU:TP")
    tensor_parallel = parts[2] if parts[2:] else "1"
    is_count = re.fullmatch("[1-9][0-9]{0,3}", tensor_parallel)
    if is_count is None or int(tensor_parallel) > MAX_GPUS:
        raise CatalogError(f"roofline:{text}: expected 1 to {MAX_GPUS} GPUs, not {tensor_parallel}")
    return load_model_shape(parts[0]), load_gpu(parts[1]), int(tensor_parallel)


def _ticks(amount: float, per_second: float) -> int:
    return round(amount / per_second * TICKS_PER_SECOND)
