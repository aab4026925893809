"""Which layers share a block table: those that read the same of a sequence.

Layers with attention are in groups of one size, the fewest that read the same, so that a block has
room for any of them (vLLM's hybrid allocator does the same).
"""

from collections.abc import Mapping, Sequence
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
    windows = {layer: config.window_of(layer) for layer in config.attention_layers}
    groups = attention_groups(windows, config.max_position_embeddings)
    if config.delta_net is None:
        return groups
    return (*groups, CacheGroup(config.delta_net.layers, 2, is_recurrent=True))


def attention_groups(
    windows: Mapping[int, int | None], max_position_embeddings: int
) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with attention: those that read all, those with a window.

    windows: of each layer; one as long as the context is none.
    """
    by_window: dict[int | None, list[int]] = {None: []}
    for layer, window in windows.items():
        is_full = window is None or window >= max_position_embeddings
        by_window.setdefault(None if is_full else window, []).append(layer)
    size = min(filter(None, map(len, by_window.values())), default=1)
    return tuple(
        CacheGroup(tuple(layers[start : start + size]), window)
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    )


def num_kv_layers(groups: Sequence[CacheGroup]) -> int:
    """Return for how many layers a block has room for keys and values: those of the first group."""
    first = groups[0]
    return 0 if first.is_recurrent else len(first.layers)
