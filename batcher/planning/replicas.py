"""Replicas of a fleet: engines that stand still between calls, their lives and results."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from heapq import heappop, heappush, merge
from itertools import pairwise
from math import inf
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from batcher.errors import InvariantError
from batcher.metrics.slo import Goodput
from batcher.metrics.times import (
    MICROSECONDS,
    PERCENTS,
    Distribution,
    Latencies,
    seconds_distribution,
)
from batcher.planning.routers import ReplicaStats
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import (
    EngineSimulation,
    ReplicaSettings,
    Role,
    SimulationResult,
    SimulationTotals,
)
from batcher.scheduling.blocks import PrefixMatch
from batcher.scheduling.clock import ticks_until
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.sequence import NEVER
from batcher.timing.step_time import TICKS_PER_SECOND

PROMPT_TOKENS = 1  # of the output: the engine that computes the prompt gives the first

# -- times and what they come to -------------------------------------------------------------------
#
# A time here and the same time in a trace give the same microseconds.


class ServedTimes(NamedTuple):
    """The times of the requests that were given tokens: [request] each, in seconds on one clock.

    num_tokens: those that it generated, at least 1, as float64; priority: likewise.
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
        """From the first arrival to the last end, in seconds; 0 of no request."""
        return float(self.end.max() - self.arrival.min()) if len(self.arrival) else 0.0

    def values(self, metric: str) -> NDArray[np.int64]:
        """Return one of the METRICS of an SLO in microseconds [request]; tpot is 0 of one token."""
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
        """Return exact percentiles by nearest rank; there is no itl, which these do not tell."""
        tpot = self.values("tpot")[self.num_tokens > 1]
        queue, ttft, e2e = (_distribution(self.values(name)) for name in ("queue", "ttft", "e2e"))
        return Latencies(queue=queue, ttft=ttft, tpot=_distribution(tpot), itl=None, e2e=e2e)

    def goodput(self, limits: dict[str, float], num_failed: int, makespan: float) -> Goodput:
        """Return how many met `limits`, in seconds by metric; `num_failed` others did not."""
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
    """The numbers of sequences that were given tokens, in the order in which they ended."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def add(self, one: SimulatedSequence, num_output_tokens: int) -> None:
        self._numbers.extend(
            (
                one.first_arrival,
                one.admitted_ticks / TICKS_PER_SECOND,
                one.first_token_ticks / TICKS_PER_SECOND,
                one.end_ticks / TICKS_PER_SECOND,
                num_output_tokens,
                one.priority,
            )
        )

    def since(self, place: int) -> ServedTimes:
        """Return those added after the first `place` ones."""
        width = len(ServedTimes._fields)
        return ServedTimes(*np.frombuffer(self._numbers[place * width :]).reshape(-1, width).T)


# -- the life of a replica -------------------------------------------------------------------------
#
# It starts, serves, fails and comes back, drains, and is down.  Failures and autoscaling make their
# moves through this table alone, and all numbers about a replica's time follow from them.


class ReplicaState(Enum):
    """The state of a replica; it is paid for unless it is down."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    DRAINING = "draining"
    DOWN = "down"


MOVES: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.STARTING: frozenset({ReplicaState.SERVING, ReplicaState.DOWN}),
    ReplicaState.SERVING: frozenset({ReplicaState.FAILED, ReplicaState.DRAINING}),
    ReplicaState.FAILED: frozenset({ReplicaState.SERVING, ReplicaState.DOWN}),
    ReplicaState.DRAINING: frozenset({ReplicaState.DOWN}),
    ReplicaState.DOWN: frozenset(),
}
PAID = frozenset(ReplicaState) - {ReplicaState.DOWN}


class Life:
    """The moves of one replica, each with its time in seconds; the first is what it begins as."""

    def __init__(self, state: ReplicaState, time: float) -> None:
        self.moves = [(time, state)]
        self.num_starts = int(state is ReplicaState.SERVING)

    @property
    def state(self) -> ReplicaState:
        return self.moves[-1][1]

    def move(self, state: ReplicaState, time: float) -> None:
        """Enter another state; raise an InvariantError if the table has no such move."""
        if state not in MOVES[self.state] or time < self.moves[-1][0]:
            raise InvariantError(f"a replica that is {self.moves[-1]} cannot be {state} at {time}")
        self.moves.append((time, state))
        self.num_starts += state is ReplicaState.SERVING

    def seconds(self, states: Collection[ReplicaState], begin: float, end: float) -> float:
        """Return how long it was in one of `states` from `begin` to `end`."""
        return sum(
            max(min(until, end) - max(since, begin), 0.0)
            for (since, state), (until, _) in pairwise([*self.moves, (inf, self.state)])
            if state in states
        )


