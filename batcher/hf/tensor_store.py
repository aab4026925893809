"""The keys and values of tokens, in cells that are tensors."""

from typing import Any

import torch

from batcher.transformer.kv_store import NUM_FIXED, KVStore


class TensorStore(KVStore):
    """A KVStore on a device, in a dtype.

    key, value: [heads, features] of a token in any layer; what is kept is like these.
    """

    def __init__(self, num_layers: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._num_cells = NUM_FIXED
        self.keys: list[Any] = [key.new_zeros(NUM_FIXED, *key.shape) for _ in range(num_layers)]
        self.values: list[Any] = [
            value.new_zeros(NUM_FIXED, *value.shape) for _ in range(num_layers)
        ]

    def _grown(self, old: Any, num_cells: int) -> Any:
        new = old.new_zeros(num_cells, *old.shape[1:])
        new[: len(old)] = old
        return new
