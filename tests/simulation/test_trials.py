"""Jobs that share nothing are simulated without a prefix cache until somebody is preempted."""

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from jobs import simulate
from msgspec.structs import replace
from test_simulator import outcome, simulate_steps

from batcher.models.simulated import SimulatedModel
from batcher.planning.deployments import Deployment
from batcher.planning.measure import run
from batcher.planning.workload import parse_streamed, workload_of
from batcher.request import PromptSegment, Request
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import step_time_of

PROFILE = "rtx4090_llama3.1-8b"
STEP_TIME = step_time_of(PROFILE)
SETTINGS = SchedulingSettings(kv_blocks=100, block_size=4, max_batch_tokens=40)


def own(length, seed=0):
    """A prompt that nobody else has."""
    return [PromptSegment(length=length, seed=seed)]


def workload(*prompts, **more):
    """Requests that all arrive at once."""
    requests = [
        Request(id=str(place), prompt=prompt, max_tokens=20, ignore_eos=True, **more)
        for place, prompt in enumerate(prompts)
    ]
    return workload_of(requests, SimulatedModel())


@pytest.mark.parametrize(
    ("jobs", "is_so"),
    [
        (workload(own(9, 1), own(9, 2)), True),
        (workload(), True),
        (workload(own(9, 1), own(3, 1)), False),
        (workload(own(9, 1), [1, 2, 3]), False),
        (workload(own(9, 1), []), False),
        (workload(own(9, 1), own(9, 2), n=2), False),
        (workload(own(9, 1), own(9, 2), session="a"), False),
        (workload([*own(1, 1), *own(9, 3)], [*own(1, 2), *own(9, 3)]), True),
    ],
)
def test_what_shares_nothing_begins_with_tokens_of_its_own(jobs, *, is_so):
    assert jobs.shares_nothing == is_so


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(0, 25)), max_size=12),
    st.integers(1, 5),
    st.integers(8, 60),
    st.sampled_from(["watermark", "on-demand", "no-evict"]),
    st.sampled_from(["fcfs", "priority", "sjf", "lpm"]),
    st.sampled_from([None, 7, 40]),
)
@example([(0, 12, 20), (0, 12, 20)], 2, 9, "on-demand", "fcfs", None)
@examples(300)
def test_a_trial_comes_to_what_the_steps_with_a_cache_do(
    rows, num_slots, kv_blocks, capacity, policy, budget
):
    requests = [
        Request(
            arrival_time=arrival / 10,
            prompt=own(length, place),
            max_tokens=num_output,
            ignore_eos=True,
            priority=place % 3,
        )
        for place, (arrival, length, num_output) in enumerate(rows)
    ]
    settings = SchedulingSettings(
        kv_blocks=kv_blocks, block_size=4, capacity=capacity, policy=policy, max_batch_tokens=budget
    )
    jobs = workload_of(requests, SimulatedModel())
    assert jobs.shares_nothing
    tried = simulate(jobs, num_slots, settings, STEP_TIME)
    assert outcome(tried) == outcome(simulate_steps(jobs, num_slots, settings, STEP_TIME))


@pytest.mark.parametrize("kv_blocks", [40, 400])
@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "shortest-queue"])
def test_a_trial_of_a_fleet_comes_to_what_the_fleet_does(monkeypatch, router, kv_blocks):
    settings = SchedulingSettings(kv_blocks=kv_blocks, max_batch_tokens=256)
    deployment = Deployment(
        batch=8, replicas=3, router=router, profile=PROFILE, scheduling=settings
    )
    streamed = parse_streamed("synthetic:rate=20,duration=10,prompt=lognormal:60:1,output=40")
    tried = run(streamed, deployment)
    assert (tried.totals.num_preemptions > 0) == (kv_blocks == 40)
    monkeypatch.setattr("batcher.planning.measure.ROUTERS", {})
    untried = run(streamed, deployment)
    for one, other in zip(tried.replicas, untried.replicas, strict=True):
        assert replace(one, settings=other.settings) == other
    assert all((one == other).all() for one, other in zip(tried.times, untried.times, strict=True))
