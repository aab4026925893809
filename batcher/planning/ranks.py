"""Data-parallel ranks: a replica of several engines, and a balancer that chooses one of them.

It chooses for each sample by itself, the shortest queue, as vLLM's does.  Ranks of a dense model do
not wait for each other.  Those of a mixture of experts have a part of the experts each, and step
together: a step takes as long as that of the slowest, and who has nothing to do computes a token
that nobody needs.

Rule: the balancer knows what ranks have reported, and what it has sent itself since then.
"""

from collections.abc import Callable, Sequence
from math import floor, inf

from batcher.planning.fleet_result import ReplicaResult
from batcher.planning.replica import ARRIVES, BEGINS, ENDS, NOTHING, Replica, ReplicaSettings
from batcher.planning.routers import ReplicaStats, ReplicaView, queue_weight
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.scheduling.clock import BatchStats, ticks_until
from batcher.scheduling.output import NO_DRAFTS, SchedulerOutput
from batcher.timing.step_time import TICKS_PER_SECOND, RankTicks

DUMMY_STEP = BatchStats(1, 1, 0, 0)
MAX_STRETCH = 64  # steps whose times are added up at once, perhaps in vain


def ranked_replica(
    turns: Turns,
    settings: ReplicaSettings,
    report_interval: float,
    results: Sequence[ReplicaResult] = (),
) -> "RankedReplica":
    """Return a replica of `settings.ranks` engines; results: those that they go on with, if any."""
    return ranks_of(
        settings,
        report_interval,
        lambda result: Replica(turns, settings, result),
        lambda result: LockstepRank(turns, settings, result),
        results,
    )


def ranks_of(
    settings: ReplicaSettings,
    report_interval: float,
    alone: Callable[[ReplicaResult | None], Replica],
    in_step: "Callable[[ReplicaResult | None], LockstepRank]",
    results: Sequence[ReplicaResult] = (),
) -> "RankedReplica":
    """Return a replica of `settings.ranks` engines.

    alone, in_step: makes one that takes its steps by itself, and one that shares experts.
    results: those that they go on with, if any.
    """
    going_on: Sequence[ReplicaResult | None] = results or [None] * settings.ranks
    rank_ticks = settings.step_time.of_rank(settings.ranks)
    if rank_ticks is None:
        return IndependentRanks([*map(alone, going_on)], report_interval)
    return LockstepRanks([*map(in_step, going_on)], report_interval, rank_ticks)


def last_report_by(time: float, interval: float, first: float) -> float:
    """Return when the last reports come that come by `time`, which is not before the `first`."""
    last = max(first, floor(time / interval) * interval)
    return min(last, time)  # a product is rounded


class RankedReplica:
    """What Replica is to a fleet, made of several engines.

    report_interval: seconds from each report of all ranks to the next, the first at 0.
    """

    def __init__(self, engines: Sequence[Replica], report_interval: float) -> None:
        self.engines = engines
        self._views = [ReplicaView(index) for index in range(len(engines))]
        self._interval, self._next_report = report_interval, 0.0

    def add(self, sequence: SimulatedSequence) -> None:
        """Send a sequence, which arrives no sooner than those before it, to a rank."""
        time = sequence.arrival_time
        if self._next_report <= time:
            report = last_report_by(time, self._interval, self._next_report)
            self.advance(report)
            self._hear_reports(report)
        view = min(self._views, key=queue_weight)  # of equals the first, as vLLM
        view.num_unreported += 1
        self._send(sequence, view.index)

    def next_event(self) -> tuple[float, int]:
        """Return what comes next, see Replica."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Go on to the next event."""
        raise NotImplementedError

    def _hear_reports_before(self, event: tuple[float, int]) -> None:
        """Tell the balancer what was reported last before the next event."""
        if event >= (self._next_report, ARRIVES):
            time, kind = event
            report = last_report_by(time, self._interval, self._next_report)
            if report == time and kind == ENDS:  # that report knows of the end
                report = max(report - self._interval, self._next_report)
            self._hear_reports(report)

    def advance(self, until: float) -> None:
        """Take all steps that begin before `until`, see Replica."""
        raise NotImplementedError

    def report(self, time: float) -> ReplicaStats:
        """Return how all ranks together stand at `time`, see Replica."""
        reports = [engine.report(time) for engine in self.engines]
        running = sum(report.running for report in reports)
        return ReplicaStats(time, running, sum(report.waiting for report in reports))

    def look_again(self) -> None:
        """Ask engines anew what comes next, of which one was told something by somebody else."""

    def _send(self, sequence: SimulatedSequence, place: int) -> None:
        self.engines[place].add(sequence)

    def _hear_reports(self, time: float) -> None:
        """Tell the balancer how the ranks stand at `time`, up to which they have gone on."""
        self._next_report = time + self._interval
        for view, engine in zip(self._views, self.engines, strict=True):
            view.report, view.num_unreported = engine.report(time), 0


