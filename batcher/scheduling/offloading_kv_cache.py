"""A KV cache whose full blocks are copied to a second tier, where they are found once evicted.

As vLLM's OffloadingConnector does, each block is copied when it has been computed, so nobody waits
for a copy when a block is evicted or its sequence preempted; only reading one back takes time.
Nothing is copied here: it tells how many blocks are read back, and who simulates lets them take
their time.
"""

from collections.abc import Hashable
from itertools import islice

from msgspec.structs import replace

from batcher.scheduling.cached_blocks import NO_BLOCK, NO_MATCH, PrefixMatch
from batcher.scheduling.host_tier import HostTier
from batcher.scheduling.kv_cache import Contents, KVCache, root_of
from batcher.scheduling.sequence import S
from batcher.settings import SchedulingSettings


class OffloadingKVCache(KVCache[S]):
    """Block tables over one pool with a second tier of `num_host_blocks`; see KVCache."""

    def __init__(
        self, settings: SchedulingSettings, contents: Contents[S], num_host_blocks: int
    ) -> None:
        super().__init__(settings, contents)
        self._tier = HostTier(num_host_blocks)
        self._chains: dict[S, list[Hashable]] = {}  # contents of the blocks of a sequence
        self._computed: dict[S, int] = {}  # how many blocks of whom, with those of this step
        self._loaded: dict[S, range] = {}  # the places of blocks that this step reads back

    def match(self, sequence: S) -> PrefixMatch:
        """Return what of `sequence` stands in blocks, or can be read back into blocks to take."""
        found = super().match(sequence)
        num_found = found.num_tokens // self.block_size
        if sequence.skips_prefix_cache or num_found > found.num_cached_blocks:
            return found  # it shares what a sibling computes
        most = max(sequence.num_tokens - 1, 0) // self.block_size
        num_here = self._tier.num_found(root_of(sequence), self._chain(sequence, most))
        if num_here <= num_found:
            return found
        return replace(found, num_tokens=num_here * self.block_size, source=NO_BLOCK)

    def outlook(self, sequence: S) -> tuple[int, ...]:
        """Return what changes whenever `match` would find something else than it did."""
        return (*super().outlook(sequence), self._tier.num_changes)

    def attach(self, sequence: S, match: PrefixMatch) -> None:
        """Give `sequence` what was found for it; what is in the tier alone is read back."""
        super().attach(sequence, match)
        num_found = match.num_tokens // self.block_size
        if match.source == NO_BLOCK and num_found > len(match.blocks):
            self._loaded[sequence] = range(len(match.blocks), num_found)

    def compute(self, sequence: S, start: int, stop: int, match: PrefixMatch = NO_MATCH) -> None:
        """Let the tokens start..stop be found from now on, and in the tier after this step."""
        super().compute(sequence, start, stop, match)
        self._computed[sequence] = stop // self.block_size

    def end_step(self) -> None:
        """Copy what the step has computed to the tier."""
        super().end_step()
        for sequence, num_blocks in self._computed.items():
            self._store(sequence, num_blocks)
        self._computed.clear()

    def close(self, sequence: S, num_computed_tokens: int) -> None:
        """Take its blocks from `sequence`; what so many tokens fill can be found, in both tiers."""
        super().close(sequence, num_computed_tokens)
        self._store(sequence, num_computed_tokens // self.block_size)
        self._chains.pop(sequence, None)

    def forget(self, sequence: S) -> None:
        """Let nothing be found that `sequence` was to compute, or to read back: it has not."""
        super().forget(sequence)
        self._computed.pop(sequence, None)
        for place in self._loaded.pop(sequence, ()):
            self.pool.forget(sequence.block_table[place])

    def take_loaded(self) -> int:
        """Return how many blocks this step reads back, which are counted no more."""
        num_loaded = sum(map(len, self._loaded.values()))
        self._loaded.clear()
        return num_loaded

    def _store(self, sequence: S, num_blocks: int) -> None:
        if not sequence.skips_prefix_cache:
            self._tier.store(root_of(sequence), self._chain(sequence, num_blocks))

    def _chain(self, sequence: S, num_blocks: int) -> list[Hashable]:
        """Return the contents of the first blocks of `sequence`."""
        chain = self._chains.setdefault(sequence, [])
        if len(chain) < num_blocks:
            size = self.block_size
            chain += self._contents(sequence, len(chain) * size, num_blocks * size, size)
        return chain if len(chain) == num_blocks else [*islice(chain, num_blocks)]
