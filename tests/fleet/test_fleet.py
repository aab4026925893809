"""Fleets: each replica is one engine to the tick, and no router knows more than it can."""

from itertools import pairwise
from math import factorial
from random import Random

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jobs import poisson, workload_of_jobs
from simulated_workloads import STEP_TIMES, BoundedModel, random_requests, random_settings

from batcher.errors import BatchdecodeError
from batcher.models.simulated import SimulatedModel
from batcher.planning import routers
from batcher.planning.deployments import Deployment, check_router
from batcher.planning.fleet import Fleet
from batcher.planning.replicas import result_of_engine
from batcher.planning.routers import ROUTERS, OwnRouter, ReplicaView, Router, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import AssumedDrafts, ReplicaSettings, simulate
from batcher.planning.workload import Workload, workload_of
from batcher.settings import SchedulingSettings
from batcher.timing.formulas import ConstantStepTime
from batcher.timing.step_time import TICKS_PER_SECOND

SEEDS = st.integers(0, 2**32)
DRAFTS = AssumedDrafts(num_tokens=3, acceptance=0.6, cost=0.1)


def times_of(sequences):
    """All that is told of sequences, by id and index."""
    return {
        (one.id, one.index): (
            one.has_failed,
            one.admitted_ticks,
            one.first_token_ticks,
            one.end_ticks,
            one.num_cached_at_first,
            one.num_preemptions,
        )
        for one in sequences
    }


def random_replica(random):
    num_slots, scheduling = random_settings(random)
    return ReplicaSettings(
        num_slots=num_slots,
        scheduling=scheduling,
        step_time=random.choice(STEP_TIMES),
        drafts=random.choice([None, None, DRAFTS]),
    )


def simulate_alone(workload, settings):
    return simulate(
        workload,
        settings.num_slots,
        settings.scheduling,
        settings.step_time,
        drafts=settings.drafts,
    )


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_a_fleet_of_one_is_the_engine_to_the_tick(seed, name):
    random = Random(seed)
    model = BoundedModel(random.choice([None, None, 60]))
    workload = workload_of(random_requests(random, may_stop=False), model)
    settings = random_replica(random)
    alone = simulate_alone(workload, settings)
    turns = Turns(workload)
    result = Fleet(turns, [settings], router_of(name), random.choice([0.1, 1.0, 50.0])).run()
    assert times_of(turns.sequences) == times_of(alone.sequences)
    expected = result_of_engine(alone, settings)
    assert result.replicas == expected.replicas
    assert result.makespan == expected.makespan


class Logged(Router):
    """A router that keeps what it knew at each decision, and what it decided."""

    def __init__(self, router):
        super().__init__()
        self.router = router
        self.hears_ends, self.hears_reports = router.hears_ends, router.hears_reports
        self.log = []

    def use(self, replicas):
        self.replicas = replicas
        self.router.use(replicas)

    def note(self, replica):
        self.router.note(replica)

    def choose(self, request, now):
        known = [(view.num_requests, view.num_tokens, view.report) for view in self.replicas]
        chosen = self.router.choose(request, now)
        self.log.append((now, request, known, chosen.index))
        return chosen


def run_logged(random, requests, router, kind=random_replica):
    workload = workload_of(requests, SimulatedModel())
    turns = Turns(workload)
    replicas = [kind(random) for _ in range(random.randint(1, 4))]
    logged = Logged(router)
    result = Fleet(turns, replicas, logged, random.choice([0.7, 2.0, 30.0])).run()
    return workload, turns, replicas, logged.log, result


@examples(150)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_each_replica_is_the_engine_with_what_it_was_sent(seed, name):
    random = Random(seed)
    requests = [one for one in random_requests(random, may_stop=False) if one.session is None]
    workload, turns, replicas, log, result = run_logged(random, requests, router_of(name))
    sent_to = {request.input_index: index for _, request, _, index in log}
    assert len(log) == len(sent_to) == len(requests)  # each once, with all its samples
    ran = times_of(turns.sequences)
    for index, settings in enumerate(replicas):
        jobs = [job for job in workload.jobs if sent_to[job.input_index] == index]
        alone = simulate_alone(Workload(jobs, workload.context), settings)
        assert {key: ran[key] for key in times_of(alone.sequences)} == times_of(alone.sequences)
        assert result.replicas[index].totals == alone.totals


@examples(150)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_turns_follow_each_other_wherever_they_are_sent(seed, name):
    random = Random(seed)
    requests = random_requests(random, may_stop=False)
    _, turns, _, log, _ = run_logged(random, requests, router_of(name))
    times = [now for now, _, _, _ in log]
    assert times == sorted(times)
    for session in ("s", "t"):
        own = [one for one in turns.sequences if one.job.session == session and not one.has_failed]
        for one, after in pairwise(own):
            end = one.end_ticks / TICKS_PER_SECOND
            assert after.arrival_time >= end + after.job.think_time


