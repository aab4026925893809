"""A fleet: requests come to a router, it sends each to a replica, and hears what comes of it.

Rule: nothing happens before all that could bear on it has happened.  A replica stands still until
it is known what is sent to it up to then; the router is told of nothing that is still to come.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from batcher.planning.fleet_result import FleetResult, ReplicaResult, ServedColumns
from batcher.planning.ranks import RankedReplica, last_report_by, ranked_replica
from batcher.planning.replica import ARRIVES, NOTHING, Replica, ReplicaSettings
from batcher.planning.routers import ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence, Turns

WINDOW = 8192  # arrivals that are sent on at once to replicas that stand still meanwhile

OnEnded = Callable[[int], object]
"""Called with how many sequences have ended by now, now and then."""


class Fleet:
    """One run over `turns` on replicas behind a router.

    report_interval: seconds from each report of all replicas to the next, the first at 0; those of
    ranks to the balancer of their replica come as often.

    Raises:
        BatchdecodeError: the settings of a replica make no sense.
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
        self._replicas = [self._make_replica(settings) for settings in replicas]
        self._views = [view_of(index, each) for index, each in enumerate(replicas)]
        self._columns = ServedColumns()
        self._num_ended = 0
        self._refused = Counter[int]()
        self._siblings: tuple[int, ReplicaView | None] = (-1, None)
        self._events: list[tuple[tuple[float, int], int]] = []  # a heap, of which replica
        self._next_events = [NOTHING] * len(replicas)  # which of them are not outdated
        self._turns_ahead: list[tuple[float, int, int, SimulatedSequence]] = []  # a heap by arrival
        self._responses: list[tuple[float, int, ReplicaView, int]] = []  # a heap by their ends
        router.use(self._views)

    def _make_replica(
        self, settings: ReplicaSettings, results: Sequence[ReplicaResult] = ()
    ) -> Replica | RankedReplica:
        """Return a replica; results: of its engines before it, with which it goes on."""
        if settings.ranks > 1:
            return ranked_replica(self._turns, settings, self._interval, results)
        return Replica(self._turns, settings, *results)

    def run(self) -> FleetResult:
        """Return what the run comes to.

        Raises:
            BatchdecodeError: the router fails.
        """
        arrivals = iter(self._turns.arrivals())
        first = next(arrivals, None)
        if first is not None:
            if self._hears_ends or self._has_turns:
                self._run_by_events(first, arrivals)
            else:
                self._run_by_windows(first, arrivals)
        return self._result(None if first is None else first.arrival_time)

    def _result(self, first_arrival: float | None) -> FleetResult:
        return FleetResult(
            [engine.close() for replica in self._replicas for engine in replica.engines],
            self._columns.times,
            self._columns.priorities,
            first_arrival,
            self._refused,
        )

    # -- if nothing depends on ends: what comes between two reports is sent on all at once --------

    def _run_by_windows(
        self, sequence: SimulatedSequence | None, arrivals: Iterator[SimulatedSequence]
    ) -> None:
        replicas, is_told = self._replicas, self._router.hears_reports
        while sequence is not None:
            if sequence.arrival_time >= self._next_report:
                report = self._last_report_by(sequence.arrival_time)
                self._advance(report)
                self._hear_reports(report)
            for _ in range(WINDOW):
                view = self._choose(sequence)
                if view is None:
                    self._refuse(sequence)
                else:
                    if is_told:  # others know by themselves, or nothing
                        self._note_sent(sequence, view)
                    replicas[view.index].add(sequence)
                sequence = next(arrivals, None)
                if sequence is None or sequence.arrival_time >= self._next_report:
                    break
            else:
                self._advance(sequence.arrival_time)
        self._advance(inf)

    def _advance(self, until: float) -> None:
        """Let all replicas take the steps that begin before `until`, and take what has ended."""
        columns = self._columns
        for replica in self._replicas:
            replica.advance(until)
            for engine in replica.engines:
                for sequence in engine.ended:
                    engine.result.add(sequence, columns)
                self._num_ended += len(engine.ended)
                engine.ended.clear()
        self._on_ended(self._num_ended)

    # -- else from event to event ----------------------------------------------------------------

    def _run_by_events(
        self, ahead: SimulatedSequence | None, arrivals: Iterator[SimulatedSequence]
    ) -> None:
        """Go on with what is next: a replica, a report, what is due, a turn, or an arrival.

        ahead: the next to arrive.
        """
        events, turns = self._events, self._turns_ahead
        while True:
            is_turn = bool(turns) and (ahead is None or turns[0] < (*order_of(ahead), ahead))
            sequence = turns[0][-1] if is_turn else ahead
            until = inf if sequence is None else sequence.arrival_time
            due = self._next_due(until)
            is_due = due < inf
            until = min(until, due)
            sure = min(until, events[0][0][0]) if events and self._has_turns else until
            is_report = self._next_report <= sure < inf
            if is_report:  # a turn that arrives before the last one might have to know this one
                until = self._last_report_by(sure)
            if events and events[0][0] < (until, ARRIVES):
                self._go_on(*heappop(events))
                continue
            self._hear_ends(until)
            if is_report:
                self._hear_reports(until)
                continue
            if is_due:
                self._do_due(until)
                continue
            if sequence is None:
                return
            if is_turn:
                heappop(turns)
            else:
                ahead = next(arrivals, None)
            view = self._route(sequence)
            if view is not None:
                self._take_ended(view.index)
                self._plan(view.index)

    def _next_due(self, until: float) -> float:  # noqa: ARG002 - others need it
        """Return when something else is to be done; inf: nothing by `until`."""
        return inf

    def _do_due(self, now: float) -> None:
        """Do it, once all has happened that comes before."""

    def _plan(self, index: int) -> None:
        """Note the next event of a replica."""
        event = self._replicas[index].next_event()
        if event != self._next_events[index]:
            self._next_events[index] = event
            heappush(self._events, (event, index))

    def _go_on(self, event: tuple[float, int], index: int) -> None:
        """Let a replica go on to an event, unless that is another one by now."""
        if event == self._next_events[index]:
            self._replicas[index].go_on()
            self._take_ended(index)
            self._next_events[index] = NOTHING
            self._plan(index)

    def _take_ended(self, index: int) -> None:
        """Count the sequences that have ended on a replica, and go on with their sessions."""
        view = self._views[index]
        for engine in self._replicas[index].engines:
            if engine.ended:
                for sequence in engine.ended:
                    self._end(view, engine, sequence)
                engine.ended.clear()
                self._on_ended(self._num_ended)

    def _end(self, view: ReplicaView, engine: Replica, sequence: SimulatedSequence) -> None:
        """Take note of a sequence that has ended on an engine; the next turn goes on."""
        engine.take(sequence, self._columns)
        self._tell_end(view, sequence, engine.now)
        turn = self._next_turn(sequence, engine.now)
        while turn is not None and turn.has_failed:  # as the one before it has
            engine.take(turn, self._columns)
            turn = self._next_turn(turn, engine.now)
        if turn is not None:
            heappush(self._turns_ahead, (*order_of(turn), turn))

    def _tell_end(self, view: ReplicaView, sequence: SimulatedSequence, now: float) -> None:
        """Count a response that has ended at `now`, of which the router is going to hear."""
        self._num_ended += 1
        if self._hears_ends:
            heappush(self._responses, (now, self._num_ended, view, sequence.num_prompt_tokens))

    def _next_turn(self, sequence: SimulatedSequence, now: float) -> SimulatedSequence | None:
        """Return the turn that goes on at `now` after one that has ended or failed."""
        if sequence.job.session is None:
            return None
        self._turns.ended.append(sequence)
        return self._turns.go_on(now)

    # -- what the router is told -----------------------------------------------------------------

    def _route(self, sequence: SimulatedSequence) -> ReplicaView | None:
        """Send a sequence to a replica, and return that; None: it is refused."""
        view = self._choose(sequence)
        if view is None:
            self._refuse(sequence)
            return None
        self._note_sent(sequence, view)
        self._deliver(sequence, view)
        return view

    def _deliver(self, sequence: SimulatedSequence, view: ReplicaView) -> None:
        self._replicas[view.index].add(sequence)

    def _note_sent(self, sequence: SimulatedSequence, view: ReplicaView) -> None:
        """Tell the router where it has sent a sequence."""
        view.num_requests += 1
        view.num_tokens += sequence.num_prompt_tokens
        view.num_unreported += 1
        self._note(view)

    def _note(self, view: ReplicaView) -> None:
        """Let the router that sends to a replica know that what is known of it has changed."""
        self._router.note(view)

    def _choose(self, sequence: SimulatedSequence) -> ReplicaView | None:
        """Return where to send a sequence; the samples of a request go where its first went."""
        if not sequence.has_siblings:
            return self._router.choose(sequence, sequence.arrival_time)
        number, view = self._siblings
        if number != sequence.input_index:
            view = self._router.choose(sequence, sequence.arrival_time)
            self._siblings = sequence.input_index, view
        return view

    def _refuse(self, sequence: SimulatedSequence) -> None:
        """End a sequence, and the turns after it, since the router sends it nowhere."""
        sequence.fail()
        turn: SimulatedSequence | None = sequence
        while turn is not None:
            self._refused[turn.priority] += 1
            turn = self._next_turn(turn, sequence.arrival_time)

    def _hear_ends(self, now: float) -> None:
        """Tell the router of the responses that have ended by `now`."""
        responses = self._responses
        while responses and responses[0][0] <= now:
            time, _, view, num_tokens = heappop(responses)
            self._hear_end(time, view, num_tokens)

    def _hear_end(self, time: float, view: ReplicaView, num_tokens: int) -> None:  # noqa: ARG002 - others need it
        """Tell the router of a response that has ended at `time`, to a prompt of `num_tokens`."""
        view.num_requests -= 1
        view.num_tokens -= num_tokens
        if self._router.hears_ends:
            self._note(view)

    def _hear_reports(self, time: float) -> None:
        """Tell the router how all replicas stand at `time`, up to which they have gone on."""
        self._next_report = time + self._interval
        for view, replica in zip(self._views, self._replicas, strict=True):
            view.report, view.num_unreported = replica.report(time), 0
            self._note(view)

    def _last_report_by(self, time: float) -> float:
        """Return when the last reports come that come by `time`."""
        return last_report_by(time, self._interval, self._next_report)


def view_of(index: int, settings: ReplicaSettings) -> ReplicaView:
    """Return what a router knows of a replica that it has sent nothing yet."""
    num_blocks, ranks = settings.scheduling.kv_blocks, settings.ranks
    if num_blocks is not None:
        num_blocks *= ranks
    return ReplicaView(index, settings.group, settings.num_slots * ranks, num_blocks)


def order_of(sequence: SimulatedSequence) -> tuple[float, int, int]:
    """Return by what sequences that arrive are in order."""
    return sequence.arrival_time, sequence.input_index, sequence.index
