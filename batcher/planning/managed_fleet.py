"""A fleet that is managed: what is too much is refused, replicas fail, and come and go.

Rule: the router learns of a failure only when it is noticed; what a failed replica had not ended is
lost there, and begins anew elsewhere.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf

from msgspec.structs import replace

from batcher.planning.fleet import (
    NOTHING,
    PAID,
    Fleet,
    FleetHistory,
    FleetResult,
    Life,
    Member,
    Refusal,
    Replica,
    ReplicaState,
    goodput_of,
)
from batcher.planning.fleet_file import (
    Autoscale,
    Autoscaler,
    Failures,
    FleetState,
    Management,
    PlannedFailure,
)
from batcher.planning.routers import ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import OnEnded, ReplicaSettings


class RouterQueue:
    """Requests that wait at the router: the best priority first, of equals the oldest.

    max_queue: how many may wait.  max_wait: for how many seconds; None: for ever.
    """

    def __init__(self, max_queue: int, max_wait: float | None) -> None:
        self._max_queue, self._max_wait = max_queue, inf if max_wait is None else max_wait
        self._keys: list[tuple[float, ...]] = []  # sorted
        self._waiting: dict[tuple[float, ...], tuple[SimulatedSequence, float]] = {}  # with limits
        self._limits: list[tuple[float, tuple[float, ...]]] = []  # a heap, some wait no longer

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def next_limit(self) -> float:
        return self._limits[0][0] if self._limits else inf

    def push(self, sequence: SimulatedSequence, now: float) -> SimulatedSequence | None:
        """Take in a sequence; return the one that does not fit any more, perhaps itself."""
        key = sequence.priority, sequence.first_arrival, sequence.input_index, sequence.index
        deadline = inf if sequence.deadline is None else sequence.deadline
        limit = min(now + self._max_wait, deadline)
        insort(self._keys, key)
        self._waiting[key] = sequence, limit
        if len(self._keys) > self._max_queue:
            return self._waiting.pop(self._keys.pop())[0]
        if limit < inf:
            heappush(self._limits, (limit, key))
        return None

    def pop(self) -> SimulatedSequence:
        return self._waiting.pop(self._keys.pop(0))[0]

    def pop_late(self, now: float) -> list[SimulatedSequence]:
        """Remove and return those that have waited too long."""
        late = []
        while self._limits and self._limits[0][0] <= now:
            limit, key = heappop(self._limits)
            sequence, still = self._waiting.get(key, (None, inf))
            if sequence is not None and still == limit:
                del self._waiting[key]
                self._keys.remove(key)
                late.append(sequence)
        return late


class ManagedFleet(Fleet):
    """One run over `turns` on replicas that are alike, and managed; new ones are as the others."""

    def __init__(
        self,
        turns: Turns,
        replicas: Sequence[ReplicaSettings],
        router: Router,
        management: Management,
        report_interval: float,
        on_ended: OnEnded = lambda _: None,
    ) -> None:
        super().__init__(turns, replicas, router, report_interval, on_ended)
        admission = management.admission
        self._hears_ends = True
        self._settings = replicas[0]
        self._history = FleetHistory([member.life for member in self._members])
        # The replicas that the router takes for serving, and of these those that have room: that
        # were sent fewer requests than they may have in flight.
        self._known = [member.view for member in self._members]
        self._max_in_flight = inf if admission is None else admission.max_in_flight
        self._offer()
        self._held = RouterQueue(
            0 if admission is None else admission.max_queue,
            None if admission is None else admission.max_wait,
        )
        self._timetable: list[tuple[float, int, Callable[[float], None]]] = []  # a heap
        self._num_planned = 0
        self._failures = management.failures or Failures()
        self._uptimes = [self._failures.times_of(index) for index in range(len(replicas))]
        self._num_losses: Counter[tuple[int, int]] = Counter()  # by request and sample
        for failure in self._failures.planned:
            self._at(failure.at, partial(self._fail_as_planned, failure))
        for member in self._members:
            self._draw_failure(member, 0.0)
        autoscale = management.autoscale
        if autoscale is not None:
            # What has ended or was refused by the last decision, and when that was.
            self._num_seen = self._num_seen_refused = 0
            self._last_look = -inf
            self._at(autoscale.interval, partial(self._look, autoscale, Autoscaler(autoscale)))

    def _result(self, first_arrival: float | None) -> FleetResult:
        while self._held:
            self._refuse(self._held.pop())  # no replica will ever serve again
        refusals = self._history.refusals
        refusals["no_replica"] += self._refused.total() - refusals.total()  # all other reasons
        result = super()._result(first_arrival)
        begin = first_arrival or 0.0
        for replica, life in zip(result.replicas, self._history.lives, strict=True):
            if life.moves != [(0.0, ReplicaState.SERVING)]:
                replica.paid_seconds = life.seconds(PAID, begin, begin + result.makespan)
        return replace(result, history=self._history)

    # -- the timetable ---------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._num_planned += 1
        if time < inf:
            heappush(self._timetable, (time, self._num_planned, action))

    def _next_due(self, until: float) -> float:
        if until == inf and not self._held and not any(m.view.num_requests for m in self._members):
            return inf
        due = self._timetable[0][0] if self._timetable else inf
        if self._held:
            due = min(due, self._held.next_limit)
        if self._responses and (self._held or until == inf):  # they may be the last to end
            due = min(due, self._responses[0][0])
        return due if due <= until else inf

    def _do_due(self, now: float) -> None:
        for sequence in self._held.pop_late(now):
            is_due = sequence.deadline is not None and sequence.deadline <= now
            self._refuse_for("deadline" if is_due else "max_wait", sequence)
        while self._timetable and self._timetable[0][0] <= now:
            _, _, action = heappop(self._timetable)
            action(now)
        while self._held and self._open:
            self._send(self._held.pop(), now)

    # -- admission -------------------------------------------------------------------------------

    def _route(self, sequence: SimulatedSequence) -> None:
        self._admit(sequence, sequence.arrival_time)

    def _admit(self, sequence: SimulatedSequence, now: float) -> None:
        number, view = self._siblings
        is_sibling = sequence.has_siblings and number == sequence.input_index
        if self._open or (is_sibling and view in self._known):
            self._send(sequence, now)
            return
        refused = self._held.push(sequence, now)
        if refused is not None and self._known:
            self._refuse_for("queue_full", refused)
        elif refused is not None:
            self._refuse(refused)

    def _refuse_for(self, reason: Refusal, sequence: SimulatedSequence) -> None:
        """Refuse a sequence for a reason; without a note the reason is that no replica serves."""
        num_before = self._refused.total()
        self._refuse(sequence)
        self._history.refusals[reason] += self._refused.total() - num_before

    def _send(self, sequence: SimulatedSequence, now: float) -> None:
        sequence.send(now)
        view = self._choose(sequence)
        if view is None:
            self._refuse_for("router", sequence)
            return
        member = self._members[view.index]
        member.in_flight[sequence] = None
        self._note_sent(sequence, view)
        if view.num_requests == self._max_in_flight:
            self._offer()
        if member.life.state is ReplicaState.SERVING:
            self._deliver(sequence, view)

    def _offer(self) -> None:
        self._open = [view for view in self._known if view.num_requests < self._max_in_flight]
        if self._open:
            self._router.use(self._open)

    def _withdraw(self, view: ReplicaView) -> None:
        """Send nothing to a replica from now on, nor samples after others."""
        if view in self._known:
            self._known.remove(view)
            self._offer()
            self._siblings = -1, None

    # -- what the router hears -------------------------------------------------------------------

    def _take_ended(self, member: Member) -> None:
        for sequence in member.replica.ended:
            del member.in_flight[sequence]
        super()._take_ended(member)

    def _hear_end(self, time: float, view: ReplicaView, num_tokens: int) -> None:
        super()._hear_end(time, view, num_tokens)
        if view.num_requests == self._max_in_flight - 1:
            self._offer()
        self._go_down_if_drained(self._members[view.index], time)

    def _hear_reports(self, time: float) -> None:
        for view in self._known:
            member = self._members[view.index]
            if member.life.state is ReplicaState.SERVING:
                view.report, view.num_unreported = member.replica.report(time), 0
                self._note(view)

    # -- failures --------------------------------------------------------------------------------

    def _draw_failure(self, member: Member, now: float) -> None:
        num_starts = member.life.num_starts

        def fail(time: float) -> None:
            if member.life.num_starts == num_starts:  # or it has failed otherwise
                self._fail(member, self._failures.restart, time)

        self._at(now + next(self._uptimes[member.view.index]), fail)

    def _fail_as_planned(self, failure: PlannedFailure, now: float) -> None:
        if failure.replica < len(self._members):
            self._fail(self._members[failure.replica], failure.back_after, now)

    def _fail(self, member: Member, back_after: float | None, now: float) -> None:
        """Let a replica fail between two steps; one that drains is not restarted."""
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
        """Send nothing more to a failed replica, and what is lost there to others."""
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
                self._refuse_for("retries", sequence)
            else:
                self._admit(sequence.anew(), now)

    def _serve(self, member: Member, before: ReplicaState, now: float) -> None:
        """Send to a replica again that is still as `before`; its KV cache is empty."""
        if member.life.state is before:
            member.life.move(ReplicaState.SERVING, now)
            self._known.append(member.view)
            self._offer()
            self._draw_failure(member, now)

    # -- autoscaling -----------------------------------------------------------------------------

    def _look(self, autoscale: Autoscale, autoscaler: Autoscaler, now: float) -> None:
        """Decide how many replicas there are to be; that is carried out after the delay."""
        by_state = Counter(member.life.state for member in self._members)
        serving = [
            member.replica.report(now)
            for member in self._members
            if member.life.state is ReplicaState.SERVING
        ]
        times = self._columns.since(self._num_seen)
        is_later = times.end > now
        self._num_seen += int(is_later.argmax()) if is_later.any() else len(is_later)
        recent = times.where(~is_later & (times.end > self._last_look))
        num_refused = self._refused.total() - self._num_seen_refused
        self._num_seen_refused, self._last_look = self._refused.total(), now
        wish = autoscaler.decide(
            FleetState(
                time=now,
                serving=by_state[ReplicaState.SERVING],
                starting=by_state[ReplicaState.STARTING] + by_state[ReplicaState.FAILED],
                slots=self._settings.num_slots,
                running=sum(report.running for report in serving),
                waiting=sum(report.waiting for report in serving) + len(self._held),
                ended=len(recent.end),
                good=goodput_of(autoscale.limits, recent, 0, recent.makespan).good,
                refused=num_refused,
            )
        )
        self._at(now + autoscale.delay, partial(self._scale_to, autoscale, wish))
        self._at(now + autoscale.interval, partial(self._look, autoscale, autoscaler))

    def _scale_to(self, autoscale: Autoscale, number: int, now: float) -> None:
        """Start or stop replicas: first those that do not serve, then those that came last."""
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
            if member.life.state is ReplicaState.SERVING:  # it ends what it was sent
                member.life.move(ReplicaState.DRAINING, now)
                self._withdraw(member.view)
                self._go_down_if_drained(member, now)
            else:
                member.life.move(ReplicaState.DOWN, now)

    def _go_down_if_drained(self, member: Member, now: float) -> None:
        if member.life.state is ReplicaState.DRAINING and not member.view.num_requests:
            member.life.move(ReplicaState.DOWN, now)
