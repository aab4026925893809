"""What a view asks about a run when it draws it: the engine's gauges, and who comes next."""

from batcher.scheduling.blocks import BlockUse
from batcher.timeline.records import label_of

from .loop import Loop


class RunGauges:
    """Reads a loop and its engine; nothing is done until somebody looks."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._engine = loop, loop.engine

    @property
    def current_step(self) -> int | None:
        """The number of the step that is being computed, None between two of them."""
        return self._loop.current_step

    @property
    def now(self) -> float:
        """The engine's time, in seconds."""
        return self._engine.now

    @property
    def num_free(self) -> int:
        """How many slots the next step can fill."""
        return self._engine.batch_size - self._engine.num_running

    @property
    def next_up(self) -> str | None:
        """What the next to be admitted is called, as far as that is known."""
        first = self._engine.scheduler.queue.peek(self._engine.now)
        if first is None:  # nothing is read before a slot is free for it
            return self._loop.upcoming
        return label_of(first.id, first.index, first.role)

    @property
    def block_use(self) -> BlockUse | None:
        """What the KV blocks are used for; None if there are none."""
        kv_cache = self._engine.scheduler.kv_cache
        return None if kv_cache is None else kv_cache.pool.use
