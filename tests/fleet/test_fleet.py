"""Fleets: each replica is one engine to the tick, and no router knows more than it can."""

from itertools import pairwise, takewhile
from math import factorial
from random import Random

import numpy as np
import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from jobs import engine_of, workload_of_jobs
from jobs import poisson as poisson_times
from msgspec.structs import replace
from simulated_workloads import STEP_TIMES, BoundedModel, random_requests, random_settings

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo
from batcher.models.simulated import SimulatedModel
from batcher.planning import routers
from batcher.planning.deployments import Deployment, check_router
from batcher.planning.fleet import Fleet
from batcher.planning.measure import Question, measure
from batcher.planning.replay import AsLogged, replay, workload_of_log
from batcher.planning.routers import ROUTERS, OwnRouter, ReplicaView, Router, router_of
from batcher.planning.simulator import AssumedDrafts, simulate
from batcher.planning.synthetic import (
    LENGTHS,
    SyntheticWorkload,
    constant,
    gamma,
    open_entries,
    parse_distribution,
    poisson,
)
from batcher.planning.workload import Turns, Workload, parse_streamed, workload_of
from batcher.request import PromptSegment, Request
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import step_time_of
from batcher.timing.step_time import TICKS_PER_SECOND, ConstantStepTime
from batcher.trace.logs import LoggedRequest

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
    step_time, drafts = random.choice(STEP_TIMES), random.choice([None, None, DRAFTS])
    return engine_of(num_slots, scheduling, step_time, drafts)


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_a_fleet_of_one_is_the_engine_to_the_tick(seed, name):
    random = Random(seed)
    model = BoundedModel(random.choice([None, None, 60]))
    workload = workload_of(random_requests(random, may_stop=False), model)
    settings = random_replica(random)
    alone = simulate(workload, settings)
    turns = Turns(workload)
    result = Fleet(turns, [settings], router_of(name), random.choice([0.1, 1.0, 50.0])).run()
    assert times_of(turns.sequences) == times_of(alone.sequences)
    assert result.replicas == alone.replicas
    assert result.makespan == alone.makespan


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
        alone = simulate(Workload(jobs, workload.context), settings)
        assert {key: ran[key] for key in times_of(alone.sequences)} == times_of(alone.sequences)
        assert [result.replicas[index]] == alone.replicas


@examples(150)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_turns_follow_each_other_wherever_they_are_sent(seed, name):
    random = Random(seed)
    requests = random_requests(random, may_stop=False)
    _, turns, _, log, _ = run_logged(random, requests, router_of(name))
    times = [now for now, _, _, _ in log]
    assert times == sorted(times)
    for session in ("s", "t"):
        own = [one for one in turns.sequences if one.session == session and not one.has_failed]
        for one, after in pairwise(own):
            end = one.end_ticks / TICKS_PER_SECOND
            assert after.arrival_time >= end + after.think_time


def roomy_replica(random):
    num_slots, policy = random.randint(1, 4), random.choice(["fcfs", "sjf"])
    return engine_of(num_slots, SchedulingSettings(policy=policy), random.choice(STEP_TIMES))


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
        router, noted = (router_of("least-tokens"), list(views))
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


def test_a_router_of_one_replica_has_no_effect():
    for option in ("router", "report_interval"):
        with pytest.raises(BatchdecodeError, match="no effect without --replicas"):
            check_router([option], [Deployment()])


# -- queues of which theory knows the mean wait; a service is one step of constant time, or many ---


def mean_wait(workload, num_replicas, num_slots, router, step_seconds):
    settings = engine_of(num_slots, Deployment().scheduling, ConstantStepTime(step_seconds))
    times = Fleet(Turns(workload), [settings] * num_replicas, router_of(router), 1.0).run().times
    half = len(times.arrival) // 20  # the queue was empty at first
    return float((times.admitted - times.arrival)[half:].mean())


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_wait_for_one_step_at_a_time_is_that_of_m_d_1():
    load = 0.5
    workload = workload_of_jobs(poisson_times(2 * load, 200_000), [1] * 200_000)
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
    arrivals = poisson_times(1.0, number)
    arrivals *= number / arrivals[-1] / (load * slots)  # the load is as it should be
    wait = mean_wait(workload_of_jobs(arrivals, outputs), 1, slots, "least-loaded", 1 / steps)
    asked = load * slots
    theory = erlang_c(slots, asked) / (slots - asked)
    assert wait - 0.5 / steps == pytest.approx(theory, rel=0.02)  # until the next step begins


LENGTH_TEXTS = ("lognormal:100:0.6", "uniform:1:30")
TEXT = "synthetic:rate=50,duration=6,prompt=lognormal:100:0.6,output=uniform:1:30,seed=3"
SLO = Slo({"ttft": 0.05})


