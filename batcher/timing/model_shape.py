"""The shape of a model, as its config.json says it, and the work and memory that follow from it."""

from typing import Any

import msgspec
from msgspec import Struct

from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.hardware import FILE_SUFFIXES

_BYTES_OF_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_NOT_DENSE = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")


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
    def weight_bytes_read(self) -> int:
        """The bytes of the weights that a step reads: all but those of the embedding."""
        return (self.layer_weights + self.output_weights) * self.bytes_per_number

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes that the cache holds for a token."""
        return 2 * self.num_hidden_layers * self.kv_size * self.bytes_per_number

    def kv_copies(self, num_gpus: int) -> float:
        """Return how often GPUs that share the layers keep a token: heads are not divided."""
        return max(num_gpus / (self.num_key_value_heads or self.num_attention_heads), 1)

    @property
    def num_all_reduces(self) -> int:
        """Those of a step on several GPUs: after the attention and the MLP of each layer."""
        return 2 * self.num_hidden_layers

    @property
    def reduced_bytes_per_token(self) -> int:
        """The bytes that all of them add up for a token."""
        return self.num_all_reduces * self.hidden_size * self.bytes_per_number


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
