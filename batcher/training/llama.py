"""A Llama in torch, whose parameters have the names that Hugging Face gives them.

RMSNorm, RoPE of halves, grouped heads, SwiGLU: what batcher/transformer computes in numpy.
"""

from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batcher.errors import BatchdecodeError
from batcher.transformer.checkpoint import Checkpoint
from batcher.transformer.config import RopeSettings, TransformerConfig

INITIAL_STD = 0.02  # as GPT-2 has it; what writes to the residual stream has less, by its depth


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            dim,
        )
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)

    def forward(self, x: Any, turns: tuple[Any, Any], mask: Any) -> Any:
        rows, length, _ = x.shape

        def heads(projected: Any) -> Any:
            return projected.view(rows, length, -1, self.head_dim).transpose(1, 2)

        queries, keys = _turned(heads(self.q_proj(x)), turns), _turned(heads(self.k_proj(x)), turns)
        scores = queries @ keys.transpose(2, 3) * self.head_dim**-0.5 + mask
        mixed = scores.softmax(dim=-1) @ heads(self.v_proj(x))
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class _Network(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Network(config)

    def forward(self, x: Any, turns: tuple[Any, Any], mask: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), turns, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A Llama, with random weights as GPT-2 has them (Radford et al., 2019, section 2.3).

    Raises:
        BatchdecodeError: the config is of another kind of model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        is_plain = config.rope == RopeSettings(config.rope.theta) and config.activation == "silu"
        if config.architecture != "llama" or not is_plain:
            raise BatchdecodeError("it is no Llama with SiLU and unscaled RoPE of halves")
        self.config, self.model = config, _Decoder(config)
        if not config.ties_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        small = INITIAL_STD / sqrt(2 * config.num_layers)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=small if writes else INITIAL_STD)

    def forward(self, tokens: Any, documents: Any) -> Any:
        """Return the logits of the token after each one: [rows, length, vocab].

        tokens: [rows, length].  documents: the same; a token attends to those before it of its own.
        """
        x, mask = self.model.embed_tokens(tokens), _mask(documents)
        turns = _turns(tokens.shape[1], self.config)
        for layer in self.model.layers:
            x = layer(x, turns, mask)
        head = self.model.embed_tokens if self.config.ties_embeddings else self.lm_head
        return functional.linear(self.model.norm(x), head.weight)

    def load(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a checkpoint of the same config."""
        self.load_state_dict(
            {name: torch.from_numpy(checkpoint.read(name).copy()) for name in checkpoint.names}
        )


def _mask(documents: Any) -> Any:
    """Return which keys each query attends to: [rows, 1, queries, keys] bool."""
    is_same = documents[:, None, :, None] == documents[:, None, None, :]
    return torch.where(is_same.tril(), 0.0, float("-inf"))


def _turns(length: int, config: TransformerConfig) -> tuple[Any, Any]:
    """Return cosines and sines of RoPE: [length, head_dim] each, alike in both halves."""
    powers = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(length), config.rope.theta**-powers).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(x: Any, turns: tuple[Any, Any]) -> Any:
    """Return heads [rows, heads, length, head_dim] with RoPE: pair i is i and i + half."""
    cosines, sines = turns
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
