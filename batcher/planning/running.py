"""From a deployment to the engine or the fleet that it is, and what that does with a workload.

Rule: the same workload and deployment come to the same, in whatever process, and in a trial or not.
"""

from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct

from batcher.planning.deployments import Deployment
from batcher.planning.disaggregated import DisaggregatedFleet
from batcher.planning.fleet import Fleet, FleetResult, ReplicaSettings, result_of_engine
from batcher.planning.fleet_file import Management
from batcher.planning.fleets import EngineGroup, groups_of, transfer_of
from batcher.planning.managed_fleet import ManagedFleet
from batcher.planning.routers import ROUTERS, BlindRouter, PartRouter, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import OnEnded, Preempted, simulate
from batcher.planning.streamed import AnyWorkload, StreamedTurns, StreamedWorkload, always
from batcher.planning.workers import OnPart
from batcher.planning.workload import Workload
from batcher.timing.loading import step_time_of


class DeploymentPart(Struct, frozen=True):
    """A deployment, or of its replicas every num_parts-th, from the one at `place` on."""

    deployment: Deployment
    place: int = 0
    num_parts: int = 1


def most_parts(workload: AnyWorkload, deployment: Deployment) -> int:
    """Return in how many parts it can be run: one if replicas depend on each other."""
    is_blind = isinstance(router_of(deployment.router), BlindRouter)
    is_independent = is_blind and _management_of(deployment) is None
    is_streamed = isinstance(workload, StreamedWorkload)
    is_one = transfer_of(deployment) is not None
    return deployment.replicas if is_independent and is_streamed and not is_one else 1


def run(
    workload: AnyWorkload, part: DeploymentPart, on_part: OnPart = lambda _: None
) -> FleetResult:
    """Return what a part of the replicas of a deployment does; one alone needs no router.

    on_part: called with the share of the samples that have ended, again and again.

    Raises:
        BatchdecodeError: its settings make no sense.
    """
    deployment = part.deployment
    workload = workload.at_rate(deployment.rate)
    replicas = [
        settings
        for group in groups_of(deployment)
        for settings in [_replica_of(group)] * group.count
    ]
    num_samples = max(workload.num_samples // part.num_parts, 1)

    def on_ended(num_ended: int) -> None:
        on_part(min(num_ended / num_samples, 1.0))

    own, management = replicas[0], _management_of(deployment)
    if management is None and len(replicas) == 1 and isinstance(workload, Workload):
        slots, scheduling, step_time = own.num_slots, own.scheduling, own.step_time
        result = simulate(workload, slots, scheduling, step_time, on_ended, own.drafts)
        return result_of_engine(result, own)
    for_trial = _replicas_of_trial(deployment, replicas)
    if for_trial is not None and workload.shares_nothing:
        with suppress(Preempted):
            return _fleet_of(workload, part, for_trial, on_ended).run()
    return _fleet_of(workload, part, replicas, on_ended).run()


def _replicas_of_trial(
    deployment: Deployment, replicas: Sequence[ReplicaSettings]
) -> list[ReplicaSettings] | None:
    """Return them for a trial; None if that would not do, or gain nothing.

    A router of one's own is asked by no fleet that may be given up: it may count.
    """
    is_plain = _management_of(deployment) is None and transfer_of(deployment) is None
    if not is_plain or deployment.router not in ROUTERS:
        return None
    for_trial = [settings.of_trial for settings in replicas]
    found = [settings for settings in for_trial if settings is not None]
    return found if len(found) == len(replicas) else None


def _fleet_of(
    workload: AnyWorkload,
    part: DeploymentPart,
    replicas: Sequence[ReplicaSettings],
    on_ended: OnEnded,
) -> Fleet:
    """Return a fleet that has done nothing yet."""
    deployment = part.deployment
    router, takes = router_of(deployment.router), always
    if isinstance(router, BlindRouter) and part.num_parts > 1:
        router = PartRouter(router, part.place, part.num_parts)
        takes = router.takes
    turns = Turns(workload) if isinstance(workload, Workload) else StreamedTurns(workload, takes)
    interval, transfer = deployment.report_interval, transfer_of(deployment)
    management = _management_of(deployment)
    if transfer is not None:
        return DisaggregatedFleet(
            turns,
            replicas,
            router,
            interval,
            on_ended,
            decode_router=router_of(deployment.router),
            transfer=transfer,
        )
    if management is None:
        return Fleet(turns, replicas, router, interval, on_ended)
    return ManagedFleet(turns, replicas, router, management, interval, on_ended)


def _management_of(deployment: Deployment) -> Management | None:
    return None if deployment.fleet is None else deployment.fleet.management


def _replica_of(group: EngineGroup) -> ReplicaSettings:
    engine = group.engine
    return ReplicaSettings(
        num_slots=engine.batch,
        scheduling=engine.scheduling,
        step_time=step_time_of(engine.profile),
        drafts=engine.drafts,
        group=group.name,
        role=group.role,
    )
