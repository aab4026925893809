"""A fleet from a YAML file: groups of replicas, and how the fleet is managed.

A group has settings of its own; the caller brings the names and readers of the settings.  Only a
file of one group may be managed: with admission, failures and autoscaling.

Rule: whatever can have no effect, or no meaning, is an error here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from math import ceil, floor, inf
from random import Random
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.foreign import calling, import_object
from batcher.metrics.slo import parse_slo
from batcher.planning.simulator import Role
from batcher.timing.catalog import (
    Amount,
    CatalogError,
    Count,
    OptionalPositive,
    OptionalText,
    Place,
    Positive,
    Text,
    as_record,
    hint_at,
    read_mapping,
)

# Autoscaling: how many replicas there are to be, decided now and then by what they report.
#
# Rule: a policy is a function of a FleetState; how fast its wishes are followed is the same for
# all.

SLO = "slo"
_EDGE = 1e-9  # of a replica: a sum of shares is rounded

Seconds = Annotated[float, Meta(ge=1e-3, le=1e9, description="seconds, from 0.001 to 1e9")]
OptionalSeconds = Annotated[
    Annotated[float, Meta(ge=1e-3, le=1e9)] | None,
    Meta(description="seconds, from 0.001 to 1e9, or null"),
]
Share = Annotated[float, Meta(ge=0, lt=1, description="a share from 0 to less than 1")]


class Autoscale(Struct, frozen=True, kw_only=True):
    """How a fleet grows and shrinks.

    policy: one of POLICIES, or module:function.  target: of the policy.  min, max: replicas.
    interval: seconds between decisions.  delay: age of the state that is decided by.  startup:
    seconds until a new replica serves.  cooldown: replicas go only if none was asked for within so
    many seconds.  tolerance: share by which the target may be missed.  slo: of the policy slo.
    """

    policy: Text
    target: OptionalPositive = None
    min: Count = 1
    max: Count
    interval: Seconds = 15.0
    delay: Amount = 0.0
    startup: Amount = 60.0
    cooldown: Amount = 300.0
    tolerance: Share = 0.1
    slo: OptionalText = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits of its SLO, {} without one."""
        return {} if self.slo is None else parse_slo(self.slo).limits


class FleetState(Struct, frozen=True, kw_only=True):
    """What is known of a fleet at `time`.

    serving, starting: replicas; failed ones that come back are starting.  slots: of a replica.
    running, waiting: requests in all that serve, and at the router.  ended, good, refused: requests
    since the last decision; good ones met the SLO of the policy.
    """

    time: float
    serving: int
    starting: int
    slots: int
    running: int
    waiting: int
    ended: int
    good: int
    refused: int

    @property
    def replicas(self) -> int:
        return self.serving + self.starting


def proportional(load: float, target: float, tolerance: float, state: FleetState) -> int:
    """Return the number of replicas with a mean load of `target` each.

    Like Kubernetes' HorizontalPodAutoscaler: nothing changes while the mean is near the target;
    starting replicas count as idle where more are asked for, and as on target where fewer are.
    """
    wanted = ceil(load / target - _EDGE)
    if load > target * state.replicas * (1 + tolerance):
        return wanted
    if load < target * state.serving * (1 - tolerance):
        return wanted + state.starting
    return state.replicas


def by_attainment(target: float, state: FleetState) -> int:
    """Return more replicas if too few requests met the SLO, else one less.

    As many times more as the share that met it is below the target, at most twice as many; and
    none while others are still starting, whose effect cannot be seen yet.
    """
    num_ended = state.ended + state.refused
    if state.good >= target * num_ended:
        return state.replicas - 1
    if state.starting:
        return state.replicas
    most = 2 * state.replicas
    if not state.good:
        return most
    return min(ceil(state.replicas * target * num_ended / state.good), most)


def policy_of(settings: Autoscale) -> Callable[[FleetState], int]:
    """Return the function that decides; raise a BatchdecodeError if settings do not fit it."""
    name, target = settings.policy, settings.target
    if ":" in name:
        return _own_policy(name)
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        hint = hint_at(name, POLICIES)
        raise BatchdecodeError(f"unknown policy {name}{hint}; known: {known}, module:function")
    if target is None:
        raise BatchdecodeError(f"policy {name} needs a target: {POLICIES[name]}")
    if name == SLO:
        if target > 1 or settings.slo is None:
            raise BatchdecodeError(f"policy slo needs a slo, and {POLICIES[name]}")
        return lambda state: by_attainment(target, state)
    if name == "queue":
        return lambda state: proportional(state.waiting, target, settings.tolerance, state)
    return lambda state: proportional(
        state.running / state.slots, target, settings.tolerance, state
    )


