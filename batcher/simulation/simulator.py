"""The loop of the engine without a model: plan, take the time, end what has all its tokens.

Rule: the scheduler decides, as it does for the engine; nothing here knows a rule of scheduling.
"""

from collections.abc import Callable
from math import inf

from batcher.errors import InvariantError
from batcher.lifecycle import ARRIVE, FINISH
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.clock import BatchStats, ticks_until
from batcher.scheduling.fast_forward import FastForward
from batcher.scheduling.output import SchedulerOutput
from batcher.scheduling.scheduler import NO_CHANGES, Scheduler
from batcher.scheduling.sequence import NEVER
from batcher.settings import SchedulingSettings
from batcher.simulation.contents import SimulatedContents
from batcher.simulation.result import SimulationResult
from batcher.simulation.sequence import SimulatedSequence, make_sequence
from batcher.simulation.turns import Turns
from batcher.simulation.uses import StepUses
from batcher.simulation.workload import Workload
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

OnEnded = Callable[[int], object]
"""Called with how many sequences have ended by now, whenever some do."""

_SAFE_BITS = 49  # of 53: times this near to each other may be the same as floats


def simulate(
    workload: Workload,
    num_slots: int,
    settings: SchedulingSettings,
    step_time: StepTime,
    on_ended: OnEnded = lambda _: None,
) -> SimulationResult:
    """Return when everything happens to a workload; from event to event where it can be.

    It is exactly what simulate_steps returns.

    Raises:
        BatchdecodeError: the settings make no sense.
    """
    return EventSimulation(workload, num_slots, settings, step_time, on_ended).run()


def simulate_steps(
    workload: Workload, num_slots: int, settings: SchedulingSettings, step_time: StepTime
) -> SimulationResult:
    """Return when everything happens to a workload, one step after the other.

    Raises:
        BatchdecodeError: the settings make no sense.
    """
    return StepSimulation(workload, num_slots, settings, step_time).run()


