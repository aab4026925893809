"""What steps used of what is limited, counted when it changes and not step by step."""

from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.scheduler import Scheduler
from batcher.simulation.result import Totals
from batcher.simulation.sequence import SimulatedSequence


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

    def __init__(self, scheduler: Scheduler[SimulatedSequence], pool: BlockPool) -> None:
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
        scheduler, batch = self._scheduler, self._scheduler.batch
        self._num_slots = batch.num_occupied
        self._num_blocks = self._pool.num_used
        if not scheduler.queue.num_slots:
            self._binding = "arrivals"
        elif batch.num_free and scheduler.blocked is not None:
            self._binding = scheduler.blocked.reason
        else:
            self._binding = "slots"
