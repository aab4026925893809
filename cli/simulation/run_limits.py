"""The limits that a logged run is simulated under, and who says so: an option, a file, or nobody.

Rule: an option goes before the file beside the log, and that before a guess; a guess is told as
one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, show_value
from batcher.planning.request_log import NAMES, Limit, RequestsOfRun, read_run_meta
from batcher.scheduling.checks import check_effects
from batcher.settings import DEFAULT_SCHEDULING, MAX_KV_BLOCKS, SchedulingSettings
from batcher.timing.profiles import kv_room_of

from ..errors import reason_of
from ..options import SchedulingOptions
from ..run.problems import say
from ..screen.terminal import printable

SUFFIX = "meta.json"
MAX_SIZE = 2**24  # bytes


class MetaFile(NamedTuple):
    """The name of the file, and what it says; nothing if there is none."""

    name: str
    limits: Mapping[str, Limit]


def read_meta_file(given: str | None, log: str | None) -> MetaFile:
    """Return what the `given` file says of the run of a log, or if None the one beside the log.

    Raises:
        BatchdecodeError: it cannot be read, or is not what it should be.
    """
    path = Path(given) if given is not None else _beside(log)
    if path is None:
        return MetaFile("", {})
    meta = read_run_meta(_content(path), str(path))
    if given is not None and not meta.limits:
        raise BatchdecodeError(f"{path} says nothing of limits; it would, under {', '.join(NAMES)}")
    for field in meta.not_simulated:
        say(f"{printable(f'{path}: {field} is not simulated')}\n")
    return MetaFile(path.name, meta.limits)


def _beside(log: str | None) -> Path | None:
    """Return the file beside `log` whose name, without its end, the log's begins with.

    Of several it is the one with the longest name, None if there is none.
    """
    if log is None or log == "-":
        return None
    path = Path(log)
    found = [
        other
        for other in path.parent.glob(f"*{SUFFIX}")
        if path.name.startswith(other.name.removesuffix(SUFFIX).rstrip("_.-"))
    ]
    return max(found, key=lambda other: len(other.name), default=None)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:
        raise BatchdecodeError(f"cannot read {path}: {reason_of(error)}") from None
    if len(content) > MAX_SIZE:
        raise BatchdecodeError(
            f"{path} is larger than {MAX_SIZE >> 20} MiB: no file about a run is"
        )
    return content


# Those of vLLM for a server on a GPU with less than 70 GiB.
GUESSED_BATCH, GUESSED_BUDGET = 256, 2048
DEFAULT = "default, of vLLM as well"
_ORDER = ("batch", "max_batch_tokens", "kv_blocks", "block_size", "prefix_cache", "capacity")
_OF_BLOCKS = ("block_size", "prefix_cache", "capacity")  # of no effect without any


class UsedLimit(Struct, frozen=True):
    """A setting, its value, who says so, and whether that is nobody."""

    name: str
    value: Any
    origin: str
    is_guessed: bool = False

    @property
    def shown(self) -> str:
        """The value as its option takes it."""
        return show_value(AXES[self.name], self.value)


class RunLimits(Struct, frozen=True):
    """How a run was limited; used: each setting that is given, or matters."""

    batch: int
    settings: SchedulingSettings
    used: list[UsedLimit]

    @property
    def guessed(self) -> list[UsedLimit]:
        """Those that nobody has said."""
        return [limit for limit in self.used if limit.is_guessed]


def limits_of_run(
    batch: int | None,
    scheduling: SchedulingOptions,
    profile: str,
    meta: MetaFile,
    log: RequestsOfRun,
) -> RunLimits:
    """Return the limits of the run of a log; batch, scheduling: what options say.

    Raises:
        BatchdecodeError: an option has no effect.
    """
    given = scheduling.values | ({} if batch is None else {"batch": batch})
    used = {
        name: UsedLimit(name, limit.value, f"{limit.place} in {meta.name}")
        for name, limit in meta.limits.items()
    }
    if log.batch is not None and not log.is_of_client:
        used["batch"] = UsedLimit("batch", log.batch, "the slots of the traced run")
    used |= {name: UsedLimit(name, value, AXES[name].option) for name, value in given.items()}
    if log.batch is not None:
        why = "guessed: as many as the client had in flight"
        used.setdefault("batch", UsedLimit("batch", log.batch, why, is_guessed=True))
    _guess(used, profile)
    known = SchedulingSettings.__struct_fields__
    settings = SchedulingSettings(
        **{name: limit.value for name, limit in used.items() if name in known}
    )
    check_effects(given, [settings])
    names = [*_ORDER, *(name for name in used if name not in _ORDER)]
    if not settings.is_paged:
        names = [name for name in names if name not in _OF_BLOCKS]
    return RunLimits(used["batch"].value, settings, [used[name] for name in names])


def warn_of_guesses(limits: RunLimits) -> None:
    """Say which limits are guesses, as nothing that is compared is worth more than they are."""
    if limits.guessed:
        names = ", ".join(f"{AXES[each.name].option} {each.shown}" for each in limits.guessed)
        say(
            f"warning: nobody says how the run was limited by {names}: these are guesses, and the "
            "errors may be theirs; give the options, or --meta FILE\n"
        )


def limits_table(limits: RunLimits) -> list[str]:
    """Return a line for each limit: its option, its value, and who says so."""
    rows = [(AXES[each.name].option, each.shown, printable(each.origin)) for each in limits.used]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:<{names}}  {value:>{values}}  {origin}" for name, value, origin in rows]


def _guess(used: dict[str, UsedLimit], profile: str) -> None:
    """Add to what is `used` what nobody has said, but has to be something."""

    def guess(name: str, value: Any, why: str) -> None:
        used.setdefault(name, UsedLimit(name, value, f"guessed: {why}", is_guessed=True))

    def keep_default(name: str) -> None:
        value = getattr(DEFAULT_SCHEDULING, name)
        used.setdefault(name, UsedLimit(name, value, DEFAULT))

    guess("batch", GUESSED_BATCH, "the default of vLLM")
    guess("max_batch_tokens", max(GUESSED_BUDGET, used["batch"].value), "the default of vLLM")
    keep_default("block_size")
    room = kv_room_of(profile)
    if room is None or not room.num_tokens:
        guess("kv_blocks", None, "no limit is known")
    else:
        num_blocks = max(room.num_blocks(used["block_size"].value), 1)
        known = "an engine" if room.is_reported else "by its data sheet, the GPU"
        had = f"{known} of {profile} had room for {room.num_tokens:,} tokens, less the null block"
        guess("kv_blocks", min(num_blocks, MAX_KV_BLOCKS), had)
    keep_default("prefix_cache")
    keep_default("capacity")
