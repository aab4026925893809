"""Steps in which nothing is decided: rows go on, tables of blocks grow, and that is all.

Rule: what happens in them is what the scheduler would have planned for each of them.
"""

from math import inf
from typing import Generic

from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import S


class FastForward(Generic[S]):
    """Looks for the next decision of a scheduler, and takes the steps before it all at once."""

    def __init__(self, scheduler: Scheduler[S]) -> None:
        self._scheduler = scheduler
        self._queue, self._batch = scheduler.queue, scheduler.batch
        self._kv_cache = scheduler.kv_cache
        settings = scheduler.settings
        self._is_static = settings.batching == "static"
        self._has_prefix_cache = scheduler.kv_cache is not None and settings.has_prefix_cache
        self._grows = scheduler.kv_cache is not None and settings.capacity != "no-evict"

    def steady_until(self, now: float) -> float | None:
        """Return until when nothing is decided if no row ends and none arrives; None: not now."""
        scheduler, batch = self._scheduler, self._batch
        if batch.prefilling or not batch.num_decoding or scheduler.has_urgent(now):
            return None
        if not (self._queue.num_slots and batch.num_free):
            return inf
        if self._is_static:
            blocked = scheduler.blocked
            return inf if blocked is not None and blocked.reason == "batch" else None
        return scheduler.refuses_until(now)

    def num_steps(self) -> int:
        """Return how many steps there are until a row ends, or may need a block that is not free.

        The step that ends a row is one of them.
        """
        batch = self._batch
        num_steps = min(batch.ending) - batch.decode_step + 1
        if not self._grows or self._kv_cache is None:
            return num_steps
        can_evict = self._has_prefix_cache and not self._scheduler.is_refusal_final
        if can_evict and self._queue.num_slots and batch.num_free:
            return min(num_steps, batch.num_steps_to_boundary())
        most = (num_steps // batch.block_size + 1) * batch.num_decoding
        if self._kv_cache.has_room(most):
            return num_steps
        return min(num_steps, batch.num_steps_for(self._kv_cache.pool.num_free))

    def skip(self, num_steps: int) -> int:
        """Take so many steps; return for how many steps new blocks were held, summed up."""
        batch, kv_cache = self._batch, self._kv_cache
        step = batch.decode_step
        batch.decode_step = step + num_steps
        if kv_cache is None or not self._grows:
            return 0
        size, block_steps = batch.block_size, 0
        take = kv_cache.pool.take
        for boundary, rows in batch.by_boundary():
            first = (boundary - step) % size
            if first >= num_steps or not rows:
                continue
            count = (num_steps - first - 1) // size + 1
            blocks = take(count * len(rows))
            if count == 1:
                for row, block in zip(rows, blocks, strict=True):
                    row.table.append(block)
            else:
                for place, row in enumerate(rows):
                    row.table += blocks[place * count : (place + 1) * count]
            held = count * (num_steps - first) - size * (count * (count - 1) // 2)
            block_steps += held * len(rows)
        return block_steps
