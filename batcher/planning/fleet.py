"""A fleet: a router sends each request to a replica.

Rule: events are handled in the order of their times.  A replica advances only once all requests
sent to it up to then are known, and the router sees nothing of the future.

One loop (`Fleet.run`) handles the next of: the event of a replica, a report, a planned action, the
next turn of a session, an arrival.  A fleet may be managed (admission, failures, autoscaling), or
have replicas that compute prompts and others that decode (see replicas).
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import floor, inf

from batcher.planning.management import (
    PAID,
    Autoscale,
    Autoscaler,
    Failures,
    FleetHistory,
    FleetState,
    Life,
    Management,
    PlannedFailure,
    Refusal,
    ReplicaState,
)
from batcher.planning.replicas import DecodeReplica, Phase, PrefillReplica, Transfer, phase_of
from batcher.planning.routers import ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.planning.simulator import (
    ARRIVES,
    NOTHING,
    PROMPT_TOKENS,
    FleetResult,
    OnEnded,
    Replica,
    ReplicaSettings,
    ServedColumns,
)
from batcher.planning.workload import Turns
from batcher.scheduling.queue import ARRIVAL_ORDER


class RouterQueue:
    """Requests that wait at the router: the best priority first, of equals the oldest.

    max_queue: most waiting requests.  max_wait: most seconds of waiting, None for no limit.
    """

    def __init__(self, max_queue: int = 0, max_wait: float | None = None) -> None:
        self._max_queue, self._max_wait = max_queue, inf if max_wait is None else max_wait
        self._keys: list[tuple[float, ...]] = []  # sorted; each ends with its limit
        self._waiting: dict[tuple[float, ...], SimulatedSequence] = {}
        self._limits: list[tuple[float, tuple[float, ...]]] = []  # a heap, some outdated

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def next_limit(self) -> float:
        return self._limits[0][0] if self._limits else inf

    def push(self, sequence: SimulatedSequence, now: float) -> SimulatedSequence | None:
        """Add a sequence; return the one that no longer fits, perhaps itself."""
        deadline = inf if sequence.deadline is None else sequence.deadline
        limit = min(now + self._max_wait, deadline)
        place = sequence.input_index, sequence.index
        key = (sequence.priority, sequence.first_arrival, *place, limit)
        insort(self._keys, key)
        self._waiting[key] = sequence
        if len(self._keys) > self._max_queue:
            return self._waiting.pop(self._keys.pop())
        if limit < inf:
            heappush(self._limits, (limit, key))
        return None

    def pop(self) -> SimulatedSequence:
        return self._waiting.pop(self._keys.pop(0))

    def pop_late(self, now: float) -> list[SimulatedSequence]:
        """Remove and return the sequences that have waited too long."""
        late = []
        while self._limits and self._limits[0][0] <= now:
            _, key = heappop(self._limits)
            if key in self._waiting:
                late.append(self._waiting.pop(key))
                self._keys.remove(key)
        return late


class Member:
    """A replica of a fleet.

    router: that sends to it.  replica: its engine, a new one after a failure.  next_event: others
    of it in the heap are outdated.  in_flight: sequences that a failure would lose, if managed.
    """

    def __init__(self, view: ReplicaView, router: Router, replica: Replica, life: Life) -> None:
        self.view, self.router, self.replica, self.life = view, router, replica, life
        self.next_event = NOTHING
        self.in_flight: dict[SimulatedSequence, None] = {}


class Fleet:
    """One run over `turns` on replicas behind a router.

    report_interval: seconds between the reports of all replicas, the first at 0.  management:
    requires equal replicas; a failed replica loses its sequences, which start again elsewhere once
    the failure is noticed.  decode_router, transfer: for decode replicas.
    """

    def __init__(
        self,
        turns: Turns,
        replicas: Sequence[ReplicaSettings],
        router: Router,
        report_interval: float,
        on_ended: OnEnded = lambda _: None,
        *,
        management: Management | None = None,
        decode_router: Router | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        self._turns, self._on_ended, self._interval = turns, on_ended, report_interval
        self._router, self._decode_router = router, decode_router or router
        self._transfer = transfer
        self._next_report = 0.0 if router.hears_reports else inf
        self._hears_ends = router.hears_ends or management is not None
        # Whether the end of a sequence may cause an arrival.
        self._has_turns = turns.has_sessions or transfer is not None
        self._settings, self._members = replicas[0], list[Member]()
        for settings in replicas:
            self._add_member(settings, Life(ReplicaState.SERVING, 0.0))
        self.columns = ServedColumns()
        self._num_ended = 0
        self._refused = Counter[int]()
        self._siblings: tuple[int, Member | None] = (-1, None)
        self._events: list[tuple[float, int, int]] = []  # a heap: time, kind, member
        self._turns_ahead: list[tuple[float, int, int, SimulatedSequence]] = []  # a heap by arrival
        # A heap by time: how many sequences of which member end then, and their prompt tokens.
        self._responses: list[tuple[float, int, Member, int, int]] = []
        views = [member.view for member in self._members]
        if decode_router is not None:
            decode_router.use([v for v in views if replicas[v.index].role == "decode"])
            views = [view for view in views if replicas[view.index].role != "decode"]
        router.use(views)
        self._is_managed = management is not None
        self._history = FleetHistory([member.life for member in self._members])
        # The replicas that the router believes to serve, and those of them below max_in_flight.
        self._known, self._open = [*views], views
        self._max_in_flight, self._held = inf, RouterQueue()
        self._timetable: list[tuple[float, int, Callable[[float], None]]] = []  # a heap
        self._num_planned = 0
        if management is None:
            return
        if (admission := management.admission) is not None:
            self._max_in_flight = admission.max_in_flight
            self._held = RouterQueue(admission.max_queue, admission.max_wait)
        self._failures = management.failures or Failures()
        self._uptimes = [self._failures.times_of(index) for index in range(len(replicas))]
        self._num_losses: Counter[tuple[int, int]] = Counter()  # by request and sample
        for failure in self._failures.planned:
            self._at(failure.at, partial(self._fail_as_planned, failure))
        for member in self._members:
            self._draw_failure(member, 0.0)
        if (autoscale := management.autoscale) is not None:
            # Ended and refused sequences at the last decision, and its time.
            self._num_seen = self._num_seen_refused = 0
            self._last_look = -inf
            self._at(autoscale.interval, partial(self._look, autoscale, Autoscaler(autoscale)))

    def _add_member(self, settings: ReplicaSettings, life: Life) -> Member:
        num_blocks, router = settings.scheduling.kv_blocks, self._router
        view = ReplicaView(len(self._members), settings.group, settings.num_slots, num_blocks)
        if settings.role == "decode" and self._transfer is not None:
            router = self._decode_router
            replica: Replica = DecodeReplica(self._turns, settings, self._transfer, self._release)
        else:
            kind = PrefillReplica if settings.role == "prefill" else Replica
            replica = kind(self._turns, settings)
        member = Member(view, router, replica, life)
        self._members.append(member)
        return member

    def run(self) -> FleetResult:
        arrivals, events, turns = iter(self._turns.arrivals()), self._events, self._turns_ahead
        members, responses = self._members, self._responses
        ahead = next(arrivals, None)
        first_arrival = None if ahead is None else ahead.arrival_time
        while True:
            is_turn = bool(turns) and (ahead is None or turns[0] < (*ARRIVAL_ORDER(ahead), ahead))
            sequence = turns[0][-1] if is_turn else ahead
            until = inf if sequence is None else sequence.arrival_time
            due = self._next_due(until) if self._is_managed else inf
            until = min(until, due)
            is_report = False
            if self._next_report <= until:
                sure = min(until, events[0][0]) if events and self._has_turns else until
                is_report = self._next_report <= sure < inf
                if is_report:  # a turn may arrive before the last report, and depend on this one
                    last = max(self._next_report, floor(sure / self._interval) * self._interval)
                    until = min(last, sure)  # a product is rounded
            if events and events[0] < (until, ARRIVES):
                time, kind, index = heappop(events)
                member = members[index]
                if member.next_event == (time, kind):
                    member.replica.step_on()
                    if member.replica.ended:
                        self._take_ended(member)
                    member.next_event = NOTHING
                    self._plan(member)
                continue
            while responses and responses[0][0] <= until:
                time, _, member, num_ended, num_tokens = heappop(responses)
                self._hear_ends(member, time, num_ended, num_tokens)
            if is_report:
                self._next_report = until + self._interval
                for view in self._known if self._is_managed else [m.view for m in self._members]:
                    member = self._members[view.index]
                    if member.life.state is ReplicaState.SERVING:
                        view.report, view.num_unreported = member.replica.report(until), 0
                        member.router.note(view)
            elif due < inf:
                self._do_due(until)
            elif sequence is None:
                return self._result(first_arrival)
            else:
                if is_turn:
                    heappop(turns)
                if self._is_managed:
                    self._admit(sequence, sequence.arrival_time)
                else:
                    self._send(sequence)
                if not is_turn:
                    ahead = next(arrivals, None)

    def _result(self, first_arrival: float | None) -> FleetResult:
        while self._held:
            self._refuse(self._held.pop(), "no_replica")  # no replica will serve again
        replicas = [member.replica.close() for member in self._members]
        history = self._history if self._is_managed else None
        result = FleetResult(
            replicas,
            self.columns.since(0),
            first_arrival,
            self._refused,
            longest_request=self._turns.longest_request,
            history=history,
        )
        begin = first_arrival or 0.0
        for replica, member in zip(replicas, self._members, strict=True):
            if member.life.moves != [(0.0, ReplicaState.SERVING)]:
                end = begin + result.makespan
                replica.paid_seconds = member.life.seconds(PAID, begin, end)
        return result

    def _plan(self, member: Member) -> None:
        event = member.replica.next_event()
        if event != member.next_event:
            member.next_event = event
            heappush(self._events, (*event, member.view.index))

    # -- sending, and ends -----------------------------------------------------------------------

    def _send(self, sequence: SimulatedSequence) -> None:
        has_siblings, is_phase = sequence.has_siblings, isinstance(sequence, Phase)
        number, to = self._siblings
        if is_phase or not has_siblings or number != sequence.input_index:
            router = self._decode_router if is_phase else self._router
            view = router.choose(sequence, sequence.arrival_time)
            to = None if view is None else self._members[view.index]
            if has_siblings:
                self._siblings = sequence.input_index, to
        if to is None:
            self._refuse(sequence, "router")
            return
        self._note_sent(sequence, to)
        if self._is_managed:
            to.in_flight[sequence] = None
            if to.view.num_requests == self._max_in_flight:
                self._offer()
            if to.life.state is not ReplicaState.SERVING:
                return
        if self._transfer is not None and not is_phase:
            sequence = phase_of(sequence, max_tokens=min(sequence.max_tokens, PROMPT_TOKENS))
        is_news = to.replica.add(sequence)
        if to.replica.ended:
            self._take_ended(to)
        if is_news:
            self._plan(to)

    def _note_sent(self, sequence: SimulatedSequence, member: Member) -> None:
        view = member.view
        view.num_requests += 1
        view.num_tokens += sequence.num_prompt_tokens
        view.num_unreported += 1
        member.router.note(view)

    def _take_ended(self, member: Member) -> None:
        """Count the sequences that ended at a replica, and add their next turns or phases."""
        replica, num_tokens = member.replica, 0
        for one in replica.ended:
            sequence, is_over = one, True
            if self._is_managed:
                del member.in_flight[one]
            elif isinstance(one, Phase):
                sequence = one.whole
                for name in (
                    *("has_failed", "num_preemptions", "num_cached_at_first"),
                    *("admitted_ticks", "first_token_ticks", "end_ticks"),
                ):
                    setattr(sequence, name, getattr(one, name))
                is_over = one.source is not None or sequence.num_output_tokens <= PROMPT_TOKENS
            replica.result.count(sequence, self.columns, replica.role)
            num_tokens += sequence.num_prompt_tokens
            if not self._has_turns:
                continue
            if not (is_over or sequence.has_failed):
                after: SimulatedSequence | None = phase_of(
                    sequence,
                    member.view.index,
                    arrival_time=replica.now,
                    num_tokens=sequence.num_prompt_tokens + PROMPT_TOKENS,
                    has_siblings=False,
                )
            else:
                after = self._turns.next_turn(sequence, replica.now)
                while after is not None and after.has_failed:
                    replica.result.count(after, self.columns, replica.role)
                    after = self._turns.next_turn(after, replica.now)
            if after is not None:
                heappush(self._turns_ahead, (*ARRIVAL_ORDER(after), after))
        num_ended = len(replica.ended)
        if num_ended:
            self._num_ended += num_ended
            if self._hears_ends:
                entry = replica.now, self._num_ended, member, num_ended, num_tokens
                heappush(self._responses, entry)
            replica.ended.clear()
            self._on_ended(self._num_ended)

    def _hear_ends(self, member: Member, time: float, num_ended: int, num_tokens: int) -> None:
        view = member.view
        was_full = view.num_requests >= self._max_in_flight
        view.num_requests -= num_ended
        view.num_tokens -= num_tokens
        if member.router.hears_ends:
            member.router.note(view)
        if self._is_managed:
            if was_full and view.num_requests < self._max_in_flight:
                self._offer()
            self._go_down_if_drained(member, time)

    def _refuse(self, sequence: SimulatedSequence, reason: Refusal) -> None:
        """Refuse a sequence and the turns behind it."""
        if isinstance(sequence, Phase):
            self._release(sequence, sequence.arrival_time)
            sequence = sequence.whole
        sequence.has_failed = True
        turn: SimulatedSequence | None = sequence
        while turn is not None:
            self._refused[turn.priority] += 1
            self._history.refusals[reason] += 1
            turn = self._turns.next_turn(turn, sequence.arrival_time)

    def _release(self, sequence: Phase, time: float) -> None:
        """Free the blocks of a transferred or failed prompt where it was computed."""
        source = None if sequence.source is None else self._members[sequence.source]
        if source is not None and isinstance(source.replica, PrefillReplica):
            source.replica.release(sequence.whole, time)
            self._plan(source)

    # -- the timetable of a managed fleet --------------------------------------------------------

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._num_planned += 1
        if time < inf:
            heappush(self._timetable, (time, self._num_planned, action))

    def _next_due(self, until: float) -> float:
        """Return the time of the next planned action up to `until`, or inf."""
        if until == inf and not self._held and not any(m.view.num_requests for m in self._members):
            return inf
        due = self._timetable[0][0] if self._timetable else inf
        if self._held:
            due = min(due, self._held.next_limit)
        if self._responses and (self._held or until == inf):  # these may be the last
            due = min(due, self._responses[0][0])
        return due if due <= until else inf

    def _do_due(self, now: float) -> None:
        for sequence in self._held.pop_late(now):
            is_due = sequence.deadline is not None and sequence.deadline <= now
            self._refuse(sequence, "deadline" if is_due else "max_wait")
        while self._timetable and self._timetable[0][0] <= now:
            _, _, action = heappop(self._timetable)
            action(now)
        while self._held and self._open:
            sequence = self._held.pop()
            sequence.send(now)
            self._send(sequence)

    # -- admission -------------------------------------------------------------------------------

    def _admit(self, sequence: SimulatedSequence, now: float) -> None:
        number, to = self._siblings
        is_sibling = sequence.has_siblings and number == sequence.input_index
        if self._open or (is_sibling and to is not None and to.view in self._known):
            sequence.send(now)
            self._send(sequence)
            return
        refused = self._held.push(sequence, now)
        if refused is not None:
            self._refuse(refused, "queue_full" if self._known else "no_replica")

    def _offer(self) -> None:
        self._open = [view for view in self._known if view.num_requests < self._max_in_flight]
        if self._open:
            self._router.use(self._open)

    def _withdraw(self, view: ReplicaView) -> None:
        """Send nothing more to a replica, not even further samples of a request."""
        if view in self._known:
            self._known.remove(view)
            self._offer()
            self._siblings = -1, None

    # -- failures --------------------------------------------------------------------------------

    def _draw_failure(self, member: Member, now: float) -> None:
        engine = member.replica

        def fail(time: float) -> None:
            if member.replica is engine:  # else it has failed already
                self._fail(member, self._failures.restart, time)

        self._at(now + next(self._uptimes[member.view.index]), fail)

    def _fail_as_planned(self, failure: PlannedFailure, now: float) -> None:
        if failure.replica < len(self._members):
            self._fail(self._members[failure.replica], failure.back_after, now)

    def _fail(self, member: Member, back_after: float | None, now: float) -> None:
        """Make a replica fail between two steps; a draining one is not restarted."""
        life = member.life
        if life.state not in (ReplicaState.SERVING, ReplicaState.DRAINING):
            return
        member.replica.advance(now)
        self._take_ended(member)
        member.next_event = NOTHING
        member.replica = Replica(self._turns, self._settings, member.replica.close())
        self._history.num_failures += 1
        is_draining = life.state is ReplicaState.DRAINING
        life.move(ReplicaState.DOWN if is_draining else ReplicaState.FAILED, now)
        back_at = inf if is_draining or back_after is None else now + back_after
        noticed_at = self._failures.noticed_at(now)
        self._at(min(noticed_at, back_at), partial(self._notice, member, back_at))
        if back_at > noticed_at:
            self._at(back_at, partial(self._serve, member, ReplicaState.FAILED))

    def _notice(self, member: Member, back_at: float, now: float) -> None:
        """Stop sending to a failed replica, and send its lost sequences to others."""
        view, lost = member.view, list(member.in_flight)
        member.in_flight.clear()
        for sequence in lost:
            view.num_requests -= 1
            view.num_tokens -= sequence.num_prompt_tokens
        self._withdraw(view)
        if back_at <= now:
            self._serve(member, ReplicaState.FAILED, now)
        elif back_at == inf and member.life.state is ReplicaState.FAILED:
            member.life.move(ReplicaState.DOWN, now)
        for sequence in lost:
            key = sequence.input_index, sequence.index
            self._num_losses[key] += 1
            self._history.num_lost += 1
            if self._num_losses[key] > self._failures.retries:
                self._refuse(sequence, "retries")
            else:
                self._admit(sequence.anew(), now)

    def _serve(self, member: Member, before: ReplicaState, now: float) -> None:
        """Make a replica serve that is still in the state `before`; its KV cache is empty."""
        if member.life.state is before:
            member.life.move(ReplicaState.SERVING, now)
            self._known.append(member.view)
            self._offer()
            self._draw_failure(member, now)

    # -- autoscaling -----------------------------------------------------------------------------

    def _look(self, autoscale: Autoscale, autoscaler: Autoscaler, now: float) -> None:
        """Decide the number of replicas, which changes after the delay."""
        by_state = Counter(member.life.state for member in self._members)
        serving = [
            member.replica.report(now)
            for member in self._members
            if member.life.state is ReplicaState.SERVING
        ]
        times = self.columns.since(self._num_seen)
        is_later = times.end > now
        self._num_seen += int(is_later.argmax()) if is_later.any() else len(is_later)
        recent = times.where(~is_later & (times.end > self._last_look))
        num_refused = self._refused.total() - self._num_seen_refused
        self._num_seen_refused, self._last_look = self._refused.total(), now
        wanted = autoscaler.decide(
            FleetState(
                time=now,
                serving=by_state[ReplicaState.SERVING],
                starting=by_state[ReplicaState.STARTING] + by_state[ReplicaState.FAILED],
                slots=self._settings.num_slots,
                running=sum(report.running for report in serving),
                waiting=sum(report.waiting for report in serving) + len(self._held),
                ended=len(recent.end),
                good=recent.goodput(autoscale.limits, 0, recent.makespan).good,
                refused=num_refused,
            )
        )
        self._at(now + autoscale.delay, partial(self._scale_to, autoscale, wanted))
        self._at(now + autoscale.interval, partial(self._look, autoscale, autoscaler))

    def _scale_to(self, autoscale: Autoscale, number: int, now: float) -> None:
        """Start replicas, or stop some: first those that do not serve, then the newest."""
        there = [
            member
            for state in (ReplicaState.SERVING, ReplicaState.FAILED, ReplicaState.STARTING)
            for member in self._members
            if member.life.state is state
        ]
        for _ in range(number - len(there)):
            member = self._add_member(self._settings, Life(ReplicaState.STARTING, now))
            self._history.lives.append(member.life)
            self._uptimes.append(self._failures.times_of(member.view.index))
            up_at = now + autoscale.startup
            self._at(up_at, partial(self._serve, member, ReplicaState.STARTING))
        for member in there[number:]:
            if member.life.state is ReplicaState.SERVING:  # it finishes its sequences
                member.life.move(ReplicaState.DRAINING, now)
                self._withdraw(member.view)
                self._go_down_if_drained(member, now)
            else:
                member.life.move(ReplicaState.DOWN, now)

    def _go_down_if_drained(self, member: Member, now: float) -> None:
        if member.life.state is ReplicaState.DRAINING and not member.view.num_requests:
            member.life.move(ReplicaState.DOWN, now)
