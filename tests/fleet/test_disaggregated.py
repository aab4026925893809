"""Prompts here and decoding there: times by hand, no request and no block lost."""

from functools import partial
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from simulated_workloads import (
    EXPERTS,
    STEP_TIMES,
    TERMS,
    WITH_EXPERTS,
    BoundedModel,
    random_requests,
    random_settings,
)

from batcher.fleet.admission import AdmissionControl
from batcher.fleet.autoscaling import Autoscale
from batcher.fleet.disaggregated import DisaggregatedFleet
from batcher.fleet.failures import Failures, PlannedFailure
from batcher.fleet.life import STEPPING, ReplicaState
from batcher.fleet.managed_disaggregated import ManagedDisaggregatedFleet
from batcher.fleet.management import Management
from batcher.fleet.ranks import ranks_of
from batcher.fleet.replica import ReplicaSettings
from batcher.fleet.routers import ROUTERS, router_of
from batcher.fleet.sides import DecodeRank, DecodeReplica, PrefillRank, PrefillReplica, Transfer
from batcher.request import Request
from batcher.settings import SchedulingSettings
from batcher.simulation.phases import whole_of
from batcher.simulation.sequence import Turns
from batcher.simulation.simulator import simulate
from batcher.simulation.workload import workload_of
from batcher.timing.formulas import ConstantStepTime, ProfileStepTime
from batcher.timing.step_time import TICKS_PER_SECOND

SEEDS = st.integers(0, 2**32)
MODEL = BoundedModel(None)
FAST = Transfer(seconds_per_token=0.0)
DENSE = ProfileStepTime("dense", TERMS)


def replica(role, num_slots=4, kv_blocks=100, step_time=None, ranks=1, **scheduling):
    if role == "decode":
        scheduling |= {"capacity": "no-evict", "prefix_cache": False}
    return ReplicaSettings(
        num_slots=num_slots,
        scheduling=SchedulingSettings(kv_blocks=kv_blocks, **scheduling),
        step_time=step_time or ConstantStepTime(1.0),
        role=role,
        ranks=ranks,
    )


def run(
    workload,
    replicas,
    transfer=FAST,
    router="round-robin",
    interval=1.0,
    kind=DisaggregatedFleet,
):
    """What it comes to; every block is free in the end, and no event is left."""
    turns = Turns(workload)
    names = {"decode_router": router_of(router), "transfer": transfer}
    fleet = kind(turns, replicas, router_of(router), interval, **names)
    return turns.sequences, run_out(fleet)


def run_managed(workload, replicas, management, transfer=FAST, router="round-robin", interval=1.0):
    turns = Turns(workload)
    fleet = Observed(
        turns,
        replicas,
        router_of(router),
        management,
        interval,
        decode_router=router_of(router),
        transfer=transfer,
    )
    result = run_out(fleet)
    assert not any(view.num_requests or view.num_tokens for view in fleet._views)
    return turns.sequences, result, fleet


def run_out(fleet):
    result = fleet.run()
    for each in [engine for replica in fleet._replicas for engine in replica.engines]:
        assert each._pool.num_used == 0
        left = each._queue.num_slots, each._queue.num_pending, each._batch.num_occupied
        assert left == (0, 0, 0)
    return result


class Observed(ManagedDisaggregatedFleet):
    """A managed fleet in which limits are looked after, and it is kept who was refused."""

    def __init__(self, *args, **more):
        self.refused = []
        super().__init__(*args, **more)

    def _note_sent(self, sequence, view):
        super()._note_sent(sequence, view)
        limit = self._pool_of(view)._max_in_flight
        assert view.num_requests <= limit or sequence.has_siblings
        # To one that has failed, and perhaps goes, until it is missed.
        assert self._lives[view.index].state not in (ReplicaState.STARTING, ReplicaState.DRAINING)

    def _take_ended(self, index):
        life, engines = self._lives[index], self._replicas[index].engines
        assert not any(each.ended for each in engines) or life.state in STEPPING
        super()._take_ended(index)

    def _release(self, sequence, time):
        if self._keeper(sequence) is not None:
            assert self._lives[sequence.source].state in STEPPING
        super()._release(sequence, time)

    def _refuse(self, sequence):
        self.refused.append(whole_of(sequence).input_index)
        super()._refuse(sequence)


