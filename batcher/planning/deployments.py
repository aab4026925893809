"""A deployment, one way to serve a workload: its axes, and its groups of replicas.

Rule: every setting that can vary is an axis; commands, tables and searches know only axes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from itertools import product
from math import gcd, isfinite
from operator import attrgetter
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.fields import read_number
from batcher.planning.management import (
    AdmissionControl,
    Autoscale,
    Failures,
    Management,
    check_management,
)
from batcher.planning.replicas import Transfer
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, DEFAULT_ROUTER, router_of
from batcher.planning.simulator import AssumedDrafts, Role
from batcher.request import MAX_DRAFT_TOKENS
from batcher.scheduling.queue import policy_of
from batcher.scheduling.scheduler import check_effects
from batcher.settings import (
    DEFAULT_SCHEDULING,
    DEFAULT_WATERMARK,
    SETTINGS,
    SchedulingSettings,
    Setting,
)
from batcher.timing.catalog import CatalogError, Place, as_record, hint_at, read_mapping
from batcher.timing.profiles import setup_of, step_time_of

MAX_COUNT = 2**40
MAX_BATCH = 2**20  # slots
MAX_DRAFT_COST = 1000  # steps
MAX_REPLICAS = 2**16
MAX_REPORT_INTERVAL = 1e6  # seconds
NO_LIMIT = "none"
MAX_GROUPS, MAX_NAME = 1024, 40  # the latter in characters

Value = Any


class ReplicaGroup(Struct, frozen=True, kw_only=True):
    """`count` equal replicas of a fleet file; settings: by axis, the rest is the deployment's."""

    name: str
    count: int
    role: Role = "both"
    settings: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, self.count))  # a dict is not hashable


class FleetFile(Struct, frozen=True, kw_only=True):
    """The contents of a fleet file; what is None is as on the command line."""

    path: str
    groups: tuple[ReplicaGroup, ...]
    router: str | None = None
    report_interval: float | None = None
    management: Management | None = None
    transfer: Transfer | None = None

    def __str__(self) -> str:
        return self.path

    @property
    def num_replicas(self) -> int:
        return sum(group.count for group in self.groups)


class Deployment(Struct, frozen=True, kw_only=True):
    """A way to serve a workload: `replicas` engines, alike or by groups of a fleet file.

    rate: the arrival rate as a multiple of the workload's.  draft_tokens, draft_acceptance,
    draft_cost: see AssumedDrafts.
    """

    batch: int = 8
    scheduling: SchedulingSettings = DEFAULT_SCHEDULING
    profile: str = "constant"
    rate: float = 1.0
    replicas: int = 1
    router: str = DEFAULT_ROUTER
    report_interval: float = DEFAULT_REPORT_INTERVAL
    fleet: FleetFile | None = None
    draft_tokens: int | None = None
    draft_acceptance: float = 0.0
    draft_cost: float = 0.0

    @property
    def drafts(self) -> AssumedDrafts | None:
        if self.draft_tokens is None:
            return None
        return AssumedDrafts(
            num_tokens=self.draft_tokens, acceptance=self.draft_acceptance, cost=self.draft_cost
        )


class Axis(Struct, frozen=True):
    """A field of Deployment, or of its scheduling, that may vary.

    read: converts a text to a value, or raises a ValueError that says what is expected.
    """

    name: str
    title: str
    read: Callable[[str], Value]

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def value_of(self, deployment: Deployment) -> Value:
        if self.name in Deployment.__struct_fields__:
            return getattr(deployment, self.name)
        return getattr(deployment.scheduling, self.name)

    def set(self, deployment: Deployment, value: Value) -> Deployment:
        if self.name in Deployment.__struct_fields__:
            return replace(deployment, **{self.name: value})
        scheduling = replace(deployment.scheduling, **{self.name: value})
        return replace(deployment, scheduling=scheduling)

    def values(self, text: str) -> list[Value]:
        """Return the values of a list with commas; raise if one is wrong or repeated."""
        found: list[Value] = []
        for part in text.split(","):
            try:
                value = self.read(part.strip())
            except ValueError as error:
                raise BatchdecodeError(f"{self.option} {part.strip() or text!r}: {error}") from None
            if value in found:
                raise BatchdecodeError(f"{self.option} {text}: {part.strip()} is repeated")
            found.append(value)
        return found


