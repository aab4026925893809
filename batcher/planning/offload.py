"""What is assumed of a second tier of the KV cache: how large it is, and how soon it is read."""

from msgspec import Struct


class KVOffload(Struct, frozen=True):
    """num_blocks: how many it holds.  ticks_per_block: what reading one of them back takes."""

    num_blocks: int
    ticks_per_block: int
