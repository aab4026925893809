"""Fleets of which some replicas compute prompts and others decode, for tests."""

from hypothesis import strategies as st
from msgspec.structs import replace
from simulated_workloads import (
    STEP_TIMES,
    TERMS,
    WITH_EXPERTS,
    BoundedModel,
    random_requests,
    random_settings,
)

from batcher.planning.admission import AdmissionControl
from batcher.planning.disaggregated import DisaggregatedFleet
from batcher.planning.life import STEPPING, ReplicaState
from batcher.planning.managed_disaggregated import ManagedDisaggregatedFleet
from batcher.planning.phases import whole_of
from batcher.planning.replica import ReplicaSettings
from batcher.planning.routers import router_of
from batcher.planning.sides import Transfer
from batcher.planning.simulated_sequence import Turns
from batcher.planning.workload import workload_of
from batcher.request import Request
from batcher.settings import SchedulingSettings
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
