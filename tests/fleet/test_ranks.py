"""Data-parallel ranks: one is the engine to the tick, several are engines with what they were sent,
step together where they share experts, and their balancer knows what a real one knows."""

from math import inf
from random import Random

import pytest
from batcher.planning.drafts import AssumedDrafts
from batcher.planning.steps import StepSimulation
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jobs import workload_of_jobs
from msgspec.structs import replace
from simulated_workloads import (
    STEP_TIMES,
    WITH_EXPERTS,
    BoundedModel,
    random_requests,
    random_settings,
)

from batcher.models.simulated import SimulatedModel
from batcher.planning.fleet import Fleet
from batcher.planning.fleet_result import result_of_engine
from batcher.planning.ranks import DUMMY_STEP, ranked_replica
from batcher.planning.replica import ReplicaSettings
from batcher.planning.routers import ROUTERS, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import simulate
from batcher.planning.workload import Workload, workload_of
from batcher.scheduling.clock import ticks_until
from batcher.settings import SchedulingSettings
from batcher.timing.formulas import ConstantStepTime, ProfileStepTime
from batcher.timing.step_time import TICKS_PER_SECOND

SEEDS = st.integers(0, 2**32)
DRAFTS = AssumedDrafts(num_tokens=3, acceptance=0.6, cost=0.1)
DENSE = [step_time for step_time in STEP_TIMES if step_time.of_rank(2) is None]


def times_of(sequences):
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


class Observed(Fleet):
    """A fleet that keeps what each rank was sent, and what each balancer was told.

    Replicas have ranks even if that is one.
    """

    def __init__(self, *args):
        self.sent = []  # sequence, replica, rank
        self.told = []  # replica, time, reports
        super().__init__(*args)

    def _make_replica(self, settings, results=()):
        replica = ranked_replica(self._turns, settings, self._interval, results)
        send, hear = replica._send, replica._hear_reports

        def observed_send(sequence, place):
            self.sent.append((sequence, replica, place))
            send(sequence, place)

        def observed_hear(time):
            hear(time)
            reports = [view.report for view in replica._views]
            self.told.append((replica, len(self.sent), time, reports))

        replica._send, replica._hear_reports = observed_send, observed_hear
        return replica


def random_replica(random, step_times, ranks):
    num_slots, scheduling = random_settings(random)
    return ReplicaSettings(
        num_slots=num_slots,
        scheduling=scheduling,
        step_time=random.choice(step_times),
        drafts=random.choice([None, None, DRAFTS]),
        ranks=ranks,
    )


def crowded_requests(random, *, has_sessions=True):
    """Requests of which many arrive while others run."""
    latest = random.choice([0.5, 5.0, 40.0])
    drawn = random_requests(random, may_stop=False) + random_requests(random, may_stop=False)
    times = [random.choice([one.arrival_time, random.uniform(0, latest)]) for one in drawn]
    return [
        replace(one, id=str(number), arrival_time=time)
        for number, (one, time) in enumerate(zip(drawn, times, strict=True))
        if has_sessions or one.session is None
    ]


def random_workload(random, *, has_sessions=True):
    requests = crowded_requests(random, has_sessions=has_sessions)
    return workload_of(requests, BoundedModel(random.choice([None, None, 60])))


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
def test_one_rank_is_the_engine_to_the_tick(seed, name):
    random = Random(seed)
    workload = random_workload(random)
    settings = random_replica(random, [*STEP_TIMES, *WITH_EXPERTS], 1)
    alone = simulate_alone(workload, settings)
    turns = Turns(workload)
    result = Observed(turns, [settings], router_of(name), random.choice([0.1, 1.0, 50.0])).run()
    assert times_of(turns.sequences) == times_of(alone.sequences)
    expected = result_of_engine(alone)
    assert result.replicas == expected.replicas
    assert result.makespan == expected.makespan


def jobs_by_rank(workload, fleet):
    """The workload that each rank of each replica was sent, with the replica and its number."""
    places = {(one.input_index, one.index): (each, rank) for one, each, rank in fleet.sent}
    assert len(places) == len(fleet.sent) == len(workload.jobs)  # each once
    for replica in fleet._replicas:
        for rank in range(len(replica.engines)):
            jobs = [
                job
                for job in workload.jobs
                if places[job.input_index, job.index] == (replica, rank)
            ]
            yield Workload(jobs, len(jobs), workload.context), replica, rank


@examples(150)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_each_rank_of_a_dense_model_is_the_engine_with_what_it_was_sent(seed, name):
    random = Random(seed)
    workload = random_workload(random, has_sessions=False)
    replicas = [random_replica(random, DENSE, random.randint(2, 4)) for _ in range(2)]
    turns = Turns(workload)
    fleet = Observed(turns, replicas, router_of(name), random.choice([0.7, 2.0, 30.0]))
    result = fleet.run()
    ran = times_of(turns.sequences)
    engines = [settings for settings in replicas for _ in range(settings.ranks)]
    parts = jobs_by_rank(workload, fleet)
    for settings, own, (jobs, _, _) in zip(engines, result.replicas, parts, strict=True):
        alone = simulate_alone(jobs, settings)
        assert {key: ran[key] for key in times_of(alone.sequences)} == times_of(alone.sequences)
        assert own.totals == alone.totals


