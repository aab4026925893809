"""Steps in which nothing is decided: rows go on, tables of blocks grow, and that is all.

Rule: what happens in them is what the scheduler would have planned for each of them.
"""

from collections.abc import Collection
from itertools import accumulate, chain
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
        self._has_urgency = settings.preempt_for is not None
        self._is_static = settings.batching == "static"
        self._has_prefix_cache = scheduler.kv_cache is not None and settings.has_prefix_cache
        self._grows = scheduler.kv_cache is not None and settings.capacity != "no-evict"

    def num_steps(self, now: float) -> tuple[int, float]:
        """Return how many steps decide nothing, if they begin before a time, and that time.

        The last of them may end a row.  That none arrives meanwhile is to be seen to.
        """
        scheduler, batch = self._scheduler, self._batch
        if batch.prefilling or not batch.num_decoding:
            return 0, now
        if self._has_urgency and scheduler.has_urgent(now):
            return 0, now
        can_admit, until = self._queue.num_slots and batch.num_free, inf
        if can_admit and not self._is_static:
            until = scheduler.refuses_until(now)
        elif can_admit and (scheduler.blocked is None or scheduler.blocked.reason != "batch"):
            until = now
        if until <= now:
            return 0, now
        num_steps = min(batch.ending) - batch.decode_step + 1
        if not self._grows or self._kv_cache is None:
            return num_steps, until
        if can_admit and self._has_prefix_cache and not scheduler.is_refusal_final:
            return min(num_steps, batch.num_steps_to_boundary()), until  # who grows may evict
        most = (num_steps // batch.block_size + 1) * batch.num_decoding
        if not self._kv_cache.has_room(most):
            num_steps = min(num_steps, batch.num_steps_for(self._kv_cache.pool.num_free))
        return num_steps, until

    def skip(self, num_steps: int) -> tuple[int, Collection[int]]:
        """Take so many steps.

        Returns for how many steps new blocks were held, summed up, and the slots of rows that end
        with the last step.
        """
        batch, kv_cache = self._batch, self._kv_cache
        step = batch.decode_step
        batch.decode_step = step + num_steps - 1
        ending = batch.end_decode_step()
        if kv_cache is None or not self._grows:
            return 0, ending
        size, by_boundary = batch.block_size, batch.by_boundary
        growing = [by_boundary.get(number % size, {}) for number in range(step, step + num_steps)]
        kv_cache.grow_all([*chain.from_iterable(growing)])
        kv_cache.end_step()
        return sum(accumulate(map(len, growing))), ending
