"""What a deployment is made of: groups of alike replicas, and how they are reached.

Rule: whoever simulates a deployment asks here what its replicas are, file or not.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from math import gcd

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, OF_ROUTING, Deployment, Value
from batcher.planning.disaggregated import Transfer
from batcher.planning.fleet import Role
from batcher.planning.fleet_file import FleetFile
from batcher.planning.routers import router_of
from batcher.scheduling.checks import check_effects
from batcher.settings import DEFAULT_WATERMARK
from batcher.timing.loading import model_shape_of

WHERE_DECODED: dict[str, Value] = {
    "capacity": "no-evict",
    "prefix_cache": False,
    "preempt_for": None,
    "watermark": DEFAULT_WATERMARK,
}
"""How replicas with the role decode are scheduled, see batcher.planning.disaggregated."""


class EngineGroup(Struct, frozen=True, kw_only=True):
    """Replicas of a deployment that are alike; engine: what each of them is.

    name: in the file, "" without one.  role: see ReplicaSettings.
    """

    name: str
    count: int
    role: Role = "both"
    engine: Deployment


def groups_of(deployment: Deployment) -> list[EngineGroup]:
    """Return the groups of alike replicas, in the order of the file; one if there is no file."""
    engine = replace(deployment, fleet=None, replicas=1)
    if deployment.fleet is None:
        return [EngineGroup(name="", count=deployment.replicas, engine=engine)]
    groups = []
    for group in deployment.fleet.groups:
        own = engine
        for name, value in group.settings.items():
            own = AXES[name].set(own, value)
        if group.role == "decode":
            own = replace(own, scheduling=replace(own.scheduling, **WHERE_DECODED))
        groups.append(EngineGroup(name=group.name, count=group.count, role=group.role, engine=own))
    return groups


def least_fleet(fleet: FleetFile) -> FleetFile:
    """Return the fewest replicas that are in the proportion of the groups of a file."""
    return _with_counts(fleet, lambda count: count // gcd(*(group.count for group in fleet.groups)))


def times(fleet: FleetFile, number: int) -> FleetFile:
    """Return a fleet of so many times as many replicas of each group."""
    return _with_counts(fleet, lambda count: count * number)


def _with_counts(fleet: FleetFile, count_of: Callable[[int], int]) -> FleetFile:
    groups = tuple(replace(group, count=count_of(group.count)) for group in fleet.groups)
    return replace(fleet, groups=groups)


def transfer_of(deployment: Deployment) -> Transfer | None:
    """Return how long it takes to where requests decode; None if they do where their prompts are.

    Raises:
        BatchdecodeError: it is not known how large a token is.
    """
    link = None if deployment.fleet is None else deployment.fleet.transfer
    if link is None:
        return None
    num_bytes = link.bytes_per_token
    if num_bytes is None:
        profile = next(g.engine.profile for g in groups_of(deployment) if g.role == "prefill")
        shape = model_shape_of(profile)
        if shape is None:
            raise BatchdecodeError(
                f"{deployment.fleet}: transfer: nothing says how large keys and values of a token "
                f"are with {profile}: give bytes_per_token"
            )
        num_bytes = shape.kv_bytes_per_token
    return Transfer(seconds_per_token=num_bytes / (link.gbytes_per_s * 1e9), latency=link.latency)


def engines_of(deployments: Iterable[Deployment]) -> list[Deployment]:
    """Return what the replicas of `deployments` are."""
    return [group.engine for deployment in deployments for group in groups_of(deployment)]


def check_router(given: Collection[str], alternatives: Iterable[Deployment]) -> None:
    """Make sure that what was given of a router has an effect in one of the `alternatives`.

    Raises:
        BatchdecodeError: it has not.
    """
    deployments = list(alternatives)
    fleets = [deployment for deployment in deployments if deployment.replicas > 1]
    if not fleets:
        for name in OF_ROUTING:
            if name in given:
                raise BatchdecodeError(
                    f"{AXES[name].option} has no effect without --replicas of at least 2"
                )
    if "report_interval" in given and not (
        any(router_of(deployment.router).hears_reports for deployment in fleets)
    ):
        raise BatchdecodeError(
            "--report-interval has no effect: the router goes by no reports of replicas"
        )


def check_fleets(given: Collection[str], alternatives: Iterable[Deployment]) -> None:
    """Make sure that all that was given beside fleets of files, and in them, has an effect.

    Raises:
        BatchdecodeError: something has not.
    """
    deployments = list(alternatives)
    if "fleet" in given and "replicas" in given:
        raise BatchdecodeError("--replicas has no effect with --fleet, whose groups have counts")
    for deployment in deployments:
        fleet = deployment.fleet
        if fleet is None:
            continue
        transfer_of(deployment)
        if fleet.report_interval is not None:
            with _in_file(f"{fleet.path}: "):
                check_router(["report_interval"], [deployment])
        for stated, group in zip(fleet.groups, groups_of(deployment), strict=True):
            with _in_file(f"{fleet.path}: group {group.name}: "):
                check_effects(stated.settings, [group.engine.scheduling])
    for name in given:
        if name in AXES and all(_states(deployment.fleet, name) for deployment in deployments):
            raise BatchdecodeError(
                f"{AXES[name].option} has no effect: all replicas of --fleet have a {name} already"
            )


def _states(fleet: FleetFile | None, name: str) -> bool:
    """Return whether a file leaves nothing of a setting to the command line."""
    if fleet is None:
        return False
    if name in OF_ROUTING:
        return getattr(fleet, name) is not None
    return all(name in group.settings for group in fleet.groups)


@contextmanager
def _in_file(place: str) -> Iterator[None]:
    """Let errors say which file they are about, and where in it."""
    try:
        yield
    except BatchdecodeError as error:
        raise BatchdecodeError(f"{place}{error}") from None