def written(arrivals, priorities=None):
    """The workload of TEXT as `batchdecode workload` writes it, but for how requests arrive."""
    prompts, outputs = (parse_distribution(text, "", LENGTHS) for text in LENGTH_TEXTS)
    synthetic = SyntheticWorkload(
        prompt_lengths=prompts, output_lengths=outputs, priorities=priorities or {}, seed=3
    )
    requests = [
        Request(
            id=entry.id,
            arrival_time=entry.arrival_time,
            prompt=[PromptSegment(length=one.length, seed=one.seed) for one in entry.prompt],
            max_tokens=entry.max_tokens,
            ignore_eos=True,
            priority=entry.priority,
        )
        for entry in takewhile(lambda one: one.arrival_time < 6, open_entries(synthetic, arrivals))
    ]
    return workload_of(requests, SimulatedModel())


def deployment(replicas, kv_blocks):
    scheduling = SchedulingSettings(kv_blocks=kv_blocks, max_batch_tokens=512)
    return Deployment(
        batch=8, profile="h100_llama3.1-8b_tp1", replicas=replicas, scheduling=scheduling
    )


@pytest.mark.parametrize("replicas", mostly_heavy([1, 3], 3))
@pytest.mark.parametrize(
    ("more", "arrivals", "kv_blocks"),
    [
        ("", poisson(50), 12),  # some prompts never fit
        (",burstiness=0.4", gamma(50, 0.4), 200),
        (",burstiness=constant", constant(50), 200),
        (",priority=-1:2:5:1", poisson(50), 200),
    ],
)
def test_it_is_the_workload_that_is_written(replicas, more, arrivals, kv_blocks):
    streamed = Question(parse_streamed(TEXT + more), SLO)
    file = Question(written(arrivals, streamed.workload.shares), SLO)
    engines = deployment(replicas, kv_blocks)
    outcome = measure(streamed, engines)
    assert outcome == measure(file, engines)
    assert (outcome.failed > 0) == (kv_blocks == 12)
    assert streamed.workload.priorities == file.workload.priorities


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synthetic:rate=5,duration=6,prompt=8", "output is missing"),
        (
            "synthetic:rate=5,rate=6,duration=6,prompt=8,output=8",
            "'rate=6': rate is repeated; expected",
        ),
        ("synthetic:prompts=5", "unknown name prompts .did you mean prompt.*; expected"),
        ("synthetic:rate", "'rate': expected NAME=VALUE; expected"),
        ("synthetic:rate=0,duration=6,prompt=8,output=8", "above 0"),
        ("synthetic:rate=1e6,duration=1e9,prompt=8,output=8", "more than"),
        ("synthetic:rate=5,duration=6,prompt=x,output=8", "unknown distribution 'x'"),
        ("synthetic:rate=5,duration=6,prompt=8,output=8,seed=-1", "a whole number"),
    ],
)
def test_a_text_that_names_none_is_told_what_does(text, message):
    with pytest.raises(BatchdecodeError, match=message):
        parse_streamed(text)


SETTINGS = SchedulingSettings(kv_blocks=40, max_batch_tokens=256)
ENGINE = engine_of(4, SETTINGS, step_time_of("rtx4090_llama3.1-8b"))
NAMES = ["a", 7, "c"]


def log_of_a_fleet(name, number=3):
    """A log that simulated engines behind a router wrote, each request with its replica."""
    chance = np.random.default_rng(5)
    arrivals = np.cumsum(chance.exponential(0.05, 90)).round(6).tolist()
    asked = [
        LoggedRequest(
            request_id=str(number),
            input_toks=int(chance.integers(1, 200)),
            output_toks=int(chance.integers(1, 60)),
            queued_ts=time,
            first_token_ts=time,
            last_token_ts=time,
        )
        for number, time in enumerate(arrivals)
    ]
    turns, router = Turns(workload_of_log(asked)), Logged(router_of(name))
    Fleet(turns, [ENGINE] * number, router, 0.1).run()
    first = asked[0].queued_ts
    return [
        replace(
            request,
            scheduled_ts=first + done.admitted,
            first_token_ts=first + done.first_token,
            last_token_ts=first + done.end,
            replica=NAMES[place],
        )
        for request, done, (*_, place) in zip(asked, turns.sequences, router.log, strict=True)
    ]


def errors_of(outcome):
    return [one.error for one in outcome.comparisons]


@pytest.mark.parametrize(
    ("name", "number"), [("round-robin", 3), ("least-loaded", 3), ("round-robin", 1)]
)
def test_the_replay_of_a_simulated_fleet_is_that_fleet(name, number):
    log = log_of_a_fleet(name, number)
    assert AsLogged(log).num_replicas == number
    as_logged = replay(log, ENGINE, number)
    routed = replay(log, ENGINE, number, router_of(name))
    assert as_logged.result.totals.num_preemptions
    for outcome in (as_logged, routed):
        assert errors_of(outcome) == pytest.approx([0] * 13, abs=1e-7)
    served = sorted(one.num_served for one in as_logged.result.replicas)
    assert served == sorted(sum(one.replica == name for one in log) for name in NAMES[:number])


def test_what_a_router_refuses_was_served_all_the_same():
    log = log_of_a_fleet("round-robin")
    with pytest.raises(BatchdecodeError, match="the router refuses 90 requests that were served"):
        replay(log, ENGINE, 3, OwnRouter("none", lambda request, replicas: None))
