"""Steps in which nothing is decided: rows go on, tables of blocks grow, and that is all.

Rule: what happens in them is what the scheduler would have planned for each of them.
"""

from collections.abc import Collection
from math import inf
from typing import Generic

from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import S


class FastForward(Generic[S]):
    """Looks for the next decision of a scheduler, and takes the steps before it all at once."""

    def __init__(self, scheduler: Scheduler[S]) -> None:
        self._scheduler = scheduler
        self._queue, self._batch = scheduler.queue, scheduler.batch
        settings = scheduler.settings
        self._has_urgency = settings.preempt_for is not None
        self._is_static = settings.batching == "static"
        self._has_prefix_cache = settings.has_prefix_cache
        self._growing_cache = scheduler.kv_cache if settings.capacity != "no-evict" else None

    def num_steps(self, now: float) -> tuple[int, float]:
        """Return how many steps decide nothing, if they begin before a time, and that time.

        The last of them may end a row.  That none arrives meanwhile is to be seen to.
        """
        batch, scheduler = self._batch, self._scheduler
        if batch.prefilling or not batch.num_decoding:
            return 0, now
        if self._has_urgency and scheduler.has_urgent(now):
            return 0, now
        until, is_open = inf, self._queue.num_slots and batch.num_free
        if is_open:
            until = self._stands_until(now) if self._is_static else scheduler.refuses_until(now)
            if until <= now:
                return 0, now
        num_steps = min(batch.ending) - batch.decode_step + 1
        if self._growing_cache is None:
            return num_steps, until
        if is_open and self._has_prefix_cache and not scheduler.is_refusal_final:
            return min(num_steps, batch.num_steps_to_boundary()), until  # who grows may evict
        pool = self._growing_cache.pool
        most = (num_steps // batch.block_size + 1) * batch.num_decoding
        if most > pool.num_free and not pool.has_room(most):
            num_steps = min(num_steps, batch.num_steps_for(pool.num_free))
        return num_steps, until

    def _stands_until(self, now: float) -> float:
        """Return until when a static batch is left as it is, and that is told; `now`: unknown."""
        blocked = self._scheduler.blocked
        return inf if blocked is not None and blocked.reason == "batch" else now

    def skip(self, num_steps: int) -> tuple[int, Collection[int]]:
        """Take so many steps.

        Returns for how many steps new blocks were held, summed up, and the slots of rows that end
        with the last step.
        """
        batch, kv_cache, step = self._batch, self._growing_cache, self._batch.decode_step
        batch.decode_step = step + num_steps - 1
        ending = batch.end_decode_step()
        if kv_cache is None:
            return 0, ending
        size, rows_at = batch.block_size, batch.by_boundary.get
        growing: list[Collection[S]] = []
        num_grown = block_steps = 0
        for number in range(step, step + num_steps):
            if rows := rows_at(number % size):
                growing.append(rows)
                num_grown += len(rows)
            block_steps += num_grown
        if num_grown:
            kv_cache.grow_in_turn(growing, num_grown)
        return block_steps, ending
