"""Which layers share a block table: those that read the same of a sequence.

Layers with attention are in groups of one size, the fewest that read the same, so that a block has
room for any of them (vLLM's hybrid allocator does the same).
"""

from collections.abc import Sequence
from typing import NamedTuple

from batcher.transformer.config import TransformerConfig


class CacheGroup(NamedTuple):
    """Layers with a block table of their own.

    window: how many tokens one reads there, its own included; None for all before it, and 2 for
    recurrent layers, which read what the token before has left.
    """

    layers: tuple[int, ...]
    window: int | None = None
    is_recurrent: bool = False


def cache_groups(config: TransformerConfig) -> tuple[CacheGroup, ...]:
    """Return the groups of all layers: those that read all, those with a window, recurrent ones."""
    by_window: dict[int | None, list[int]] = {None: []}
    for layer in config.attention_layers:
        window = config.window_of(layer)
        if window is not None and window >= config.max_position_embeddings:
            window = None
        by_window.setdefault(window, []).append(layer)
    size = min(filter(None, map(len, by_window.values())), default=1)
    groups = [
        CacheGroup(tuple(layers[start : start + size]), window)
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    ]
    if config.delta_net is not None:
        groups.append(CacheGroup(config.delta_net.layers, 2, is_recurrent=True))
    return tuple(groups)


def num_kv_layers(groups: Sequence[CacheGroup]) -> int:
    """Return for how many layers a block has room for keys and values: those of the first group."""
    first = groups[0]
    return 0 if first.is_recurrent else len(first.layers)