def timeline_of(lives: Iterable[Life], end: float) -> list[tuple[float, int, int]]:
    """Return (time, replicas that serve, replicas paid for) at each change up to `end`."""

    def changes(life: Life) -> Iterator[tuple[float, int, int]]:
        was_serving = was_paid = False
        for time, state in life.moves:
            is_serving, is_paid = state is ReplicaState.SERVING, state in PAID
            yield time, is_serving - was_serving, is_paid - was_paid
            was_serving, was_paid = is_serving, is_paid

    timeline: list[tuple[float, int, int]] = []
    num_serving = num_paid = 0
    for time, serving, paid in merge(*map(changes, lives)):
        num_serving += serving
        num_paid += paid
        if time > end:
            break
        if timeline and timeline[-1][0] == time:
            timeline.pop()
        if not timeline or timeline[-1][1:] != (num_serving, num_paid):
            timeline.append((time, num_serving, num_paid))
    return timeline


# -- results ---------------------------------------------------------------------------------------


class ReplicaResult(Struct):
    """What one engine did.

    num_served: sequences that were given tokens.  failed: those that could never run, by priority.
    kv_read: tokens that decoding rows read before their own, less what drafts saved.  prefill_work:
    see StepTime; of prompts and drafts.  last_admission_ticks: of a first admission; None: none.
    end_ticks: the end of its last step.  paid_seconds: None for all the time from the first arrival
    to the end of all steps.  stalled_ticks: without a step though requests waited, as blocks were
    kept for others.
    """

    settings: ReplicaSettings
    totals: SimulationTotals = field(default_factory=SimulationTotals)
    num_served: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    kv_read: int = 0
    prefill_work: int = 0
    last_admission_ticks: int | None = None
    end_ticks: int = 0
    paid_seconds: float | None = None
    stalled_ticks: int = 0

    def count(self, sequence: SimulatedSequence, columns: ServedColumns, role: Role) -> None:
        """Count a sequence that has ended, or failed, or as much of it as an engine of `role` does.

        An engine that computes prompts alone does all of a sequence of one token.
        """
        if sequence.has_failed:
            self.failed[sequence.priority] += 1
            return
        num_prompt, num_output = sequence.num_prompt_tokens, sequence.num_output_tokens
        is_continued = role == "prefill" and num_output > PROMPT_TOKENS
        if num_output > 1 and not is_continued:
            self.kv_read += (num_output - 1) * num_prompt + (
                (num_output - 1) * (num_output - 2) >> 1
            )
        if role != "decode" and sequence.job.max_tokens:
            self.prefill_work += num_prompt**2 - sequence.num_cached_at_first**2
        if sequence.first_token_ticks == NEVER:
            return
        self.num_served += 1
        begin = sequence.first_token_ticks if role == "decode" else sequence.admitted_ticks
        if begin > (self.last_admission_ticks or NEVER):
            self.last_admission_ticks = begin
        if not is_continued:
            columns.add(sequence, num_output)

    @property
    def busy_ticks(self) -> int:
        return sum(self.totals.binding_ticks.values())


Refusal = Literal["queue_full", "max_wait", "deadline", "retries", "router", "no_replica"]


class FleetHistory(Struct):
    """The lives of the replicas of a managed fleet.

    lives: of all there ever were, in the order of the results.  num_failures: of replicas.
    num_lost: how often a sequence was lost with one.  refusals: sequences refused, with the turns
    after them, by reason.
    """

    lives: list[Life]
    refusals: Counter[Refusal]
    num_failures: int = 0
    num_lost: int = 0


class Peaks(Struct, gc=False):
    """The most slots, blocks and tokens of any step of any of several replicas.

    request: the tokens of the longest request.
    """

    slots: int = 0
    blocks: int = 0
    tokens: int = 0
    request: int = 0


