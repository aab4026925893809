"""Managed fleets: every request comes to one end, whatever fails, comes, goes or is full."""

from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jobs import engine_of, poisson, workload_of_jobs
from msgspec.structs import replace
from simulated_workloads import STEP_TIMES, random_requests, random_settings

from batcher.errors import BatchdecodeError, InvariantError
from batcher.models.simulated import SimulatedModel
from batcher.planning.fleet import Fleet, RouterQueue
from batcher.planning.management import (
    MOVES,
    PAID,
    AdmissionControl,
    Autoscale,
    Autoscaler,
    Failures,
    FleetState,
    Life,
    Management,
    PlannedFailure,
    ReplicaState,
    by_attainment,
    proportional,
    timeline_of,
)
from batcher.planning.routers import ROUTERS, OwnRouter, router_of
from batcher.planning.simulator import simulate
from batcher.planning.workload import Turns, Workload, workload_of
from batcher.scheduling.sequence import NEVER
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import TICKS_PER_SECOND, ConstantStepTime

SEEDS = st.integers(0, 2**32)


class Observed(Fleet):
    """A managed fleet that keeps what was sent where and when, and what became of it."""

    def __init__(self, *args, **more):
        self.sent, self.ended, self.refused = [], [], []
        super().__init__(*args, **more)

    def _note_sent(self, sequence, member):
        is_up, view = member.life.state is ReplicaState.SERVING, member.view
        self.sent.append((sequence, view.index, sequence.arrival_time, is_up))
        super()._note_sent(sequence, member)
        assert view.num_requests <= self._max_in_flight or sequence.has_siblings

    def _take_ended(self, member):
        self.ended += [(key_of(one), one.end_ticks) for one in member.replica.ended]
        super()._take_ended(member)

    def _refuse(self, sequence, reason):
        self.refused.append(key_of(sequence))
        super()._refuse(sequence, reason)

    @property
    def lives(self):
        return [member.life for member in self._members]


def key_of(sequence):
    return sequence.input_index, sequence.index


def random_management(random, num_replicas):
    admission = AdmissionControl(
        max_in_flight=random.randint(1, 4),
        max_queue=random.choice([0, 2, 50]),
        max_wait=random.choice([None, 0.5, 20.0]),
    )
    failures = Failures(
        mtbf=random.choice([None, 3.0, 40.0]),
        restart=random.choice([0.5, 7.0]),
        seed=random.randint(0, 9),
        planned=tuple(
            PlannedFailure(
                replica=random.randrange(num_replicas + 1),
                at=random.choice([0.0, 1.25, 10.0, 33.3]),
                back_after=random.choice([None, 2.0, 30.0]),
            )
            for _ in range(random.randint(0, 2))
        ),
        health_check=random.choice([0.3, 5.0]),
        retries=random.choice([0, 1, 10]),
    )
    autoscale = Autoscale(
        policy=random.choice(["target-utilisation", "queue", "slo"]),
        target=0.5,
        slo="e2e=20",
        min=random.randint(1, num_replicas),
        max=random.randint(num_replicas, 5),
        interval=random.choice([0.7, 5.0]),
        delay=random.choice([0.0, 1.0]),
        startup=random.choice([0.0, 3.0]),
        cooldown=random.choice([0.0, 10.0]),
    )
    return Management(
        admission=random.choice([None, admission]),
        failures=random.choice([None, failures]),
        autoscale=random.choice([None, autoscale]),
    )


def random_fleet(random, name, requests):
    num_slots, scheduling = random_settings(random)
    replica = engine_of(num_slots, scheduling, random.choice(STEP_TIMES))
    workload = workload_of(requests, SimulatedModel())
    num_replicas = random.randint(1, 3)
    management = random_management(random, num_replicas)
    settings = [replica] * num_replicas
    interval = random.choice([0.7, 30.0])
    fleet = Observed(Turns(workload), settings, router_of(name), interval, management=management)
    return fleet, workload, replica


