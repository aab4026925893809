"""Prompts here and decoding there: times by hand, no request and no block lost."""

from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jobs import simulate
from msgspec.structs import replace
from served import requests_of
from simulated_workloads import STEP_TIMES, BoundedModel, random_requests, random_settings

from batcher.planning.fleet import Fleet
from batcher.planning.replicas import Transfer
from batcher.planning.routers import ROUTERS, router_of
from batcher.planning.simulator import ReplicaSettings
from batcher.planning.workload import Turns, workload_of
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import TICKS_PER_SECOND, ConstantStepTime

SEEDS = st.integers(0, 2**32)
FAST = Transfer(gbytes_per_s=1, bytes_per_token=0)


def replica(role, num_slots=4, kv_blocks=100, step_time=None, **scheduling):
    if role == "decode":
        scheduling |= {"capacity": "no-evict", "prefix_cache": False}
    return ReplicaSettings(
        num_slots=num_slots,
        scheduling=SchedulingSettings(kv_blocks=kv_blocks, **scheduling),
        step_time=step_time or ConstantStepTime(1.0),
        role=role,
    )


def run(workload, replicas, transfer=FAST, router="round-robin", interval=1.0):
    """What it comes to; every block is free in the end, and no event is left."""
    turns = Turns(workload)
    names = {"decode_router": router_of(router), "transfer": transfer}
    fleet = Fleet(turns, replicas, router_of(router), interval, **names)
    result = fleet.run()
    for each in (member.replica for member in fleet._members):
        assert each._pool.num_used == 0
        left = each._queue.num_slots, each._queue.num_pending, each._batch.num_occupied
        assert left == (0, 0, 0)
    return turns.sequences, result


def workload(*rows):
    return workload_of(requests_of(*rows), BoundedModel(None))


def both_sides(step_time=None):
    return [replica(role, step_time=step_time) for role in ("prefill", "decode")]


def seconds(sequences, name):
    return [getattr(one, name) / TICKS_PER_SECOND for one in sequences]


def random_sides(random):
    """Replicas of both roles, and how long it is from one to the other."""
    replicas = []
    for role in ["prefill"] * random.randint(1, 3) + ["decode"] * random.randint(1, 3):
        num_slots, settings = random_settings(random)
        step_time = random.choice(STEP_TIMES)
        if role == "decode":
            kv_blocks = random.choice([12, 40, 400])
            policy = "sjf" if settings.policy == "lpm" else settings.policy
            limits = {"max_batch_tokens": settings.max_batch_tokens, "policy": policy}
            replicas.append(replica(role, num_slots, kv_blocks, step_time, **limits))
        else:
            own = ReplicaSettings(
                num_slots=num_slots, scheduling=settings, step_time=step_time, role=role
            )
            replicas.append(own)
    random.shuffle(replicas)
    transfer = Transfer(
        gbytes_per_s=1,
        bytes_per_token=random.choice([0, 1e7, 1e9]),
        latency=random.choice([0.0, 0.3]),
    )
    return replicas, transfer


def test_a_request_alone_takes_its_prompt_the_way_and_its_other_tokens():
    transfer, replicas = Transfer(gbytes_per_s=1, bytes_per_token=1e7, latency=0.5), both_sides()
    (one,), result = run(workload((0, 100, 6)), replicas, transfer)
    assert (one.admitted, one.first_token, one.end) == (0.0, 1.0, 1.0 + 1.5 + 5)
    assert [part.num_steps for part in result.replicas] == [1, 5]
    assert [part.num_served for part in result.replicas] == [1, 1]
    assert list(result.times.num_tokens) == [6]
    (one,), result = run(workload((0, 5, 1)), replicas)  # output of one token goes nowhere
    assert (one.first_token, one.end) == (1.0, 1.0)
    assert [part.num_steps for part in result.replicas] == [1, 0]


@examples(30)
@given(st.integers(1, 200), st.integers(2, 40), st.sampled_from(STEP_TIMES))
def test_a_request_alone_takes_what_its_steps_take(num_prompt, num_output, step_time):
    (one,), result = run(workload((0, num_prompt, num_output)), both_sides(step_time))
    first = step_time.ticks(num_prompt, 1, 0, num_prompt**2)
    begin = step_time.ticks(1, 1, 0, 2 * num_prompt + 1)
    reads = range(num_prompt + 1, num_prompt + num_output - 1)
    assert one.first_token_ticks == first
    rest = begin + sum(step_time.ticks(1, 1, read, 0) for read in reads)
    assert one.end_ticks == pytest.approx(first + rest, abs=1)  # it arrives at a time in seconds
    assert result.replicas[1].end_ticks == one.end_ticks


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
    assert result.replicas[1].num_steps == alone.totals.num_steps


def test_blocks_are_held_on_both_sides_until_all_is_there():
    # a prompt of 32 tokens has 2 blocks; the second prompt has none before 1 + 10 s, when the
    # first one is there
    transfer = replace(FAST, latency=10.0)
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
    assert result.replicas[1].block_steps == 6 * 3


def test_blocks_are_looked_for_when_a_step_ends():
    replicas = [replica("prefill", step_time=ConstantStepTime(0.25)), replica("decode")]
    (one, two), _ = run(workload((0, 4, 4), (1, 4, 3)), replicas)
    assert (one.first_token, one.end) == (0.25, 3.25)  # its steps begin at 0.25, 1.25 and 2.25
    assert (two.first_token, two.end) == (1.25, 3.25)
    (one, two), _ = run(workload((0, 4, 4), (1.25, 4, 3)), replicas)
    assert (two.first_token, two.end) == (1.5, 4.25)
    # with 1.2 s on the way steps begin at 1.45, 2.45 and so on; it leaves at 4.45
    transfer = replace(FAST, latency=1.2)
    (one, two), _ = run(workload((0, 4, 9), (3.25, 4, 3)), replicas, transfer)
    assert (one.end, two.first_token, two.end) == pytest.approx((9.45, 3.5, 8.45))


def test_who_never_has_room_to_decode_fails_and_leaves_no_block_behind():
    replicas = [replica("prefill"), replica("decode", kv_blocks=2)]
    (one, two), result = run(workload((0, 20, 30), (0, 20, 5)), replicas)
    assert (one.has_failed, two.has_failed) == (True, False)
    assert (result.failed.total(), result.replicas[1].failed.total()) == (1, 1)


@examples(200)
@given(SEEDS, st.sampled_from(sorted(ROUTERS)))
def test_every_sequence_comes_to_one_end_and_every_block_is_free(seed, name):
    random = Random(seed)
    requests = random_requests(random, may_stop=False)
    work = workload_of(requests, BoundedModel(random.choice([None, None, 60])))
    replicas, transfer = random_sides(random)
    interval = random.choice([0.1, 1.0, 50.0])
    sequences, result = run(work, replicas, transfer, name, interval)
    served = [one for one in sequences if not one.has_failed and one.max_tokens]
    assert len(served) + result.failed.total() + sum(
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
