"""A fleet that is managed: what is too much is refused, replicas fail, and come and go.

Rule: the router learns of a failure only when it is noticed; what a failed replica had not ended is
lost there, and begins anew elsewhere.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import Any

from msgspec.structs import replace

from batcher.planning.admission import RouterQueue
from batcher.planning.autoscaling import FleetState
from batcher.planning.failures import Failures
from batcher.planning.fleet import Fleet, OnEnded, view_of
from batcher.planning.fleet_result import FleetHistory, FleetResult, Refusal
from batcher.planning.life import PAID, Life, ReplicaState
from batcher.planning.management import Management
from batcher.planning.phases import whole_of
from batcher.planning.pool import Pool
from batcher.planning.replica import NOTHING, Replica, ReplicaSettings
from batcher.planning.routers import ReplicaView, Router
from batcher.planning.scaled_group import ScaledGroup
from batcher.planning.simulated_sequence import SimulatedSequence, Turns

Action = Callable[[float], None]
"""What is done at a time, which it is given."""


class ManagedFleet(Fleet):
    """One run over `turns` on replicas that are managed; new ones are as others of their group.

    Raises:
        BatchdecodeError: the settings of a replica, or of the policy, make no sense.
    """

    def __init__(
        self,
        turns: Turns,
        replicas: Sequence[ReplicaSettings],
        router: Router,
        management: Management,
        report_interval: float,
        on_ended: OnEnded = lambda _: None,
        **more: Any,
    ) -> None:
        super().__init__(turns, replicas, router, report_interval, on_ended, **more)
        admission = management.admission
        self._hears_ends = True
        self._settings = list(replicas)
        self._lives = [Life(ReplicaState.SERVING, 0.0) for _ in replicas]
        self._flying: list[dict[SimulatedSequence, None]] = [{} for _ in replicas]
        max_in_flight = inf if admission is None else admission.max_in_flight
        self._pool = Pool(router, self._views, max_in_flight)
        self._pools = [self._pool]
        self._held = RouterQueue(
            0 if admission is None else admission.max_queue,
            None if admission is None else admission.max_wait,
        )
        self._timetable: list[tuple[float, int, Action]] = []  # a heap
        self._num_planned = 0
        self._failures = management.failures or Failures()
        self._uptimes = [self._failures.times_of(index) for index in range(len(replicas))]
        self._num_losses: Counter[tuple[int, int]] = Counter()  # by request and sample
        self._history = FleetHistory(self._lives)
        for failure in self._failures.planned:
            self._at(
                failure.at, partial(self._fail_as_planned, failure.replica, failure.back_after)
            )
        for index in range(len(replicas)):
            self._draw_failure(index, 0.0)
        self._served_by = array("i")  # which replica served each in the columns
        for autoscale in management.autoscale:
            group = ScaledGroup(autoscale, replicas, self._columns, self._served_by)
            self._at(autoscale.interval, partial(self._look, group))

    def _result(self, first_arrival: float | None) -> FleetResult:
        while self._held:
            self._refuse(self._held.pop())  # no replica will ever serve again
        refusals = self._history.refusals
        refusals["no_replica"] += self._refused.total() - refusals.total()  # all other reasons
        result = super()._result(first_arrival)
        begin = first_arrival or 0.0
        for replica, life in zip(self._replicas, self._lives, strict=True):
            if life.moves != [(0.0, ReplicaState.SERVING)]:
                for engine in replica.engines:
                    engine.result.paid_seconds = life.seconds(PAID, begin, begin + result.makespan)
        return replace(result, history=self._history)

    # -- the timetable ---------------------------------------------------------------------------

    def _at(self, time: float, action: Action) -> None:
        """Plan that something is done at a time."""
        self._num_planned += 1
        if time < inf:
            heappush(self._timetable, (time, self._num_planned, action))

    def _next_due(self, until: float) -> float:
        is_idle = until == inf and not any(view.num_requests for view in self._views)
        if is_idle and not (self._held and self._may_serve):
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
        self._send_held(now)

    # -- admission -------------------------------------------------------------------------------

    def _route(self, sequence: SimulatedSequence) -> ReplicaView | None:
        self._admit(sequence, sequence.arrival_time)
        return None  # which replica goes on is planned there

    def _admit(self, sequence: SimulatedSequence, now: float) -> None:
        """Send a sequence to a replica that has room, or let it wait, or refuse it."""
        if self._pool.open or self._goes_with_siblings(sequence):
            self._send(sequence, now)
            return
        refused = self._held.push(sequence, now)
        if refused is not None and self._pool.known:
            self._refuse_for("queue_full", refused)
        elif refused is not None:
            self._refuse(refused)

    def _refuse_for(self, reason: Refusal, sequence: SimulatedSequence) -> None:
        """Refuse a sequence, and note why; without a note it is that no replica serves."""
        num_before = self._refused.total()
        self._refuse(sequence)
        self._history.refusals[reason] += self._refused.total() - num_before

    @property
    def _may_serve(self) -> bool:
        """Whether a replica may come to which those that wait are sent."""
        return True

    def _send_held(self, now: float) -> None:
        """Send those that wait where there is room."""
        while self._held and self._pool.open:
            self._send(self._held.pop(), now)

    def _send(self, sequence: SimulatedSequence, now: float) -> None:
        sequence.send(now)
        view = self._choose(sequence)
        if view is None:
            self._refuse_for("router", sequence)
            return
        index = view.index
        self._flying[index][whole_of(sequence)] = None
        self._note_sent(sequence, view)
        self._pool_of(view).note_sent(view)
        if self._lives[index].state is ReplicaState.SERVING:
            self._deliver(sequence, view)
            self._take_ended(index)
            self._plan(index)

    def _goes_with_siblings(self, sequence: SimulatedSequence) -> bool:
        number, view = self._siblings
        return sequence.has_siblings and number == sequence.input_index and view in self._pool.known

    def _pool_of(self, view: ReplicaView) -> Pool:  # noqa: ARG002 - others have several
        """Return the replicas among which this one is chosen."""
        return self._pool

    def _withdraw(self, view: ReplicaView) -> None:
        """Let the router send nothing to a replica from now on, nor samples after others."""
        if self._pool_of(view).withdraw(view):
            self._siblings = -1, None

    # -- what the router hears -------------------------------------------------------------------

    def _end(self, view: ReplicaView, engine: Replica, sequence: SimulatedSequence) -> None:
        num_before = len(self._columns)
        super()._end(view, engine, sequence)
        self._served_by.extend([view.index] * (len(self._columns) - num_before))

    def _take_ended(self, index: int) -> None:
        flying = self._flying[index]
        for engine in self._replicas[index].engines:
            for sequence in engine.ended:
                del flying[whole_of(sequence)]
        super()._take_ended(index)

    def _hear_end(self, time: float, view: ReplicaView, num_tokens: int) -> None:
        super()._hear_end(time, view, num_tokens)
        self._pool_of(view).note_end(view)
        self._go_down_if_drained(view.index, time)

    def _hear_reports(self, time: float) -> None:
        self._next_report = time + self._interval
        for view in chain.from_iterable(pool.known for pool in self._pools):
            if self._lives[view.index].state is ReplicaState.SERVING:
                view.report = self._replicas[view.index].report(time)
                view.num_unreported = 0
                self._note(view)

    # -- failures --------------------------------------------------------------------------------

    def _draw_failure(self, index: int, now: float) -> None:
        """Plan when a replica fails that serves from now on."""
        num_starts = self._lives[index].num_starts
        time = now + next(self._uptimes[index])
        self._at(time, partial(self._fail_by_chance, index, num_starts))

    def _fail_by_chance(self, index: int, num_starts: int, now: float) -> None:
        if self._lives[index].num_starts == num_starts:  # or it has failed otherwise
            self._fail(index, self._failures.restart, now)

    def _fail_as_planned(self, index: int, back_after: float | None, now: float) -> None:
        if index < len(self._lives):
            self._fail(index, back_after, now)

    def _fail(self, index: int, back_after: float | None, now: float) -> None:
        """Let a replica fail between two steps; one that drains is not restarted."""
        life = self._lives[index]
        if life.state not in (ReplicaState.SERVING, ReplicaState.DRAINING):
            return
        self._replicas[index].advance(now)
        self._take_ended(index)
        self._next_events[index] = NOTHING
        results = [engine.close() for engine in self._replicas[index].engines]
        self._replicas[index] = self._make_replica(self._settings[index], results)
        self._history.num_failures += 1
        is_draining = life.state is ReplicaState.DRAINING
        life.move(ReplicaState.DOWN if is_draining else ReplicaState.FAILED, now)
        back_at = inf if is_draining or back_after is None else now + back_after
        noticed_at = self._failures.noticed_at(now)
        self._at(min(noticed_at, back_at), partial(self._notice, index, back_at))
        if back_at > noticed_at:
            self._at(back_at, partial(self._come_back, index))

    def _notice(self, index: int, back_at: float, now: float) -> None:
        """Send nothing more to a replica that has failed, and what is lost there to others."""
        view, life, lost = self._views[index], self._lives[index], list(self._flying[index])
        self._flying[index].clear()
        for sequence in lost:
            view.num_requests -= 1
            view.num_tokens -= sequence.num_prompt_tokens
        self._withdraw(view)
        if back_at <= now:
            self._come_back(index, now)
        elif back_at == inf and life.state is ReplicaState.FAILED:
            life.move(ReplicaState.DOWN, now)
        for sequence in lost:
            self._lose(sequence, now)

    def _lose(self, sequence: SimulatedSequence, now: float) -> None:
        """Let a sequence begin anew that is known to be lost, unless it was too often."""
        key = sequence.input_index, sequence.index
        self._num_losses[key] += 1
        self._history.num_lost += 1
        if self._num_losses[key] > self._failures.retries:
            self._refuse_for("retries", sequence)
        else:
            self._admit(sequence.anew(), now)

    def _come_back(self, index: int, now: float) -> None:
        """Let a replica that has failed serve again, with nothing in its KV cache."""
        if self._lives[index].state is ReplicaState.FAILED:
            self._serve(index, now)

    # -- autoscaling -----------------------------------------------------------------------------

    def _look(self, group: ScaledGroup, now: float) -> None:
        """Decide how many replicas of a group there are to be, which is carried out a bit later."""
        wish = group.autoscaler.decide(self._state(group, now))
        self._at(now + group.autoscale.delay, partial(self._scale_to, group, wish))
        self._at(now + group.autoscale.interval, partial(self._look, group))

    def _state(self, group: ScaledGroup, now: float) -> FleetState:
        """Return what replicas of a group report now, and what has ended since the last time."""
        counts = Counter(self._lives[index].state for index in group.members)
        serving = [
            self._replicas[index].report(now)
            for index in group.members
            if self._lives[index].state is ReplicaState.SERVING
        ]
        num_ended, num_good, num_refused = group.recent.take(now, self._refused.total())
        return FleetState(
            time=now,
            serving=counts[ReplicaState.SERVING],
            starting=counts[ReplicaState.STARTING] + counts[ReplicaState.FAILED],
            slots=group.settings.num_slots * group.settings.ranks,
            running=sum(report.running for report in serving),
            waiting=sum(report.waiting for report in serving) + group.num_told(len(self._held)),
            ended=num_ended,
            good=num_good,
            refused=num_refused,
        )

    def _scale_to(self, group: ScaledGroup, number: int, now: float) -> None:
        """Let replicas start or go: first those that do not serve, then those that came last."""
        by_state = defaultdict(list)
        for index in group.members:
            by_state[self._lives[index].state].append(index)
        there = (
            by_state[ReplicaState.SERVING]
            + by_state[ReplicaState.FAILED]
            + by_state[ReplicaState.STARTING]
        )
        for _ in range(number - len(there)):
            self._start(group, now)
        for index in there[number:]:
            self._retire(index, now)

    def _start(self, group: ScaledGroup, now: float) -> None:
        """Let a new replica of a group start."""
        settings, index = group.settings, len(self._views)
        group.members.append(index)
        self._views.append(view_of(index, settings))
        self._replicas.append(self._make_replica(settings))
        self._settings.append(settings)
        self._next_events.append(NOTHING)
        self._flying.append({})
        self._uptimes.append(self._failures.times_of(index))
        self._lives.append(Life(ReplicaState.STARTING, now))
        self._at(now + group.autoscale.startup, partial(self._come_up, index))

    def _come_up(self, index: int, now: float) -> None:
        if self._lives[index].state is ReplicaState.STARTING:
            self._serve(index, now)

    def _retire(self, index: int, now: float) -> None:
        """Let a replica go once it has ended what it was sent."""
        life = self._lives[index]
        if life.state is ReplicaState.SERVING:
            life.move(ReplicaState.DRAINING, now)
            self._withdraw(self._views[index])
            self._go_down_if_drained(index, now)
        else:
            life.move(ReplicaState.DOWN, now)

    def _go_down_if_drained(self, index: int, now: float) -> None:
        life = self._lives[index]
        if life.state is ReplicaState.DRAINING and not self._views[index].num_requests:
            life.move(ReplicaState.DOWN, now)

    def _serve(self, index: int, now: float) -> None:
        """Let the router send to a replica that has started."""
        self._lives[index].move(ReplicaState.SERVING, now)
        self._pool_of(self._views[index]).add(self._views[index])
        self._draw_failure(index, now)