@examples(300)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_every_sequence_comes_to_one_end_and_goes_where_a_replica_may_serve(seed, name):
    random = Random(seed)
    fleet, workload, _ = random_fleet(random, name, random_requests(random, may_stop=False))
    result = fleet.run()
    ends = [key for key, _ in fleet.ended] + fleet.refused
    assert len(ends) == len(set(ends))
    num_empty = sum(not job.max_tokens for job in workload.jobs)
    num_served = len(result.times.arrival)
    assert num_served == sum(replica.num_served for replica in result.replicas)
    num_ended = num_served + result.failed.total()
    assert len(workload.jobs) - num_empty <= num_ended <= len(workload.jobs)
    assert (result.times.admitted >= result.times.arrival).all()
    refusals = result.history.refusals
    assert refusals.total() == result.refused.total()
    assert all(count > 0 for count in refusals.values())
    for _, index, time, is_up in fleet.sent:  # nowhere that is known not to serve
        state = [state for since, state in fleet.lives[index].moves if since <= time]
        assert is_up or state[-1] in (ReplicaState.FAILED, ReplicaState.DOWN)
        assert ReplicaState.SERVING in state


@examples(300)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_between_two_failures_a_replica_is_the_engine_with_what_it_was_sent(seed, name):
    random = Random(seed)
    requests = [one for one in random_requests(random, may_stop=False) if one.session is None]
    fleet, workload, settings = random_fleet(random, name, requests)
    fleet.run()
    ended = dict(fleet.ended)
    jobs = {(job.input_index, job.index): job for job in workload.jobs}
    last = {key_of(one): number for number, (one, *_) in enumerate(fleet.sent)}
    for index, life in enumerate(fleet.lives):
        moves = [*life.moves, (float("inf"), None)]
        for (begin, state), (end, after) in pairwise(moves):
            if state is not ReplicaState.SERVING:
                continue
            sent = [
                (key_of(one), time, number)
                for number, (one, to, time, is_up) in enumerate(fleet.sent)
                if to == index
                and is_up
                and begin <= time
                and (time < end or after is not ReplicaState.FAILED)
            ]
            mine = [replace(jobs[key], arrival_time=time) for key, time, _ in sent]
            alone = simulate(Workload(mine, workload.context), settings)
            end_ticks = {key_of(one): one.end_ticks for one in alone.sequences}
            for key, _, number in sent:
                if last[key] == number and key in ended:
                    assert ended[key] == end_ticks[key]
                elif (
                    after is not ReplicaState.DRAINING and end_ticks[key] != NEVER
                ):  # it could never run
                    assert end_ticks[key] > end * TICKS_PER_SECOND


@examples(100)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_a_fleet_that_is_not_managed_in_any_respect_is_the_fleet_to_the_tick(seed, name):
    random = Random(seed)
    workload = workload_of(random_requests(random, may_stop=False), SimulatedModel())
    num_slots, scheduling = random_settings(random)
    replica = engine_of(num_slots, scheduling, random.choice(STEP_TIMES))
    plain = Fleet(Turns(workload), [replica] * 3, router_of(name), 0.7).run()
    settings = Turns(workload), [replica] * 3, router_of(name), 0.7
    managed = Fleet(*settings, management=Management()).run()
    assert managed.replicas == plain.replicas
    assert managed.makespan == plain.makespan


# -- one thing at a time, in numbers that can be checked by hand -----------------------------------

SECOND_STEPS = engine_of(1, SchedulingSettings(), ConstantStepTime(1.0))


def run_jobs(workload, num_replicas=1, router="round-robin", settings=SECOND_STEPS, **sections):
    router = router_of(router) if isinstance(router, str) else router
    management = Management(**sections)
    replicas = [settings] * num_replicas
    fleet = Observed(Turns(workload), replicas, router, 1.0, management=management)
    return fleet, fleet.run()


def run(arrivals, outputs, *fleet, **sections):
    return run_jobs(workload_of_jobs(arrivals, outputs), *fleet, **sections)