class ReferenceRank(StepSimulation):
    """An engine of which each step is planned, and told how long it has taken."""

    @property
    def has_rows(self):
        return self._batch.num_occupied > 0

    @property
    def has_work(self):
        return self._queue.num_slots > 0 or self.has_rows

    @property
    def arrival(self):
        """When the next sequence arrives, in ticks."""
        if not self._queue.num_pending:
            return inf
        return ticks_until(self._queue.next_arrival or 0.0)

    def go_to(self, ticks):
        self._ticks, self._now = ticks, ticks / TICKS_PER_SECOND
        if self.arrival <= ticks:
            self._join_arrivals()

    def plan(self):
        self._planned = self._schedule(self._wanted_of(self._drafts) if self._drafts else {})
        return self._scheduler.batch_stats(self._planned) if self.has_rows else DUMMY_STEP

    def take(self, ticks, num_tokens):
        if self.has_rows:
            self._end_step(self._planned, ticks, num_tokens)
        else:
            self._advance(1, ticks, 0)


def in_lockstep(workloads, settings):
    """Return the ranks when they have taken all steps together, and their sequences."""
    all_turns = [Turns(workload) for workload in workloads]
    ranks = [
        ReferenceRank(
            turns,
            settings.num_slots,
            settings.scheduling,
            settings.step_time,
            drafts=settings.drafts,
        )
        for turns in all_turns
    ]
    for turns, rank in zip(all_turns, ranks, strict=True):
        for sequence in turns.begin():
            rank._queue.add(sequence, 0.0)
    rank_ticks, now = settings.step_time.of_rank(len(ranks)), 0
    while now < inf:
        for rank in ranks:
            rank.go_to(now)
        if not any(rank.has_work for rank in ranks):
            now = min(rank.arrival for rank in ranks)
            continue
        planned = [rank.plan() for rank in ranks]
        beside = [rank._ticks_beside(rank._planned) for rank in ranks]
        num_tokens = sum(stats.num_tokens for stats in planned)
        ticks = [
            rank_ticks(*stats, num_tokens) + more
            for stats, more in zip(planned, beside, strict=True)
        ]
        for rank, stats in zip(ranks, planned, strict=True):
            rank.take(max(ticks), stats.num_tokens)
        now += max(ticks)
    return [(turns.sequences, rank) for turns, rank in zip(all_turns, ranks, strict=True)]


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_ranks_that_share_experts_take_all_steps_together(seed, name):
    random = Random(seed)
    workload = random_workload(random, has_sessions=False)
    settings = random_replica(random, WITH_EXPERTS, random.randint(2, 4))
    turns = Turns(workload)
    fleet = Observed(turns, [settings], router_of(name), random.choice([0.7, 2.0, 30.0]))
    result = fleet.run()
    ran = times_of(turns.sequences)
    expected = in_lockstep([jobs for jobs, _, _ in jobs_by_rank(workload, fleet)], settings)
    for own, (sequences, rank) in zip(result.replicas, expected, strict=True):
        assert {key: ran[key] for key in times_of(sequences)} == times_of(sequences)
        assert own.totals == replace(rank._totals, num_steps=rank._step)
    assert len({own.totals.num_steps for own in result.replicas}) == 1
    assert len({own.busy_ticks for own in result.replicas}) == 1


@examples(150)
@given(SEEDS, st.sampled_from(["round-robin", "random"]))
def test_it_makes_no_difference_whether_a_fleet_goes_from_event_to_event(seed, name):
    random = Random(seed)
    workload = random_workload(random, has_sessions=False)
    kinds = random.choice([DENSE, WITH_EXPERTS])
    replicas = [random_replica(random, kinds, random.randint(1, 3)) for _ in range(2)]
    interval, runs = random.choice([0.25, 0.7, 2.0, 30.0]), []
    for hears_ends in (False, True):
        turns, router = Turns(workload), router_of(name)
        router.hears_ends = hears_ends
        result = Fleet(turns, replicas, router, interval).run()
        runs.append((times_of(turns.sequences), [each.totals for each in result.replicas]))
    assert runs[0] == runs[1]


def roomy_replica(random, ranks):
    return ReplicaSettings(
        num_slots=random.randint(1, 4),
        scheduling=SchedulingSettings(policy=random.choice(["fcfs", "sjf"])),
        step_time=random.choice([*STEP_TIMES, *WITH_EXPERTS]),
        ranks=ranks,
    )


