"""The states of recurrent layers, in cells: one holds what a layer keeps of all tokens so far."""

import numpy as np

from batcher.transformer.attention import NOWHERE
from batcher.transformer.config import DeltaNetSettings

_MAX_BYTES = 4 * 2**20  # of states at once; with more, each took twice the time


class RecurrentStates:
    """What each gated delta net keeps, for a number of cells, which may grow.

    Whose state is in which cell is up to the spans of a step; NOWHERE holds that of no tokens.

    convolution: for each layer [cells, kernel_size - 1, channels], the last inputs.
    delta: for each layer [cells, value heads, key_head_dim, value_head_dim], what keys lead to.
    num_computed_together: as many as do not push each other out of the processor's caches.
    """

    def __init__(self, settings: DeltaNetSettings) -> None:
        self.kernel_size = settings.kernel_size
        convolution = (NOWHERE + 1, settings.kernel_size - 1, settings.num_channels)
        heads = (settings.num_value_heads, settings.key_head_dim, settings.value_head_dim)
        self.convolution = [np.zeros(convolution, np.float32) for _ in settings.layers]
        self.delta = [np.zeros((NOWHERE + 1, *heads), np.float32) for _ in settings.layers]
        self.num_computed_together = max(1, _MAX_BYTES // self.delta[0].nbytes)

    @property
    def num_cells(self) -> int:
        """How many cells there are, NOWHERE included."""
        return len(self.delta[0])

    def make_room(self, num_cells: int) -> None:
        """Have at least the cells up to `num_cells`; memory is used as they are."""
        num_old = self.num_cells
        if num_cells < num_old:
            return
        num_new = max(num_cells + 1, 2 * num_old)
        for store in (self.convolution, self.delta):
            for layer, old in enumerate(store):
                store[layer] = np.zeros((num_new, *old.shape[1:]), np.float32)
                store[layer][:num_old] = old

    def copy(self, source: int, target: int) -> None:
        """Let a cell hold what another does."""
        for states in (*self.convolution, *self.delta):
            states[target] = states[source]