class IndependentRanks(RankedReplica):
    """Ranks that do not wait for each other."""

    def __init__(self, engines: Sequence[Replica], report_interval: float) -> None:
        super().__init__(engines, report_interval)
        self._events: list[tuple[float, int] | None] = [NOTHING] * len(engines)  # None: not known

    def next_event(self) -> tuple[float, int]:
        """Return the first event of a rank."""
        return min(self._all_events())

    def advance(self, until: float) -> None:
        """Let each take all steps that begin before `until`."""
        for place, engine in enumerate(self.engines):
            engine.advance(until)
            self._events[place] = None

    def look_again(self) -> None:
        """Ask all of them."""
        self._events = [None] * len(self.engines)

    def _send(self, sequence: SimulatedSequence, place: int) -> None:
        super()._send(sequence, place)
        self._events[place] = None

    def go_on(self) -> None:
        """Let the rank go on whose event is the first."""
        event = self.next_event()
        self._hear_reports_before(event)
        place = self._events.index(event)
        self.engines[place].go_on()
        self._events[place] = None

    def _all_events(self) -> list[tuple[float, int]]:
        events = [
            engine.next_event() if event is None else event
            for event, engine in zip(self._events, self.engines, strict=True)
        ]
        self._events = [*events]
        return events


class LockstepRank(Replica):
    """An engine that begins and ends each step when others do.

    stands_at_arrivals: whether it has to have gone on to when a sequence arrives that it is sent.
    """

    stands_at_arrivals = False
    _planned: tuple[SchedulerOutput[SimulatedSequence], int] | None = None  # and its tokens

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs or waits."""
        return not (self._queue.num_slots or self._batch.num_occupied)

    @property
    def has_no_rows(self) -> bool:
        """Whether nobody runs."""
        return self._batch.num_free == self._num_slots

    @property
    def next_arrival(self) -> float:
        """When the next sequence joins those who wait; inf if none does."""
        if not self._queue.num_pending:
            return inf
        arrival = self._queue.next_arrival
        return self._now if arrival is None else max(arrival, self._now)

    def after(self, ticks: int) -> float:
        """Return what time it is so many ticks from now."""
        return (self._ticks + ticks) / TICKS_PER_SECOND

    def jump(self, ticks: int) -> None:
        """Let the next step begin at a time, to which nobody runs or waits."""
        self._ticks, self._now = ticks, ticks / TICKS_PER_SECOND

    def join(self) -> bool:
        """Let those wait who have arrived by now; return whether there is any."""
        if self.next_arrival > self._now:
            return False
        self._join_arrivals()
        return True

    def num_sure_steps(self) -> tuple[int, float]:
        """Return how many steps decide nothing, if they begin before a time, and that time."""
        if self.is_idle:
            return MAX_STRETCH, self._before_news(inf)
        num_steps, until = (0, 0.0) if self._drafts else self._fast_forward.num_steps(self._now)
        return num_steps, self._before_news(until)

    @property
    def decoding(self) -> tuple[int, int, int]:
        """How many rows decode, what they read, and by how much that grows with each step."""
        num_rows = self._batch.num_decoding
        return (num_rows, self._batch.num_read, num_rows) if num_rows else (1, 0, 0)

    def skip(self, num_steps: int, ticks: int) -> None:
        """Take so many steps that decide nothing."""
        if self.is_idle:
            self._advance(num_steps, ticks, 0)
        else:
            self._skip(num_steps, ticks)

    def begin_step(self) -> tuple[BatchStats, int]:
        """Plan the next step; return what it computes, and what it takes beside that."""
        self._planned = None
        if self.is_idle:
            return DUMMY_STEP, 0
        wanted = NO_DRAFTS if self._drafts is None else self._wanted_of(self._drafts)
        scheduled = self._schedule(wanted)
        if self.has_no_rows:
            return DUMMY_STEP, 0
        stats = self._scheduler.batch_stats(scheduled)
        self._planned = scheduled, stats.num_tokens
        return stats, self._ticks_beside(scheduled)

    def end_step(self, ticks: int) -> None:
        """End the step that was planned, which has taken so many ticks."""
        if self._planned is None:
            self._advance(1, ticks, 0)
        else:
            scheduled, num_tokens = self._planned
            self._end_step(scheduled, ticks, num_tokens)


class LockstepRanks(RankedReplica):
    """Ranks that share experts, so each of their steps takes as long as that of the slowest.

    rank_ticks: tells how long that of a rank would take.
    """

    def __init__(
        self, ranks: Sequence[LockstepRank], report_interval: float, rank_ticks: RankTicks
    ) -> None:
        super().__init__(ranks, report_interval)
        self._ranks, self._rank_ticks = ranks, rank_ticks

    def next_event(self) -> tuple[float, int]:
        """Return when steps end that decide nothing in any rank, or one begins that does."""
        now, arrival = self._ranks[0].now, self._next_arrival
        if arrival <= now:
            return now, BEGINS
        if self._is_idle:
            return (arrival, BEGINS) if arrival < inf else NOTHING
        num_steps, ticks = self._stretch(inf)
        return (self._ranks[0].after(ticks), ENDS) if num_steps else (now, BEGINS)

    def advance(self, until: float) -> None:
        """Take all steps that begin before `until`, if all that arrive before then were added."""
        while self._ranks[0].now < until:
            if self._is_idle and self._next_arrival >= until:
                return
            self._join()
            self._take_steps(*self._stretch(until))

    def go_on(self) -> None:
        """Let all take the steps up to the next event, or the one that is it."""
        self._hear_reports_before(self.next_event())
        has_news = self._join()
        self._take_steps(*((0, 0) if has_news else self._stretch(inf)))

    def _send(self, sequence: SimulatedSequence, place: int) -> None:
        if self._ranks[place].stands_at_arrivals:
            self.advance(sequence.arrival_time)
        super()._send(sequence, place)

    @property
    def _is_idle(self) -> bool:
        return all(rank.is_idle for rank in self._ranks)

    @property
    def _next_arrival(self) -> float:
        return min(rank.next_arrival for rank in self._ranks)

    def _join(self) -> bool:
        """Let those wait who have arrived, or who will next if all ranks are idle."""
        if self._is_idle and self._next_arrival > self._ranks[0].now:
            ticks = ticks_until(self._next_arrival)
            for rank in self._ranks:
                rank.jump(ticks)
        joined = [rank.join() for rank in self._ranks]
        return any(joined)

    def _stretch(self, until: float) -> tuple[int, int]:
        """Return how many steps decide nothing and begin before `until`, and their ticks."""
        num_steps = 0 if self._is_idle else MAX_STRETCH
        for rank in self._ranks:
            num_sure, time = rank.num_sure_steps()
            if not num_sure:
                return 0, 0
            num_steps, until = min(num_steps, num_sure), min(until, time)
        decoding = [rank.decoding for rank in self._ranks]
        num_tokens = sum(num_rows for num_rows, _, _ in decoding)
        ticks, rank_ticks, first = 0, self._rank_ticks, self._ranks[0]
        for number in range(num_steps):
            if number and first.after(ticks) >= until:
                return number, ticks
            ticks += max(
                rank_ticks(num_rows, num_rows, num_read + number * growth, 0, num_tokens)
                for num_rows, num_read, growth in decoding
            )
        return num_steps, ticks

    def _take_steps(self, num_steps: int, ticks: int) -> None:
        """Let all ranks take steps that decide nothing; if there are none, one that does."""
        if num_steps:
            for rank in self._ranks:
                rank.skip(num_steps, ticks)
            return
        begun = [rank.begin_step() for rank in self._ranks]
        if all(rank.has_no_rows for rank in self._ranks):
            return
        num_tokens = sum(stats.num_tokens for stats, _ in begun)
        longest = max(self._rank_ticks(*stats, num_tokens) + beside for stats, beside in begun)
        for rank in self._ranks:
            rank.end_step(longest)
