"""How the work of a fleet was spread: over its replicas, and over the groups that are alike."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from batcher.fleet.result import FleetResult, ReplicasResult
from batcher.timing.step_time import TICKS_PER_SECOND
from batcher.whatif.deployments import AXES, OF_ENGINE, EngineGroup

NUM_DIGITS = 6


class ReplicaSpread(Struct, frozen=True, kw_only=True):
    """How the work was spread over the replicas of a fleet.

    busiest, mean, idlest: for which share of the makespan one took steps.
    most_served, least_served: how many samples.
    """

    busiest: float
    mean: float
    idlest: float
    most_served: int
    least_served: int


class GroupUse(Struct, frozen=True, kw_only=True):
    """What the replicas of a group did.

    settings: of each replica.  served, failed: samples.  busy: for which share of the makespan a
    replica took steps, on average.  slots_used, kv_used: shares over their steps, None without such
    a limit.
    """

    name: str
    replicas: int
    settings: dict[str, Any]
    served: int
    failed: int
    steps: int
    busy: float
    slots_used: float
    kv_used: float | None
    preemptions: int


def parts_of(result: FleetResult, groups: Sequence[EngineGroup]) -> list[ReplicasResult]:
    """Return what the replicas of each group did, which stand in their order in `result`."""
    replicas = iter(result.replicas)
    return [ReplicasResult(list(islice(replicas, group.count))) for group in groups]


def spread_of(result: FleetResult) -> ReplicaSpread:
    """Return how the work was spread over all replicas."""
    busy = [_share(replica.busy_ticks, result.makespan) for replica in result.replicas]
    served = [replica.num_served for replica in result.replicas]
    return ReplicaSpread(
        busiest=round(max(busy), NUM_DIGITS),
        mean=round(sum(busy) / len(busy), NUM_DIGITS),
        idlest=round(min(busy), NUM_DIGITS),
        most_served=max(served),
        least_served=min(served),
    )


def uses_of(result: FleetResult, groups: Sequence[EngineGroup]) -> list[GroupUse]:
    """Return what the replicas of each group did."""
    return [
        GroupUse(
            name=group.name,
            replicas=group.count,
            settings={name: AXES[name].value_of(group.engine) for name in OF_ENGINE},
            served=sum(replica.num_served for replica in part.replicas),
            failed=sum(replica.failed.total() for replica in part.replicas),
            steps=part.totals.num_steps,
            busy=round(_share(part.busy_ticks, result.makespan) / group.count, NUM_DIGITS),
            slots_used=round(part.slot_utilisation, NUM_DIGITS),
            kv_used=None if (used := part.kv_utilisation) is None else round(used, NUM_DIGITS),
            preemptions=part.totals.num_preemptions,
        )
        for group, part in zip(groups, parts_of(result, groups), strict=True)
    ]


def _share(ticks: int, makespan: float) -> float:
    return ticks / TICKS_PER_SECOND / makespan if makespan else 0.0
