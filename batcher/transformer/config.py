"""What a transformer is made of: its sizes, its RoPE and its window, whichever file said so."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe"]
Activation = Literal["silu", "gelu_tanh"]
RopeStyle = Literal["half-split", "interleaved"]
Size = Annotated[int, Meta(ge=1, le=2**24)]
"""Of anything a model has many of; a vocabulary of more would have logits of 64 MiB a row."""
NumLayers = Annotated[int, Meta(ge=1, le=4096)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
TokenId = Annotated[int, Meta(ge=0, lt=2**24)]


class LinearScaling(Struct, frozen=True):
    """Every frequency is divided by `factor`, as Chen et al. 2023 interpolate positions."""

    factor: Positive


class Llama3Scaling(Struct, frozen=True):
    """Low frequencies are divided by `factor`, high ones are not, those between in part.

    Low is what turns less than low_freq_factor times in the original context, high what turns
    more than high_freq_factor times; see `_compute_llama3_parameters` of transformers.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size


class FrequencyFactors(Struct, frozen=True):
    """Each frequency is divided by a factor of its own: how GGUF files say what Llama 3 does.

    factors: [head_dim / 2].
    """

    factors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | FrequencyFactors


class RopeSettings(Struct, frozen=True):
    """Rotary position embeddings.

    style: which values of a head are a pair: i and i + head_dim / 2, or 2i and 2i + 1.
    """

    theta: Positive = 10_000.0
    style: RopeStyle = "half-split"
    scaling: Scaling | None = None


class ExpertSettings(Struct, frozen=True):
    """A mixture of experts.

    layers: those that have experts.  num_chosen: how many of them each token goes through.
    normalises: whether the shares of those that are chosen are made to add up to one.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalises: bool


class TransformerConfig(Struct, frozen=True):
    """A decoder of RMSNorm, RoPE, grouped heads and gated networks.

    sliding_window: how many tokens, itself included, a token attends to; None for all before it.
    full_layers: the layers that attend to all tokens though there is a window.
    local_rope: that of layers with a window, where it is another one.
    attention_scale: of the scores; None for head_dim ** -0.5.
    attention_softcap, logit_softcap: see `soft_cap` in layers.py.
    has_offset_norms: whether norms multiply by one more than their weights.
    has_post_norms: whether what attention and the network come to is normalised, too.
    has_qkv_bias: of the projections of queries, keys and values alone.
    has_qk_norm: whether each head of queries and keys is normalised, before RoPE.
    ties_embeddings: whether the embedding is the output projection as well.

    Raises:
        BatchdecodeError: these numbers do not go together.
    """

    architecture: Architecture
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSettings
    sliding_window: int | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    ties_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    full_layers: tuple[int, ...] = ()
    local_rope: RopeSettings | None = None
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    has_offset_norms: bool = False
    has_post_norms: bool = False
    experts: ExpertSettings | None = None

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token attends to in a layer; None for all before it."""
        return None if layer in self.full_layers else self.sliding_window

    def rope_of(self, layer: int) -> RopeSettings:
        """Return the RoPE of a layer."""
        local_rope = self.local_rope
        return self.rope if local_rope is None or self.window_of(layer) is None else local_rope

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BatchdecodeError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} groups, "
                "one for each head of keys and values"
            )
        if self.head_dim % 2:
            raise BatchdecodeError(f"head_dim {self.head_dim} is odd, and RoPE turns pairs")
        scaling = self.rope.scaling
        if (
            isinstance(scaling, Llama3Scaling)
            and scaling.low_freq_factor >= scaling.high_freq_factor
        ):
            raise BatchdecodeError("low_freq_factor is not below high_freq_factor")
        beyond = [token for token in self.eos_token_ids if token >= self.vocab_size]
        if beyond:
            raise BatchdecodeError(f"EOS is {beyond[0]}, and the vocabulary ends before it")


def head_dim_of(hidden_size: int, num_heads: int) -> int:
    """Return the size of a head where a file does not say it.

    Raises:
        BatchdecodeError: the heads do not divide the hidden size.
    """
    if hidden_size % num_heads:
        raise BatchdecodeError(
            f"hidden_size {hidden_size} does not divide into {num_heads} heads, "
            "and no head_dim is given"
        )
    return hidden_size // num_heads