class StepSimulation:
    """One run over a workload, one step after the other."""

    def __init__(
        self,
        workload: Workload,
        num_slots: int,
        settings: SchedulingSettings,
        step_time: StepTime,
        on_ended: OnEnded = lambda _: None,
    ) -> None:
        self._on_ended, self._num_ended = on_ended, 0
        self._scheduler: Scheduler[SimulatedSequence] = Scheduler(
            num_slots, settings, SimulatedContents().blocks, self._estimate
        )
        self._queue, self._batch = self._scheduler.queue, self._scheduler.batch
        kv_cache = self._scheduler.kv_cache
        self._pool = BlockPool(0) if kv_cache is None else kv_cache.pool
        self._settings, self._step_time = settings, step_time
        self._step = self._ticks = 0  # when the current step starts
        self._now = 0.0  # the same in seconds
        self._uses = StepUses(self._scheduler, self._pool)
        self._totals = self._uses.totals
        self._turns = Turns(workload)
        for sequence in self._turns.begin():
            self._queue.add(sequence, 0.0)

    def run(self) -> SimulationResult:
        """Return what the run comes to."""
        queue, batch, turns = self._queue, self._batch, self._turns
        while queue.num_pending or queue.num_slots or batch.num_occupied:
            if queue.num_pending:
                self._join_arrivals()
            self._go_on()
            if turns.ended:
                self._go_on_with_turns()
        self._uses.turn(self._step, self._ticks)
        return SimulationResult(
            turns.sequences,
            self._totals,
            num_slots=len(batch.slots),
            num_blocks=self._settings.kv_blocks,
            max_batch_tokens=self._settings.max_batch_tokens,
            end_ticks=self._ticks,
        )

    # -- arrivals --------------------------------------------------------------------------------

    def _join_arrivals(self) -> None:
        """Let what has arrived wait for a slot; if all is idle, jump to the next arrival."""
        queue = self._queue
        arrival = queue.next_arrival
        if arrival is not None and arrival > self._now:
            if queue.num_slots or self._batch.num_occupied:
                return
            self._ticks = ticks_until(arrival)
            self._now = self._ticks / TICKS_PER_SECOND
        for sequence in queue.take_arrivals(self._now):
            self._arrive(sequence)
        self._uses.turn(self._step, self._ticks)

    def _arrive(self, sequence: SimulatedSequence) -> None:
        sequence.state = ARRIVE[sequence.state]
        if not sequence.max_tokens:
            self._end(sequence)
        elif self._scheduler.why_never(sequence) is not None:
            self._fail(sequence)
        else:
            self._queue.push(sequence)

    def _end(self, sequence: SimulatedSequence) -> None:
        """Note that a sequence has all its tokens by now."""
        sequence.end_ticks = self._ticks
        self._num_ended += 1
        if sequence.job.session is not None:
            self._turns.ended.append(sequence)

    def _fail(self, sequence: SimulatedSequence) -> None:
        """End a sequence that waits, and can never run."""
        sequence.state = FINISH[sequence.state]
        sequence.has_failed = True
        if sequence.job.session is not None:
            self._turns.ended.append(sequence)

    def _go_on_with_turns(self) -> None:
        """Let the turns arrive whose predecessors have ended; they fail if those have."""
        turns = self._turns
        while turns.ended:
            sequence = turns.go_on(self._now)
            if sequence is None:
                continue
            if sequence.has_failed:
                self._fail(sequence)
            else:
                self._queue.add(sequence, self._now)

    def _estimate(self, stats: BatchStats) -> float:
        """Return how many seconds a step that computes `stats` takes."""
        return self._step_time.ticks(*stats) / TICKS_PER_SECOND

    # -- a step ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the next step, if any row is there to be computed."""
        scheduled = self._scheduler.schedule(self._step, self._now)
        if scheduled is not NO_CHANGES:
            self._note(scheduled)
        if self._batch.num_occupied:
            self._compute(scheduled)

    def _note(self, scheduled: SchedulerOutput[SimulatedSequence]) -> None:
        """Take note of whom a step admits and preempts, and who begins to decode."""
        totals = self._totals
        self._uses.turn(self._step, self._ticks)
        if self._scheduler.kv_cache is not None:
            self._scheduler.kv_cache.take_copies()  # there is nothing to copy
        for preemption in scheduled.preempted:
            victim = preemption.first
            victim.num_preemptions += 1
            victim.num_lost = preemption.num_computed[victim]
            totals.num_preemptions += 1
        for sequence in scheduled.admitted:
            num_cached = sequence.num_cached
            if sequence.admitted_ticks == NEVER:
                sequence.admitted_ticks = self._ticks
                sequence.num_cached_at_first = num_cached
                totals.asked_tokens += sequence.num_tokens
                totals.found_tokens += num_cached
            totals.num_cached += num_cached
            if sequence.num_lost > num_cached:
                totals.recomputed_tokens += sequence.num_lost - num_cached
        for sequence in scheduled.prefill_finished:
            job = sequence.job
            if job.num_output_tokens < job.max_tokens:
                self._shorten(sequence)

    def _shorten(self, sequence: SimulatedSequence) -> None:
        """Let a sequence that begins to decode end when it has all its tokens."""
        num_left = sequence.job.num_output_tokens - sequence.num_generated
        self._batch.end_after(sequence, num_left)

    def _compute(self, scheduled: SchedulerOutput[SimulatedSequence]) -> None:
        """Take the time of a step, and end those that have all their tokens after it."""
        scheduler, batch = self._scheduler, self._batch
        stats = scheduler.batch_stats(scheduled)
        self._ticks += self._step_time.ticks(*stats)
        self._now = self._ticks / TICKS_PER_SECOND
        self._step += 1
        scheduler.update(scheduled)
        self._totals.computed_tokens += stats.num_tokens
        chunks, prefill_finished = scheduled.num_scheduled_tokens, scheduled.prefill_finished
        if chunks or prefill_finished:  # an empty prompt has no chunk
            totals, ticks = self._totals, self._ticks
            totals.prefill_tokens += sum(chunks.values())
            totals.num_prompt_steps += not scheduled.is_decode_step
            for sequence in prefill_finished:
                if sequence.first_token_ticks == NEVER:
                    sequence.first_token_ticks = ticks
        if scheduled.is_decode_step:
            ending = batch.ending.get(batch.decode_step - 1)
            if ending is not None:
                self._leave(ending)

    def _leave(self, slots: list[int]) -> None:
        """Take out those whose last step is over; the one before the current one."""
        for slot in sorted(slots):
            sequence = self._batch.slots[slot]
            if sequence is None:
                raise InvariantError(f"nobody holds slot {slot}, whose holder was to end")
            self._scheduler.finish(sequence, self._step - 1, FINISH, has_failed=False)
            self._end(sequence)
        self._on_ended(self._num_ended)
        self._uses.turn(self._step, self._ticks)