class FleetResult(Struct, frozen=True, dict=True):
    """What all replicas of a fleet did, or (see `part`) some of them.

    times: of all that were served.  refused: sequences that the router refused, by priority.
    first_arrival: in seconds; None if there was none.  history: None if it was not managed.  peaks:
    None of one engine alone.
    """

    replicas: list[ReplicaResult]
    times: ServedTimes
    first_arrival: float | None
    refused: Counter[int] = field(default_factory=Counter)
    history: FleetHistory | None = None
    peaks: Peaks | None = None

    def part(self, group: str) -> Self:
        own = [each for each in self.replicas if each.settings.group == group]
        return self if len(own) == len(self.replicas) else replace(self, replicas=own)

    @cached_property
    def totals(self) -> SimulationTotals:
        totals = [replica.totals for replica in self.replicas]
        if len(totals) == 1:
            return totals[0]
        sums = SimulationTotals()
        for name in SimulationTotals.__struct_fields__:
            parts = [getattr(each, name) for each in totals]
            setattr(sums, name, sum(parts, type(parts[0])()))
        return sums

    @property
    def busy_ticks(self) -> int:
        return sum(replica.busy_ticks for replica in self.replicas)

    @property
    def failed(self) -> Counter[int]:
        """The sequences that could never run, or were refused, by priority."""
        return sum((replica.failed for replica in self.replicas), self.refused)

    @property
    def makespan(self) -> float:
        """From the first arrival to the end of the last step, in seconds."""
        end_ticks = max(replica.end_ticks for replica in self.replicas)
        return max(end_ticks / TICKS_PER_SECOND - (self.first_arrival or 0.0), 0.0)

    def paid_seconds(self, makespan: float) -> float:
        """Return the sum of the seconds that replicas are paid for, in a run of `makespan`."""
        paid = (each.paid_seconds for each in self.replicas)
        return sum(makespan if each is None else each for each in paid)

    def share_used(self, limit: Callable[[ReplicaSettings], int | None], used: int) -> float | None:
        """Return the share of what all steps might use; None where a replica has no limit."""
        there = 0
        for replica in self.replicas:
            most = limit(replica.settings)
            if most is None:
                return None
            there += most * replica.totals.num_steps
        return used / there if there else 0.0


def result_of_engine(run: SimulationResult, settings: ReplicaSettings) -> FleetResult:
    columns = ServedColumns()
    replica = ReplicaResult(settings, run.totals, end_ticks=run.end_ticks)
    for sequence in run.sequences:
        replica.count(sequence, columns, "both")
    first = min((sequence.arrival_time for sequence in run.sequences), default=None)
    return FleetResult([replica], columns.since(0), first)


# -- engines ---------------------------------------------------------------------------------------

ENDS, ARRIVES, BEGINS = range(3)
NOTHING = (inf, BEGINS)


