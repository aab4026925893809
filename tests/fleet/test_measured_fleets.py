"""What a deployment of several replicas comes to, beside that of one, and beside theory."""

from math import factorial

import numpy as np
import pytest
from jobs import poisson, workload_of_jobs

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo
from batcher.planning.deployments import Deployment, check_router
from batcher.planning.fleet import Fleet
from batcher.planning.measure import Question, measure
from batcher.planning.plan import find_plan
from batcher.planning.routers import ROUTERS, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import ReplicaSettings
from batcher.timing.formulas import ConstantStepTime

QUESTION = Question(workload_of_jobs(poisson(40, 400), [20] * 400, 100), Slo({"e2e": 0.5}))
BASE = Deployment(batch=4, profile="h100_llama3.1-8b_tp1")


def fleet_of(number, router="round-robin"):
    return Deployment(batch=4, profile=BASE.profile, replicas=number, router=router)


def test_replicas_each_serve_their_share_and_the_rest_is_told_of_all():
    alone, two = measure(QUESTION, BASE), measure(QUESTION, fleet_of(2))
    assert two.served == alone.served == 400
    assert two.makespan < alone.makespan
    assert sum(two.binding.shares.values()) == pytest.approx(1)


@pytest.mark.heavy
def test_who_knows_more_balances_better():
    lengths = np.random.default_rng(2).geometric(1 / 60, 3000)
    question = Question(workload_of_jobs(poisson(24, 3000), lengths, 100))
    queue = {name: measure(question, fleet_of(4, name)).latencies.queue.mean for name in ROUTERS}
    assert queue["least-loaded"] < queue["random-two"] < queue["random"]
    assert queue["least-loaded"] < queue["shortest-queue"] < queue["round-robin"]


def test_the_smallest_fleet_that_meets_an_slo():
    plan = find_plan(QUESTION, fleet_of(1, "least-loaded"), "replicas")
    assert plan.is_met
    shares = {trial.value: trial.share for trial in plan.trials}
    assert shares[plan.value - 1] < 1 <= shares[plan.value]


@pytest.mark.parametrize("option", ["router", "report_interval"])
def test_a_router_of_one_replica_has_no_effect(option):
    with pytest.raises(BatchdecodeError, match="no effect without --replicas"):
        check_router([option], [BASE])


def test_reports_that_nobody_goes_by_have_no_effect():
    with pytest.raises(BatchdecodeError, match="goes by no reports"):
        check_router(["report_interval"], [fleet_of(2, "least-loaded")])
    check_router(["report_interval"], [fleet_of(2, "shortest-queue")])


def test_an_unknown_router_is_answered_with_a_near_one():
    with pytest.raises(BatchdecodeError, match="did you mean least-loaded"):
        router_of("least-load")


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


def wait_for_the_shorter_of_two(load, longest=40):
    """The mean wait, in services, of two M/M/1 servers of which each request joins the shorter.

    From the balance of the states (first, second) of their lengths, solved by iteration.
    """
    first, second = np.indices((longest + 1, longest + 1))
    to_first = np.where(first == second, 0.5, first < second)
    rate, state = 2 * load, np.zeros(first.shape)
    state[0, 0] = 1.0
    for _ in range(4000):
        after = np.zeros(first.shape)
        for joins, moved, its_own in (
            (to_first, after, state),
            (1 - to_first, after.T, state.T),  # the same of the second, with axes swapped
        ):
            arriving = (state * joins) if its_own is state else (state * joins).T
            moved[1:] += rate * arriving[:-1]
            moved[-1] += rate * arriving[-1]
            moved[:-1] += its_own[1:]
            moved[0] += its_own[0]
        state = after / (rate + 2)
    return (state * (first + second)).sum() / rate - 1  # Little's law


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_wait_behind_the_least_loaded_of_two_is_that_for_the_shorter_and_not_m_m_c():
    load, steps, number = 0.5, 60, 100_000
    outputs = np.random.default_rng(3).geometric(1 / steps, number)
    steps = float(outputs.mean())
    arrivals = poisson(1.0, number)
    arrivals *= number / arrivals[-1] / (2 * load)
    wait = mean_wait(workload_of_jobs(arrivals, outputs), 2, 1, "least-loaded", 1 / steps)
    theory = wait_for_the_shorter_of_two(load)
    assert wait - 0.5 / steps == pytest.approx(theory, rel=0.02)
    # Who waits at one replica does not go to the other when that is free.
    assert theory > 1.2 * erlang_c(2, 2 * load) / (2 - 2 * load)
