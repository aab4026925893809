"""How the work of a fleet was spread: over its replicas, and over the groups that are alike."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from batcher.planning.deployments import AXES, OF_ENGINE
from batcher.planning.fleet import (
    PAID,
    FleetResult,
    Life,
    ReplicasResult,
    ReplicaState,
    Role,
    timeline_of,
)
from batcher.planning.fleets import EngineGroup
from batcher.timing.step_time import TICKS_PER_SECOND

NUM_DIGITS = 6


class GroupUse(Struct, frozen=True, kw_only=True):
    """What the replicas of a group did.

    replicas: all there ever were.  most_replicas: at once.  role, settings: of each.
    served, failed: samples; a prompt that goes on elsewhere counts as served.  busy: for which
    share of the time in which they were there they took steps.  slots_used, kv_used: shares over
    their steps, None without such a limit.
    """

    name: str
    replicas: int
    role: Role
    settings: dict[str, Any]
    served: int
    failed: int
    steps: int
    busy: float
    slots_used: float
    kv_used: float | None
    preemptions: int
    most_replicas: int


class FleetUse(Struct, frozen=True, kw_only=True):
    """How the replicas of a managed fleet came and went.

    failures: of replicas.  lost: how often a sample was lost with one.  replica_seconds: in which
    replicas were paid for, all but those that are down.  mean_replicas: that were, most_replicas:
    at once.  serving: for which share of these seconds they served.
    refusals: how many samples were refused for which reason, of those for which any was.
    timeline: a time, and how many serve and are paid for from then on.
    """

    failures: int
    lost: int
    replica_seconds: float
    mean_replicas: float
    most_replicas: int
    serving: float
    refusals: dict[str, int]
    timeline: list[tuple[float, int, int]]


def fleet_use_of(result: FleetResult) -> FleetUse | None:
    """Return how the replicas came and went; None if they were there all the time."""
    history, begin, makespan = result.history, result.first_arrival or 0.0, result.makespan
    if history is None:
        return None
    end = begin + makespan
    seconds = sum(life.seconds(PAID, begin, end) for life in history.lives)
    serving = sum(life.seconds([ReplicaState.SERVING], begin, end) for life in history.lives)
    timeline = timeline_of(history.lives, end)
    return FleetUse(
        failures=history.num_failures,
        lost=history.num_lost,
        replica_seconds=round(seconds, NUM_DIGITS),
        mean_replicas=round(seconds / makespan, NUM_DIGITS) if makespan else 0.0,
        most_replicas=max(num_paid for _, _, num_paid in timeline),
        serving=round(serving / seconds, NUM_DIGITS) if seconds else 0.0,
        refusals={reason: count for reason, count in sorted(history.refusals.items()) if count},
        timeline=[(round(time, NUM_DIGITS), serve, paid) for time, serve, paid in timeline],
    )


def parts_of(result: FleetResult, groups: Sequence[EngineGroup]) -> list[ReplicasResult]:
    """Return what the replicas of each group did."""
    return [
        ReplicasResult([each for each in result.replicas if each.group == group.name])
        for group in groups
    ]


def uses_of(result: FleetResult, groups: Sequence[EngineGroup]) -> list[GroupUse]:
    """Return what the replicas of each group did."""
    most = _most_at_once(result, groups)
    return [
        GroupUse(
            name=group.name,
            replicas=len(part.replicas),
            role=group.role,
            settings={name: AXES[name].value_of(group.engine) for name in OF_ENGINE},
            served=sum(replica.num_served for replica in part.replicas),
            failed=sum(replica.failed.total() for replica in part.replicas),
            steps=part.totals.num_steps,
            busy=round(_share(part.busy_ticks, part.paid_seconds(result.makespan)), NUM_DIGITS),
            slots_used=round(part.slot_utilisation, NUM_DIGITS),
            kv_used=None if (used := part.kv_utilisation) is None else round(used, NUM_DIGITS),
            preemptions=part.totals.num_preemptions,
            most_replicas=most.get(group.name, len(part.replicas)),
        )
        for group, part in zip(groups, parts_of(result, groups), strict=True)
    ]


def _most_at_once(result: FleetResult, groups: Sequence[EngineGroup]) -> dict[str, int]:
    """Return how many replicas of each group there were at once, at most; {} if all always were."""
    if result.history is None:
        return {}
    lives: dict[str, list[Life]] = {group.name: [] for group in groups}
    for life, replica in zip(result.history.lives, result.replicas, strict=True):
        lives[replica.group].append(life)
    end = (result.first_arrival or 0.0) + result.makespan
    return {
        name: max((paid for _, _, paid in timeline_of(of_group, end)), default=0)
        for name, of_group in lives.items()
    }


def _share(ticks: int, seconds: float) -> float:
    return ticks / TICKS_PER_SECOND / seconds if seconds else 0.0
