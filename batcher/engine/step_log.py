"""What each step computes: measured for the clock, and collected until it is told as one event."""

from batcher.events import StepsEvent
from batcher.scheduling.clock import StepLoad
from batcher.scheduling.load import load_of
from batcher.scheduling.plan import StepPlan
from batcher.scheduling.scheduler import Scheduler

MAX_STEPS = 256  # in one event


class StepLog:
    """Measures steps; an engine whose steps nobody asks about has none."""

    __slots__ = (
        "_blocks",
        "_decode_padding",
        "_decodes",
        "_ends",
        "_first_step",
        "_num_steps",
        "_padding",
        "_prefill_padding",
        "_prefills",
        "_rows",
        "_scheduler",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_steps = self._padding = 0
        self._forget()

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
        sizes = [chunk.num_tokens for chunk in plan.chunks]
        num_known = sum(sizes)
        kv_cache = self._scheduler.kv_cache
        self._decodes.append(load.num_tokens - num_known)
        self._prefills.append(num_known)
        self._rows.append(load.num_sequences)
        self._blocks.append(kv_cache.pool.num_used if kv_cache is not None else 0)
        self._prefill_padding.append(max(sizes) * len(sizes) - num_known if sizes else 0)
        self._decode_padding.append(self._padding if plan.decodes else 0)
        return load

    def end_step(self, end: float) -> None:
        """Note when the step that was measured last ended."""
        self._ends.append(end)
        self._num_steps += 1

    def take(self) -> StepsEvent:
        """Return the event of all steps since the last call."""
        event = StepsEvent(
            self._first_step,
            self._ends,
            self._decodes,
            self._prefills,
            self._rows,
            self._blocks,
            self._prefill_padding,
            self._decode_padding,
        )
        self._forget()
        return event

    def _forget(self) -> None:
        self._first_step = self._num_steps
        self._ends: list[float] = []
        self._decodes: list[int] = []
        self._prefills: list[int] = []
        self._rows: list[int] = []
        self._blocks: list[int] = []
        self._prefill_padding: list[int] = []
        self._decode_padding: list[int] = []
