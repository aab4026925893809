"""The token mixer of most layers: attention, with what is around it."""

from dataclasses import dataclass

from batcher.transformer.attention import Attention
from batcher.transformer.layers import FloatArray, RotaryEmbedding, rms_norm, sigmoid
from batcher.transformer.linear import Linear
from batcher.transformer.linears import OwnHeads
from batcher.transformer.step import Step


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Queries, keys and values of a layer, normalised and turned; what is attended to, projected.

    group: the number of its group of layers.  cache: that of its keys and values in the store.
    num_heads, num_kv_heads, head_dim: of queries, and of keys and values.
    own_heads: of keys and values, those that are attended with here.
    qkv: one product for queries, keys and values.  output: what is made of all heads.
    has_output_gate: whether each query is followed by a gate, which what it attends to is
    multiplied by.
    query_norm, key_norm: of each head, if these are normalised.
    """

    group: int
    cache: int
    num_heads: int
    num_kv_heads: int
    own_heads: OwnHeads
    head_dim: int
    eps: float
    qkv: Linear
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    rotary: RotaryEmbedding
    attention: Attention
    output: Linear
    has_output_gate: bool = False

    def __call__(self, x: FloatArray, step: Step) -> FloatArray:
        """Return the output [tokens, hidden_size] of x [tokens, hidden_size].

        Keys and values of all tokens are written into their cells before any of them is read.
        """
        every = 2 if self.has_output_gate else 1
        first_key = self.num_heads * every
        first_value = first_key + self.num_kv_heads
        own, group = self.own_heads.which, first_key // self.num_kv_heads
        heads = self.qkv(x).reshape(len(x), -1, self.head_dim)
        queries = heads[:, own.start * group : own.stop * group]
        query = self._turned(queries[:, ::every], self.query_norm, step)
        own_keys = heads[:, first_key:first_value][:, own]
        keys, values = step.store.update(
            self.cache,
            step.own_cells[self.group],
            self._turned(own_keys, self.key_norm, step),
            heads[:, first_value:][:, own],
        )
        attended = query  # of no heads
        if query.size:
            attended = step.mixed[self.group].attend(self.attention, query, keys, values)
        if self.has_output_gate:
            attended *= sigmoid(queries[:, 1::every])
        width = self.num_heads // self.num_kv_heads * self.head_dim
        by_kv_head = attended.reshape(len(x), own.stop - own.start, width)
        return self.output(self.own_heads.gather(by_kv_head))

    def _turned(self, heads: FloatArray, norm: FloatArray | None, step: Step) -> FloatArray:
        """Return heads [tokens, heads, head_dim], normalised and turned by their positions."""
        normed = heads if norm is None else rms_norm(heads, norm, self.eps)
        return self.rotary.rotate(normed, *step.angles(self.rotary))
