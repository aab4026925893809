"""The loop of the engine without a model: plan, take the time, end what has all its tokens.

Rule: the scheduler decides, as it does for the engine; nothing here knows a rule of scheduling.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

from batcher.errors import InvariantError
from batcher.lifecycle import FINISH, State
from batcher.planning.drafts import AssumedDrafts, key_of, work_of_drafts
from batcher.planning.offload import KVOffload
from batcher.planning.simulated_sequence import SimulatedContents, SimulatedSequence, Turns
from batcher.planning.simulation_result import SimulationResult, SimulationTotals
from batcher.planning.trials import Preempted
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.clock import BatchStats, ticks_until
from batcher.scheduling.fast_forward import FastForward
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.offloading_kv_cache import OffloadingKVCache
from batcher.scheduling.output import NO_DRAFTS, Preemption, SchedulerOutput
from batcher.scheduling.scheduler import NO_CHANGES, Scheduler
from batcher.scheduling.sequence import NEVER
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

OnEnded = Callable[[int], object]
"""Called with how many sequences have ended by now, whenever some do."""


class StepSimulation:
    """One engine, of which each step takes its time by itself, and a run over all its turns.

    needs_tables: whether it matters which blocks a sequence holds, and not only how many.
    is_trial: whether it is given up once somebody is preempted, see batcher.planning.trials.
    """

    needs_tables = False

    def __init__(
        self,
        turns: Turns,
        num_slots: int,
        settings: SchedulingSettings,
        step_time: StepTime,
        on_ended: OnEnded = lambda _: None,
        drafts: AssumedDrafts | None = None,
        offload: KVOffload | None = None,
        *,
        is_trial: bool = False,
    ) -> None:
        self._is_trial = is_trial
        self._drafts, self._offload = drafts, offload
        self._drafting: dict[
            SimulatedSequence, None
        ] = {}  # as they began, the first has the choice
        self._on_ended, self._num_ended, self._num_slots = on_ended, 0, num_slots
        finds = settings.has_prefix_cache or turns.has_siblings
        needs_tables = finds or settings.preempt_for is not None or self.needs_tables
        self._scheduler: Scheduler[SimulatedSequence] = Scheduler(
            num_slots,
            settings,
            SimulatedContents().blocks if needs_tables else None,
            self._estimate,
            kv_cache=self._make_kv_cache(settings),
        )
        self._fast_forward = FastForward(self._scheduler)
        self._queue, self._batch = self._scheduler.queue, self._scheduler.batch
        kv_cache = self._scheduler.kv_cache
        self._pool = BlockPool(0) if kv_cache is None else kv_cache.pool
        self._tables = kv_cache if needs_tables or offload is not None else None
        self._settings, self._step_time = settings, step_time
        self._step = self._ticks = 0  # when the current step starts
        self._now = 0.0  # the same in seconds
        self._totals = SimulationTotals()
        self._turns = turns
        # Then arrivals are only more who wait, if nobody could be admitted ahead of others.
        self._all_wait = settings.preempt_for is None and self._turns.all_wait and self._all_fit()
        self._is_in_order = settings.batching == "static" or settings.policy == "fcfs"
        self._until = inf  # steps that begin later are not taken
        self._has_more = drafts is not None or offload is not None  # that steps take time for

    def _make_kv_cache(self, settings: SchedulingSettings) -> KVCache[SimulatedSequence] | None:
        """Return the blocks; None if they are as the settings say."""
        if self._offload is None:
            return None
        contents = SimulatedContents().blocks
        return OffloadingKVCache(settings, contents, self._offload.num_blocks)

    def _all_fit(self) -> bool:
        """Whether each sequence can run, none being a later turn of a session."""
        longest = self._turns.longest
        return longest is None or self._scheduler.why_never(longest) is None

    def run(self) -> SimulationResult:
        """Return what the run comes to."""
        queue, batch, turns = self._queue, self._batch, self._turns
        for sequence in turns.begin():
            queue.add(sequence, 0.0)
        while queue.num_pending or queue.num_slots or batch.num_free < self._num_slots:
            if queue.num_pending:
                self._join_arrivals()
            self._go_on()
            if turns.ended:
                self._go_on_with_turns()
        self._totals.num_steps = self._step
        return SimulationResult(
            turns.sequences,
            self._totals,
            num_slots=self._num_slots,
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
        arrivals = queue.take_arrivals(self._now)
        if self._all_wait:
            for sequence in arrivals:
                queue.push(sequence)
            return
        for sequence in arrivals:
            if not sequence.fits:
                self._fail(sequence)
            elif not sequence.max_tokens:
                sequence.end_ticks = self._ticks
                self._note_over(sequence)
            elif self._scheduler.why_never(sequence) is None or sequence.cut_to(
                self._scheduler.room_for_output(sequence)
            ):
                queue.push(sequence)
            else:
                self._fail(sequence)

    def _fail(self, sequence: SimulatedSequence) -> None:
        """End a sequence that waits, and can never run."""
        self._scheduler.finish_waiting(sequence, FINISH)
        sequence.fail()
        self._note_over(sequence)

    def _note_over(self, sequence: SimulatedSequence) -> None:
        """Count one that has ended or failed, which may have another turn go on."""
        self._num_ended += 1
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

    # -- steps -----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take all steps up to one that may decide something, or that one.

        In those before it rows decode, and nothing else happens but to the last of them.
        """
        if self._drafts is not None and (num_wanted := self._wanted_of(self._drafts)):
            self._take_step(num_wanted)
            return
        num_steps, until = self._fast_forward.num_steps(self._now)
        if num_steps:
            num_steps, ticks = self._time_of(num_steps, until)
            self._skip(num_steps, ticks)
        else:
            self._take_step()

    def _wanted_of(self, drafts: AssumedDrafts) -> Mapping[SimulatedSequence, int]:
        """Return how many drafts are wanted of which rows."""
        self._drafting = {row: None for row in self._drafting if row.state is State.RUNNING}
        return drafts.wanted(self._drafting, self._batch.decode_step)

    def _skip(self, num_steps: int, ticks: int) -> None:
        """Let steps pass in which rows decode, and nothing else happens but to the last of them."""
        self._advance(num_steps, ticks, num_steps * self._batch.num_decoding)
        num_block_steps, ending = self._fast_forward.skip(num_steps)
        self._totals.block_steps += num_block_steps
        if ending:
            self._end_all(ending)

    def _take_step(self, num_wanted: Mapping[SimulatedSequence, int] = NO_DRAFTS) -> None:
        """Take the next step, if any row is there to be computed.

        num_wanted: how many drafts are wanted of which rows.
        """
        scheduled = self._schedule(num_wanted)
        if self._batch.num_free < self._num_slots:
            num_tokens, num_rows, num_read, work = self._scheduler.batch_stats(scheduled)
            ticks = self._step_time.ticks(num_tokens, num_rows, num_read, work)
            if self._has_more:
                ticks += self._ticks_beside(scheduled)
            self._end_step(scheduled, ticks, num_tokens)

    def _schedule(
        self, num_wanted: Mapping[SimulatedSequence, int]
    ) -> SchedulerOutput[SimulatedSequence]:
        """Plan the next step."""
        scheduled = self._scheduler.schedule(self._step, self._now, num_wanted)
        if scheduled is not NO_CHANGES:
            self._note(scheduled)
        return scheduled

    def _ticks_beside(self, scheduled: SchedulerOutput[SimulatedSequence]) -> int:
        """Return what a step takes beside its rows: for drafts, and for blocks to be read back."""
        ticks = 0
        if self._drafts is not None and scheduled.num_drafts:
            ticks = self._make_drafts(self._drafts, scheduled.num_drafts)
        if self._offload is not None:
            ticks += self._read_back(self._offload)
        return ticks

    def _end_step(
        self, scheduled: SchedulerOutput[SimulatedSequence], ticks: int, num_tokens: int
    ) -> None:
        """Let a step pass that takes so many ticks, and end those that have all their tokens."""
        self._advance(1, ticks, num_tokens)
        if self._drafts is not None and scheduled.num_drafts:
            self._settle(self._drafts, scheduled)
        for sequence in scheduled.prefill_finished:
            if sequence.first_token_ticks == NEVER:
                sequence.first_token_ticks = self._ticks
            num_output = sequence.job.output.length
            if num_output < sequence.max_tokens:  # which nobody but its job knows
                self._batch.end_after(sequence, num_output - sequence.num_generated)
        ending = self._scheduler.update(scheduled)
        if ending:
            self._end_all(ending)

    def _make_drafts(
        self, drafts: AssumedDrafts, num_drafts: Mapping[SimulatedSequence, int]
    ) -> int:
        """Count the drafts that a step verifies; return how many ticks it takes to make them."""
        totals, batch = self._totals, self._batch
        totals.num_draft_rows += len(num_drafts)
        totals.num_drafts += sum(num_drafts.values())
        totals.draft_work += work_of_drafts(batch, num_drafts)
        ticks = drafts.ticks(self._step_time, batch, num_drafts)
        totals.draft_ticks += ticks
        return ticks

    def _read_back(self, offload: KVOffload) -> int:
        """Count the blocks that a step reads back; return how many ticks that takes."""
        kv_cache = self._scheduler.kv_cache
        if not isinstance(kv_cache, OffloadingKVCache):
            return 0
        num_loaded = kv_cache.take_loaded()
        self._totals.num_loaded_blocks += num_loaded
        self._totals.loading_ticks += num_loaded * offload.ticks_per_block
        return num_loaded * offload.ticks_per_block

    def _settle(self, drafts: AssumedDrafts, scheduled: SchedulerOutput[SimulatedSequence]) -> None:
        """Let rows keep the drafts that are accepted, none behind the end of their outputs."""
        totals, batch = self._totals, self._batch
        accepted: dict[int, int] = {}
        for row, num_drafts in scheduled.num_drafts.items():
            position = batch.decode_step + row.offset
            most = min(num_drafts, row.last_decode_step - batch.decode_step)
            place = position + 1 - row.num_prompt_tokens
            num = drafts.num_accepted(key_of(row), place, most)
            accepted[row.slot] = num
            totals.num_accepted += num
            totals.unread_tokens += num * position + num * (num + 1) // 2
        self._scheduler.settle_drafts(scheduled, accepted)

    def _note(self, scheduled: SchedulerOutput[SimulatedSequence]) -> None:
        """Take note of whom a step admits and preempts, and what it computes of prompts."""
        totals = self._totals
        if self._tables is not None:
            self._tables.take_copies()  # there is nothing to copy
        if scheduled.preempted:
            self._note_preempted(scheduled.preempted)
        if scheduled.admitted:
            self._note_admitted(scheduled.admitted)
        if self._drafts is not None:
            self._drafting |= dict.fromkeys(scheduled.prefill_finished)
        if scheduled.num_scheduled_tokens:
            totals.prefill_tokens += sum(scheduled.num_scheduled_tokens.values())
        if not scheduled.is_decode_step:
            totals.num_prompt_steps += 1

    def _note_admitted(self, admitted: Sequence[SimulatedSequence]) -> None:
        """Take note of whom a step admits."""
        totals, ticks, num_asked = self._totals, self._ticks, 0
        for sequence in admitted:
            num_cached = sequence.num_cached_tokens
            if sequence.admitted_ticks == NEVER:
                sequence.admitted_ticks = ticks
                num_asked += sequence.num_tokens
                if num_cached:
                    sequence.num_cached_at_first = num_cached
                    totals.found_tokens += num_cached
            elif sequence.num_lost_tokens > num_cached:
                totals.recomputed_tokens += sequence.num_lost_tokens - num_cached
            if num_cached:
                totals.num_cached += num_cached
        totals.asked_tokens += num_asked

    def _note_preempted(self, preempted: Sequence[Preemption[SimulatedSequence]]) -> None:
        """Take note of whom a step preempts.

        Raises:
            Preempted: the simulation is a trial.
        """
        if self._is_trial:
            raise Preempted
        self._totals.num_preemptions += len(preempted)
        for victim, _, _, num_computed_tokens in preempted:
            victim.num_preemptions += 1
            victim.num_lost_tokens = num_computed_tokens[victim]

    def _time_of(self, num_steps: int, until: float) -> tuple[int, int]:
        """Return how many of so many steps begin before `until` or an arrival, and their ticks."""
        until, num_rows = self._before_news(until), self._batch.num_decoding
        num_read, ticks, ticks_of = self._batch.num_read, 0, self._step_time.ticks
        for number in range(num_steps):
            if until < inf and number and (self._ticks + ticks) / TICKS_PER_SECOND >= until:
                return number, ticks
            ticks += ticks_of(num_rows, num_rows, num_read, 0)
            num_read += num_rows
        return num_steps, ticks

    def _before_news(self, until: float) -> float:
        """Return the first of `until`, of where it is to stand still, and of the next arrival.

        An arrival that only waits is none.
        """
        queue = self._queue
        until = min(until, self._until)
        is_closed = queue.num_slots and (self._is_in_order or not self._batch.num_free)
        if self._all_wait and is_closed:
            return until
        if self._turns.ended:  # others go on
            return min(until, self._now)
        if not queue.num_pending:
            return until
        arrival = queue.next_arrival
        return until if arrival is None or arrival > until else arrival

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
        """Let steps that take `ticks` together pass, and count what is held and used in them."""
        totals, pool, num_free = self._totals, self._pool, self._batch.num_free
        totals.slot_steps += num_steps * (self._num_slots - num_free)
        totals.block_steps += num_steps * (pool.num_total - pool.num_free)
        totals.computed_tokens += num_tokens
        binding = "slots"
        if not self._queue.num_slots:
            binding = "arrivals"
        elif num_free and (blocked := self._scheduler.blocked) is not None:
            binding = blocked.reason
        totals.binding_ticks[binding] += ticks
        self._step += num_steps
        self._ticks = end = self._ticks + ticks
        self._now = end / TICKS_PER_SECOND

    def _end_all(self, ending: Collection[int]) -> None:
        """Take those out of these slots whose last step was the one before the current one."""
        slots, finish, last_step = self._batch.slots, self._scheduler.finish, self._step - 1
        for slot in sorted(ending):
            sequence = slots[slot]
            if sequence is None:
                raise InvariantError(f"nobody holds slot {slot}, whose holder was to end")
            finish(sequence, last_step, FINISH)
            sequence.end_ticks = self._ticks
            self._note_over(sequence)
        self._on_ended(self._num_ended)
