"""A fleet from a YAML file: groups of replicas, each with settings of its own.

Rule: what a setting of an engine is called, and may be, is for those to say who read the file.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.management import SECTIONS, Management, management_of
from batcher.planning.replica import Role
from batcher.timing.catalog import (
    Amount,
    CatalogError,
    OptionalPositive,
    Positive,
    as_record,
    hint_at,
    read_mapping,
)
from batcher.timing.place import Place

Readers = Mapping[str, Callable[[str], Any]]
"""For each setting what makes a value of a text, or raises what says what it may be."""

MAX_GROUPS = 1024
MAX_NAME = 40  # characters
NOT_WHERE_DECODED = ("capacity", "watermark", "prefix_cache", "preempt_for", "kv_offload_blocks")


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
        """How many replicas all groups have."""
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
        place = Place(path, f"group {_called(values, number)}", "replicas", number - 1)
        group = _group(values, str(number), place, {**of_engine, "count": of_fleet["replicas"]})
        if group.name in groups:
            raise CatalogError(f"{place}: another group is called {group.name}")
        groups[group.name] = group
    if contents.transfer is not None:
        stated["transfer"] = as_record(
            contents.transfer, TransferLink, Place(path, "transfer", "transfer")
        )
    fleet = FleetFile(path=path, groups=tuple(groups.values()), **stated)
    _check_roles(fleet)
    _read(of_fleet["replicas"], fleet.num_replicas, f"{path}: all replicas together")
    sections = {name: getattr(contents, name) for name in SECTIONS}
    counts = {group.name: group.count for group in fleet.groups}
    management = management_of(sections, counts, path)
    return replace(fleet, management=management)


def _check_roles(fleet: FleetFile) -> None:
    """Make sure that all which prompts are computed for decode somewhere, and how they get there.

    Raises:
        CatalogError: it is not so.
    """
    roles = {group.role for group in fleet.groups}
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise CatalogError(
            f"{fleet.path}: role: expected groups with prefill and with decode, or none with either"
        )
    if fleet.transfer is None and "decode" in roles:
        raise CatalogError(f"{fleet.path}: transfer is missing: gbytes_per_s, and maybe latency")
    if fleet.transfer is not None and "decode" not in roles:
        raise CatalogError(f"{fleet.path}: transfer has no effect without groups with role: decode")


def _called(values: Any, number: int) -> str:
    """Return what messages call a group: its number, and its name if it has one."""
    name = values.get("name") if isinstance(values, dict) else None
    return f"{number} ({name})" if isinstance(name, str) and name else str(number)


def _group(values: Any, number: str, place: Place, readers: Readers) -> ReplicaGroup:
    """Return a group of a file, which has its number for a name if it states none."""
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