def workload(*rows):
    """Requests of rows (arrival, prompt tokens, output tokens); no two prompts begin alike."""
    return workload_of(
        [
            Request(
                prompt=[place + 1] * num_prompt,
                max_tokens=num_output,
                ignore_eos=True,
                arrival_time=float(arrival),
            )
            for place, (arrival, num_prompt, num_output) in enumerate(rows)
        ],
        MODEL,
    )


def seconds(sequences, name):
    return [getattr(one, name) / TICKS_PER_SECOND for one in sequences]


def test_a_request_alone_takes_its_prompt_the_way_and_its_other_tokens():
    transfer = Transfer(seconds_per_token=0.01, latency=0.5)
    (one,), result = run(workload((0, 100, 6)), [replica("prefill"), replica("decode")], transfer)
    assert (one.admitted, one.first_token, one.end) == (0.0, 1.0, 1.0 + 1.5 + 5)
    assert [part.totals.num_steps for part in result.replicas] == [1, 5]
    assert [part.num_served for part in result.replicas] == [1, 1]
    assert list(result.times.num_tokens) == [6]


@examples(30)
@given(st.integers(1, 200), st.integers(2, 40), st.sampled_from(STEP_TIMES))
def test_a_request_alone_takes_what_its_steps_take(num_prompt, num_output, step_time):
    replicas = [replica(role, step_time=step_time) for role in ("prefill", "decode")]
    (one,), result = run(workload((0, num_prompt, num_output)), replicas)
    first = step_time.ticks(num_prompt, 1, 0, num_prompt**2)
    begin = step_time.ticks(1, 1, 0, 2 * num_prompt + 1)
    reads = range(num_prompt + 1, num_prompt + num_output - 1)
    assert one.first_token_ticks == first
    rest = begin + sum(step_time.ticks(1, 1, read, 0) for read in reads)
    assert one.end_ticks == pytest.approx(first + rest, abs=1)  # it arrives at a time in seconds
    assert result.replicas[1].end_ticks == one.end_ticks


def test_output_of_one_token_goes_nowhere():
    (one,), result = run(workload((0, 5, 1)), [replica("prefill"), replica("decode")])
    assert (one.first_token, one.end) == (1.0, 1.0)
    assert [part.totals.num_steps for part in result.replicas] == [1, 0]


@examples(60)
@given(SEEDS)
def test_the_decode_side_is_an_engine_to_which_all_come_when_it_is_there(seed):
    random = Random(seed)
    arrivals = sorted(random.uniform(0, 9) for _ in range(12))
    rows = [(at, random.randint(1, 40), random.randint(2, 9)) for at in arrivals]
    step = ConstantStepTime(0.5)
    prompts = replica("prefill", 12, 1000, step)
    decoding = replica("decode", random.randint(1, 4), 1000, step)
    sequences, result = run(workload(*rows), [prompts, decoding])
    there = [
        (one.first_token, row[1], row[2] - 1) for one, row in zip(sequences, rows, strict=True)
    ]
    alone = simulate(workload(*there), decoding.num_slots, SchedulingSettings(), step)
    assert seconds(sequences, "end_ticks") == pytest.approx(seconds(alone.sequences, "end_ticks"))
    assert result.replicas[1].totals.num_steps == alone.totals.num_steps


def test_blocks_are_held_on_both_sides_until_all_is_there():
    # a prompt of 32 tokens has 2 blocks; the second prompt has none before 1 + 10 s, when the
    # first one is there
    transfer = Transfer(seconds_per_token=0.0, latency=10.0)
    rows = [(0, 32, 4), (0, 32, 4)]
    replicas = [replica("prefill", kv_blocks=2), replica("decode", kv_blocks=20)]
    (one, two), result = run(workload(*rows), replicas, transfer)
    assert (one.first_token, one.end) == (1.0, 14.0)
    assert (two.admitted, two.first_token, two.end) == (11.0, 12.0, 25.0)
    # with blocks for one request where they decode, the second one leaves when the first has ended
    replicas = [replica("prefill"), replica("decode", kv_blocks=3)]
    (one, two), result = run(workload(*rows), replicas, transfer)
    assert (one.first_token, two.first_token) == (1.0, 1.0)
    assert (one.end, two.end) == (14.0, 27.0)
    assert result.replicas[1].totals.block_steps == 6 * 3


