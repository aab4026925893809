"""Fleets with roles that refuse, fail and grow: no request and no block lost."""

from random import Random

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from role_fleets import (
    SEEDS,
    in_groups,
    random_admission,
    random_sides,
    random_work,
    replica,
    run,
    run_managed,
    seconds,
    workload,
)

from batcher.planning.admission import AdmissionControl
from batcher.planning.autoscaling import Autoscale
from batcher.planning.failures import Failures, PlannedFailure
from batcher.planning.life import ReplicaState
from batcher.planning.management import Management
from batcher.planning.routers import ROUTERS
from batcher.planning.sides import Transfer
from batcher.timing.formulas import ConstantStepTime
from batcher.timing.step_time import TICKS_PER_SECOND


@examples(100)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_with_nothing_to_manage_it_is_the_same_to_the_tick(seed, name):
    random = Random(seed)
    work, (replicas, transfer) = random_work(random), random_sides(random)
    sequences, result = run(work, replicas, transfer, name)
    managed, same, _ = run_managed(work, replicas, Management(), transfer, name)
    assert seconds(managed, "end_ticks") == seconds(sequences, "end_ticks")
    assert same.replicas == result.replicas


def scaled(random, role, count):
    return Autoscale(
        policy=random.choice(["target-utilisation", "queue", "slo"]),
        target=0.5,
        slo="e2e=20",
        min=1,
        max=random.randint(count, 5),
        interval=random.choice([0.7, 5.0]),
        startup=random.choice([0.0, 3.0]),
        cooldown=random.choice([0.0, 10.0]),
        group=role,
    )


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_what_is_managed_comes_to_one_end_and_every_block_is_free(seed, name):
    random = Random(seed)
    work, (replicas, transfer) = random_work(random), random_sides(random)
    replicas, counts = in_groups(replicas)
    roles = random.choice([[], ["prefill"], ["decode"], ["decode", "prefill"]])
    management = Management(
        admission=random_admission(random),
        autoscale=tuple(scaled(random, role, counts[role]) for role in roles),
    )
    interval = random.choice([0.1, 1.0, 50.0])
    sequences, result, fleet = run_managed(work, replicas, management, transfer, name, interval)
    served = [one for one in sequences if not one.has_failed and one.max_tokens]
    assert len(result.times.arrival) == len(served)
    assert sum(one.has_failed for one in sequences) == result.num_failed
    for one in served:
        assert one.first_arrival <= one.admitted <= one.first_token <= one.end
    for role in counts.keys() - set(roles):
        assert sum(each.role == role for each in fleet._settings) == counts[role]


def test_requests_wait_at_the_router_while_prompts_are_computed_and_not_while_others_decode():
    management = Management(admission=AdmissionControl(max_in_flight=1, max_queue=1))
    rows = [(0, 4, 9), (0, 4, 9), (0, 4, 9), (1, 4, 3)]
    replicas = [replica("prefill"), replica("decode")]
    sequences, result, _ = run_managed(workload(*rows), replicas, management)
    assert [one.has_failed for one in sequences] == [False, False, True, False]
    first = [one.first_token for one in sequences if not one.has_failed]
    assert first == [1.0, 2.0, 3.0]
    assert result.refused.total() == 1


def test_a_replica_that_drains_keeps_prompts_until_they_are_gone():
    autoscale = Autoscale(
        policy="target-utilisation", target=0.5, max=2, interval=3.0, cooldown=0.0, group="prefill"
    )
    replicas = [
        replace(replica("prefill"), group="prefill"),
        replace(replica("prefill"), group="prefill"),
        replica("decode"),
    ]
    slow = Transfer(seconds_per_token=0.0, latency=10.0)
    rows = [(0, 4, 9), (0, 4, 9), (30, 4, 9)]
    management = Management(autoscale=(autoscale,))
    _, _, fleet = run_managed(workload(*rows), replicas, management, slow)
    assert fleet._lives[1].moves == [
        (0.0, ReplicaState.SERVING),
        (6.0, ReplicaState.DRAINING),  # at 3.0 it was only seen that nothing runs
        (11.0, ReplicaState.DOWN),  # computed at 1.0, and on its way for ten seconds
    ]


def test_who_waits_at_the_router_waits_for_a_prompt_to_be_computed():
    admission = AdmissionControl(max_in_flight=1, max_queue=50)
    replicas = [replace(replica(role), group=role) for role in ("prefill", "decode")]
    for role, expected in (("prefill", 5), ("decode", 1)):
        autoscale = Autoscale(
            policy="queue", target=1, max=5, interval=2.0, startup=1.0, group=role
        )
        management = Management(admission=admission, autoscale=(autoscale,))
        _, _, fleet = run_managed(workload(*[(0, 4, 2)] * 20), replicas, management)
        assert sum(each.role == role for each in fleet._settings) == expected


def failing(*planned, **more):
    """A fleet in which replicas fail, each (replica, time, seconds until it is back)."""
    failures = [PlannedFailure(replica=n, at=at, back_after=back) for n, at, back in planned]
    return Management(failures=Failures(planned=tuple(failures), **{"health_check": 1.0} | more))


def ends(result):
    """When each of those that were served got its first token, and its last."""
    return sorted(zip(result.times.first_token.tolist(), result.times.end.tolist(), strict=True))


