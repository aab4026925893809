"""Simulates one engine without a model: plan a step, let it take its time, end what is complete.

Rule: the scheduler decides, as it does for the engine; nothing here knows a rule of scheduling.
Steps in which nothing is decided are taken at once: rows decode, their block tables grow, and that
is all.  Each does what the scheduler would have planned for it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from math import inf
from typing import Literal, Self

from msgspec import Struct, field
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.lifecycle import FINISH, State
from batcher.planning.simulated_sequence import SimulatedContents, SimulatedSequence, Turns
from batcher.planning.workload import Job, Workload
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.clock import ticks_until
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.queue import LONGEST_PREFIX_MATCH, POLICIES
from batcher.scheduling.scheduler import NO_CHANGES, NO_DRAFTS, Scheduler, SchedulerOutput
from batcher.scheduling.sequence import NEVER
from batcher.settings import SchedulingSettings
from batcher.splitmix64 import scramble
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime


class SimulationTotals(Struct, gc=False):
    """Sums over all steps.

    num_steps: steps that computed something.  computed_tokens: known, generated or drafted.
    recomputed_tokens: lost by preemptions and not found in blocks again.  asked_tokens,
    found_tokens: at first admissions, and found in blocks.  slot_steps, block_steps: slots and
    blocks held, summed over steps.  num_draft_rows: rows with drafts, summed over steps.
    draft_ticks: time to make drafts.  draft_work: prefill_work of verifying them.  unread_tokens:
    reads that accepted drafts saved.  binding_ticks: how long each of arrivals (nothing waited),
    slots, kv, tokens, preemption and batch kept the first of the waiting queue out.
    """

    num_steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    slot_steps: int = 0
    block_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_draft_rows: int = 0
    draft_ticks: int = 0
    draft_work: int = 0
    unread_tokens: int = 0
    binding_ticks: Counter[str] = field(default_factory=Counter)

    @property
    def binding_shares(self) -> dict[str, float]:
        """The share of each of binding_ticks in the time of all steps; largest first."""
        total = self.binding_ticks.total() or 1
        return {name: count / total for name, count in self.binding_ticks.most_common()}


class SimulationResult(Struct, frozen=True):
    """sequences: in the order of the workload's jobs.  end_ticks: when the last step had ended."""

    sequences: list[SimulatedSequence]
    totals: SimulationTotals
    end_ticks: int

    @property
    def end(self) -> float:
        return self.end_ticks / TICKS_PER_SECOND


# -- assumed drafts ------------------------------------------------------------------------------

_BITS = 53  # as many as a float has


