"""Simulations of a workload on one engine: step by step, and from event to event alike."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from math import inf
from typing import Generic

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.lifecycle import FINISH, State
from batcher.metrics.arrays import ServedTimes
from batcher.planning.simulated_sequence import SimulatedContents, SimulatedSequence, Turns
from batcher.planning.workload import Workload
from batcher.scheduling.batch import RunningBatch
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.clock import BatchStats, ticks_until
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.offloading_kv_cache import OffloadingKVCache
from batcher.scheduling.output import NO_DRAFTS, Preemption, SchedulerOutput
from batcher.scheduling.policies import LONGEST_PREFIX_MATCH, POLICIES
from batcher.scheduling.scheduler import NO_CHANGES, Scheduler
from batcher.scheduling.sequence import NEVER, S
from batcher.settings import SchedulingSettings
from batcher.splitmix64 import scramble
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

# What a simulation comes to: the times of each sequence, and what the steps were used for.


class SimulationTotals(Struct, gc=False):
    """What all steps come to.

    num_steps: those that computed something.  num_prompt_steps: those in which no row decoded on,
    as all that decode stood still.
    computed_tokens: known, generated or drafted.  prefill_tokens: those of them that were known.
    recomputed_tokens: computed, lost by preemptions, and not found in blocks again.
    asked_tokens, found_tokens: what sequences were admitted with the first time, and what of it was
    found in blocks.  num_cached: found in blocks by all admissions.
    slot_steps, block_steps: slots and blocks held, summed over all steps.
    num_drafts, num_accepted: drafts that were verified, and those of them that were accepted.
    num_draft_rows: the rows that verified some, summed over all steps.  draft_ticks: how long it
    took to make them.  draft_work: what verifying them adds to prefill_work, see StepTime.
    num_loaded_blocks: read back from a second tier.  loading_ticks: how long that took.
    unread_tokens: how much less all rows read since accepted tokens needed no step of their own.
    binding_ticks: how long each of arrivals (nobody waited), slots, kv, tokens, preemption and
    batch kept the first of the waiting queue out of steps.
    """

    num_steps: int = 0
    num_prompt_steps: int = 0
    computed_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    num_cached: int = 0
    slot_steps: int = 0
    block_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_draft_rows: int = 0
    draft_ticks: int = 0
    draft_work: int = 0
    num_loaded_blocks: int = 0
    loading_ticks: int = 0
    unread_tokens: int = 0
    binding_ticks: Counter[str] = field(default_factory=Counter)

    @property
    def binding_shares(self) -> dict[str, float]:
        """The share of each of binding_ticks in the time of all steps; largest first."""
        total = self.binding_ticks.total()
        shares = self.binding_ticks.most_common()
        return {name: count / total for name, count in shares} if total else {}


class SimulationResult(Struct, frozen=True):
    """sequences: in the order of the workload's jobs.

    num_slots, num_blocks, max_batch_tokens: the limits; None for none.
    end_ticks: when the last step had ended.
    """

    sequences: list[SimulatedSequence]
    totals: SimulationTotals
    num_slots: int
    num_blocks: int | None
    max_batch_tokens: int | None
    end_ticks: int

    @property
    def end(self) -> float:
        """When the last step had ended, in seconds."""
        return self.end_ticks / TICKS_PER_SECOND


def times_of(sequences: Iterable[SimulatedSequence]) -> ServedTimes:
    """Return the times of sequences that came to their end."""
    return served_times(
        (
            sequence.arrival_time,
            sequence.admitted,
            sequence.first_token,
            sequence.end,
            sequence.num_output_tokens,
        )
        for sequence in sequences
    )


def served_times(rows: Iterable[tuple[float | None, ...]]) -> ServedTimes:
    """Return the fields of ServedTimes, given by request, as columns; None is NaN."""
    table = np.array([*rows], float).reshape(-1, len(ServedTimes._fields))
    arrival, admitted, first_token, end, num_tokens = np.ascontiguousarray(table.T)
    return ServedTimes(arrival, admitted, first_token, end, num_tokens.astype(np.int64))


# Drafts without a model: how many there are, which are accepted, and how long they take to make.
#
# Rule: whether a draft is accepted depends on the sample and the place in its output alone, not on
# the schedule, so that all settings are compared with the same luck.

# What is assumed of a second tier of the KV cache: how large it is, and how soon it is read.


class KVOffload(Struct, frozen=True):
    """num_blocks: how many it holds.  ticks_per_block: what reading one of them back takes."""

    num_blocks: int
    ticks_per_block: int


_BITS = 53  # as many as a float has


class AssumedDrafts(Struct, frozen=True, kw_only=True):
    """What is assumed of the drafts of rows that decode.

    num_tokens: of a row in a step, unless its request says otherwise.
    acceptance: how likely a draft is accepted if all before it are, 0 to 1.
    cost: of one draft of each row, as a share of a step that only decodes these rows.
    """

    num_tokens: int
    acceptance: float
    cost: float = 0.0

    def wanted(
        self, rows: Iterable[SimulatedSequence], decode_step: int
    ) -> dict[SimulatedSequence, int]:
        """Return how many drafts are wanted of which of the rows, those that decode.

        As the engine, which does not know where an output ends, it looks as far as max_tokens.
        """
        num_wanted: dict[SimulatedSequence, int] = {}
        for row in rows:
            if row.is_decoding:
                own = row.job.draft_tokens
                num_left = row.last_decode_step - decode_step
                num_left += row.max_tokens - row.num_output_tokens
                num = min(self.num_tokens if own is None else own, num_left)
                if num > 0:
                    num_wanted[row] = num
        return num_wanted

    def num_accepted(self, job_key: int, place: int, num_drafts: int) -> int:
        """Return how many drafts are accepted of those for the tokens from `place` of an output on.

        job_key: see `key_of`.
        """
        threshold = self.acceptance * 2**_BITS
        for number in range(num_drafts):
            if scramble(job_key + place + number) >> 64 - _BITS >= threshold:
                return number
        return num_drafts

    def ticks(
        self,
        step_time: StepTime,
        batch: RunningBatch[SimulatedSequence],
        num_drafts: Mapping[SimulatedSequence, int],
    ) -> int:
        """Return how long it takes to make drafts of rows, one after the other of each."""
        if not self.cost:
            return 0
        num_rows = len(num_drafts)
        num_read = sum(batch.decode_step + row.offset for row in num_drafts)
        each, per = Decimal(repr(self.cost)).as_integer_ratio()
        rounds = max(num_drafts.values())
        return rounds * step_time.ticks(num_rows, num_rows, num_read, 0) * each // per


def key_of(sequence: SimulatedSequence) -> int:
    """Return what the luck of a sample is drawn from."""
    job = sequence.job
    return scramble((job.input_index << 32) + job.index)


def work_of_drafts(
    batch: RunningBatch[SimulatedSequence], num_drafts: Mapping[SimulatedSequence, int]
) -> int:
    """Return the sum of P * (2 * context + P) over rows that verify P drafts in the decode step."""
    work = 0
    for row, num in num_drafts.items():
        context = batch.decode_step + row.offset + 1
        work += num * (2 * context + num)
    return work


# The loop of the engine without a model: plan, take the time, end what has all its tokens.
#
# Rule: the scheduler decides, as it does for the engine; nothing here knows a rule of scheduling.

# Trials: simulations with a prefix cache in which blocks are only counted while that will do.
#
# Where no two jobs begin with the same tokens, nobody finds a block but who was preempted and comes
# back to what it had computed.  Until then as many blocks are held and free as without the cache.
#
# Rule: a trial comes to what the simulation with the cache does, or is given up.


class Preempted(Exception):  # noqa: N818 - it is no error
    """Somebody was preempted in a trial, and may find blocks."""


def settings_of_trial(settings: SchedulingSettings) -> SchedulingSettings | None:
    """Return those of a trial for jobs that share nothing; None if it would not do, or not help.

    A policy of one's own is asked by no simulation that may be given up: it may count.
    """
    is_known = settings.policy in POLICIES and settings.policy != LONGEST_PREFIX_MATCH
    if not (is_known and settings.has_prefix_cache) or settings.preempt_for is not None:
        return None
    return None if settings.kv_blocks is None else replace(settings, prefix_cache=False)


# Steps in which nothing is decided: rows go on, tables of blocks grow, and that is all.
#
# Rule: what happens in them is what the scheduler would have planned for each of them.


class FastForward(Generic[S]):
    """Looks for the next decision of a scheduler, and takes the steps before it all at once."""

    def __init__(self, scheduler: Scheduler[S]) -> None:
        self._scheduler = scheduler
        self._queue, self._batch = scheduler.queue, scheduler.batch
        settings = scheduler.settings
        self._has_urgency = settings.preempt_for is not None
        self._is_static = settings.batching == "static"
        self._has_prefix_cache = settings.has_prefix_cache
        self._growing_cache = scheduler.kv_cache if settings.capacity != "no-evict" else None

    def num_steps(self, now: float) -> tuple[int, float]:
        """Return how many steps decide nothing, if they begin before a time, and that time.

        The last of them may end a row.  That none arrives meanwhile is to be seen to.
        """
        batch, scheduler = self._batch, self._scheduler
        if batch.prefilling or not batch.num_decoding:
            return 0, now
        if self._has_urgency and scheduler.has_urgent(now):
            return 0, now
        until, is_open = inf, self._queue.num_slots and batch.num_free
        if is_open:
            until = self._stands_until(now) if self._is_static else scheduler.refuses_until(now)
            if until <= now:
                return 0, now
        num_steps = min(batch.ending) - batch.decode_step + 1
        if self._growing_cache is None:
            return num_steps, until
        if is_open and self._has_prefix_cache and not scheduler.is_refusal_final:
            return min(num_steps, batch.num_steps_to_boundary()), until  # who grows may evict
        pool = self._growing_cache.pool
        most = (num_steps // batch.block_size + 1) * batch.num_decoding
        if most > pool.num_free and not pool.has_room(most):
            num_steps = min(num_steps, batch.num_steps_for(pool.num_free))
        return num_steps, until

    def _stands_until(self, now: float) -> float:
        """Return until when a static batch is left as it is, and that is told; `now`: unknown."""
        blocked = self._scheduler.blocked
        return inf if blocked is not None and blocked.reason == "batch" else now

    def skip(self, num_steps: int) -> tuple[int, Collection[int]]:
        """Take so many steps.

        Returns for how many steps new blocks were held, summed up, and the slots of rows that end
        with the last step.
        """
        batch, kv_cache, step = self._batch, self._growing_cache, self._batch.decode_step
        batch.decode_step = step + num_steps - 1
        ending = batch.end_decode_step()
        if kv_cache is None:
            return 0, ending
        size, rows_at = batch.block_size, batch.by_boundary.get
        growing: list[Collection[S]] = []
        num_grown = block_steps = 0
        for number in range(step, step + num_steps):
            if rows := rows_at(number % size):
                growing.append(rows)
                num_grown += len(rows)
            block_steps += num_grown
        if num_grown:
            kv_cache.grow_in_turn(growing, num_grown)
        return block_steps, ending


OnEnded = Callable[[int], object]
"""Called with how many sequences have ended by now, whenever some do."""


class StepSimulation:
    """One engine, of which each step takes its time by itself, and a run over all its turns.

    needs_tables: whether it matters which blocks a sequence holds, and not only how many.
    is_trial: whether it is given up once somebody is preempted, see batcher.planning.simulator.
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


_SAFE_BITS = 49  # of 53: times this near to each other may be the same as floats


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