def test_what_a_failure_loses_begins_anew_and_its_times_count_from_when_it_came():
    failures = Failures(planned=(PlannedFailure(replica=0, at=4.5, back_after=3.0),))
    fleet, result = run([0.0], [10], failures=failures)
    assert result.times.first_token.tolist() == [8.5]  # it was back at 7.5, which was noticed
    assert result.times.end.tolist() == [17.5]
    assert result.times.arrival.tolist() == [0.0]
    assert result.history.num_lost == 1
    assert result.totals.computed_tokens == 5 + 10  # the step under way at 4.5 still ended
    assert fleet.lives[0].moves == [
        (0.0, ReplicaState.SERVING),
        (4.5, ReplicaState.FAILED),
        (7.5, ReplicaState.SERVING),
    ]
    late = Failures(planned=(PlannedFailure(replica=0, at=5000.0, back_after=3.0),))
    fleet, result = run([0.0, 0.0], [3, 5], failures=late)  # nothing fails once all have ended
    assert result.history.num_failures == 0
    assert [life.state for life in fleet.lives] == [ReplicaState.SERVING]


def test_until_a_failure_is_noticed_requests_are_sent_there():
    failures = Failures(planned=(PlannedFailure(replica=0, at=0.5),), health_check=4.0)
    fleet, result = run([0.0, 1.0, 2.0, 3.0, 5.0], [1] * 5, 2, failures=failures)
    assert [index for _, index, _, _ in fleet.sent] == [0, 1, 0, 1, 1, 1]
    assert result.times.end.tolist() == [1.0, 2.0, 4.0, 5.0, 6.0]  # lost: what came at 2.0
    assert fleet.lives[0].moves[1:] == [(0.5, ReplicaState.FAILED), (4.0, ReplicaState.DOWN)]


def test_chance_begins_anew_when_a_replica_is_back():
    by_chance = Failures(mtbf=100.0, seed=1)
    times = by_chance.times_of(0)
    first, second = next(times), next(times)
    planned = (PlannedFailure(replica=0, at=first / 2, back_after=first / 4),)
    arrivals = [float(number) for number in range(int(first + second) + 2)]
    failures = Failures(mtbf=100.0, seed=1, planned=planned)
    fleet, _ = run(arrivals, [1] * len(arrivals), failures=failures)
    failed = [time for time, state in fleet.lives[0].moves if state is ReplicaState.FAILED]
    assert failed[:2] == pytest.approx([first / 2, 0.75 * first + second])


def test_what_is_lost_too_often_is_refused():
    planned = tuple(PlannedFailure(replica=0, at=at, back_after=0.25) for at in (0.5, 2.5, 5.5))
    for retries, num_refused in ((2, 1), (3, 0)):
        failures = Failures(planned=planned, retries=retries)
        _, result = run([0.0], [5], failures=failures)
        assert (result.refused.total(), result.history.num_lost) == (num_refused, 3)
        assert +result.history.refusals == Counter(retries=num_refused)


def test_where_no_replica_serves_requests_wait_as_many_as_may_and_as_long_as_they_may():
    failures = Failures(
        planned=(PlannedFailure(replica=0, at=0.5, back_after=9.5),), health_check=1.0
    )
    admission = AdmissionControl(max_in_flight=8, max_queue=2, max_wait=6.0)
    fleet, result = run([2.0, 5.0, 6.0, 7.0], [1] * 4, failures=failures, admission=admission)
    assert fleet.refused == [(2, 0), (3, 0), (0, 0)]  # no room; and one has waited from 2.0 to 8.0
    assert result.times.end.tolist() == [11.0]
    assert result.history.refusals == {"no_replica": 2, "max_wait": 1}


def test_who_is_less_urgent_is_refused_first():
    admission = AdmissionControl(max_in_flight=1, max_queue=2)
    fleet, result = run([0.0, 0.1, 0.2, 0.3], [1] * 4, admission=admission)
    assert fleet.refused == [(3, 0)]
    assert +result.history.refusals == {"queue_full": 1}
    jobs = workload_of_jobs([0.0, 0.1, 0.2, 0.3], [1] * 4).jobs
    urgent = [replace(job, priority=own) for job, own in zip(jobs, (0, 2, 1, 0), strict=True)]
    fleet, result = run_jobs(Workload(urgent), admission=admission)
    assert fleet.refused == [(1, 0)]
    assert result.times.arrival.tolist() == [0.0, 0.3, 0.2]
    assert result.times.end.tolist() == [1.0, 2.0, 3.0]