def seconds(ticks):
    return ticks / TICKS_PER_SECOND


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_a_balancer_knows_what_was_reported_and_what_it_has_sent_and_no_more(seed, name):
    random = Random(seed)
    requests = [one for one in crowded_requests(random) if one.output_limit]
    workload = workload_of(requests, SimulatedModel())
    replicas = [roomy_replica(random, random.randint(2, 4)) for _ in range(2)]
    interval = random.choice([0.25, 0.7, 2.0, 30.0])
    fleet = Observed(Turns(workload), replicas, router_of(name), interval)
    fleet.run()
    for number, (sequence, replica, rank) in enumerate(fleet.sent):
        now = sequence.arrival_time
        heard = [told for told in fleet.told if told[0] is replica and told[1] <= number]
        _, num_before, time, reports = heard[-1]
        assert now - interval * (1 + 1e-9) < time <= now
        weights = []
        for place, report in enumerate(reports):
            mine = [one for one, *to in fleet.sent[:num_before] if to == [replica, place]]
            there = [one for one in mine if seconds(one.end_ticks) > time]
            running = [one for one in there if seconds(one.admitted_ticks) < time]
            assert (report.running, report.waiting) == (len(running), len(there) - len(running))
            since = [1 for _, *to in fleet.sent[num_before:number] if to == [replica, place]]
            weights.append(4 * (report.waiting + len(since)) + report.running)
        assert rank == weights.index(min(weights))


@examples(150)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_every_sequence_comes_to_one_end(seed, name):
    random = Random(seed)
    workload = random_workload(random)
    kinds = [*STEP_TIMES, *WITH_EXPERTS]
    replicas = [random_replica(random, kinds, random.randint(1, 3)) for _ in range(3)]
    turns = Turns(workload)
    result = Fleet(turns, replicas, router_of(name), random.choice([0.7, 2.0, 30.0])).run()
    num_empty = sum(not one.has_failed and not one.max_tokens for one in turns.sequences)
    num_served = sum(each.num_served for each in result.replicas)
    assert num_served + result.num_failed + num_empty == len(workload.jobs)
    assert len(result.times.arrival) == num_served
    assert len(result.replicas) == sum(settings.ranks for settings in replicas)


# -- in numbers that can be checked by hand --------------------------------------------------------


def run(arrivals, outputs, step_time, ranks=2, num_slots=2):
    settings = ReplicaSettings(
        num_slots=num_slots, scheduling=SchedulingSettings(), step_time=step_time, ranks=ranks
    )
    fleet = Observed(Turns(workload_of_jobs(arrivals, outputs)), [settings], router_of("random"), 1)
    return fleet.run(), [rank for _, _, rank in fleet.sent]


def test_of_ranks_that_are_equal_the_first_is_chosen_and_what_was_sent_waits():
    result, ranks = run([0, 0, 0, 0.5, 1.5, 2.5], [1, 5, 1, 1, 1, 1], ConstantStepTime(1.0))
    assert ranks == [0, 1, 0, 1, 0, 0]  # at 1.0 rank 1 has one that runs, and at 2.0 as well
    assert [each.num_served for each in result.replicas] == [4, 2]


def test_samples_of_a_request_are_sent_one_by_one():
    random = Random(1)
    while True:
        requests = [one for one in random_requests(random, may_stop=False) if (one.n or 1) > 1]
        if requests:
            break
    workload = workload_of(requests[:1], SimulatedModel())
    settings = ReplicaSettings(
        num_slots=4, scheduling=SchedulingSettings(), step_time=ConstantStepTime(), ranks=4
    )
    fleet = Observed(Turns(workload), [settings], router_of("random"), 0.1)
    fleet.run()
    assert [rank for _, _, rank in fleet.sent] == list(range(len(workload.jobs)))


def test_a_step_takes_as_long_as_that_of_the_slowest_with_the_experts_that_all_tokens_hit():
    terms = {"t0": 1000, "w": 0, "f": 0, "g": 100, "d": 0, "h": 0, "e": 0, "x": 8000}
    step_time = ProfileStepTime("experts", terms, (), (2, 1))
    result, ranks = run([0, 0, 0], [1, 2, 1], step_time)
    assert ranks == [0, 1, 0]
    # two rows in rank 0, one in rank 1: 1 + 0.2 s, and 8 / 2 s for the experts, 7/8 of which 3
    # tokens hit; then one row in rank 1, and a token that nobody needs: 3/4 are hit
    assert result.times.end.tolist() == [4.7, 4.7, pytest.approx(8.8)]
    assert [each.totals.num_steps for each in result.replicas] == [2, 2]
    assert [each.totals.slot_steps for each in result.replicas] == [2, 2]
    assert DUMMY_STEP.num_tokens == 1


def test_without_experts_nobody_waits_for_others():
    terms = {"t0": 1000, "w": 0, "f": 0, "g": 100, "d": 0, "h": 0, "e": 0}
    result, _ = run([0, 0, 0], [1, 2, 1], ProfileStepTime("dense", terms))
    assert result.times.end.tolist() == pytest.approx([1.2, 1.2, 2.2])
    assert [each.totals.num_steps for each in result.replicas] == [1, 2]