class Replica(EngineSimulation):
    """An engine that stands still between calls of `go_on` and `advance`.

    It takes exactly the steps that `simulate` takes if all that is sent to it is its workload.
    turns: of all the fleet.  result: of an engine before it, which it continues.
    """

    def __init__(
        self,
        turns: Turns,
        settings: ReplicaSettings,
        result: ReplicaResult | None = None,
        kv_cache: KVCache[SimulatedSequence] | None = None,
    ) -> None:
        super().__init__(turns, settings, kv_cache)
        self.peaks = Peaks()
        self.role = settings.role
        self.result = ReplicaResult(settings) if result is None else result
        self._totals = self.result.totals
        self._last_end, self._num_last = NEVER, 0  # when sequences ended last, and how many
        # Steps up to the next event, and their ticks, if it ends some that decide nothing.
        self._next_stretch: tuple[int, int] | None = None

    @property
    def now(self) -> float:
        return self._now

    def add(self, sequence: SimulatedSequence) -> None:
        """Take in a sequence, which arrives when no step begun by now can know of it."""
        self._next_stretch = None
        self._queue.add(sequence, self._now)

    def next_event(self) -> tuple[float, int]:
        """Return when it ends steps that decide nothing, or begins one that does.

        Nothing joins, is admitted or ends before.  At equal times ENDS come before what arrives
        then, and that before what BEGINS; NOTHING if there is nothing to do.
        """
        queue, now, self._next_stretch = self._queue, self._now, None
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

    def go_on(self) -> None:
        """Take the steps up to the next event, or the one that is it."""
        if self._next_stretch is not None:
            planned, self._next_stretch = self._next_stretch, None
            self._skip(*planned)
            return
        if self._queue.num_pending:
            num_pending = self._queue.num_pending
            self._join_arrivals()
            self._until = inf if num_pending == self._queue.num_pending else self._now
        self._go_on()
        self._until = inf

    def advance(self, until: float) -> None:
        """Take all steps that begin before `until`, if all that arrive before then were added."""
        queue, batch, self._until, self._next_stretch = self._queue, self._batch, until, None
        while self._now < until:
            if queue.num_pending:
                if not (queue.num_slots or batch.num_occupied):
                    arrival = queue.next_arrival
                    if arrival is not None and arrival >= until:
                        break
                self._join_arrivals()
            elif not (queue.num_slots or batch.num_occupied):
                break
            self._go_on()
        self._until = inf

    def report(self, time: float) -> ReplicaStats:
        """Return its state at `time`; a step may end after it."""
        running = self._batch.num_occupied
        if self._now > time and self._last_end == self._ticks:
            running += self._num_last
        return ReplicaStats(time, running, self._queue.num_waiting + self._queue.num_pending)

    def close(self) -> ReplicaResult:
        self._totals.num_steps += self._step
        self.result.end_ticks = max(self.result.end_ticks, self._ticks)
        return self.result

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
        peaks, num_slots = self.peaks, self._batch.num_occupied
        peaks.slots = max(peaks.slots, num_slots)
        if num_tokens > peaks.tokens and num_tokens // num_steps > peaks.tokens:
            peaks.tokens = num_tokens // num_steps
        self._note_blocks()
        super()._advance(num_steps, ticks, num_tokens)

    def _end_all(self, ending: Collection[int]) -> None:
        self._note_blocks()
        super()._end_all(ending)

    def _note_blocks(self) -> None:
        num_blocks = self._pool.num_total - self._pool.num_free
        self.peaks.blocks = max(self.peaks.blocks, num_blocks)

    def _note_over(self, sequence: SimulatedSequence) -> None:
        if self._last_end != self._ticks:
            self._last_end, self._num_last = self._ticks, 0
        self._num_last += 1
        self.ended.append(sequence)


# -- engines that compute prompts, and others that decode ------------------------------------------
#
# An engine that computes prompts gives the first token, too.  The keys and values of the prompt go
# to an engine that decodes, once that has blocks for all tokens of the request; it looks for them
# when a step of its has ended.  The first engine keeps its blocks until all is there, and only then
# a slot is asked for.  So blocks are held on both sides while they travel, as by vLLM's connectors,
# and a full decode side backs up into the memory of the other one (DistServe: Zhong et al., OSDI
# 2024).
#
# Rule: an engine knows a phase of a sequence alone, and nothing that comes before the end of its
# last step; the sequence learns from its phases what came of it.


class Transfer(Struct, frozen=True, kw_only=True):
    """The time of keys and values from one replica to another."""

    seconds_per_token: float
    latency: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.latency + num_tokens * self.seconds_per_token


class Phase(SimulatedSequence, eq=False, gc=False, kw_only=True):
    """A part of the sequence `whole`, as an engine takes it.

    source: the replica with the prompt, if this comes after the first token; None: this is the
    prompt and the first token.
    """

    whole: SimulatedSequence
    source: int | None = None


def phase_of(whole: SimulatedSequence, source: int | None = None, **changed: Any) -> Phase:
    fields = {name: getattr(whole, name) for name in SimulatedSequence.__struct_fields__}
    return Phase(whole=whole, source=source, **(fields | changed))