POLICIES = {
    "target-utilisation": "the share of slots that is to be used",
    "queue": "how many requests are to wait for each replica",
    SLO: "the share of requests that is to meet the SLO, up to 1",
}


def _own_policy(name: str) -> Callable[[FleetState], int]:
    function = import_object(name, "autoscaling policy", ", ".join(POLICIES))
    if not callable(function):
        kind = type(function).__name__
        raise BatchdecodeError(f"the autoscaling policy {name} is no function, but a {kind}")

    def decide(state: FleetState) -> int:
        with calling(f"the autoscaling policy {name} raised"):
            number = function(state)
        if not isinstance(number, int):
            raise BatchdecodeError(
                f"the autoscaling policy {name} returned {number!r}, not a number of replicas"
            )
        return number

    return decide


class Autoscaler:
    """Decides how many replicas there are to be."""

    def __init__(self, settings: Autoscale) -> None:
        self._settings, self._policy = settings, policy_of(settings)
        self._wished: deque[tuple[float, int]] = deque()  # within the cooldown

    def decide(self, state: FleetState) -> int:
        settings, wished = self._settings, self._wished
        wish = min(max(self._policy(state), settings.min), settings.max)
        if not wished:
            wished.append((state.time, state.replicas))
        wished.append((state.time, wish))
        while wished[0][0] < state.time - settings.cooldown:
            wished.popleft()
        if wish >= state.replicas:
            return wish
        return min(state.replicas, max(number for _, number in wished))


Readers = Mapping[str, Callable[[str], Any]]
"""For each setting what makes a value of a text, or raises what says what it may be."""

MAX_GROUPS, MAX_NAME = 1024, 40  # the latter in characters
NOT_WHERE_DECODED = ("capacity", "watermark", "prefix_cache", "preempt_for")


Number = Annotated[int, Meta(ge=0, le=2**40, description="a whole number of at least 0")]
Retries = Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")]


class AdmissionControl(Struct, frozen=True, kw_only=True):
    """Limits on what a router admits.

    max_in_flight: requests sent to one replica that have not ended; samples of a request stay
    together.  max_queue: requests that wait at the router; one more, and the least urgent is
    refused.  max_wait: seconds in that queue; None: for ever.
    """

    max_in_flight: Count
    max_queue: Number = 0
    max_wait: OptionalPositive = None


class PlannedFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica, counted from 0, that fails at a time if it serves then.

    back_after: seconds until it serves again; None: never.
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

    mtbf: mean serving seconds between failures of a replica, exponential.  restart: seconds until
    it serves again.  health_check: seconds between the looks by which the router notices.  retries:
    how often a lost request is sent anew.
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
    """The management of a fleet; None: none in this respect."""

    admission: AdmissionControl | None = None
    failures: Failures | None = None
    autoscale: Autoscale | None = None


class ReplicaGroup(Struct, frozen=True, kw_only=True):
    """`count` equal replicas; settings: those stated, by name; the rest is the fleet's."""

    name: str
    count: int
    role: Role = "both"
    settings: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, self.count))  # a dict has none


class TransferLink(Struct, frozen=True, kw_only=True):
    """The link from where prompts are computed to where requests decode.

    latency: in seconds.  bytes_per_token: None: that of the model.
    """

    gbytes_per_s: Positive
    latency: Amount = 0.0
    bytes_per_token: OptionalPositive = None


class FleetFile(Struct, frozen=True, kw_only=True):
    """The contents of a fleet file; None: not stated, so as on the command line."""

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

    of_fleet: readers of `router`, `report_interval`, and of the count `replicas`.  of_engine:
    readers of the settings of a group.

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
    """Return what `reader` makes of a value as YAML has it; named: what errors add to `place`."""
    if value is None or isinstance(value, bool):
        value = {None: "none", True: "on", False: "off"}[value]
    if not isinstance(value, str | int | float):
        raise CatalogError(f"{place}{named}: expected a single value")
    try:
        return reader(str(value))
    except (BatchdecodeError, ValueError) as error:  # of an endless number, too
        raise CatalogError(f"{place}{named} {value!r}: {error}") from None
