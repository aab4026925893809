"""What each step computes: measured for the clock, and collected until it is told as one event."""

from batcher.events import StepsEvent
from batcher.scheduling.clock import StepLoad
from batcher.scheduling.load import load_of
from batcher.scheduling.plan import StepPlan
from batcher.scheduling.scheduler import Scheduler

MAX_STEPS = 256  # in one event


class StepLog:
    """Measures steps; an engine whose steps nobody asks about has none."""

    __slots__ = ("_ends", "_first_step", "_measures", "_num_steps", "_padding", "_scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_steps = self._first_step = self._padding = 0
        self._ends: list[float] = []
        self._measures: list[tuple[int, ...]] = []  # of each step, as StepsEvent names them

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def is_full(self) -> bool:
        """Whether it is time to tell of the steps."""
        return len(self._ends) >= MAX_STEPS

    def begin_step(self) -> None:
        """Note what rows decode before a plan is made."""
        scheduler = self._scheduler
        self._padding = scheduler.decoding.padding(scheduler.slots.sequences)

    def measure(self, plan: StepPlan) -> StepLoad:
        """Return what the step of `plan` computes, before it has ended."""
        load = load_of(self._scheduler, plan)
        kv_cache = self._scheduler.kv_cache
        num_blocks = 0 if kv_cache is None else kv_cache.pool.num_used
        num_known = prefill_padding = 0
        if plan.chunks:
            sizes = [chunk.num_tokens for chunk in plan.chunks]
            num_known = sum(sizes)
            prefill_padding = max(sizes) * len(sizes) - num_known
        decode_padding = self._padding if plan.decodes else 0
        num_decodes, num_rows = load.num_tokens - num_known, load.num_sequences
        self._measures.append(
            (num_decodes, num_known, num_rows, num_blocks, prefill_padding, decode_padding)
        )
        return load

    def end_step(self, end: float) -> None:
        """Note when the step that was measured last ended."""
        self._ends.append(end)
        self._num_steps += 1

    def take(self) -> StepsEvent:
        """Return the event of all steps since the last call, of which there are some."""
        columns = map(list, zip(*self._measures, strict=True))
        event = StepsEvent(self._first_step, self._ends, *columns)
        self._ends, self._measures, self._first_step = [], [], self._num_steps
        return event