def test_blocks_are_looked_for_when_a_step_ends():
    replicas = [replica("prefill", step_time=ConstantStepTime(0.25)), replica("decode")]
    (one, two), _ = run(workload((0, 4, 4), (1, 4, 3)), replicas)
    assert (one.first_token, one.end) == (0.25, 3.25)  # its steps begin at 0.25, 1.25 and 2.25
    assert (two.first_token, two.end) == (1.25, 3.25)
    (one, two), _ = run(workload((0, 4, 4), (1.25, 4, 3)), replicas)
    assert (two.first_token, two.end) == (1.5, 4.25)
    # with 1.2 s on the way steps begin at 1.45, 2.45 and so on; it leaves at 4.45
    transfer = Transfer(seconds_per_token=0.0, latency=1.2)
    (one, two), _ = run(workload((0, 4, 9), (3.25, 4, 3)), replicas, transfer)
    assert (one.end, two.first_token, two.end) == pytest.approx((9.45, 3.5, 8.45))


def test_who_never_has_room_to_decode_fails_and_leaves_no_block_behind():
    replicas = [replica("prefill"), replica("decode", kv_blocks=2)]
    (one, two), result = run(workload((0, 20, 30), (0, 20, 5)), replicas)
    assert (one.has_failed, two.has_failed) == (True, False)
    assert (result.num_failed, result.replicas[1].failed.total()) == (1, 1)


def random_sides(random, most_ranks=3):
    """Replicas of both roles, and how long it is from one to the other."""
    replicas = []
    step_times = STEP_TIMES if most_ranks == 1 else [*STEP_TIMES, *WITH_EXPERTS]
    for role in ["prefill"] * random.randint(1, 3) + ["decode"] * random.randint(1, 3):
        num_slots, settings = random_settings(random)
        step_time, ranks = random.choice(step_times), random.randint(1, most_ranks)
        if role == "decode":
            kv_blocks = random.choice([12, 40, 400])
            policy = "sjf" if settings.policy == "lpm" else settings.policy
            limits = {"max_batch_tokens": settings.max_batch_tokens, "policy": policy}
            replicas.append(replica(role, num_slots, kv_blocks, step_time, ranks, **limits))
        else:
            own = ReplicaSettings(
                num_slots=num_slots,
                scheduling=settings,
                step_time=step_time,
                role=role,
                ranks=ranks,
            )
            replicas.append(own)
    random.shuffle(replicas)
    transfer = Transfer(
        seconds_per_token=random.choice([0.0, 0.01, 1.0]), latency=random.choice([0.0, 0.3])
    )
    return replicas, transfer


def in_groups(replicas):
    """Replicas that are alike and one group if they have one role; and how many are in each."""
    kinds = {each.role: replace(each, group=each.role) for each in replicas}
    counts = {role: sum(each.role == role for each in replicas) for role in kinds}
    return [kinds[each.role] for each in replicas], counts


def random_admission(random):
    admission = AdmissionControl(
        max_in_flight=random.randint(1, 4),
        max_queue=random.choice([0, 2, 50]),
        max_wait=random.choice([None, 0.5, 20.0]),
    )
    return random.choice([None, admission])


def random_work(random):
    requests = random_requests(random, may_stop=False)
    return workload_of(requests, BoundedModel(random.choice([None, None, 60])))


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_every_sequence_comes_to_one_end_and_every_block_is_free(seed, name):
    random = Random(seed)
    work = random_work(random)
    replicas, transfer = random_sides(random)
    interval = random.choice([0.1, 1.0, 50.0])
    sequences, result = run(work, replicas, transfer, name, interval)
    served = [one for one in sequences if not one.has_failed and one.max_tokens]
    assert len(served) + result.num_failed + sum(
        not (one.has_failed or one.max_tokens) for one in sequences
    ) == len(work.jobs)
    assert len(result.times.arrival) == len(served)
    assert sum(result.times.num_tokens) == sum(one.num_output_tokens for one in served)
    for one in served:
        assert one.arrival_time <= one.admitted <= one.first_token <= one.end
        if one.num_output_tokens > 1:
            assert one.end > one.first_token + transfer.seconds(one.num_prompt_tokens) - 1e-9
    again, _ = run(work, replicas, transfer, name, interval)
    assert seconds(again, "end_ticks") == seconds(sequences, "end_ticks")


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


