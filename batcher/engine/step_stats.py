"""Per-step statistics, as events of up to 256 steps."""

from msgspec.structs import replace

from batcher.engine.sequence import Sequence
from batcher.events import StepsEvent
from batcher.scheduling.clock import BatchStats, Clock, ConstantClock, WallClock
from batcher.scheduling.scheduler import Scheduler, SchedulerOutput

MAX_STEPS = 256  # in one event


class StepStats:
    """Counts the work of each step of a measured run."""

    def __init__(self, scheduler: Scheduler[Sequence], clock: Clock) -> None:
        self._scheduler, self._batch, self._clock = scheduler, scheduler.batch, clock
        self._is_even = isinstance(clock, ConstantClock)
        self._pool = None if scheduler.kv_cache is None else scheduler.kv_cache.pool
        self._first_step = self._padding = 0
        self._ends: list[float] = []
        # One entry per step, as in StepsEvent.
        self._stats: list[tuple[int, ...]] = []
        # For wall times: the step's start, tokens read and prefill_work.
        self._timed: list[tuple[float, int, int]] | None = (
            [] if isinstance(clock, WallClock) else None
        )

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def is_full(self) -> bool:
        return len(self._ends) >= MAX_STEPS

    def start_at(self, step: int) -> None:
        self._first_step = step

    def begin_step(self) -> None:
        self._padding = self._batch.padding

    def measure(self, scheduled: SchedulerOutput[Sequence]) -> BatchStats | None:
        """Return what a scheduled step computes, before it ends; None if the clock ignores it."""
        stats, pool, num_prefill, prefill_padding, num_drafts = None, self._pool, 0, 0, 0
        if not self._is_even:
            stats = self._scheduler.batch_stats(scheduled)
            if self._timed is not None:
                self._timed.append((self._clock.now, stats.kv_read, stats.prefill_work))
        num_decodes, num_rows = self._scheduler.count_rows(scheduled)
        if scheduled.num_scheduled_tokens:
            sizes = scheduled.num_scheduled_tokens.values()
            num_prefill = sum(sizes)
            prefill_padding = max(sizes) * len(sizes) - num_prefill
        if scheduled.num_drafts:
            num_drafts = sum(scheduled.num_drafts.values())
            num_prefill += num_drafts
        num_blocks = 0 if pool is None else pool.num_total - pool.num_free
        padding = self._padding if scheduled.is_decode_step else 0
        self._stats.append(
            (num_decodes, num_prefill, num_rows, num_blocks, prefill_padding, padding, num_drafts)
        )
        return stats

    def end_step(self, end: float) -> None:
        self._ends.append(end)

    def take(self) -> StepsEvent:
        """Return the event of all steps since the last call; there must be at least one."""
        ends = self._ends
        columns = map(list, zip(*self._stats))  # noqa: B905 - alike, and most often only one
        *told, drafts = columns
        event = StepsEvent(self._first_step, ends, *told)
        if any(drafts):
            event = replace(event, drafts=drafts)
        if self._timed:
            starts, kv_read, prefill_work = map(list, zip(*self._timed, strict=True))
            seconds = [end - start for start, end in zip(starts, ends, strict=True)]
            event = replace(event, seconds=seconds, kv_read=kv_read, prefill_work=prefill_work)
            self._timed = []
        self._ends, self._stats = [], []
        self._first_step += len(ends)
        return event