def test_a_request_that_is_refused_by_the_router_itself_is_refused():
    admission = AdmissionControl(max_in_flight=1)
    nowhere = OwnRouter("none", lambda *_: None)
    _, result = run([0.0, 1.0], [1, 1], 1, nowhere, admission=admission)
    assert result.refused.total() == 2
    assert +result.history.refusals == {"router": 2}


FOUR_SLOTS = engine_of(4, SchedulingSettings(), ConstantStepTime(0.1))


def autoscaled(**given):
    return Autoscale(
        **({"policy": "target-utilisation", "target": 0.5, "max": 20, "interval": 5.0} | given)
    )


def test_a_load_that_does_not_change_is_given_as_many_replicas_as_have_the_target():
    autoscale = autoscaled(startup=3.0, cooldown=0.0, tolerance=0.0)
    arrivals = [number / 10 for number in range(2000)]  # 10 a second, 2 seconds each: 20 at once
    fleet, result = run(arrivals, [20] * 2000, 2, "least-loaded", FOUR_SLOTS, autoscale=autoscale)
    timeline = timeline_of(fleet.lives, 190.0)
    assert timeline[:3] == [(0.0, 2, 2), (5.0, 2, 4), (8.0, 4, 4)]  # all slots: 2 · 1 / 0.5
    assert 9 <= timeline[-1][1] <= 11  # 20 of 4 slots each, half of which are to be used: 10
    paid = sum(life.seconds(PAID, 0.0, result.makespan) for life in fleet.lives)
    assert result.paid_seconds(result.makespan) == pytest.approx(paid)


def test_replicas_that_go_end_what_they_have_and_are_paid_for_until_then():
    autoscale = autoscaled(startup=0.0, cooldown=5.0, min=1, interval=10.0)
    fleet, result = run(
        [0.0, 0.0, 50.0], [250, 250, 10], 2, "least-loaded", FOUR_SLOTS, autoscale=autoscale
    )
    assert fleet.lives[1].moves == [
        (0.0, ReplicaState.SERVING),
        (20.0, ReplicaState.DRAINING),
        (25.0, ReplicaState.DOWN),
    ]
    assert [replica.paid_seconds for replica in result.replicas] == [None, 25.0]
    assert result.paid_seconds(result.makespan) == 51.0 + 25.0
    assert len(result.times.end) == 3


# -- against theory --------------------------------------------------------------------------------


def test_a_replica_serves_as_much_of_the_time_as_theory_says():
    arrivals = [100.0 * number for number in range(4_000)]
    failures = Failures(mtbf=200.0, restart=50.0, health_check=5.0)
    fleet, result = run(arrivals, [1] * 4_000, failures=failures)
    end = result.makespan
    assert fleet.lives[0].seconds([ReplicaState.SERVING], 0.0, end) / end == pytest.approx(
        0.8, rel=0.02
    )
    assert result.history.num_failures == pytest.approx(end / 250, rel=0.05)


def loss_of(slots, load, max_queue):
    """The share of requests that M/M/c/K refuses, by its balance; load: in servers."""
    weights = [1.0]
    for number in range(1, slots + max_queue + 1):
        weights.append(weights[-1] * load / min(number, slots))
    return weights[-1] / sum(weights)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_as_much_is_refused_as_theory_says():
    slots, max_queue, steps, number = 4, 4, 300, 60_000
    outputs = np.random.default_rng(3).geometric(1 / steps, number)
    arrivals = poisson(1.0, number, seed=4)
    load = 4.5
    arrivals *= number / arrivals[-1] / load
    step_time = ConstantStepTime(1 / float(outputs.mean()))
    settings = engine_of(slots, SchedulingSettings(), step_time)
    admission = AdmissionControl(max_in_flight=slots, max_queue=max_queue)
    _, result = run(arrivals, outputs, 1, "round-robin", settings, admission=admission)
    refused = result.refused.total() / number
    assert refused == pytest.approx(loss_of(slots, load, max_queue), rel=0.02)


def state_of(serving, starting=0, time=0.0, **given):
    counts = dict.fromkeys(("running", "waiting", "ended", "good", "refused"), 0)
    return FleetState(time=time, serving=serving, starting=starting, slots=8, **(counts | given))


