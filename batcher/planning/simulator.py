"""Simulations of a workload on one engine: step by step, and from event to event alike."""

from contextlib import suppress
from math import inf

from batcher.planning.drafts import AssumedDrafts
from batcher.planning.offload import KVOffload
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulation_result import SimulationResult
from batcher.planning.steps import OnEnded, StepSimulation
from batcher.planning.trials import Preempted, settings_of_trial
from batcher.planning.workload import Workload
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

_SAFE_BITS = 49  # of 53: times this near to each other may be the same as floats


def simulate(
    workload: Workload,
    num_slots: int,
    settings: SchedulingSettings,
    step_time: StepTime,
    on_ended: OnEnded = lambda _: None,
    drafts: AssumedDrafts | None = None,
    offload: KVOffload | None = None,
) -> SimulationResult:
    """Return when everything happens to a workload; from event to event where it can be.

    It is exactly what simulate_steps returns.  Steps in which rows are given drafts are taken one
    by one, since each decides how far its rows come.

    Raises:
        BatchdecodeError: the settings make no sense.
    """
    for_trial = settings_of_trial(settings) if offload is None else None
    if for_trial is not None and workload.shares_nothing:
        with suppress(Preempted):
            return EventSimulation(
                Turns(workload), num_slots, for_trial, step_time, on_ended, drafts, is_trial=True
            ).run()
    turns = Turns(workload)
    return EventSimulation(turns, num_slots, settings, step_time, on_ended, drafts, offload).run()


def simulate_steps(
    workload: Workload,
    num_slots: int,
    settings: SchedulingSettings,
    step_time: StepTime,
    drafts: AssumedDrafts | None = None,
    offload: KVOffload | None = None,
) -> SimulationResult:
    """Return when everything happens to a workload, with the time of each step by itself.

    Raises:
        BatchdecodeError: the settings make no sense.
    """
    return StepSimulation(
        Turns(workload), num_slots, settings, step_time, drafts=drafts, offload=offload
    ).run()


class EventSimulation(StepSimulation):
    """The same from event to event: the times of steps that decide nothing are not added up."""

    def _time_of(self, num_steps: int, until: float) -> tuple[int, int]:
        """Return how many of so many steps surely begin before, and how long they take together."""
        batch, step_time = self._batch, self._step_time
        num_rows, num_read = batch.num_decoding, batch.num_read
        ticks = step_time.ticks_of_decodes(num_rows, num_read, num_steps)
        until = self._before_news(until)
        if until == inf:
            return num_steps, ticks
        end = int(until * TICKS_PER_SECOND)
        left = end - (end >> _SAFE_BITS) - 1 - self._ticks  # sooner than floats tell apart
        if ticks <= left:
            return num_steps, ticks
        num_sure = 1 if left <= 0 else step_time.num_decodes_until(num_rows, num_read, left)
        if num_sure < num_steps:
            return num_sure, step_time.ticks_of_decodes(num_rows, num_read, num_sure)
        return num_steps, ticks
