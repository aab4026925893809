"""Attention of transformers' models over keys and values in cells: a function of our own.

The models ask for the function `ATTENTION` by its name, as they do for those of transformers; in
`step` it is handed what this call of the model computes, and where all of that is kept.
"""

from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "batchdecode"


class LayerStep(Protocol):
    """What a layer's attention is asked of."""

    def attend(self, layer: int, call: "AttentionCall") -> torch.Tensor:
        """Return the output [tokens, heads, value features] of all queries of a layer."""


class AttentionCall:
    """What a layer brings: queries, keys and values of all tokens, and how they are scored.

    query, key, value: [tokens, heads, features]; of keys and values there may be fewer heads.
    window: how many tokens, its own included, a query sees; None for all before it.
    softcap: between which bounds scores are kept; None if they are not.
    sinks: [heads] a score of nothing that takes its share; None without one.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.window = window
        self._scale = query.shape[-1] ** -0.5 if scale is None else scale
        self._softcap, self._sinks = softcap, sinks

    def of(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Return the output [rows, queries, heads, value features] of queries of some sequences.

        query: [rows, queries, heads, features].  keys, values: [rows, keys, kv_heads, features].
        mask: which keys are seen, fits [rows, heads, queries, keys]; None for all.
        is_causal: whether there are as many queries as keys, and none looks ahead.
        """
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        if self._softcap is None and self._sinks is None:
            output = scaled_dot_product_attention(
                query,
                keys,
                values,
                mask,
                is_causal=is_causal,
                scale=self._scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
        else:
            if is_causal:
                mask = query.new_ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril()
            output = self._scored(query, keys, values, mask)
        return output.transpose(1, 2)

    def _scored(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the same, [rows, heads, queries, features], where scores are not only scaled."""
        num_each = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(num_each, 1) for part in (keys, values))
        scores = query @ keys.transpose(2, 3) * self._scale
        if self._softcap is not None:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if self._sinks is not None:
            sinks = self._sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
        shares = scores.softmax(-1, torch.float32).to(values.dtype)
        return shares[..., : keys.shape[2]] @ values


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,  # noqa: ARG001 - what a step masks, it knows
    *,
    step: LayerStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """Return the output [1, tokens, heads, features] of a layer; parameters as transformers'."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    call = AttentionCall(query, key, value, scaling, sliding_window, softcap, s_aux)
    return step.attend(module.layer_idx, call)[None], None


AttentionInterface.register(ATTENTION, _attend)