class AssumedDrafts(Struct, frozen=True, kw_only=True):
    """Drafts without a model.

    Acceptance depends on the sample and the place in its output alone, never on the schedule, so
    that all settings are compared with the same luck.
    num_tokens: of a row per step, unless its request sets it.  acceptance: probability that a draft
    is accepted if all before it are.  cost: of one draft of each row, as a share of a decoding
    step.
    """

    num_tokens: int
    acceptance: float
    cost: float = 0.0

    def wanted(
        self, rows: Iterable[SimulatedSequence], decode_step: int
    ) -> dict[SimulatedSequence, int]:
        """Return the number of drafts for each row that decodes.

        Like the engine, which does not know where an output ends, it looks as far as max_tokens.
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

    def num_accepted(self, job: Job, place: int, num_drafts: int) -> int:
        """Return how many drafts for the tokens from `place` of an output are accepted."""
        key, threshold = scramble((job.input_index << 32) + job.index), self.acceptance * 2**_BITS
        for number in range(num_drafts):
            if scramble(key + place + number) >> 64 - _BITS >= threshold:
                return number
        return num_drafts


# -- the engine ----------------------------------------------------------------------------------

_SAFE_BITS = 49  # of 53: times this near to each other may be the same as floats

OnEnded = Callable[[int], object]
"""Called with how many sequences have ended by now, now and then."""

Role = Literal["both", "prefill", "decode"]


class Preempted(Exception):  # noqa: N818 - it is no error
    """A sequence was preempted in a trial, and may find blocks."""


class ReplicaSettings(Struct, frozen=True, kw_only=True):
    """The settings of one engine.

    group: its group in a fleet file.  role: it computes prompts, decodes, or does both.  is_trial:
    its simulation is given up at the first preemption.
    """

    num_slots: int
    scheduling: SchedulingSettings
    step_time: StepTime
    drafts: AssumedDrafts | None = None
    group: str = ""
    role: Role = "both"
    is_trial: bool = False

    @property
    def of_trial(self) -> Self | None:
        """The settings of a trial with jobs that share nothing; None if there can be none.

        Where no two jobs begin with the same tokens, a prefix cache holds nothing for a sequence
        but what it had computed before a preemption.  Until the first preemption as many blocks are
        held and free as without the cache, so a trial only counts them.  A user's own policy may
        count its calls, so no trial calls it.
        """
        settings = self.scheduling
        is_known = settings.policy in POLICIES and settings.policy != LONGEST_PREFIX_MATCH
        has_cache = settings.has_prefix_cache and settings.kv_blocks is not None
        if not (is_known and has_cache) or settings.preempt_for is not None:
            return None
        return replace(self, scheduling=replace(settings, prefix_cache=False), is_trial=True)


class EngineSimulation:
    """One engine, and a run over all its turns.

    ended: sequences that ended or failed since they were last taken from here.  needs_tables: which
    blocks a sequence holds matters, not only how many.  kv_cache: None for the one of the settings.
    """

    needs_tables = False

    def __init__(
        self,
        turns: Turns,
        engine: ReplicaSettings,
        kv_cache: KVCache[SimulatedSequence] | None = None,
    ) -> None:
        settings, step_time = engine.scheduling, engine.step_time
        self.ended: list[SimulatedSequence] = []
        self._turns, self._num_slots, self._settings = turns, engine.num_slots, settings
        self._step_time, self._drafts, self._is_trial = step_time, engine.drafts, engine.is_trial
        self._drafting: dict[SimulatedSequence, None] = {}  # as they began; the first has a choice
        finds = settings.has_prefix_cache or turns.has_siblings
        needs_tables = finds or settings.preempt_for is not None or self.needs_tables
        self._scheduler: Scheduler[SimulatedSequence] = Scheduler(
            engine.num_slots,
            settings,
            SimulatedContents().blocks if needs_tables else None,
            lambda stats: step_time.ticks(*stats) / TICKS_PER_SECOND,
            kv_cache=kv_cache,
        )
        self._queue, self._batch = self._scheduler.queue, self._scheduler.batch
        kv_cache = self._scheduler.kv_cache
        self._pool = BlockPool(0) if kv_cache is None else kv_cache.pool
        self._tables = kv_cache if needs_tables else None
        self._growing_cache = kv_cache if settings.capacity != "no-evict" else None
        self._step = self._ticks = 0  # when the current step starts
        self._now = 0.0  # the same in seconds
        self._until = inf  # steps that begin later are not taken
        self._totals = SimulationTotals()
        # Then arrivals only wait, if none could be admitted ahead of others.
        self._all_wait = settings.preempt_for is None and turns.all_wait
        if self._all_wait and turns.longest is not None:
            self._all_wait = self._scheduler.why_never(turns.longest) is None
        self._is_in_order = settings.batching == "static" or settings.policy == "fcfs"

    def run(self, on_ended: OnEnded = lambda _: None) -> SimulationResult:
        queue, batch, turns, num_ended = self._queue, self._batch, self._turns, 0
        for sequence in turns.begin():
            queue.add(sequence, 0.0)
        while queue.num_pending or queue.num_slots or batch.num_free < self._num_slots:
            if queue.num_pending:
                self._join_arrivals()
            self._go_on()
            if self.ended:
                for sequence in self.ended:  # which grows by turns that fail
                    turn = turns.next_turn(sequence, self._now)
                    if turn is not None and turn.has_failed:
                        self._fail(turn)
                    elif turn is not None:
                        queue.add(turn, self._now)
                num_ended += len(self.ended)
                self.ended.clear()
                on_ended(num_ended)
        self._totals.num_steps = self._step
        return SimulationResult(turns.sequences, self._totals, self._ticks)

    # -- arrivals --------------------------------------------------------------------------------

    def _join_arrivals(self) -> None:
        """Queue what has arrived; if all is idle, jump to the next arrival."""
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
        self._scheduler.finish_waiting(sequence, FINISH)
        sequence.has_failed = True
        self._note_over(sequence)

    def _note_over(self, sequence: SimulatedSequence) -> None:
        self.ended.append(sequence)

    # -- steps -----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take all steps up to one that may decide something, or that one."""
        if self._drafts is not None:
            self._drafting = {row: None for row in self._drafting if row.state is State.RUNNING}
            num_wanted = self._drafts.wanted(self._drafting, self._batch.decode_step)
            if num_wanted:
                self._take_step(num_wanted)
                return
        num_steps, until = self._num_sure_steps(self._now)
        if num_steps:
            self._skip(*self._time_of(num_steps, until))
        else:
            self._take_step()

    def _num_sure_steps(self, now: float) -> tuple[int, float]:
        """Return how many steps decide nothing if they begin before a time, and that time.

        The last of them may end a row.  The caller sees to arrivals.
        """
        batch, scheduler, settings = self._batch, self._scheduler, self._settings
        if batch.prefilling or not batch.num_decoding:
            return 0, now
        if settings.preempt_for is not None and scheduler.has_urgent(now):
            return 0, now
        until, is_open = inf, self._queue.num_slots and batch.num_free
        if is_open:
            if settings.batching != "static":
                until = scheduler.refuses_until(now)
            elif (blocked := scheduler.blocked) is None or blocked.reason != "batch":
                until = now  # it is not known yet whether the batch is left as it is
            if until <= now:
                return 0, now
        num_steps = min(batch.ending) - batch.decode_step + 1
        if self._growing_cache is None:
            return num_steps, until
        if is_open and settings.has_prefix_cache and not scheduler.is_refusal_final:
            # A row that grows may evict what one that waits would find.
            return min(num_steps, batch.num_steps_to_boundary()), until
        pool = self._growing_cache.pool
        most = (num_steps // batch.block_size + 1) * batch.num_decoding
        if most > pool.num_free and not pool.has_room(most):
            num_steps = min(num_steps, batch.num_steps_for(pool.num_free))
        return num_steps, until

    def _time_of(self, num_steps: int, until: float) -> tuple[int, int]:
        """Return how many steps surely begin before `until` or an arrival, and their ticks."""
        batch, step_time = self._batch, self._step_time
        num_rows, num_read = batch.num_decoding, batch.num_read
        ticks = step_time.ticks_of_decodes(num_rows, num_read, num_steps)
        until = self._before_news(until)
        if until == inf:
            return num_steps, ticks
        end = int(until * TICKS_PER_SECOND)
        left = end - (end >> _SAFE_BITS) - 1 - self._ticks  # sooner than floats can distinguish
        if ticks <= left:
            return num_steps, ticks
        num_sure = 1 if left <= 0 else step_time.num_decodes_until(num_rows, num_read, left)
        if num_sure < num_steps:
            return num_sure, step_time.ticks_of_decodes(num_rows, num_read, num_sure)
        return num_steps, ticks

    def _before_news(self, until: float) -> float:
        """Return the first of `until`, the end of `advance`, and the next arrival that matters."""
        queue = self._queue
        until = min(until, self._until)
        is_closed = queue.num_slots and (self._is_in_order or not self._batch.num_free)
        if self._all_wait and is_closed:
            return until
        if self.ended and self._turns.has_sessions:  # others go on
            return min(until, self._now)
        if not queue.num_pending:
            return until
        arrival = queue.next_arrival
        return until if arrival is None or arrival > until else arrival

    def _skip(self, num_steps: int, ticks: int) -> None:
        """Take steps in which rows decode, and nothing else happens but to the last of them."""
        batch, kv_cache, step = self._batch, self._growing_cache, self._batch.decode_step
        self._advance(num_steps, ticks, num_steps * batch.num_decoding)
        batch.decode_step = step + num_steps - 1
        ending = batch.end_decode_step()
        if kv_cache is not None:
            size, rows_at = batch.block_size, batch.by_boundary.get
            growing: list[Collection[SimulatedSequence]] = []
            num_grown = 0
            for number in range(step, step + num_steps):
                if rows := rows_at(number % size):
                    growing.append(rows)
                    num_grown += len(rows)
                self._totals.block_steps += num_grown
            if num_grown:
                kv_cache.grow_all([*chain.from_iterable(growing)])
        if ending:
            self._end_all(ending)

    def _take_step(self, num_wanted: Mapping[SimulatedSequence, int] = NO_DRAFTS) -> None:
        """Take the next step, if there is any row; num_wanted: drafts by row."""
        batch = self._batch
        scheduled = self._scheduler.schedule(self._step, self._now, num_wanted)
        if scheduled is not NO_CHANGES:
            self._note(scheduled)
        if batch.num_free == self._num_slots:
            return
        stats = self._scheduler.batch_stats(scheduled)
        ticks = self._step_time.ticks(*stats)
        drafts = self._drafts if scheduled.num_drafts else None
        if drafts is not None:
            ticks += self._make_drafts(drafts, scheduled.num_drafts)
        self._advance(1, ticks, stats.num_tokens)
        if drafts is not None:
            totals, rows = self._totals, self._batch
            accepted: dict[int, int] = {}
            for row, num_drafts in scheduled.num_drafts.items():
                position = rows.decode_step + row.offset
                most = min(num_drafts, row.last_decode_step - rows.decode_step)
                place = position + 1 - row.num_prompt_tokens
                num = drafts.num_accepted(row.job, place, most)
                accepted[row.slot] = num
                totals.num_accepted += num
                totals.unread_tokens += num * position + num * (num + 1) // 2
            self._scheduler.settle_drafts(scheduled, accepted)
        for sequence in scheduled.prefill_finished:
            if sequence.first_token_ticks == NEVER:
                sequence.first_token_ticks = self._ticks
            num_output = sequence.job.output.length
            if num_output < sequence.max_tokens:  # which nothing but its job knows
                batch.end_after(sequence, num_output - sequence.num_generated)
        ending = self._scheduler.update(scheduled)
        if ending:
            self._end_all(ending)

    def _make_drafts(
        self, drafts: AssumedDrafts, num_drafts: Mapping[SimulatedSequence, int]
    ) -> int:
        """Count the drafts that a step verifies; return the ticks that making them takes."""
        totals, decode_step, num_rows = self._totals, self._batch.decode_step, len(num_drafts)
        totals.num_draft_rows += num_rows
        totals.num_drafts += sum(num_drafts.values())
        num_read = 0
        for row, num in num_drafts.items():
            context = decode_step + row.offset + 1
            totals.draft_work += num * (2 * context + num)
            num_read += context - 1
        if not drafts.cost:
            return 0
        each, per = Decimal(repr(drafts.cost)).as_integer_ratio()
        rounds = max(num_drafts.values())
        draft_ticks = rounds * self._step_time.ticks(num_rows, num_rows, num_read, 0) * each // per
        totals.draft_ticks += draft_ticks
        return draft_ticks

    def _note(self, scheduled: SchedulerOutput[SimulatedSequence]) -> None:
        """Count what a step admits and preempts; raise Preempted in a trial."""
        totals = self._totals
        if self._tables is not None:
            self._tables.take_copies()  # there is nothing to copy
        if scheduled.preempted and self._is_trial:
            raise Preempted
        totals.num_preemptions += len(scheduled.preempted)
        for victim, _, _, num_computed_tokens in scheduled.preempted:
            victim.num_preemptions += 1
            victim.num_lost_tokens = num_computed_tokens[victim]
        for sequence in scheduled.admitted:
            num_cached = sequence.num_cached_tokens
            if sequence.admitted_ticks == NEVER:
                sequence.admitted_ticks = self._ticks
                sequence.num_cached_at_first = num_cached
                totals.asked_tokens += sequence.num_tokens
                totals.found_tokens += num_cached
            elif sequence.num_lost_tokens > num_cached:
                totals.recomputed_tokens += sequence.num_lost_tokens - num_cached
        if self._drafts is not None:
            self._drafting |= dict.fromkeys(scheduled.prefill_finished)

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
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
        """End the rows in these slots whose last step was the one before the current one."""
        slots, release, last_step = self._batch.slots, self._scheduler.release, self._step - 1
        for slot in sorted(ending):
            sequence = slots[slot]
            if sequence is None:
                raise InvariantError(f"slot {slot} is free, and its sequence was to end")
            release(sequence, last_step, FINISH)
            sequence.end_ticks = self._ticks
            self._note_over(sequence)


def simulate(
    workload: Workload,
    num_slots: int,
    settings: SchedulingSettings,
    step_time: StepTime,
    on_ended: OnEnded = lambda _: None,
    drafts: AssumedDrafts | None = None,
) -> SimulationResult:
    """Return when everything happens to a workload, exactly as if each step were taken by itself.

    Steps in which rows are given drafts are, since each decides how far its rows come.

    Raises:
        BatchdecodeError: the settings make no sense.
    """
    engine = ReplicaSettings(
        num_slots=num_slots, scheduling=settings, step_time=step_time, drafts=drafts
    )
    for_trial = engine.of_trial
    if for_trial is not None and workload.shares_nothing:
        with suppress(Preempted):
            return EngineSimulation(Turns(workload), for_trial).run(on_ended)
    return EngineSimulation(Turns(workload), engine).run(on_ended)
