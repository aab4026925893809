"""A gated delta net by its definition: token by token and head by head, in float64."""

import numpy as np

from batcher.transformer.mixers import GatedDeltaNet


def delta_net_by_definition(net: GatedDeltaNet, x: np.ndarray) -> np.ndarray:
    """Return the output [tokens, hidden_size] of x [tokens, hidden_size], all of one sequence."""
    sizes = net.settings
    group = sizes.num_value_heads // sizes.num_key_heads
    channels, betas, decays, gates = [], [], [], []
    for qkvz, ba in zip(net.qkvz(x).astype(np.float64), net.ba(x).astype(np.float64), strict=True):
        queries, keys, values, gate, beta, decay = [], [], [], [], [], []
        for head, (wide, narrow) in enumerate(
            zip(np.split(qkvz, sizes.num_key_heads), np.split(ba, sizes.num_key_heads), strict=True)
        ):
            ends = np.cumsum([sizes.key_head_dim] * 2 + [group * sizes.value_head_dim])
            query, key, value, z = np.split(wide, ends)
            queries.append(query)
            keys.append(key)
            values.append(value)
            gate += np.split(z, group)
            for number in range(group):
                beta.append(1 / (1 + np.exp(-narrow[number])))
                inner = narrow[group + number] + net.fading_bias[head, number]
                decay.append(np.exp(-float(net.fading[head, number]) * np.log1p(np.exp(inner))))
        channels.append(np.concatenate([*queries, *keys, *values]))
        betas.append(beta)
        decays.append(decay)
        gates.append(gate)
    shape = (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
    memories = np.zeros(shape)
    rows = []
    for token in range(len(x)):
        mixed = np.zeros(sizes.num_channels)
        for back in range(min(sizes.kernel_size, token + 1)):
            mixed += channels[token - back] * net.convolution[-1 - back]
        mixed *= 1 / (1 + np.exp(-mixed))
        queries, keys, values = np.split(mixed, [sizes.key_size, 2 * sizes.key_size])
        row = []
        for head in range(sizes.num_value_heads):
            query = _unit(np.split(queries, sizes.num_key_heads)[head // group])
            key = _unit(np.split(keys, sizes.num_key_heads)[head // group])
            value = np.split(values, sizes.num_value_heads)[head]
            memory = memories[head]
            memory *= decays[token][head]
            memory += np.outer(key, (value - memory.T @ key) * betas[token][head])
            recalled = memory.T @ query / np.sqrt(sizes.key_head_dim)
            recalled /= np.sqrt((recalled**2).mean() + net.eps)
            gate = gates[token][head]
            row.append(recalled * net.norm * gate / (1 + np.exp(-gate)))
        rows.append(np.concatenate(row))
    return net.output(np.array(rows, np.float32))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum() + 1e-6)