def test_a_prompt_that_is_lost_on_its_way_is_computed_anew_at_once():
    replicas = [replica("prefill"), replica("prefill"), replica("decode")]
    slow = Transfer(seconds_per_token=0.0, latency=10.0)
    work = workload((0, 4, 4))
    # computed by 1.0, there by 11.0; the other replica begins anew when the first one fails
    _, result, fleet = run_managed(work, replicas, failing((0, 5.0, None)), slow)
    assert ends(result) == [(6.0, 19.0)]
    assert (fleet._history.num_lost, fleet.refused) == (1, [])
    # all is there by then: nobody asks for the prompt any more
    _, result, fleet = run_managed(work, replicas, failing((0, 11.5, None)), slow)
    assert (ends(result), fleet._history.num_lost) == ([(1.0, 14.0)], 0)


def test_a_prompt_that_is_lost_before_it_is_sent_is_computed_anew():
    # the second one waits for blocks where it decodes until the first has ended, at 7.0
    replicas = [replica("prefill"), replica("prefill"), replica("decode", kv_blocks=1)]
    work = workload((0, 4, 6), (0, 4, 6))
    _, result, _ = run_managed(work, replicas, failing())
    assert ends(result) == [(1.0, 6.0), (1.0, 11.0)]
    _, result, fleet = run_managed(work, replicas, failing((1, 3.0, None)))
    assert ends(result) == [(1.0, 6.0), (4.0, 11.0)]
    assert fleet._history.num_lost == 1


def test_what_a_failed_replica_computes_is_missed_when_it_is_looked_at():
    replicas = [replica("prefill", step_time=ConstantStepTime(4.0)), replica("decode")]
    work = workload((0, 4, 3), (1, 4, 3))
    # the step under way ends at 4.0, but its prompt is gone; the other is sent anew at 2.0
    _, result, fleet = run_managed(work, replicas, failing((0, 1.5, 0.5)))
    assert ends(result) == [(6.0, 8.0), (10.0, 12.0)]
    assert fleet._history.num_lost == 2


def test_what_was_to_decode_on_a_failed_replica_begins_with_its_prompt():
    replicas = [replica("prefill"), replica("decode"), replica("decode")]
    work = workload((0, 4, 9))
    _, result, fleet = run_managed(work, replicas, failing((1, 3.5, None)))
    assert ends(result) == [(5.0, 13.0)]  # missed at 4.0
    assert fleet._history.num_lost == 1
    _, _, fleet = run_managed(work, replicas, failing((1, 3.5, None), retries=0))
    assert fleet.refused == [0]


def test_a_prompt_is_kept_until_it_is_missed_that_nobody_takes_and_who_decodes_nowhere_is_refused():
    replicas = [replica("prefill", kv_blocks=1), replica("decode")]
    # sent at 1.0 to a replica that has failed, missed at 2.0; until then there is no block for more
    work = workload((0, 4, 3), (0, 4, 3))
    _, result, fleet = run_managed(work, replicas, failing((1, 0.5, None), health_check=2.0))
    assert (ends(result), sorted(fleet.refused)) == ([], [0, 1])
    assert result.replicas[0].stalled_ticks == TICKS_PER_SECOND
    _, result, fleet = run_managed(work, replicas, failing((1, 0.5, 1.5), health_check=2.0))
    assert fleet.refused == []
    assert len(ends(result)) == 2


def test_who_waits_for_a_prompt_that_nobody_will_ever_compute_is_refused():
    replicas = [replica("prefill"), replica("decode")]
    management = failing((0, 0.5, None), mtbf=3.0)  # the other one fails and comes back for ever
    management = replace(management, admission=AdmissionControl(max_in_flight=1, max_queue=9))
    _, result, fleet = run_managed(workload((0, 4, 3), (0, 4, 3)), replicas, management)
    assert (ends(result), sorted(fleet.refused)) == ([], [0, 1])


@examples(300)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_whatever_fails_every_sequence_comes_to_one_end_and_every_block_is_free(seed, name):
    random = Random(seed)
    work, (replicas, transfer) = random_work(random), random_sides(random)
    replicas, counts = in_groups(replicas)
    failures = Failures(
        mtbf=random.choice([None, 3.0, 40.0]),
        restart=random.choice([0.5, 7.0]),
        planned=tuple(
            PlannedFailure(
                replica=random.randrange(len(replicas)),
                at=random.choice([0.0, 1.25, random.uniform(0, 20)]),
                back_after=random.choice([None, 2.0, 30.0]),
            )
            for _ in range(random.randint(1, 3))
        ),
        health_check=random.choice([0.3, 5.0]),
        retries=random.choice([0, 1, 10]),
    )
    roles = random.choice([[], [], ["prefill"], ["decode"]])
    management = Management(
        admission=random_admission(random),
        failures=failures,
        autoscale=tuple(scaled(random, role, counts[role]) for role in roles),
    )
    interval = random.choice([0.1, 1.0, 50.0])
    runs = [run_managed(work, replicas, management, transfer, name, interval) for _ in range(2)]
    (_, result, fleet), (_, again, _) = runs
    assert ends(result) == ends(again)
    num_served, num_empty = len(result.times.end), sum(not job.max_tokens for job in work.jobs)
    assert len(work.jobs) - num_empty <= num_served + result.num_failed <= len(work.jobs)
    assert not fleet._untaken
    assert not any(fleet._flying)
    assert all(first <= end for first, end in ends(result))
    assert (result.times.admitted >= result.times.arrival).all()
