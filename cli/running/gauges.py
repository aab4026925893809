"""What a view asks about a run when it draws it: the engine's gauges, and who comes next."""

from batcher.engine import Engine
from batcher.scheduling.blocks import BlockUse
from batcher.timeline.stays import label_of
from cli.running.sources import Source


class RunGauges:
    """Reads an engine and its source; nothing is done until somebody looks."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine, self._source = engine, source

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
            return self._source.upcoming
        return label_of(first.id, first.index, first.role)

    @property
    def block_use(self) -> BlockUse | None:
        """What the KV blocks are used for; None if there are none."""
        kv_cache = self._engine.scheduler.kv_cache
        return None if kv_cache is None else kv_cache.pool.use
