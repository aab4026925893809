"""How much memory the cache of a transformer takes, which its config tells without its weights."""

from typing import NamedTuple

from batcher.transformer.cache_groups import cache_groups, num_kv_layers
from batcher.transformer.config import TransformerConfig

_FLOAT_SIZE = 4  # bytes


class CacheSize(NamedTuple):
    """What a cache takes, in bytes.

    per_token: the keys and values of a token, in all groups of layers.
    cell: those of one group, which a block has room for.
    state: the recurrent states that a block has room for beside them.
    """

    per_token: int
    cell: int
    state: int

    def of_block(self, block_size: int) -> int:
        """Return what a block of so many tokens takes."""
        return block_size * self.cell + self.state


def cache_size(config: TransformerConfig) -> CacheSize:
    """Return what the cache of such a transformer takes."""
    groups, delta_net = cache_groups(config), config.delta_net
    cell = 2 * num_kv_layers(groups) * config.num_kv_heads * config.head_dim * _FLOAT_SIZE
    num_tables = sum(not group.is_recurrent for group in groups)
    state_size = 0 if delta_net is None else len(delta_net.layers) * delta_net.state_size
    return CacheSize(num_tables * cell, cell, state_size * _FLOAT_SIZE)
