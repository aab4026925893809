"""What steps used of what is limited, counted when it changes and not step by step."""

from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.scheduler import Scheduler
from batcher.simulation.result import Totals


class StepUses:
    """Adds up slots, blocks and what was binding; see Totals."""

    __slots__ = (
        "_binding",
        "_num_blocks",
        "_num_slots",
        "_pool",
        "_scheduler",
        "_step",
        "_ticks",
        "totals",
    )

    def __init__(self, scheduler: Scheduler, pool: BlockPool) -> None:
        self.totals = Totals()
        self._scheduler, self._pool = scheduler, pool
        self._step = self._ticks = self._num_slots = self._num_blocks = 0
        self._binding = "arrivals"

    def turn(self, step: int, ticks: int) -> None:
        """Count what was held up to the start of `step`, at `ticks`; from now on it is another."""
        num_steps = step - self._step
        if num_steps:
            totals = self.totals
            totals.num_steps += num_steps
            totals.slot_steps += num_steps * self._num_slots
            totals.block_steps += num_steps * self._num_blocks
            totals.binding_ticks[self._binding] += ticks - self._ticks
            self._step = step
        self._ticks = ticks
        scheduler, slots = self._scheduler, self._scheduler.slots
        self._num_slots = slots.num_occupied
        self._num_blocks = self._pool.num_used
        if not scheduler.queue.num_slots:
            self._binding = "arrivals"
        elif slots.num_free and scheduler.hold is not None:
            self._binding = scheduler.hold.reason
        else:
            self._binding = "slots"