class EventSimulation(StepSimulation):
    """The same from event to event: steps in which nothing is decided are taken all at once."""

    def __init__(
        self,
        workload: Workload,
        num_slots: int,
        settings: SchedulingSettings,
        step_time: StepTime,
        on_ended: OnEnded = lambda _: None,
    ) -> None:
        super().__init__(workload, num_slots, settings, step_time, on_ended)
        self._fast_forward = FastForward(self._scheduler)
        can_wait = settings.preempt_for is None and self._turns.all_wait
        self._all_wait = can_wait and not self._has_too_large(workload)

    def _has_too_large(self, workload: Workload) -> bool:
        """Return whether some job can never run."""
        longest = max(
            workload.jobs,
            key=lambda job: job.num_prompt_tokens + job.max_tokens,
            default=None,
        )
        return longest is not None and (
            self._scheduler.why_never(make_sequence(longest)) is not None
        )

    def _go_on(self) -> None:
        """Take the steps up to the next event, or the one that may be one."""
        until = self._fast_forward.steady_until(self._now)
        num_steps = 0 if until is None else self._num_steps(until)
        if num_steps > 1:
            self._skip(num_steps)
        else:
            super()._go_on()

    def _num_steps(self, until: float) -> int:
        """Return how many steps begin before `until`, the next arrival or another event."""
        num_steps, queue = self._fast_forward.num_steps(), self._queue
        has_news = self._turns.ended or (queue.num_pending and queue.next_arrival is None)
        if num_steps < 2 or has_news:  # noqa: PLR2004 - one is no more than the next step
            return 0
        can_ignore = self._all_wait and queue.num_slots and not self._batch.num_free
        arrival = queue.next_arrival
        if arrival is not None and not can_ignore:
            until = min(until, arrival)
        if until == inf:
            return num_steps
        ticks = int(until * TICKS_PER_SECOND)
        left = ticks - (ticks >> _SAFE_BITS) - 1 - self._ticks  # sooner than floats can tell apart
        if left <= 0:
            return 0
        num_rows, num_read = self._batch.num_decoding, self._batch.num_read
        return min(num_steps, self._step_time.num_decodes_until(num_rows, num_read, left))

    def _skip(self, num_steps: int) -> None:
        """Take so many steps, in which rows decode and nothing else happens but to the last."""
        batch = self._batch
        num_rows, num_read = batch.num_decoding, batch.num_read
        self._ticks += self._step_time.ticks_of_decodes(num_rows, num_read, num_steps)
        self._now = self._ticks / TICKS_PER_SECOND
        self._step += num_steps
        self._totals.computed_tokens += num_rows * num_steps
        self._totals.block_steps += self._fast_forward.skip(num_steps)
        ending = batch.ending.get(batch.decode_step - 1)
        self._uses.turn(self._step, self._ticks)
        if ending is not None:
            self._leave(ending)
