"""A fleet: requests come to a router, it sends each to a replica, and hears what comes of it.

Rule: nothing happens before all that could bear on it has happened.  A replica stands still until
all that is sent to it up to then is known; the router hears of nothing that is still to come.

One loop (`Fleet._run`) takes the next of: the event of a replica, a report, an action that is due
(see managed_fleet), the next turn of a session, an arrival.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from heapq import heappop, heappush, merge
from itertools import pairwise
from math import floor, inf
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import Struct, field
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
from batcher.planning.routers import ReplicaStats, ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import (
    EngineSimulation,
    OnEnded,
    ReplicaSettings,
    SimulationResult,
    SimulationTotals,
)
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.queue import ARRIVAL_ORDER
from batcher.scheduling.sequence import NEVER
from batcher.timing.step_time import TICKS_PER_SECOND

# Latencies and goodput of requests whose times are arrays, by the definitions of a run's summary.
#
# Rule: a time here and the same time in a trace give the same microseconds.

Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


class ServedTimes(NamedTuple):
    """When each request that came to its end by itself did what: [request], all of one length.

    arrival, admitted, first_token, end: float64, in seconds on one clock.  num_tokens: int64, those
    that it generated, at least 1.
    """

    arrival: Seconds
    admitted: Seconds
    first_token: Seconds
    end: Seconds
    num_tokens: Counts

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
            seconds = ((self.end - self.arrival) - (self.first_token - self.arrival)) / gaps
            return _microseconds(np.where(self.num_tokens > 1, seconds, 0.0))
        until = {"queue": self.admitted, "ttft": self.first_token, "e2e": self.end}[metric]
        return _microseconds(until - self.arrival)


def latencies_of(times: ServedTimes) -> Latencies:
    """Return the latencies of requests; percentiles are exact by nearest rank.

    There is no itl, which these times do not tell.
    """
    return Latencies(
        queue=distribution_of(times.values("queue")),
        ttft=distribution_of(times.values("ttft")),
        tpot=distribution_of(times.values("tpot")[times.num_tokens > 1]),
        itl=None,
        e2e=distribution_of(times.values("e2e")),
    )


def goodput_of(
    limits: dict[str, float], times: ServedTimes, num_failed: int, makespan: float
) -> Goodput:
    """Return how many requests met `limits`, with `num_failed` others that came to no end.

    limits: in seconds, by metric.  makespan: of the run, in seconds.
    """
    is_good = np.ones(len(times.arrival), bool)
    missed = {"failed": num_failed} if num_failed else {}
    for metric, limit in limits.items():
        is_late = times.values(metric) > round(limit * MICROSECONDS)
        is_good &= ~is_late
        if is_late.any():
            missed[metric] = int(is_late.sum())
    num_requests = len(times.arrival) + num_failed
    return Goodput.of(limits, num_requests, int(is_good.sum()), makespan, missed)


def distribution_of(values: NDArray[np.int64]) -> Distribution | None:
    count = len(values)
    if not count:
        return None
    ranks = [-(-count * percent // 100) - 1 for percent in PERCENTS]
    percentiles = [int(value) for value in np.sort(values)[ranks]]
    mean = int(values.sum()) / count
    return seconds_distribution(count, mean, percentiles, int(values.max()))


def _microseconds(seconds: Seconds) -> NDArray[np.int64]:
    return np.maximum(np.rint(seconds * MICROSECONDS), 0).astype(np.int64)


# -- the life of a replica -----------------------------------------------------------------------
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


# -- what a fleet comes to -----------------------------------------------------------------------
#
# No request is kept as an object; six numbers of each that was served are.

Priorities = NDArray[np.int32]


class ServedColumns:
    """The times and priorities of sequences that were given tokens, in the order of `add`."""

    def __init__(self) -> None:
        self._columns = tuple(array("d") for _ in ServedTimes._fields)
        self._priorities = array("i")

    def add(self, sequence: SimulatedSequence, num_output_tokens: int) -> None:
        arrival, admitted, first_token, end, num_tokens = self._columns
        arrival.append(sequence.first_arrival)
        admitted.append(sequence.admitted_ticks / TICKS_PER_SECOND)
        first_token.append(sequence.first_token_ticks / TICKS_PER_SECOND)
        end.append(sequence.end_ticks / TICKS_PER_SECOND)
        num_tokens.append(num_output_tokens)
        self._priorities.append(sequence.priority)

    def since(self, place: int) -> ServedTimes:
        """Return those added after the first `place` ones."""
        arrival, admitted, first_token, end, num_tokens = (
            np.frombuffer(column[place:]) for column in self._columns
        )
        return ServedTimes(arrival, admitted, first_token, end, num_tokens.astype(np.int64))

    @property
    def priorities(self) -> Priorities:
        """The priorities of all; nothing may be added after that."""
        return np.frombuffer(self._priorities, np.int32)


class ReplicaResult(Struct):
    """What one engine did.

    num_served: sequences that were given tokens.  failed: those that could never run, by priority.
    kv_read: tokens that decoding rows read before their own, less what drafts saved.  prefill_work:
    see StepTime; of prompts and drafts.  last_admission_ticks: of a first admission; None: none.
    end_ticks: the end of its last step.  paid_seconds: None for all the time from the first arrival
    to the end of all steps.  stalled_ticks: without a step though requests waited, as blocks were
    kept for others.
    """

    num_slots: int
    num_blocks: int | None
    max_batch_tokens: int | None
    totals: SimulationTotals = field(default_factory=SimulationTotals)
    num_served: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    kv_read: int = 0
    prefill_work: int = 0
    last_admission_ticks: int | None = None
    end_ticks: int = 0
    paid_seconds: float | None = None
    stalled_ticks: int = 0
    group: str = ""

    def add(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        """Count a sequence that has ended, or failed."""
        if sequence.has_failed:
            self.failed[sequence.priority] += 1
            return
        num_output = sequence.num_output_tokens
        self.add_output(sequence.num_prompt_tokens, num_output)
        self.add_prompt(sequence)
        if sequence.first_token_ticks != NEVER:
            self.note_served(sequence.admitted_ticks)
            columns.add(sequence, num_output)

    def add_output(self, num_prompt: int, num_output: int) -> None:
        decoded = max(num_output - 1, 0)
        self.kv_read += decoded * num_prompt + (decoded * (decoded - 1) >> 1)

    def add_prompt(self, sequence: SimulatedSequence) -> None:
        if sequence.job.max_tokens:
            self.prefill_work += sequence.num_prompt_tokens**2 - sequence.num_cached_at_first**2

    def note_served(self, admitted_ticks: int) -> None:
        self.num_served += 1
        if admitted_ticks > (self.last_admission_ticks or NEVER):
            self.last_admission_ticks = admitted_ticks

    @property
    def busy_ticks(self) -> int:
        return sum(self.totals.binding_ticks.values())


def _empty_result(settings: ReplicaSettings) -> ReplicaResult:
    return ReplicaResult(
        settings.num_slots,
        settings.scheduling.kv_blocks,
        settings.scheduling.max_batch_tokens,
        group=settings.group,
    )


Refusal = Literal["queue_full", "max_wait", "deadline", "retries", "router", "no_replica"]


class FleetHistory(Struct):
    """The lives of the replicas of a managed fleet.

    lives: of all there ever were, in the order of the results.  num_failures: of replicas.
    num_lost: how often a sequence was lost with one.  refusals: sequences refused, with the turns
    after them, by reason.
    """

    lives: list[Life]
    num_failures: int = 0
    num_lost: int = 0
    refusals: Counter[Refusal] = field(default_factory=Counter)


class ReplicasResult(Struct, frozen=True, dict=True):
    """What several replicas did together."""

    replicas: list[ReplicaResult]

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

    def paid_seconds(self, makespan: float) -> float:
        """Return the sum of the seconds that replicas are paid for, in a run of `makespan`."""
        paid = (each.paid_seconds for each in self.replicas)
        return sum(makespan if each is None else each for each in paid)

    def share_used(self, limit: str, num_used: int) -> float | None:
        """Return the share of what all steps might use; None where a replica has no limit."""
        there = 0
        for replica in self.replicas:
            most = getattr(replica, limit)
            if most is None:
                return None
            there += most * replica.totals.num_steps
        return num_used / there if there else 0.0


class FleetResult(ReplicasResult, frozen=True, dict=True):
    """What all replicas of a fleet did.

    times, priorities: of all that were served.  refused: sequences that the router refused, by
    priority.  first_arrival: in seconds; None if there was none.  history: None if it was not
    managed.
    """

    times: ServedTimes
    priorities: Priorities
    first_arrival: float | None
    refused: Counter[int] = field(default_factory=Counter)
    history: FleetHistory | None = None

    @property
    def num_failed(self) -> int:
        return self.failed.total()

    @property
    def failed(self) -> Counter[int]:
        """The sequences that could never run, or were refused, by priority."""
        return sum((replica.failed for replica in self.replicas), self.refused)

    @property
    def makespan(self) -> float:
        """From the first arrival to the end of the last step, in seconds."""
        end_ticks = max(replica.end_ticks for replica in self.replicas)
        return max(end_ticks / TICKS_PER_SECOND - (self.first_arrival or 0.0), 0.0)


def result_of_engine(run: SimulationResult, settings: ReplicaSettings) -> FleetResult:
    columns, replica = ServedColumns(), _empty_result(settings)
    replica.totals, replica.end_ticks = run.totals, run.end_ticks
    for sequence in run.sequences:
        replica.add(sequence, columns)
    first = min((sequence.arrival_time for sequence in run.sequences), default=None)
    return FleetResult([replica], columns.since(0), columns.priorities, first)


# -- replicas ------------------------------------------------------------------------------------

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
        self.result = _empty_result(settings) if result is None else result
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

    def count(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        self.result.add(sequence, columns)

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

    def _note_over(self, sequence: SimulatedSequence) -> None:
        if self._last_end != self._ticks:
            self._last_end, self._num_last = self._ticks, 0
        self._num_last += 1
        self.ended.append(sequence)


class Member:
    """A replica of a fleet, and what the fleet keeps of it.

    replica: its engine, another one after a failure.  next_event: an event of an older one is
    outdated.  in_flight: what was sent there and has not come back, where that may be lost.
    """

    def __init__(self, view: ReplicaView, replica: Replica, life: Life) -> None:
        self.view, self.replica, self.life = view, replica, life
        self.next_event = NOTHING
        self.in_flight: dict[SimulatedSequence, None] = {}


# -- the fleet -----------------------------------------------------------------------------------


class Fleet:
    """One run over `turns` on replicas behind a router.

    report_interval: seconds between the reports of all replicas, the first at 0.
    """

    def __init__(
        self,
        turns: Turns,
        replicas: Sequence[ReplicaSettings],
        router: Router,
        report_interval: float,
        on_ended: OnEnded = lambda _: None,
    ) -> None:
        self._turns, self._router, self._on_ended = turns, router, on_ended
        self._interval = report_interval
        self._next_report = 0.0 if router.hears_reports else inf
        self._hears_ends = router.hears_ends
        self._has_turns = turns.has_sessions  # or others that arrive when something has ended
        self._members: list[Member] = []
        for settings in replicas:
            self._add_member(settings, Life(ReplicaState.SERVING, 0.0))
        self._columns = ServedColumns()
        self._num_ended = 0
        self._refused = Counter[int]()
        self._siblings: tuple[int, ReplicaView | None] = (-1, None)
        self._events: list[tuple[tuple[float, int], int]] = []  # a heap, of which member
        self._turns_ahead: list[tuple[float, int, int, SimulatedSequence]] = []  # a heap by arrival
        self._responses: list[tuple[float, int, ReplicaView, int]] = []  # a heap by their ends
        router.use([member.view for member in self._members])

    def _add_member(self, settings: ReplicaSettings, life: Life) -> Member:
        num_blocks = settings.scheduling.kv_blocks
        view = ReplicaView(len(self._members), settings.group, settings.num_slots, num_blocks)
        member = Member(view, self._make_replica(settings), life)
        self._members.append(member)
        return member

    def _make_replica(self, settings: ReplicaSettings) -> Replica:
        return Replica(self._turns, settings)

    def run(self) -> FleetResult:
        arrivals = iter(self._turns.arrivals())
        first = next(arrivals, None)
        self._run(first, arrivals)
        return self._result(None if first is None else first.arrival_time)

    def _result(self, first_arrival: float | None) -> FleetResult:
        return FleetResult(
            [member.replica.close() for member in self._members],
            self._columns.since(0),
            self._columns.priorities,
            first_arrival,
            self._refused,
        )

    def _run(self, ahead: SimulatedSequence | None, arrivals: Iterator[SimulatedSequence]) -> None:
        """Take the next of a replica, a report, what is due, a turn and an arrival.

        ahead: the next to arrive.
        """
        events, turns = self._events, self._turns_ahead
        while True:
            is_turn = bool(turns) and (ahead is None or turns[0] < (*ARRIVAL_ORDER(ahead), ahead))
            sequence = turns[0][-1] if is_turn else ahead
            until = inf if sequence is None else sequence.arrival_time
            due = self._next_due(until)
            is_due = due < inf
            until = min(until, due)
            sure = min(until, events[0][0][0]) if events and self._has_turns else until
            is_report = self._next_report <= sure < inf
            if is_report:  # a turn that arrives before the last one might have to know this one
                last = max(self._next_report, floor(sure / self._interval) * self._interval)
                until = min(last, sure)  # a product is rounded
            if events and events[0][0] < (until, ARRIVES):
                event, index = heappop(events)
                member = self._members[index]
                if event == member.next_event:
                    member.replica.go_on()
                    self._take_ended(member)
                    member.next_event = NOTHING
                    self._plan(member)
                continue
            while self._responses and self._responses[0][0] <= until:
                time, _, view, num_tokens = heappop(self._responses)
                self._hear_end(time, view, num_tokens)
            if is_report:
                self._next_report = until + self._interval
                self._hear_reports(until)
                continue
            if is_due:
                self._do_due(until)
                continue
            if sequence is None:
                return
            if is_turn:
                heappop(turns)
            self._route(sequence)
            if not is_turn:
                ahead = next(arrivals, None)

    def _next_due(self, until: float) -> float:  # noqa: ARG002 - others need it
        """Return when something else is to be done; inf: nothing by `until`."""
        return inf

    def _do_due(self, now: float) -> None:
        """Do it, once all has happened that comes before."""

    def _plan(self, member: Member) -> None:
        event = member.replica.next_event()
        if event != member.next_event:
            member.next_event = event
            heappush(self._events, (event, member.view.index))

    def _take_ended(self, member: Member) -> None:
        replica = member.replica
        if replica.ended:
            for sequence in replica.ended:
                self._end(member, sequence)
            replica.ended.clear()
            self._on_ended(self._num_ended)

    def _end(self, member: Member, sequence: SimulatedSequence) -> None:
        replica = member.replica
        replica.count(sequence, self._columns)
        self._note_end(member, sequence)
        turn = self._turns.next_turn(sequence, replica.now)
        while turn is not None and turn.has_failed:  # as the one before it has
            replica.count(turn, self._columns)
            turn = self._turns.next_turn(turn, replica.now)
        if turn is not None:
            heappush(self._turns_ahead, (*ARRIVAL_ORDER(turn), turn))

    def _note_end(self, member: Member, sequence: SimulatedSequence) -> None:
        self._num_ended += 1
        if self._hears_ends:
            entry = member.replica.now, self._num_ended, member.view, sequence.num_prompt_tokens
            heappush(self._responses, entry)

    # -- what the router hears -----------------------------------------------------------------

    def _route(self, sequence: SimulatedSequence) -> None:
        view = self._choose(sequence)
        if view is None:
            self._refuse(sequence)
            return
        self._note_sent(sequence, view)
        self._deliver(sequence, view)

    def _deliver(self, sequence: SimulatedSequence, view: ReplicaView) -> None:
        member = self._members[view.index]
        member.replica.add(sequence)
        self._take_ended(member)
        self._plan(member)

    def _note_sent(self, sequence: SimulatedSequence, view: ReplicaView) -> None:
        view.num_requests += 1
        view.num_tokens += sequence.num_prompt_tokens
        view.num_unreported += 1
        self._note(view)

    def _note(self, view: ReplicaView) -> None:
        self._router.note(view)

    def _choose(self, sequence: SimulatedSequence) -> ReplicaView | None:
        if not sequence.has_siblings:
            return self._router.choose(sequence, sequence.arrival_time)
        number, view = self._siblings
        if number != sequence.input_index:
            view = self._router.choose(sequence, sequence.arrival_time)
            self._siblings = sequence.input_index, view
        return view

    def _refuse(self, sequence: SimulatedSequence) -> None:
        sequence.has_failed = True
        turn: SimulatedSequence | None = sequence
        while turn is not None:
            self._refused[turn.priority] += 1
            turn = self._turns.next_turn(turn, sequence.arrival_time)

    def _hear_end(self, time: float, view: ReplicaView, num_tokens: int) -> None:  # noqa: ARG002 - others need it
        view.num_requests -= 1
        view.num_tokens -= num_tokens
        if self._router.hears_ends:
            self._note(view)

    def _hear_reports(self, time: float) -> None:
        for member in self._members:
            member.view.report, member.view.num_unreported = member.replica.report(time), 0
            self._note(member.view)
