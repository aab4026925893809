"""Simulates one engine without a model: schedule a step, add its duration, finish its rows.

Rule: the scheduler decides, as it does for the engine; there is no scheduling policy here.  Steps
that decide nothing are taken at once: rows decode and their block tables grow, exactly as the
scheduler would have planned each step.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from batcher.errors import InvariantError
from batcher.lifecycle import FINISH, State
from batcher.metrics.slo import Goodput
from batcher.metrics.times import (
    MICROSECONDS,
    PERCENTS,
    Distribution,
    Latencies,
    seconds_distribution,
)
from batcher.planning.management import FleetHistory
from batcher.planning.routers import ReplicaStats
from batcher.planning.simulated_sequence import SimulatedContents, SimulatedSequence
from batcher.planning.workload import Turns, Workload
from batcher.scheduling.blocks import BlockPool
from batcher.scheduling.clock import ticks_until
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.queue import LONGEST_PREFIX_MATCH, POLICIES
from batcher.scheduling.scheduler import NO_CHANGES, NO_DRAFTS, Scheduler, SchedulerOutput
from batcher.scheduling.sequence import NEVER
from batcher.settings import SchedulingSettings
from batcher.splitmix64 import scramble
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

PROMPT_TOKENS = 1  # output tokens that the engine with the prompt generates

# -- assumed drafts ------------------------------------------------------------------------------

_BITS = 53  # of a float


class AssumedDrafts(Struct, frozen=True, kw_only=True):
    """Drafts without a model.

    Acceptance depends only on the sample and the place in its output, so that all settings are
    compared with the same luck.
    num_tokens: per row and step, unless the request sets it.  acceptance: the probability that a
    draft is accepted if all before it are.  cost: of one draft of each row, as a share of a
    decoding step.
    """

    num_tokens: int
    acceptance: float
    cost: float = 0.0

    def wanted(
        self, rows: Iterable[SimulatedSequence], decode_step: int
    ) -> dict[SimulatedSequence, int]:
        """Return the number of drafts for each decoding row, up to max_tokens as in the engine."""
        num_wanted: dict[SimulatedSequence, int] = {}
        for row in rows:
            if row.is_decoding:
                own = row.draft_tokens
                num_left = row.last_decode_step - decode_step
                num_left += row.max_tokens - row.num_output_tokens
                num = min(self.num_tokens if own is None else own, num_left)
                if num > 0:
                    num_wanted[row] = num
        return num_wanted

    def num_accepted(self, row: SimulatedSequence, place: int, num_drafts: int) -> int:
        """Return how many drafts from `place` of an output on are accepted."""
        key, threshold = scramble((row.input_index << 32) + row.index), self.acceptance * 2**_BITS
        for number in range(num_drafts):
            if scramble(key + place + number) >> 64 - _BITS >= threshold:
                return number
        return num_drafts


# -- settings and results ------------------------------------------------------------------------

Role = Literal["both", "prefill", "decode"]


class Preempted(Exception):  # noqa: N818 - not an error
    """A sequence was preempted in a trial, and may have prefix hits."""


class ReplicaSettings(Struct, frozen=True, kw_only=True):
    """The settings of one engine; is_trial: stop its simulation at the first preemption."""

    num_slots: int
    scheduling: SchedulingSettings
    step_time: StepTime
    drafts: AssumedDrafts | None = None
    group: str = ""
    role: Role = "both"
    is_trial: bool = False

    @property
    def of_trial(self) -> Self | None:
        """The settings of a trial without prefix cache for jobs that share nothing, or None.

        If no two jobs begin with the same tokens, a sequence has prefix hits only after it was
        preempted.  Until the first preemption the same number of blocks is free as without the
        cache, so a trial only counts blocks.  A custom policy may count its calls, so no trial
        calls it.
        """
        settings = self.scheduling
        is_known = settings.policy in POLICIES and settings.policy != LONGEST_PREFIX_MATCH
        has_cache = settings.has_prefix_cache and settings.kv_blocks is not None
        if not (is_known and has_cache) or settings.preempt_for is not None:
            return None
        return replace(self, scheduling=replace(settings, prefix_cache=False), is_trial=True)


class ServedTimes(NamedTuple):
    """The times of requests with output: [request] float64 each, in seconds on one clock.

    num_tokens: generated, at least 1.
    """

    arrival: NDArray[np.float64]
    admitted: NDArray[np.float64]
    first_token: NDArray[np.float64]
    end: NDArray[np.float64]
    num_tokens: NDArray[np.float64]
    priority: NDArray[np.float64]

    def where(self, is_wanted: NDArray[np.bool_]) -> Self:
        columns: list[Any] = [column[is_wanted] for column in self]
        return type(self)(*columns)

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end, in seconds; 0 without requests."""
        return float(self.end.max() - self.arrival.min()) if len(self.arrival) else 0.0

    def values(self, metric: str) -> NDArray[np.int64]:
        """Return a metric of an SLO in microseconds [request]; tpot is 0 for a single token."""
        if metric == "tpot":
            gaps = np.maximum(self.num_tokens - 1, 1)
            decoding = (self.end - self.arrival) - (self.first_token - self.arrival)
            seconds = np.where(self.num_tokens > 1, decoding / gaps, 0.0)
        else:
            until = {"queue": self.admitted, "ttft": self.first_token, "e2e": self.end}[metric]
            seconds = until - self.arrival
        found: NDArray[np.int64] = np.maximum(np.rint(seconds * MICROSECONDS), 0).astype(np.int64)
        return found

    def latencies(self) -> Latencies:
        """Return exact percentiles by nearest rank, without itl."""
        tpot = self.values("tpot")[self.num_tokens > 1]
        queue, ttft, e2e = (_distribution(self.values(name)) for name in ("queue", "ttft", "e2e"))
        return Latencies(queue=queue, ttft=ttft, tpot=_distribution(tpot), itl=None, e2e=e2e)

    def goodput(self, limits: dict[str, float], num_failed: int, makespan: float) -> Goodput:
        """Return how many met `limits`, in seconds by metric; `num_failed` more did not."""
        is_good = np.ones(len(self.arrival), bool)
        missed = {"failed": num_failed} if num_failed else {}
        for metric, limit in limits.items():
            is_late = self.values(metric) > round(limit * MICROSECONDS)
            is_good &= ~is_late
            if is_late.any():
                missed[metric] = int(is_late.sum())
        num_requests = len(self.arrival) + num_failed
        return Goodput.of(limits, num_requests, int(is_good.sum()), makespan, missed)


