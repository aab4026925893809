"""The keys and values of tokens, in cells that are tensors."""

from typing import Any

import torch

from batcher.transformer.kv_store import NUM_FIXED, KVStore


class TensorStore(KVStore):
    """A KVStore on a device, in a dtype.

    key, value: [heads, features] of a token in any layer; what is kept is like these.
    has_versions: whether a cell keeps two, [cells, 2, heads, features]; behind the keys of layers
    are then [cells, 2] integers, zeros at first, on the processor; see LongRope.
    """

    def __init__(
        self, num_layers: int, key: torch.Tensor, value: torch.Tensor, *, has_versions: bool
    ) -> None:
        self._num_cells = NUM_FIXED
        shape = (NUM_FIXED, 2) if has_versions else (NUM_FIXED,)
        self.keys: list[Any] = [key.new_zeros(*shape, *key.shape) for _ in range(num_layers)]
        self.values: list[Any] = [value.new_zeros(*shape, *value.shape) for _ in range(num_layers)]
        if has_versions:
            self.keys.append(torch.zeros(shape, dtype=torch.long))

    def _grown(self, old: Any, num_cells: int) -> Any:
        new = old.new_zeros(num_cells, *old.shape[1:])
        new[: len(old)] = old
        return new