def roomy_replica(random):
    return ReplicaSettings(
        num_slots=random.randint(1, 4),
        scheduling=SchedulingSettings(policy=random.choice(["fcfs", "sjf"])),
        step_time=random.choice(STEP_TIMES),
    )


def seconds(ticks):
    return ticks / TICKS_PER_SECOND


@examples(150)
@given(SEEDS, st.sampled_from(["own", "shortest-queue"]))
def test_a_router_knows_what_came_back_or_was_reported_and_no_more(seed, name):
    random = Random(seed)
    requests = [one for one in random_requests(random, may_stop=False) if one.max_tokens]
    own = OwnRouter("own", lambda _, replicas: random.randrange(len(replicas)))
    router = own if name == "own" else router_of(name)
    _, turns, replicas, log, _ = run_logged(random, requests, router, roomy_replica)
    sent = [[] for _ in replicas]
    last_report = None
    for now, request, known, index in log:
        for place, (num_requests, num_tokens, report) in enumerate(known):
            flying = [one for one in sent[place] if seconds(one.end_ticks) > now]
            if router.hears_ends:
                assert num_requests == len(flying)
                assert num_tokens == sum(one.num_prompt_tokens for one in flying)
            assert last_report is None or report.time >= last_report
            assert report.time <= now
            there = [one for one in sent[place] if one.arrival_time < report.time]
            there = [one for one in there if seconds(one.end_ticks) > report.time]
            running = [one for one in there if seconds(one.admitted_ticks) < report.time]
            assert report.running == len(running)
            assert report.waiting == len(there) - len(running)
        last_report = known[0][2].time
        sent[index] += [one for one in turns.sequences if one.input_index == request.input_index]


MOVES = st.one_of(
    st.tuples(st.just("note"), st.integers(0, 5), st.integers(-3, 5)),
    st.tuples(st.just("use"), st.permutations(range(6)), st.integers(1, 6)),
)


@examples(100)
@given(st.lists(MOVES, max_size=60), st.sampled_from([1, 8]))
def test_the_least_is_that_which_has_been_so_for_longest(moves, max_outdated):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "MAX_OUTDATED", max_outdated)
        views = [ReplicaView(number) for number in range(6)]
        router, noted = (
            router_of("least-tokens"),
            list(views),
        )
        router.use(views)
        for kind, first, second in moves:
            if kind == "use":
                noted = [views[number] for number in first[:second]]
                router.use(noted.copy())
            else:
                view = views[first]
                view.num_tokens = max(0, view.num_tokens + second)
                if view in noted:
                    noted.remove(view)
                    noted.append(view)
                router.note(view)
            assert router.choose(None, 0.0) is min(noted, key=lambda view: view.num_tokens)
            assert len(router._heap) <= max_outdated * len(noted)


@pytest.mark.parametrize("option", ["router", "report_interval"])
def test_a_router_of_one_replica_has_no_effect(option):
    with pytest.raises(BatchdecodeError, match="no effect without --replicas"):
        check_router([option], [Deployment()])


# -- queues of which theory knows the mean wait; a service is one step of constant time, or many ---


def mean_wait(workload, num_replicas, num_slots, router, step_seconds):
    settings = ReplicaSettings(
        num_slots=num_slots,
        scheduling=Deployment().scheduling,
        step_time=ConstantStepTime(step_seconds),
    )
    times = Fleet(Turns(workload), [settings] * num_replicas, router_of(router), 1.0).run().times
    half = len(times.arrival) // 20  # the queue was empty at first
    return float((times.admitted - times.arrival)[half:].mean())


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_wait_for_one_step_at_a_time_is_that_of_m_d_1():
    load = 0.5
    workload = workload_of_jobs(poisson(2 * load, 200_000), [1] * 200_000)
    wait = mean_wait(workload, 2, 1, "random", 1.0)  # a random half of a Poisson process is one
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.02)


def erlang_c(servers, load):
    """The probability of waiting in M/M/c; load: in servers."""
    last = load**servers / factorial(servers) * servers / (servers - load)
    return last / (sum(load**n / factorial(n) for n in range(servers)) + last)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_wait_for_slots_is_that_of_m_m_c():
    slots, load, steps, number = 4, 0.7, 300, 300_000
    outputs = np.random.default_rng(2).geometric(1 / steps, number)
    steps = float(outputs.mean())  # a mean service is so many, of 1 second together
    arrivals = poisson(1.0, number)
    arrivals *= number / arrivals[-1] / (load * slots)  # the load is as it should be
    wait = mean_wait(workload_of_jobs(arrivals, outputs), 1, slots, "least-loaded", 1 / steps)
    asked = load * slots
    theory = erlang_c(slots, asked) / (slots - asked)
    assert wait - 0.5 / steps == pytest.approx(theory, rel=0.02)  # until the next step begins