class OfRanks(DisaggregatedFleet):
    """A fleet whose replicas have ranks, though it is one of each."""

    def _make_replica(self, settings, results=()):
        kinds = (PrefillReplica, PrefillRank)
        if settings.role == "decode":
            taken = {"transfer": self._transfer, "on_taken": self._release}
            kinds = partial(DecodeReplica, **taken), partial(DecodeRank, **taken)
        alone, in_step = (partial(kind, self._turns, settings) for kind in kinds)
        return ranks_of(settings, self._interval, lambda _: alone(), lambda _: in_step())


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_one_rank_of_each_role_is_an_engine_to_the_tick(seed, name):
    random = Random(seed)
    work = random_work(random)
    replicas, transfer = random_sides(random, 1)
    replicas = [
        replace(each, step_time=random.choice([each.step_time, *WITH_EXPERTS])) for each in replicas
    ]
    interval = random.choice([0.1, 1.0, 50.0])
    sequences, result = run(work, replicas, transfer, name, interval)
    ranked, same = run(work, replicas, transfer, name, interval, OfRanks)
    assert seconds(ranked, "end_ticks") == seconds(sequences, "end_ticks")
    assert seconds(ranked, "first_token_ticks") == seconds(sequences, "first_token_ticks")
    assert same.replicas == result.replicas


@pytest.mark.parametrize("step_time", [EXPERTS, DENSE])
def test_a_rank_that_is_full_waits_until_its_prompts_are_where_they_decode(step_time):
    # each has two blocks, so one prompt of 32 tokens; the third one is computed when the first is
    # where it decodes, ten seconds after the first two were computed
    slow = Transfer(seconds_per_token=0.0, latency=10.0)
    kinds = {"step_time": step_time, "ranks": 2}
    replicas = [replica("prefill", kv_blocks=2, **kinds), replica("decode", **kinds)]
    work = workload((0, 32, 2), (0, 32, 2), (0, 32, 2))
    (one, two, three), result = run(work, replicas, slow)
    together = alone = DENSE.ticks(32, 1, 0, 32**2)
    if step_time is EXPERTS:  # which those hit that all ranks compute, one token of who idles too
        ticks = EXPERTS.of_rank(2)
        together, alone = ticks(32, 1, 0, 32**2, 64), ticks(32, 1, 0, 32**2, 33)
    assert [one.first_token_ticks, two.first_token_ticks] == [together] * 2
    begin = together + 10 * TICKS_PER_SECOND
    assert three.first_token_ticks == pytest.approx(begin + alone, abs=1)
    waited, idle = (part.stalled_ticks for part in result.replicas[:2])  # the third one's, and not
    assert (waited, idle) == (pytest.approx(begin - together), 0)


@pytest.mark.parametrize("step_time", [EXPERTS, DENSE])
def test_a_rank_that_is_full_goes_on_when_it_hears_that_its_prompt_is_taken(step_time):
    # there is room to decode for one request, so the second prompt leaves when the first has ended,
    # after ten seconds on its way, and the fourth request has blocks ten seconds later
    slow = Transfer(seconds_per_token=0.0, latency=10.0)
    prompts = replica("prefill", kv_blocks=2, step_time=step_time, ranks=2)
    work = workload(*[(0, 32, 2)] * 4)
    (one, two, three, four), _ = run(work, [prompts, replica("decode", kv_blocks=3)], slow)
    assert (one.admitted, two.admitted) == (0, 0)
    assert three.admitted == pytest.approx(one.first_token + 10, abs=1e-6)
    assert four.admitted == pytest.approx(one.end + 10, abs=1e-6)
