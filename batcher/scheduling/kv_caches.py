"""Which KV cache a scheduler has; one without blocks imports none of them."""

from batcher.scheduling.counted_blocks import CountedBlocks
from batcher.scheduling.grouped_kv_cache import GroupedKVCache
from batcher.scheduling.kv_cache import Contents, KVCache
from batcher.scheduling.sequence import S
from batcher.settings import ONE_GROUP, CacheWindows, SchedulingSettings


def make_kv_cache(
    settings: SchedulingSettings,
    token_contents: Contents[S] | None,
    windows: CacheWindows,
    block_bytes: int | None,
) -> KVCache[S]:
    """Return an empty KV cache; the arguments are those of a `Scheduler`."""
    if token_contents is None:
        return CountedBlocks(settings)
    if windows == ONE_GROUP:
        return KVCache(settings, token_contents, block_bytes)
    return GroupedKVCache(settings, token_contents, windows, block_bytes)
