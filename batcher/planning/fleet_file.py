"""A fleet from a YAML file: groups of replicas, and how the fleet is managed.

A group has settings of its own; the caller brings the names and readers of the settings.  Only a
file of one group may be managed: with admission, failures and autoscaling.

Rule: whatever can have no effect, or no meaning, is an error here.
"""

from collections.abc import Callable, Iterator, Mapping
from math import floor, inf
from random import Random
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.autoscaling import (
    POLICIES,
    SLO,
    Autoscale,
    OptionalSeconds,
    Seconds,
    policy_of,
)
from batcher.planning.simulator import Role
from batcher.timing.catalog import (
    Amount,
    CatalogError,
    Count,
    OptionalPositive,
    Place,
    Positive,
    as_record,
    hint_at,
    read_mapping,
)

Readers = Mapping[str, Callable[[str], Any]]
"""For each setting what makes a value of a text, or raises what says what it may be."""

MAX_GROUPS, MAX_NAME = 1024, 40  # the latter in characters
NOT_WHERE_DECODED = ("capacity", "watermark", "prefix_cache", "preempt_for")


Number = Annotated[int, Meta(ge=0, le=2**40, description="a whole number of at least 0")]
Retries = Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")]


class AdmissionControl(Struct, frozen=True, kw_only=True):
    """Limits on what a router admits.

    max_in_flight: how many requests one replica is sent before one of them has ended; the samples
    of a request stay together, whatever it is.  max_queue: how many wait at the router while all
    replicas have so many; one more, and the last in order of priority is refused.
    max_wait: after so many seconds in that queue a request is refused; None: it may wait for ever.
    """

    max_in_flight: Count
    max_queue: Number = 0
    max_wait: OptionalPositive = None


class PlannedFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica, counted from 0, that fails at a time if it serves then.

    back_after: after how many seconds it serves again; None: never.
    """

    replica: Number
    at: Amount
    back_after: OptionalSeconds = None


Planned = Annotated[
    tuple[PlannedFailure, ...],
    Meta(
        description="a list of failures, each with a replica, counted from 0, at, in seconds, and "
        "perhaps back_after, in seconds, at least 0.001"
    ),
]


class Failures(Struct, frozen=True, kw_only=True):
    """How replicas fail.

    mtbf: the mean time between failures of a replica, in seconds that it serves; the times are
    exponential.  restart: how many seconds one of them takes to serve again.  seed: of these times.
    planned: failures at known times.
    health_check: seconds from each look at all replicas to the next, by which the router notices.
    retries: how often a request that was lost is sent anew.
    """

    mtbf: OptionalSeconds = None
    restart: Seconds = 60.0
    seed: Number = 0
    planned: Planned = ()
    health_check: Seconds = 10.0
    retries: Retries = 3

    def times_of(self, replica: int) -> Iterator[float]:
        draw = Random(f"{self.seed}:{replica}").expovariate  # noqa: S311 - chance, not secrets
        while True:
            yield inf if self.mtbf is None else draw(1 / self.mtbf)

    def noticed_at(self, time: float) -> float:
        return (floor(time / self.health_check) + 1) * self.health_check


class Management(Struct, frozen=True, kw_only=True):
    """How a fleet is managed; None: not in this respect."""

    admission: AdmissionControl | None = None
    failures: Failures | None = None
    autoscale: Autoscale | None = None


class ReplicaGroup(Struct, frozen=True, kw_only=True):
    """So many replicas that are alike.

    role: see ReplicaSettings.  settings: what is stated of them, by name; all else is as for the
    fleet.
    """

    name: str
    count: int
    role: Role = "both"
    settings: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, self.count))  # a dict has none


class TransferLink(Struct, frozen=True, kw_only=True):
    """What keys and values travel over, from where prompts are computed to where requests decode.

    latency: in seconds.  bytes_per_token: None: as the model has it.
    """

    gbytes_per_s: Positive
    latency: Amount = 0.0
    bytes_per_token: OptionalPositive = None


class FleetFile(Struct, frozen=True, kw_only=True):
    """What a file states of a fleet; None: nothing, so it is as on the command line."""

    path: str
    groups: tuple[ReplicaGroup, ...]
    router: str | None = None
    report_interval: float | None = None
    management: Management | None = None
    transfer: TransferLink | None = None

    def __str__(self) -> str:
        return self.path

    @property
    def num_replicas(self) -> int:
        return sum(group.count for group in self.groups)


class _Contents(Struct):
    """The sections of a file, of which each reads what is in it."""

    replicas: Annotated[
        list[Any], Meta(min_length=1, max_length=MAX_GROUPS, description="a list of groups")
    ]
    router: Any = None
    report_interval: Any = None
    admission: Any = None
    failures: Any = None
    autoscale: Any = None
    transfer: Any = None


def read_fleet(path: str, of_fleet: Readers, of_engine: Readers) -> FleetFile:
    """Return the fleet of a YAML file.

    of_fleet: reads `router` and `report_interval`, and as `replicas` how many there are.
    of_engine: reads the settings that a group may state.

    Raises:
        CatalogError: the file cannot be read, or something in it is not allowed.
    """
    contents = as_record(read_mapping(path), _Contents, path)
    stated = {
        name: _read(of_fleet[name], value, Place(path, name, name))
        for name in ("router", "report_interval")
        if (value := getattr(contents, name)) is not None
    }
    groups: dict[str, ReplicaGroup] = {}
    for number, values in enumerate(contents.replicas, 1):
        name = values.get("name") if isinstance(values, dict) else None
        called = f"{number} ({name})" if isinstance(name, str) and name else str(number)
        place = Place(path, f"group {called}", "replicas", number - 1)
        group = _group(values, str(number), place, {**of_engine, "count": of_fleet["replicas"]})
        if group.name in groups:
            raise CatalogError(f"{place}: another group is called {group.name}")
        groups[group.name] = group
    if contents.transfer is not None:
        stated["transfer"] = as_record(
            contents.transfer, TransferLink, Place(path, "transfer", "transfer")
        )
    fleet = FleetFile(path=path, groups=tuple(groups.values()), **stated)
    roles = {group.role for group in fleet.groups}
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise CatalogError(
            f"{path}: role: expected groups with prefill and with decode, or none with either"
        )
    if fleet.transfer is None and "decode" in roles:
        raise CatalogError(f"{path}: transfer is missing: gbytes_per_s, and maybe latency")
    if fleet.transfer is not None and "decode" not in roles:
        raise CatalogError(f"{path}: transfer has no effect without groups with role: decode")
    _read(of_fleet["replicas"], fleet.num_replicas, f"{path}: all replicas together")
    return replace(fleet, management=_management(contents, fleet))


def _management(contents: _Contents, fleet: FleetFile) -> Management | None:
    kinds = (("admission", AdmissionControl), ("failures", Failures), ("autoscale", Autoscale))
    sections: dict[str, Any] = {}
    for name, kind in kinds:
        values, place = getattr(contents, name), Place(fleet.path, name, name)
        if values is not None and len(fleet.groups) > 1:
            names = ", ".join(group.name for group in fleet.groups)
            raise CatalogError(
                f"{place}: expected one group of replicas, without a role, and there are "
                f"{len(fleet.groups)}: {names}"
            )
        if values is not None:
            sections[name] = as_record(values, kind, place)
    if not sections:
        return None
    management = Management(**sections)
    failures, autoscale = management.failures, management.autoscale
    num_replicas = fleet.num_replicas
    place = Place(fleet.path, "failures", "failures")
    if failures is not None and failures.mtbf is None and not failures.planned:
        raise CatalogError(f"{place}: nothing fails without mtbf or planned")
    if failures is not None and autoscale is None:
        for failure in failures.planned:
            if failure.replica >= num_replicas:
                raise CatalogError(
                    f"{place}: planned: there is no replica {failure.replica}, the last is "
                    f"{num_replicas - 1}"
                )
    if autoscale is not None:
        place = Place(fleet.path, "autoscale", "autoscale")
        if not autoscale.min <= num_replicas <= autoscale.max:
            raise CatalogError(
                f"{place}: it begins with {num_replicas} replicas, which is not from min "
                f"{autoscale.min} to max {autoscale.max}"
            )
        if autoscale.slo is not None and autoscale.policy in POLICIES and autoscale.policy != SLO:
            raise CatalogError(f"{place}: slo has no effect on {autoscale.policy}")
        try:
            policy_of(autoscale)
            _ = autoscale.limits
        except BatchdecodeError as error:
            raise CatalogError(f"{place}: {error}") from None
    return management


def _group(values: Any, number: str, place: Place, readers: Readers) -> ReplicaGroup:
    allowed = ["name", "role", *readers]
    if not isinstance(values, dict):
        raise CatalogError(f"{place}: expected a count, and any of {', '.join(allowed)}")
    settings = dict(values)
    name = settings.pop("name", number)
    if not isinstance(name, str | int) or not 0 < len(str(name)) <= MAX_NAME:
        raise CatalogError(
            f"{place.at('name')}: name: expected text of up to {MAX_NAME} characters"
        )
    role = settings.pop("role", "both")
    if role not in get_args(Role):
        hint = hint_at(str(role), get_args(Role))
        raise CatalogError(
            f"{place.at('role')}: role: expected {', '.join(get_args(Role))}, not {role!r}{hint}"
        )
    for key in settings:
        if role == "decode" and key in NOT_WHERE_DECODED:
            raise CatalogError(
                f"{place.at(key)}: {key} has no effect with role: decode, where a request has "
                "blocks for all its tokens from the outset, and finds none"
            )
        if key not in readers:
            raise CatalogError(
                f"{place.at(str(key))}: unknown setting {key}{hint_at(str(key), allowed)}; "
                f"allowed: {', '.join(allowed)}"
            )
    if "count" not in settings:
        raise CatalogError(f"{place}: count is missing")
    read = {key: _read(readers[key], v, place.at(key), f": {key}") for key, v in settings.items()}
    return ReplicaGroup(name=str(name), count=read.pop("count"), role=role, settings=read)


def _read(reader: Callable[[str], Any], value: Any, place: str | Place, named: str = "") -> Any:
    """Return what `reader` makes of a value as YAML has it; named: what messages add to `place`."""
    if value is None or isinstance(value, bool):
        value = {None: "none", True: "on", False: "off"}[value]
    if not isinstance(value, str | int | float):
        raise CatalogError(f"{place}{named}: expected a single value")
    try:
        return reader(str(value))
    except (BatchdecodeError, ValueError) as error:  # of an endless number, too
        raise CatalogError(f"{place}{named} {value!r}: {error}") from None
