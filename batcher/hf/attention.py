"""Attention of single tokens over keys and values in blocks, in Triton.

The keys of a token are split into parts by their number alone (Dao et al. 2023, Flash-Decoding).
So the order of all sums depends on no other token.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_NUM_PARTS = 8
_NUM_KEYS = 64  # read at a time; of large heads half as many, to fit into shared memory
_LARGE = 128  # features


@triton.jit
def _attend_part(
    query, keys, values, tables, slots, lengths, own_cells, outputs, tops, totals,
    scale, first_cell, block_size, num_slots, query_stride, key_stride, value_stride,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, SHARING: tl.constexpr,
    SHARING_WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    NUM_PARTS: tl.constexpr, NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend with the SHARING heads of a token that share a key head to one part of its keys.

    Widths are dimensions rounded up to powers of two.
    """
    token, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, length = tl.load(slots + token), tl.load(lengths + token).to(tl.int32)
    own_cell = tl.load(own_cells + token)
    first = tl.maximum(length - WINDOW, 0) if WINDOW is not None else 0
    size = tl.cdiv(tl.cdiv(length - first, NUM_PARTS), NUM_KEYS) * NUM_KEYS
    start = first + part * size
    stop = tl.minimum(start + size, length)
    key_dims, value_dims = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    sharing = tl.arange(0, SHARING_WIDTH)
    heads = kv_head * SHARING + sharing
    is_head, is_key, is_value = sharing < SHARING, key_dims < KEY_DIM, value_dims < VALUE_DIM
    at_query = token * query_stride + heads[:, None] * KEY_DIM + key_dims[None, :]
    q = tl.load(query + at_query, mask=is_head[:, None] & is_key[None, :], other=0.0)
    top = tl.full([SHARING_WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([SHARING_WIDTH], tl.float32)
    output = tl.zeros([SHARING_WIDTH, VALUE_WIDTH], tl.float32)
    for begin in range(start, stop, NUM_KEYS):
        positions = begin + tl.arange(0, NUM_KEYS)
        is_there = positions < stop
        entries = tables + (positions // block_size) * num_slots + slot
        is_own = positions == length - 1  # whose block may be missing yet
        blocks = tl.load(entries, mask=is_there & ~is_own, other=0).to(tl.int64)
        cells = first_cell + blocks * block_size + positions % block_size
        cells = tl.where(is_own, own_cell, cells)
        at_keys = cells[None, :] * key_stride + kv_head * KEY_DIM + key_dims[:, None]
        k = tl.load(keys + at_keys, mask=is_key[:, None] & is_there[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP is not None:  # times the hyperbolic tangent
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        kept, shares = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
        at_values = cells[:, None] * value_stride + kv_head * VALUE_DIM + value_dims[None, :]
        v = tl.load(values + at_values, mask=is_there[:, None] & is_value[None, :], other=0.0)
        output = output * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(shares, 1)
        top = new_top
    at = (token * NUM_HEADS + heads) * NUM_PARTS + part
    tl.store(tops + at, top, mask=is_head)
    tl.store(totals + at, total, mask=is_head)
    tl.store(outputs + at[:, None] * VALUE_WIDTH + value_dims[None, :], output, is_head[:, None])


@triton.jit
def _merge_parts(
    outputs, tops, totals, sinks, result, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one head of a token."""
    head, dims = tl.program_id(0), tl.arange(0, VALUE_WIDTH)
    parts = head * NUM_PARTS + tl.arange(0, NUM_PARTS)
    top = tl.load(tops + parts)
    highest = tl.maximum(tl.max(top, 0), -1e30)  # finite without keys, as in padding
    if HAS_SINKS:
        sink = tl.load(sinks + head % NUM_HEADS).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weights = tl.exp(top - highest)
    total = tl.sum(tl.load(totals + parts) * weights, 0)
    if HAS_SINKS:
        total += tl.exp(sink - highest)
    found = tl.load(outputs + parts[:, None] * VALUE_WIDTH + dims[None, :])
    output = tl.sum(found * weights[:, None], 0) / tl.maximum(total, 1e-30)
    at = result + head * VALUE_DIM + dims
    tl.store(at, output.to(result.dtype.element_ty), mask=dims < VALUE_DIM)


def paged_attention(
    call: Any, keys: torch.Tensor, values: torch.Tensor, where: Any
) -> torch.Tensor:
    """Return the output [tokens, heads, value features] of an AttentionCall.

    keys, values: [cells, kv_heads, features]. where: a Where of tiles.py.
    """
    tables, slots, lengths, own_cells, first_cell, block_size = where
    query = call.query.contiguous()
    (num_tokens, num_heads, key_dim), value_dim = query.shape, values.shape[2]
    sharing, width = num_heads // keys.shape[1], max(16, triton.next_power_of_2(value_dim))
    shape = (num_tokens, num_heads, _NUM_PARTS)
    outputs = query.new_empty(*shape, width, dtype=torch.float32)
    tops, totals = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _attend_part[num_tokens, keys.shape[1], _NUM_PARTS](
        *(query, keys, values, tables, slots, lengths, own_cells, outputs, tops, totals),
        *(call.scale, first_cell, block_size, tables.shape[1]),
        *(query.stride(0), keys.stride(0), values.stride(0)),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_WIDTH=max(16, triton.next_power_of_2(key_dim)),
        VALUE_WIDTH=width,
        NUM_HEADS=num_heads,
        SHARING=sharing,
        SHARING_WIDTH=max(16, triton.next_power_of_2(sharing)),
        WINDOW=call.window,
        SOFTCAP=call.softcap,
        NUM_PARTS=_NUM_PARTS,
        NUM_KEYS=_NUM_KEYS if max(key_dim, value_dim) <= _LARGE else _NUM_KEYS // 2,
    )
    result = query.new_empty(num_tokens, num_heads, value_dim)
    _merge_parts[(num_tokens * num_heads,)](
        *(outputs, tops, totals, call.sinks, result),
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        VALUE_WIDTH=width,
        HAS_SINKS=call.sinks is not None,
        NUM_PARTS=_NUM_PARTS,
    )
    return result
