"""What a transformer is made of: its sizes, its RoPE and its window, whichever file said so."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError

Architecture = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "qwen3_next"
]
Activation = Literal["silu", "gelu_tanh"]
RopeStyle = Literal["half-split", "interleaved"]
Size = Annotated[int, Meta(ge=1, le=2**24)]
"""Of anything a model has many of; a vocabulary of more would have logits of 64 MiB a row."""
NumLayers = Annotated[int, Meta(ge=1, le=4096)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
Share = Annotated[float, Meta(gt=0, le=1)]
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
    partial_rotary_factor: the part of a head, from its beginning, that is turned at all.
    """

    theta: Positive = 10_000.0
    style: RopeStyle = "half-split"
    scaling: Scaling | None = None
    partial_rotary_factor: Share = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many features of a head are turned."""
        return int(head_dim * self.partial_rotary_factor)


class ExpertSettings(Struct, frozen=True):
    """A mixture of experts.

    layers: those that have experts.  num_chosen: how many of them each token goes through.
    normalises: whether the shares of those that are chosen are made to add up to one.
    shared_intermediate_size: of one that every token goes through; None if there is no such one.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalises: bool
    shared_intermediate_size: int | None = None


class DeltaNetSettings(Struct, frozen=True):
    """Gated delta nets, which some layers have in place of attention.

    layers: those that do.  num_key_heads: of queries and of keys; each serves as many value heads.
    kernel_size: of how many tokens, itself included, the convolution mixes the features.

    Raises:
        BatchdecodeError: these numbers do not go together.
    """

    layers: tuple[int, ...]
    num_key_heads: Size
    num_value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    kernel_size: Size

    @property
    def key_size(self) -> int:
        """How many features all keys of a token have; so do its queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """How many features all values of a token have."""
        return self.num_value_heads * self.value_head_dim

    @property
    def num_channels(self) -> int:
        """How many features of a token the convolution mixes: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_size(self) -> int:
        """How many numbers a layer keeps of all tokens so far."""
        memory = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (self.kernel_size - 1) * self.num_channels + memory

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise BatchdecodeError(
                f"{self.num_value_heads} value heads of linear attention do not divide into "
                f"{self.num_key_heads} groups, one for each key head"
            )


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
    has_output_gate: whether queries come with gates, by which what is attended to is multiplied.
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
    has_output_gate: bool = False
    experts: ExpertSettings | None = None
    delta_net: DeltaNetSettings | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention, and so keep keys and values of all tokens."""
        others = () if self.delta_net is None else self.delta_net.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

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
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if rotary_dim % 2 or not rotary_dim:
            raise BatchdecodeError(
                f"partial_rotary_factor {self.rope.partial_rotary_factor} of head_dim "
                f"{self.head_dim} is {rotary_dim}, and RoPE turns pairs"
            )
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
