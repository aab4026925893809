"""Blocks without a limit, which do not keep all that was ever computed."""

from batcher.scheduling.blocks import BlockPool

MAX_GROWN_BLOCKS = 2**21
MAX_GROWN_TOKENS = 2**25


class GrowingPool(BlockPool):
    """As many blocks as are asked for.

    It grows for the sake of what can be found again only up to 2^21 blocks and 2^25 tokens.  Beyond
    that free ones are taken as in a pool that is full, and there are more only if there is none.
    It grows to twice its size, so there may come to be twice as many.
    """

    __slots__ = ("_max_grown",)

    def __init__(self, block_size: int) -> None:
        super().__init__(None)
        self._max_grown = min(MAX_GROWN_BLOCKS, MAX_GROWN_TOKENS // block_size)

    def _grow(self, num_blocks: int) -> None:
        if self.num_total < self._max_grown or self.num_free < num_blocks:
            super()._grow(num_blocks)