def _distribution(values: NDArray[np.int64]) -> Distribution | None:
    count = len(values)
    if not count:
        return None
    ranks = [-(-count * percent // 100) - 1 for percent in PERCENTS]
    percentiles = [int(value) for value in np.sort(values)[ranks]]
    return seconds_distribution(count, int(values.sum()) / count, percentiles, int(values.max()))


class ServedColumns:
    """The numbers of sequences with output, in the order in which they ended."""

    def __init__(self) -> None:
        self.numbers = array("d")

    def since(self, place: int) -> ServedTimes:
        """Return the numbers of all but the first `place` sequences."""
        width = len(ServedTimes._fields)
        return ServedTimes(*np.frombuffer(self.numbers[place * width :]).reshape(-1, width).T)


class ReplicaResult(Struct):
    """The counters of one engine.

    recomputed_tokens: lost by preemptions and not found in blocks again.  asked_tokens,
    found_tokens: at first admissions, and found in blocks.  slot_steps, block_steps,
    num_draft_rows: summed over steps.  draft_ticks: time of drafting.  draft_work: prefill_work of
    verifying.  unread_tokens: reads saved by accepted drafts.  binding_ticks: how long each limit
    kept the head of the waiting queue out ("arrivals" if it was empty).  failed: sequences that can
    never run, by priority.  kv_read, prefill_work: see StepTime.  stalled_ticks: without steps, as
    blocks were kept for transfers.  last_admission_ticks: the last first admission.  paid_seconds:
    None for the whole makespan.  peak_*: the most of any step.
    """

    settings: ReplicaSettings
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
    num_served: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    kv_read: int = 0
    prefill_work: int = 0
    stalled_ticks: int = 0
    last_admission_ticks: int | None = None
    end_ticks: int = 0
    paid_seconds: float | None = None
    peak_slots: int = 0
    peak_blocks: int = 0
    peak_tokens: int = 0

    def count(self, sequence: SimulatedSequence, served: "ServedColumns", role: Role) -> None:
        """Count an ended or failed sequence, or the part that an engine of `role` computes."""
        if sequence.has_failed:
            self.failed[sequence.priority] += 1
            return
        num_prompt, num_output = sequence.num_prompt_tokens, sequence.output.length
        num_output = min(num_output, sequence.max_tokens)
        is_continued = role == "prefill" and num_output > PROMPT_TOKENS
        if num_output > 1 and not is_continued:
            num_more = num_output - 1
            self.kv_read += num_more * num_prompt + (num_more * (num_more - 1) >> 1)
        if role != "decode" and sequence.max_tokens:
            self.prefill_work += num_prompt**2 - sequence.num_cached_at_first**2
        first_token = sequence.first_token_ticks
        if first_token == NEVER:
            return
        self.num_served += 1
        begin = first_token if role == "decode" else sequence.admitted_ticks
        if begin > (self.last_admission_ticks or NEVER):
            self.last_admission_ticks = begin
        if not is_continued:
            came = sequence.came
            served.numbers.extend(
                (
                    sequence.arrival_time if came is None else came,
                    sequence.admitted_ticks / TICKS_PER_SECOND,
                    first_token / TICKS_PER_SECOND,
                    sequence.end_ticks / TICKS_PER_SECOND,
                    num_output,
                    sequence.priority,
                )
            )

    @property
    def busy_ticks(self) -> int:
        return self.binding_ticks.total()

    @property
    def binding_shares(self) -> dict[str, float]:
        """The share of each of binding_ticks in the time of all steps; largest first."""
        total = self.busy_ticks or 1
        return {name: count / total for name, count in self.binding_ticks.most_common()}


_FIELDS = ReplicaResult.__struct_fields__
_SUMMED = _FIELDS[1 : _FIELDS.index("stalled_ticks") + 1]


class FleetResult(Struct, frozen=True, dict=True):
    """The results of all replicas of a fleet, or of a `part` of them.

    refused: sequences that the router refused, by priority.  sequences: in the order of the jobs,
    unless streamed.  longest_request: in tokens.  history: of a managed fleet.
    """

    replicas: list[ReplicaResult]
    times: ServedTimes
    first_arrival: float | None
    refused: Counter[int] = field(default_factory=Counter)
    sequences: list[SimulatedSequence] = []
    longest_request: int = 0
    history: FleetHistory | None = None

    def part(self, group: str) -> Self:
        own = [each for each in self.replicas if each.settings.group == group]
        return self if len(own) == len(self.replicas) else replace(self, replicas=own)

    @cached_property
    def totals(self) -> ReplicaResult:
        if len(self.replicas) == 1:
            return self.replicas[0]
        totals = ReplicaResult(self.replicas[0].settings)
        for name in _SUMMED:
            parts = [getattr(each, name) for each in self.replicas]
            setattr(totals, name, sum(parts, type(parts[0])()))
        return totals

    @property
    def failed(self) -> Counter[int]:
        """The sequences that can never run, or were refused, by priority."""
        return sum((replica.failed for replica in self.replicas), self.refused)

    @property
    def makespan(self) -> float:
        """From the first arrival to the end of the last step, in seconds."""
        end_ticks = max(replica.end_ticks for replica in self.replicas)
        return max(end_ticks / TICKS_PER_SECOND - (self.first_arrival or 0.0), 0.0)

    def paid_seconds(self, makespan: float) -> float:
        paid = (each.paid_seconds for each in self.replicas)
        return sum(makespan if each is None else each for each in paid)

    def share_used(self, limit: Callable[[ReplicaSettings], int | None], used: int) -> float | None:
        """Return the used share of a limit over all steps; None if a replica has no limit."""
        available = 0
        for replica in self.replicas:
            most = limit(replica.settings)
            if most is None:
                return None
            available += most * replica.num_steps
        return used / available if available else 0.0


# -- the engine ----------------------------------------------------------------------------------

_SAFE_BITS = 49  # of 53: closer times may be the same float

ENDS, ARRIVES, BEGINS = range(3)
NOTHING = (inf, BEGINS)

OnEnded = Callable[[int], object]  # called with the number of sequences that have ended


class Replica:
    """One engine, which a fleet advances by `step_on` and `advance`, or which runs by itself.

    ended: sequences that ended or failed since the caller cleared it.  needs_tables: block tables
    matter, not only numbers of blocks.  turns: of the whole fleet.  result: of the failed engine
    that it replaces.  kv_cache: None for that of the settings.
    """

    needs_tables = False

    def __init__(
        self,
        turns: Turns,
        engine: ReplicaSettings,
        result: ReplicaResult | None = None,
        kv_cache: KVCache[SimulatedSequence] | None = None,
    ) -> None:
        settings, step_time = engine.scheduling, engine.step_time
        self.ended: list[SimulatedSequence] = []
        self.role = engine.role
        self.result = ReplicaResult(engine) if result is None else result
        self._turns, self._num_slots, self._settings = turns, engine.num_slots, settings
        self._step_time, self._drafts, self._is_trial = step_time, engine.drafts, engine.is_trial
        self._drafting: dict[SimulatedSequence, None] = {}  # by start; the first drafts first
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
        self.now = 0.0  # the same in seconds
        self._until = inf  # steps that begin later are not taken
        # Whether arrivals can only wait: all fit, and none is admitted ahead of others.
        self._all_wait = settings.preempt_for is None and turns.all_wait
        if self._all_wait and turns.longest is not None:
            self._all_wait = self._scheduler.why_never(turns.longest) is None
        self._is_in_order = settings.batching == "static" or settings.policy == "fcfs"
        self._last_end, self._num_last = NEVER, 0  # the time of the last ends, and their number
        # The steps up to the next event that decide nothing, and their ticks.
        self._next_stretch: tuple[int, int] | None = None

    def run(self, on_ended: OnEnded = lambda _: None) -> "FleetResult":
        turns, served, num_ended = self._turns, ServedColumns(), 0

        def take_ended() -> None:
            nonlocal num_ended
            for sequence in self.ended:  # grows by turns that fail
                self.result.count(sequence, served, self.role)
                turn = turns.next_turn(sequence, self.now)
                if turn is not None and turn.has_failed:
                    self._fail(turn)
                elif turn is not None:
                    self._queue.add(turn)
            num_ended += len(self.ended)
            self.ended.clear()
            on_ended(num_ended)

        first_turns = turns.begin()
        for sequence in first_turns:
            self._queue.add(sequence)
        self.advance(inf, take_ended)
        return FleetResult(
            [self.close()],
            served.since(0),
            min((turn.arrival_time for turn in first_turns), default=None),
            sequences=turns.sequences,
            longest_request=turns.longest_request,
        )

    def add(self, sequence: SimulatedSequence) -> bool:
        """Add a sequence that arrives after all steps begun so far.

        Return whether the next event changes; it does not if an earlier arrival is pending.
        """
        is_news = not self._queue.num_pending
        if is_news:
            self._next_stretch = None
        self._queue.add(sequence)
        return is_news

    def next_event(self) -> tuple[float, int]:
        """Return when steps that decide nothing end, or when a step that decides begins.

        No sequence joins, is admitted or ends before.  At equal times ENDS comes before ARRIVES,
        and that before BEGINS; NOTHING if the engine is idle.
        """
        queue, now, self._next_stretch = self._queue, self.now, None
        if queue.num_pending:
            arrival = queue.next_arrival
            if arrival is None or arrival <= now:
                return now, BEGINS
            if not (queue.num_slots or self._batch.num_occupied):
                return arrival, BEGINS
        elif not (queue.num_slots or self._batch.num_occupied):
            return NOTHING
        num_steps, until = (0, now) if self._drafts else self._num_sure_steps(now)
        if not num_steps:
            return now, BEGINS
        self._next_stretch = _, ticks = self._time_of(num_steps, until)
        return (self._ticks + ticks) / TICKS_PER_SECOND, ENDS

    def step_on(self) -> None:
        """Take the steps up to the next event."""
        if self._next_stretch is not None:
            planned, self._next_stretch = self._next_stretch, None
            self._skip(*planned)
            return
        if self._queue.num_pending:
            num_pending = self._queue.num_pending
            self._join_arrivals()
            self._until = inf if num_pending == self._queue.num_pending else self.now
        self._take_steps()
        self._until = inf

    def advance(self, until: float, take_ended: Callable[[], object] | None = None) -> None:
        """Take all steps that begin before `until`; earlier arrivals must have been added.

        take_ended: called after steps in which sequences ended.
        """
        queue, batch, self._until, self._next_stretch = self._queue, self._batch, until, None
        while self.now < until:
            if queue.num_pending:
                is_idle = not (queue.num_slots or batch.num_occupied)
                if is_idle and (queue.next_arrival or 0.0) >= until:
                    break
                self._join_arrivals()
            elif not (queue.num_slots or batch.num_occupied):
                break
            self._take_steps()
            if self.ended and take_ended is not None:
                take_ended()
        self._until = inf

    def report(self, time: float) -> ReplicaStats:
        """Return its state at `time`; a step may end after it."""
        running = self._batch.num_occupied
        if self.now > time and self._last_end == self._ticks:
            running += self._num_last
        return ReplicaStats(time, running, self._queue.num_waiting + self._queue.num_pending)

    def close(self) -> ReplicaResult:
        self.result.num_steps += self._step
        self.result.end_ticks = max(self.result.end_ticks, self._ticks)
        return self.result

    # -- arrivals --------------------------------------------------------------------------------

    def _join_arrivals(self) -> None:
        """Queue the arrivals up to now; if the engine is idle, jump to the next one."""
        queue = self._queue
        arrival = queue.next_arrival
        if arrival is not None and arrival > self.now:
            if queue.num_slots or self._batch.num_occupied:
                return
            self._ticks = ticks_until(arrival)
            self.now = self._ticks / TICKS_PER_SECOND
        arrivals = queue.take_arrivals(self.now)
        scheduler = self._scheduler
        for sequence in arrivals:
            if self._all_wait:
                queue.push(sequence)
            elif not sequence.fits:
                self._fail(sequence)
            elif not sequence.max_tokens:
                sequence.end_ticks = self._ticks
                self._note_over([sequence])
            elif scheduler.why_never(sequence) is None or sequence.cut_to(
                scheduler.room_for_output(sequence)
            ):
                queue.push(sequence)
            else:
                self._fail(sequence)

    def _fail(self, sequence: SimulatedSequence) -> None:
        self._scheduler.finish_waiting(sequence, FINISH)
        sequence.has_failed = True
        self._note_over([sequence])

    def _note_over(self, sequences: Collection[SimulatedSequence]) -> None:
        if self._last_end != self._ticks:
            self._last_end, self._num_last = self._ticks, 0
        self._num_last += len(sequences)
        self.ended += sequences

    # -- steps -----------------------------------------------------------------------------------

    def _take_steps(self) -> None:
        """Take all steps up to one that may decide something, or that step."""
        if self._drafts is not None:
            self._drafting = {row: None for row in self._drafting if row.state is State.RUNNING}
            num_wanted = self._drafts.wanted(self._drafting, self._batch.decode_step)
            if num_wanted:
                self._take_step(num_wanted)
                return
        num_steps, until = self._num_sure_steps(self.now)
        if num_steps:
            self._skip(*self._time_of(num_steps, until))
        else:
            self._take_step()

    def _num_sure_steps(self, now: float) -> tuple[int, float]:
        """Return (the number of steps that decide nothing, the time before which they begin).

        The last of them may end a row.  The caller handles arrivals.
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
                until = now  # the scheduler has not refused the batch yet
            if until <= now:
                return 0, now
        num_steps = min(batch.ending) - batch.decode_step + 1
        if self._growing_cache is None:
            return num_steps, until
        if is_open and settings.has_prefix_cache and not scheduler.is_refusal_final:
            # A growing row may evict blocks that a waiting one would find.
            return min(num_steps, batch.num_steps_to_boundary()), until
        pool = self._growing_cache.pool
        most = (num_steps // batch.block_size + 1) * batch.num_decoding
        if most > pool.num_free and not pool.has_room(most):
            num_steps = min(num_steps, batch.num_steps_for(pool.num_free))
        return num_steps, until

    def _time_of(self, num_steps: int, until: float) -> tuple[int, int]:
        """Return the number of steps that begin before `until` or an arrival, and their ticks."""
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
        if self.ended and self._turns.has_sessions:  # next turns may arrive
            return min(until, self.now)
        if not queue.num_pending:
            return until
        arrival = queue.next_arrival
        return until if arrival is None or arrival > until else arrival

    def _skip(self, num_steps: int, ticks: int) -> None:
        """Take steps in which rows only decode; the last may end some."""
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
                self.result.block_steps += num_grown
            if num_grown:
                kv_cache.grow_all([*chain.from_iterable(growing)])
                num_blocks = self._pool.num_total - self._pool.num_free
                self.result.peak_blocks = max(self.result.peak_blocks, num_blocks)
        if ending:
            self._end_all(ending)

    def _take_step(self, num_wanted: Mapping[SimulatedSequence, int] = NO_DRAFTS) -> None:
        """Take the next step if there is a row; num_wanted: drafts by row."""
        batch = self._batch
        scheduled = self._scheduler.schedule(self._step, self.now, num_wanted)
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
            result, rows = self.result, self._batch
            accepted: dict[int, int] = {}
            for row, num_drafts in scheduled.num_drafts.items():
                position = rows.decode_step + row.offset
                most = min(num_drafts, row.last_decode_step - rows.decode_step)
                place = position + 1 - row.num_prompt_tokens
                num = drafts.num_accepted(row, place, most)
                accepted[row.slot] = num
                result.num_accepted += num
                result.unread_tokens += num * position + num * (num + 1) // 2
            self._scheduler.settle_drafts(scheduled, accepted)
        for sequence in scheduled.prefill_finished:
            if sequence.first_token_ticks == NEVER:
                sequence.first_token_ticks = self._ticks
            num_output = sequence.output.length
            if num_output < sequence.max_tokens:  # its output ends early
                batch.end_after(sequence, num_output - sequence.num_generated)
        ending = self._scheduler.update(scheduled)
        if ending:
            self._end_all(ending)

    def _make_drafts(
        self, drafts: AssumedDrafts, num_drafts: Mapping[SimulatedSequence, int]
    ) -> int:
        """Count the drafts that a step verifies; return the ticks of drafting."""
        result, decode_step, num_rows = self.result, self._batch.decode_step, len(num_drafts)
        result.num_draft_rows += num_rows
        result.num_drafts += sum(num_drafts.values())
        num_read = 0
        for row, num in num_drafts.items():
            context = decode_step + row.offset + 1
            result.draft_work += num * (2 * context + num)
            num_read += context - 1
        if not drafts.cost:
            return 0
        each, per = Decimal(repr(drafts.cost)).as_integer_ratio()
        rounds = max(num_drafts.values())
        draft_ticks = rounds * self._step_time.ticks(num_rows, num_rows, num_read, 0) * each // per
        result.draft_ticks += draft_ticks
        return draft_ticks

    def _note(self, scheduled: SchedulerOutput[SimulatedSequence]) -> None:
        """Count admissions and preemptions; raise Preempted in a trial."""
        result = self.result
        if self._tables is not None:
            self._tables.take_copies()  # dropped: there is no data to copy
        if scheduled.preempted and self._is_trial:
            raise Preempted
        result.num_preemptions += len(scheduled.preempted)
        for victim, _, _, num_computed_tokens in scheduled.preempted:
            victim.num_preemptions += 1
            victim.num_lost_tokens = num_computed_tokens[victim]
        for sequence in scheduled.admitted:
            num_cached = sequence.num_cached_tokens
            if sequence.admitted_ticks == NEVER:
                sequence.admitted_ticks = self._ticks
                sequence.num_cached_at_first = num_cached
                result.asked_tokens += sequence.num_tokens
                result.found_tokens += num_cached
            elif sequence.num_lost_tokens > num_cached:
                result.recomputed_tokens += sequence.num_lost_tokens - num_cached
        if self._drafts is not None:
            self._drafting |= dict.fromkeys(scheduled.prefill_finished)

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
        result, pool, num_free = self.result, self._pool, self._batch.num_free
        num_slots, num_blocks = self._num_slots - num_free, pool.num_total - pool.num_free
        result.slot_steps += num_steps * num_slots
        result.block_steps += num_steps * num_blocks
        result.computed_tokens += num_tokens
        result.peak_slots = max(result.peak_slots, num_slots)
        result.peak_blocks = max(result.peak_blocks, num_blocks)
        if num_tokens > result.peak_tokens and num_tokens // num_steps > result.peak_tokens:
            result.peak_tokens = num_tokens // num_steps
        binding = "slots"
        if not self._queue.num_slots:
            binding = "arrivals"
        elif num_free and (blocked := self._scheduler.blocked) is not None:
            binding = blocked.reason
        result.binding_ticks[binding] += ticks
        self._step += num_steps
        self._ticks = end = self._ticks + ticks
        self.now = end / TICKS_PER_SECOND

    def _end_all(self, ending: Collection[int]) -> None:
        """End the rows in these slots, whose last step is over."""
        slots, release, last_step = self._batch.slots, self._scheduler.release, self._step - 1
        ended = []
        for slot in sorted(ending):
            sequence = slots[slot]
            if sequence is None:
                raise InvariantError(f"slot {slot}, whose sequence is to end, is free")
            release(sequence, last_step, FINISH)
            sequence.end_ticks = self._ticks
            ended.append(sequence)
        self._note_over(ended)


def simulate(
    workload: Workload, engine: ReplicaSettings, on_ended: OnEnded = lambda _: None
) -> FleetResult:
    """Return the result of one engine, exactly as if each step were taken by itself."""
    for_trial = engine.of_trial
    if for_trial is not None and workload.shares_nothing:
        with suppress(Preempted):
            return Replica(Turns(workload), for_trial, ReplicaResult(engine)).run(on_ended)
    return Replica(Turns(workload), engine).run(on_ended)
