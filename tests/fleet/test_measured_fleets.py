"""What a deployment of several replicas comes to, beside that of one, and beside theory."""

from math import factorial

import numpy as np
import pytest
from jobs import poisson, workload_of_jobs

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import Deployment, check_router
from batcher.planning.fleet import Fleet
from batcher.planning.routers import router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import ReplicaSettings
from batcher.timing.formulas import ConstantStepTime


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