@pytest.mark.parametrize(
    ("load", "serving", "starting", "wanted"),
    [
        (5.0, 10, 0, 10),  # on target
        (5.4, 10, 0, 10),  # within the tolerance
        (5.6, 10, 0, 12),
        (4.6, 10, 0, 10),
        (4.0, 10, 0, 8),
        (5.6, 10, 2, 12),  # two that start will do
        (7.0, 10, 2, 14),
        (4.0, 10, 2, 10),  # those that start are on target
        (0.0, 0, 3, 3),  # nobody serves
    ],
)
def test_replicas_are_in_proportion_to_the_load(load, serving, starting, wanted):
    assert proportional(load, 0.5, 0.1, state_of(serving, starting)) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"starting": 1, "ended": 10}, 5),  # no more while some start
        ({"ended": 100, "good": 99}, 3),
        ({"ended": 100, "good": 90}, 5),  # 4 · 0.99 / 0.9
        ({"ended": 90, "good": 90, "refused": 10}, 5),
        ({"ended": 100, "good": 10}, 8),
        ({"refused": 10}, 8),
        ({}, 3),
    ],
)
def test_attainment_asks_for_more_by_what_is_missed(given, wanted):
    assert by_attainment(0.99, state_of(4, **given)) == wanted


def test_a_policy_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "scaling_of_mine.py").write_text(
        "def by_time(state):\n    return 5 if state.time < 10 else 'many'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scaler = Autoscaler(Autoscale(policy="scaling_of_mine:by_time", max=4))
    assert scaler.decide(state_of(2)) == 4
    with pytest.raises(BatchdecodeError, match="'many', not a number of replicas"):
        scaler.decide(state_of(2, time=10.0))


def test_replicas_go_once_nothing_has_asked_for_them_during_the_cooldown():
    scaler = Autoscaler(Autoscale(policy="queue", target=1.0, max=9, cooldown=30.0))
    asked = [(0.0, 6), (10.0, 2), (20.0, 4), (30.0, 1), (40.0, 1), (50.0, 1), (60.0, 1)]
    number, decided = 6, []
    for time, waiting in asked:
        number = scaler.decide(state_of(number, time=time, waiting=waiting))
        decided.append(number)
    assert decided == [6, 6, 6, 6, 4, 4, 1]


def test_a_replica_moves_as_the_table_says_and_time_does_not_go_back():
    for before, allowed in MOVES.items():
        for after in ReplicaState:
            life = Life(before, 1.0)
            if after in allowed:
                life.move(after, 1.0)
                assert life.state is after
            else:
                with pytest.raises(InvariantError):
                    life.move(after, 1.0)
    with pytest.raises(InvariantError):
        Life(ReplicaState.STARTING, 1.0).move(ReplicaState.SERVING, 0.5)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_timeline_is_what_all_lives_are_at_each_time(gaps):
    lives = []
    for steps in gaps:
        life, time = Life(ReplicaState.STARTING, steps[0]), steps[0]
        for gap in steps[1:]:
            time += gap
            allowed = sorted(MOVES[life.state], key=lambda state: state.value)
            if allowed:
                life.move(allowed[gap % len(allowed)], time)
        lives.append(life)
    timeline = timeline_of(lives, 40.0)
    for moment in range(41):
        now = [[s for since, s in life.moves if since <= moment][-1:] for life in lives]
        states = [each[0] for each in now if each]
        told = [entry[1:] for entry in timeline if entry[0] <= moment][-1:] or [(0, 0)]
        assert told == [
            (states.count(ReplicaState.SERVING), sum(state in PAID for state in states))
        ]
    assert all(one[1:] != other[1:] for one, other in pairwise(timeline))


def test_who_waits_at_the_router_again_may_wait_as_long_again():
    (sequence,) = Turns(workload_of_jobs([0.0], [1])).sequences
    queue = RouterQueue(1, 5.0)
    queue.push(sequence, 0.0)
    assert queue.pop() is sequence
    queue.push(sequence, 3.0)  # lost in between
    assert queue.pop_late(5.0) == []
    assert queue.pop_late(8.0) == [sequence]