class FleetAxis(Axis, frozen=True):
    """A fleet file, which also sets the number of replicas, and perhaps the router."""

    def set(self, deployment: Deployment, value: FleetFile) -> Deployment:
        stated = {name: each for name in OF_ROUTING if (each := getattr(value, name)) is not None}
        return replace(deployment, fleet=value, replicas=value.num_replicas, **stated)


def _count(maximum: int, text: str, *, has_none: bool = False) -> int | None:
    if has_none and text == NO_LIMIT:
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= maximum):
        either = f", or {NO_LIMIT}" if has_none else ""
        raise ValueError(f"expected a whole number from 1 to {maximum:,}{either}")
    return int(text)


def _number(is_allowed: Callable[[float], bool], expected: str, text: str) -> float:
    try:
        number = read_number(text, float)
    except ValueError:
        raise ValueError(expected) from None
    if not (isfinite(number) and is_allowed(number)):
        raise ValueError(expected)
    return number


def _one_of(names: Mapping[str, Value], text: str) -> Value:
    if text not in names:
        near = get_close_matches(text, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{hint}known: {', '.join(names)}")
    return names[text]


def _name_for(find: Callable[[str], object], text: str) -> str:
    find(text)  # or raise
    return text


def _draft_tokens(text: str) -> int | None:
    return None if text == "0" else _count(MAX_DRAFT_TOKENS, text, has_none=True)


class _Contents(Struct):
    """The sections of a fleet file."""

    replicas: Annotated[
        list[Any], Meta(min_length=1, max_length=MAX_GROUPS, description="a list of groups")
    ]
    router: Any = None
    report_interval: Any = None
    admission: Any = None
    failures: Any = None
    autoscale: Any = None
    transfer: Any = None


def read_fleet(path: str) -> FleetFile:
    """Return the fleet of a YAML file, or raise a CatalogError, also for what has no effect."""
    contents = as_record(read_mapping(path), _Contents, path)
    stated = {
        name: _read(name, value, Place(path, name, name))
        for name in OF_ROUTING
        if (value := getattr(contents, name)) is not None
    }
    groups: dict[str, ReplicaGroup] = {}
    for number, values in enumerate(contents.replicas, 1):
        name = values.get("name") if isinstance(values, dict) else None
        called = f"{number} ({name})" if isinstance(name, str) and name else str(number)
        place = Place(path, f"group {called}", "replicas", number - 1)
        group = _group(values, str(number), place)
        if group.name in groups:
            raise CatalogError(f"{place}: the name {group.name} is used by another group")
        groups[group.name] = group
    if contents.transfer is not None:
        place = Place(path, "transfer", "transfer")
        stated["transfer"] = as_record(contents.transfer, Transfer, place)
    fleet = FleetFile(path=path, groups=tuple(groups.values()), **stated)
    roles = {group.role for group in fleet.groups}
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise CatalogError(
            f"{path}: role: expected groups with prefill and with decode, or with neither"
        )
    if fleet.transfer is None and "decode" in roles:
        raise CatalogError(f"{path}: transfer is missing: set gbytes_per_s and optionally latency")
    if fleet.transfer is not None and "decode" not in roles:
        raise CatalogError(f"{path}: transfer has no effect without groups with role: decode")
    _read("replicas", fleet.num_replicas, f"{path}: all replicas together")
    kinds: dict[str, Any] = {
        "admission": AdmissionControl,
        "failures": Failures,
        "autoscale": Autoscale,
    }
    sections: dict[str, Any] = {}
    for name, kind in kinds.items():
        values, place = getattr(contents, name), Place(path, name, name)
        if values is not None and len(fleet.groups) > 1:
            raise CatalogError(
                f"{place}: expected one group of replicas, without a role, not "
                f"{len(fleet.groups)}: {', '.join(groups)}"
            )
        if values is not None:
            sections[name] = as_record(values, kind, place)
    if sections:
        fleet = replace(fleet, management=Management(**sections))
        check_management(Management(**sections), fleet.num_replicas, path)
    return fleet


def _group(values: Any, number: str, place: Place) -> ReplicaGroup:
    allowed = ["name", "role", *OF_ENGINE, "count"]
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
        if role == "decode" and key in WHERE_DECODED:
            raise CatalogError(
                f"{place.at(key)}: {key} has no effect with role: decode, where a request gets "
                "all its blocks at once"
            )
        if key not in allowed:
            raise CatalogError(
                f"{place.at(str(key))}: unknown setting {key}{hint_at(str(key), allowed)}; "
                f"allowed: {', '.join(allowed)}"
            )
    if "count" not in settings:
        raise CatalogError(f"{place}: count is missing")
    read = {key: _read(key, value, place.at(key), f": {key}") for key, value in settings.items()}
    return ReplicaGroup(name=str(name), count=read.pop("count"), role=role, settings=read)


def _read(name: str, value: Any, place: str | Place, named: str = "") -> Any:
    """Return a value of an axis from YAML; named: added to `place` in errors."""
    if value is None or isinstance(value, bool):
        value = {None: "none", True: "on", False: "off"}[value]
    if not isinstance(value, str | int | float):
        raise CatalogError(f"{place}{named}: expected a single value")
    try:
        return AXES["replicas" if name == "count" else name].read(str(value))
    except (BatchdecodeError, ValueError) as error:
        raise CatalogError(f"{place}{named} {value!r}: {error}") from None


def _reader(setting: Setting) -> Callable[[str], Value]:
    if setting.choices is not None:
        none = {NO_LIMIT: None} if setting.takes_none else {}
        return partial(_one_of, {**none, **setting.choices})
    if setting.is_allowed is not None:
        expected = f"expected {setting.expected or setting.must_be}"
        return partial(_number, setting.is_allowed, expected)
    if setting.kind is str:
        return partial(_name_for, policy_of)
    return partial(_count, MAX_COUNT, has_none=setting.is_optional)


_REPORT_INTERVAL = f"expected seconds, above 0 and up to {MAX_REPORT_INTERVAL:,.0f}"
_DRAFT_COST = f"expected a share of a step, from 0 to {MAX_DRAFT_COST:,}"

# In the order of their columns; the last one changes fastest from row to row.
AXES = {
    axis.name: axis
    for axis in (
        Axis("profile", "profile", partial(_name_for, step_time_of)),
        *(
            Axis(setting.name, setting.title, _reader(setting))
            for setting in sorted(SETTINGS.values(), key=attrgetter("rank"))
        ),
        Axis(
            "draft_acceptance",
            "accept",
            partial(_number, lambda share: 0 <= share <= 1, "expected a share from 0 to 1"),
        ),
        Axis(
            "draft_cost",
            "cost",
            partial(_number, lambda share: 0 <= share <= MAX_DRAFT_COST, _DRAFT_COST),
        ),
        Axis("draft_tokens", "drafts", _draft_tokens),
        FleetAxis("fleet", "fleet", read_fleet),
        Axis(
            "report_interval",
            "reports s",
            partial(_number, lambda seconds: 0 < seconds <= MAX_REPORT_INTERVAL, _REPORT_INTERVAL),
        ),
        Axis("router", "router", partial(_name_for, router_of)),
        Axis("replicas", "replicas", partial(_count, MAX_REPLICAS)),
        Axis("batch", "batch", partial(_count, MAX_BATCH)),
    )
}
OF_ROUTING = ("router", "report_interval")
OF_ENGINE = [name for name in AXES if name not in ("fleet", "replicas", *OF_ROUTING)]


def show_value(axis: Axis, value: Value) -> str:
    setting = SETTINGS.get(axis.name)
    if setting is not None:
        return setting.shown(value)
    return NO_LIMIT if value is None else str(value)


def grid_of(values: Mapping[str, Sequence[Value]], base: Deployment) -> list[Deployment]:
    """Return `base` with all combinations of values, by axis; the last of AXES varies fastest."""
    axes = [axis for name, axis in AXES.items() if name in values]
    deployments = []
    for combination in product(*(values[axis.name] for axis in axes)):
        deployment = base
        for axis, value in zip(axes, combination, strict=True):
            deployment = axis.set(deployment, value)
        deployments.append(deployment)
    return deployments


WHERE_DECODED: dict[str, Value] = {  # settings of replicas with role: decode
    "capacity": "no-evict",
    "prefix_cache": False,
    "preempt_for": None,
    "watermark": DEFAULT_WATERMARK,
}


class EngineGroup(Struct, frozen=True, kw_only=True):
    """Equal replicas of a deployment; engine: one of them; name: in the file, or ""."""

    name: str
    count: int
    role: Role = "both"
    engine: Deployment


def groups_of(deployment: Deployment) -> list[EngineGroup]:
    """Return the groups of equal replicas, in the order of the file; one without a file."""
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


def scaled_fleet(fleet: FleetFile, number: int = 1) -> FleetFile:
    """Return `number` times the fewest replicas in the proportions of the groups."""
    least = gcd(*(group.count for group in fleet.groups))
    groups = (replace(group, count=group.count // least * number) for group in fleet.groups)
    return replace(fleet, groups=tuple(groups))


def transfer_of(deployment: Deployment) -> Transfer | None:
    """Return the transfer of prompts to decode replicas, with its bytes per token, or None."""
    transfer = None if deployment.fleet is None else deployment.fleet.transfer
    if transfer is None or transfer.bytes_per_token is not None:
        return transfer
    profile = next(g.engine.profile for g in groups_of(deployment) if g.role == "prefill")
    shape = setup_of(profile).shape
    if shape is None:
        raise BatchdecodeError(
            f"{deployment.fleet}: transfer: the size of keys and values is unknown with {profile}: "
            "set bytes_per_token"
        )
    return replace(transfer, bytes_per_token=shape.sizes.kv_bytes_per_token)


def engines_of(deployments: Iterable[Deployment]) -> list[Deployment]:
    return [group.engine for deployment in deployments for group in groups_of(deployment)]


def check_given(given: Collection[str], deployments: Sequence[Deployment]) -> None:
    """Raise a BatchdecodeError if a `given` option, or a setting of a file, has no effect."""
    check_fleets(given, deployments)
    engines = engines_of(deployments)
    fleets = [deployment.fleet for deployment in deployments if deployment.fleet is not None]
    stated = {name for fleet in fleets for group in fleet.groups for name in group.settings}
    check_effects(given, [engine.scheduling for engine in engines])
    check_drafts({*given, *stated}, engines)
    check_router(given, deployments)


def check_router(given: Collection[str], deployments: Sequence[Deployment]) -> None:
    fleets = [deployment for deployment in deployments if deployment.replicas > 1]
    for name in OF_ROUTING:
        if name in given and not fleets:
            raise BatchdecodeError(
                f"{AXES[name].option} has no effect without --replicas of at least 2"
            )
    if "report_interval" in given and not (
        any(router_of(deployment.router).hears_reports for deployment in fleets)
    ):
        raise BatchdecodeError(
            "--report-interval has no effect: the router uses no reports of replicas"
        )


def check_fleets(given: Collection[str], deployments: Sequence[Deployment]) -> None:
    if "fleet" in given and "replicas" in given:
        raise BatchdecodeError("--replicas has no effect with --fleet, whose groups set it")
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
                f"{AXES[name].option} has no effect: all replicas of --fleet already have a {name}"
            )


def _states(fleet: FleetFile | None, name: str) -> bool:
    if fleet is None:
        return False
    if name in OF_ROUTING:
        return getattr(fleet, name) is not None
    return all(name in group.settings for group in fleet.groups)


@contextmanager
def _in_file(place: str) -> Iterator[None]:
    try:
        yield
    except BatchdecodeError as error:
        raise BatchdecodeError(f"{place}{error}") from None


def without_drafts(deployment: Deployment) -> Deployment:
    return replace(deployment, draft_tokens=None, draft_acceptance=0.0, draft_cost=0.0)


def check_drafts(given: Collection[str], engines: Sequence[Deployment]) -> None:
    has_drafts = any(each.draft_tokens is not None for each in engines)
    for name in ("draft_acceptance", "draft_cost"):
        if name in given and not has_drafts:
            option = AXES[name].option
            raise BatchdecodeError(f"{option} has no effect without --draft-tokens of at least 1")
    if has_drafts and "draft_acceptance" not in given:
        raise BatchdecodeError(
            "--draft-tokens needs --draft-acceptance, the share of drafts that are accepted"
        )