class PrefillReplica(Replica):
    """An engine that keeps the blocks of a prompt until they are released.

    With all blocks kept it stands still, though requests wait, until the next release.
    """

    needs_tables = True

    def __init__(self, turns: Turns, settings: ReplicaSettings) -> None:
        super().__init__(turns, settings)
        self._kept: dict[SimulatedSequence, list[int]] = {}
        self._releases: list[tuple[float, int, SimulatedSequence]] = []  # a heap
        self._num_releases = 0
        self._is_stuck = False

    def release(self, whole: SimulatedSequence, time: float) -> None:
        self._num_releases += 1
        heappush(self._releases, (time, self._num_releases, whole))

    def next_event(self) -> tuple[float, int]:
        """Return what Replica does; if no block is free, when that may change."""
        if not self._is_stuck:
            return super().next_event()
        times = [self._releases[0][0]] if self._releases else []
        if self._queue.num_pending:
            times.append(self._queue.next_arrival or self._now)
        return (max(min(times), self._now), BEGINS) if times else NOTHING

    def go_on(self) -> None:
        if self._is_stuck:
            begin, self._ticks = self._ticks, max(self._ticks, ticks_until(self.next_event()[0]))
            self.result.stalled_ticks += self._ticks - begin
            self._now = self._ticks / TICKS_PER_SECOND
        self._next_stretch = None  # blocks may be given back first
        super().go_on()

    def close(self) -> ReplicaResult:
        self._give_back(inf)
        return super().close()

    def _give_back(self, now: float) -> None:
        while self._releases and self._releases[0][0] <= now:
            self._pool.give_back(self._kept.pop(heappop(self._releases)[-1]))

    def _go_on(self) -> None:
        self._give_back(self._now)
        step = self._step
        super()._go_on()
        self._is_stuck = step == self._step and self._queue.num_slots > 0

    def _end_all(self, ending: Collection[int]) -> None:
        for slot in ending:
            row = self._batch.slots[slot]
            if isinstance(row, Phase) and row.whole.num_output_tokens > PROMPT_TOKENS:
                self._kept[row.whole] = table = row.block_table.copy()
                self._pool.share(table)
        super()._end_all(ending)


class ReservedBlocks(KVCache[SimulatedSequence]):
    """Blocks that sequences have before they are admitted, whose prompts came from elsewhere."""

    def reserve(self, sequence: SimulatedSequence) -> bool:
        if not self.has_room(self.num_blocks(sequence.most_tokens)):
            return False
        self.extend(sequence, sequence.most_tokens)
        return True

    def match(self, sequence: SimulatedSequence) -> PrefixMatch:
        return PrefixMatch([], sequence.num_prompt_tokens, sequence.num_tokens)

    def num_needed(
        self,
        matches: Mapping[SimulatedSequence, PrefixMatch],  # noqa: ARG002
        *,
        is_alone: bool,  # noqa: ARG002
    ) -> int:
        return 0

    def admit(self, matches: Mapping[SimulatedSequence, PrefixMatch]) -> None:
        """Let a sequence, which has all its blocks, continue behind its prompt."""
        for row, match in matches.items():
            row.num_cached_tokens = match.num_tokens


class DecodeReplica(Replica):
    """An engine to which prompts come computed; none is preempted there.

    on_taken: called with a sequence, and when it has its blocks.
    """

    def __init__(
        self,
        turns: Turns,
        settings: ReplicaSettings,
        transfer: Transfer,
        on_taken: Callable[[Phase, float], object],
    ) -> None:
        self._blocks = ReservedBlocks(settings.scheduling, None)
        super().__init__(turns, settings, kv_cache=self._blocks)
        self._transfer, self._on_taken = transfer, on_taken
        self._incoming: deque[Phase] = deque()

    def add(self, sequence: SimulatedSequence) -> None:
        """Advance to the arrival of the second phase of a sequence, and take it in."""
        self.advance(sequence.arrival_time)
        if not isinstance(sequence, Phase):
            raise InvariantError(f"{sequence.id!r} comes to where requests decode, not computed")
        if self._scheduler.why_never(sequence) is not None:
            sequence.has_failed = True
            self.ended.append(sequence)
            self._on_taken(sequence, sequence.arrival_time)
            return
        self._incoming.append(sequence)
        self._take_in()

    def report(self, time: float) -> ReplicaStats:
        """Return its state; those without blocks wait, too."""
        report = super().report(time)
        return replace(report, waiting=report.waiting + len(self._incoming))

    def _take_in(self) -> None:
        incoming = self._incoming
        while incoming and self._blocks.reserve(incoming[0]):
            sequence = incoming.popleft()
            begin = max(self._now, sequence.arrival_time)
            sequence.send(begin + self._transfer.seconds(sequence.num_prompt_tokens))
            self._on_taken(sequence, sequence.arrival_time)
            self._queue.add(sequence, self._now)

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
        super()._advance(num_steps, ticks, num_tokens)
        if self._incoming and not self._queue.num_slots:
            self._totals.binding_ticks["arrivals"] -= ticks
            self._totals.binding_ticks["kv"] += ticks

    def _end_all(self, ending: Collection[int]) -> None:
        super()._end_all(ending)
        if ending:
            self._take_in()
