"""Commands of records, whose fields are the options; and the options that several commands have."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

import msgspec
from msgspec import NODEFAULT

from batcher.errors import BatchdecodeError
from batcher.settings import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_SCHEDULING,
    MAX_KV_BLOCKS,
    SETTINGS,
    SchedulingSettings,
    Setting,
)
from batcher.speculation.settings import SPECULATION_SETTINGS, SpeculationSettings

from .command import Command
from .help import OptionGroup, option

if TYPE_CHECKING:
    from batcher.engine.speculating import DraftCache
    from batcher.models.base import Model
    from batcher.scheduling.clock import Clock
    from batcher.timing.step_time import StepTime

OptionsT = TypeVar("OptionsT")

STDOUT = "-"
MAX_BATCH = 2**20  # as batcher.engine has it, which would load numpy
MAX_DELAY = 24 * 60 * 60
MIN_INTERVAL = 1e-6  # seconds: times are known to a microsecond


def as_command(
    function: Callable[[OptionsT], int | None],
    record: type[OptionsT],
    *,
    examples: Sequence[str] = (),
    notes: Sequence[str] = (),
    below: Mapping[str, Command] | None = None,
    respell: Callable[[str], list[str]] | None = None,
    takes_dashes: bool = False,
) -> Command:
    """Return the command that gives `function` a `record` of its options; see Command.

    The function returns the exit status, None for 0.
    """
    return Command(
        function,
        record,
        examples=examples,
        notes=notes,
        below=below or {},
        respell=respell,
        takes_dashes=takes_dashes,
    )


# -- what options are checked by -------------------------------------------------------------------


def refuse(message: str) -> NoReturn:
    """Say that a value cannot be; for a callback.  message: goes on behind the name of the option.

    Raises:
        BadParameter: as it is told to.
    """
    from typer import BadParameter  # noqa: PLC0415 - for a mistake only

    raise BadParameter(message)


def refuse_stdout(path: str | None) -> str | None:
    """Return `path`, or raise if it is stdout; the callback of what goes beside the results."""
    if path == STDOUT:
        refuse("must be a file: stdout is for the results")
    return path


def num_bytes(text: str | None) -> int | None:
    """Return the bytes of a size such as 512MiB, 2GB or 1048576; a callback.

    Raises:
        BadParameter: it is none.
    """
    if text is None:
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        refuse(f"must be a size such as 512MiB, 2GB or 1048576, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


# -- options of scheduling -------------------------------------------------------------------------

SCHEDULING, TIME, SPECULATION = "Scheduling", "Time", "Speculation"
MAX_COUNT = 2**31 - 1
WALL = "wall"

_KV_MEMORY = (
    "Memory for KV blocks, such as 2GB or 512MiB, of a model that says how much a token takes; "
    "it becomes --kv-blocks."
)
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?((?:[KMGT]i?)?B?)", re.IGNORECASE)
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for kind, base in (("B", 1000), ("IB", 1024), ("", 1000), ("I", 1024))
}
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_CHECK = "Count all blocks after every step, and read every token again."
_PROFILE = (
    "How long a step takes: a profile, FILE.yaml, constant:SECONDS, roofline:MODEL:GPU, or wall.  "
    "[default: {}]"
)


class SchedulingOptions:
    """What was said of scheduling, of time and of checking.

    given: what was, by the names of the options.  values: the fields of SchedulingSettings in it.
    speculation: where drafts come from, if there are to be any.
    """

    def __init__(self, **options: Any) -> None:
        self.given = {name: value for name, value in options.items() if value is not None}
        self.check: bool | None = options.get("check")
        self.profile: str | None = options.get("profile")
        self._kv_memory: int | None = options.get("kv_memory")
        self.speculation = speculation_of(self.given)
        settings = [setting for setting in SETTINGS.values() if setting.name in self.given]
        self.values = {setting.name: setting.read(self.given[setting.name]) for setting in settings}

    @property
    def has_default_schedule(self) -> bool:
        """Whether no option has changed who is admitted when, and what time it is then."""
        is_plain = self.profile is None and self.speculation is None
        return is_plain and self.settings() == DEFAULT_SCHEDULING

    def fitted(self, model: "Model") -> Self:
        """Return these, with as many blocks as --kv-memory has room for, if it was given.

        Raises:
            BatchdecodeError: the model does not say how large they are, there is room for none, or
                their number was given, too.
        """
        if self._kv_memory is None:
            return self
        if "kv_blocks" in self.given:
            raise BatchdecodeError(
                "--kv-memory and --kv-blocks exclude each other: one follows from the other"
            )
        from batcher.models.base import kv_block_bytes_of  # noqa: PLC0415 - with it comes numpy

        block_size = self.values.get("block_size", DEFAULT_BLOCK_SIZE)
        num_bytes = kv_block_bytes_of(model, block_size)
        if num_bytes is None:
            raise BatchdecodeError(
                f"--kv-memory needs a model that says how much a token takes; {model.name} "
                "does not: give --kv-blocks"
            )
        num_bytes += self._draft_bytes(model, block_size)
        num_blocks = self._kv_memory // num_bytes
        if not 1 <= num_blocks <= MAX_KV_BLOCKS:
            raise BatchdecodeError(
                f"--kv-memory has room for {num_blocks:,} blocks of {block_size} tokens, which "
                f"take {num_bytes:,} bytes each; there can be 1 to {MAX_KV_BLOCKS:,}"
            )
        given = {name: value for name, value in self.given.items() if name != "kv_memory"}
        return type(self)(**given, kv_blocks=num_blocks)

    def _draft_cache(self, model: "Model", block_size: int) -> "DraftCache | None":
        """Return what the cache of a second model takes, which drafts; None if there is none."""
        if self.speculation is None:
            return None
        from batcher.engine.speculating import draft_cache_of  # noqa: PLC0415 - seldom

        return draft_cache_of(self.speculation, model, block_size)

    def _draft_bytes(self, model: "Model", block_size: int) -> int:
        """Return what a block takes beside that for a second model, which drafts.

        Raises:
            BatchdecodeError: there is one that does not say.
        """
        cache = self._draft_cache(model, block_size)
        if cache is not None and cache.per_block is None:
            raise BatchdecodeError(
                "--kv-memory needs a draft that says how much a token takes; this one does not: "
                "give --kv-blocks"
            )
        return 0 if cache is None or cache.per_block is None else cache.per_block

    def draft_bytes_per_token(self, model: "Model") -> int:
        """Return what a token takes in the cache of a second model, as far as that says so."""
        cache = self._draft_cache(model, DEFAULT_BLOCK_SIZE)
        return 0 if cache is None else cache.per_token or 0

    def settings(self) -> SchedulingSettings:
        """Return what decides the schedule.

        Raises:
            BatchdecodeError: an option has no effect.
        """
        from batcher.scheduling.checks import check_effects  # noqa: PLC0415 - heavy

        settings = SchedulingSettings(**self.values)
        check_effects(self.given, [settings])
        return settings

    def step_time(self) -> "StepTime | None":
        """Return how long steps take; None if it is a second, or as long as they do.

        Raises:
            BatchdecodeError: there is no such profile.
        """
        if self.profile is None or self.profile == WALL:
            return None
        from batcher.timing.profiles import step_time_of  # noqa: PLC0415 - with it comes yaml

        return step_time_of(self.profile)

    def clock(self, sleep: Callable[[float], object]) -> "Clock | None":
        """Return the clock on the wall if that is to be read; `sleep` waits for an arrival."""
        if self.profile != WALL:
            return None
        from batcher.scheduling.clock import WallClock  # noqa: PLC0415 - heavy

        return WallClock(sleep=sleep)


def scheduling_group(
    panel: str | None = None, without: Collection[str] = (), default_time: str = "1 second"
) -> OptionGroup:
    """Return these options, which make a SchedulingOptions.

    panel: the title they are listed under, if they are all to be under one.  without: the names of
    those that mean nothing to the command, or that it has itself.  default_time: how long a step
    takes if nothing is said.
    """
    kinds = {name: _kind_of(setting, panel) for name, setting in SETTINGS.items()}
    kinds["check"] = bool | None, option(panel or SCHEDULING, _CHECK)
    kinds["profile"] = (
        str | None,
        option(
            panel or TIME,
            _PROFILE.format(default_time),
            "NAME",
            is_common=panel is None,
            offers="profile",
        ),
    )
    kinds["kv_memory"] = (
        str | None,
        option(panel or SCHEDULING, _KV_MEMORY, "SIZE", callback=num_bytes),
    )
    kinds |= speculation_kinds(panel)
    kinds = {name: kind for name, kind in kinds.items() if name not in without}
    return OptionGroup(kinds, lambda given: SchedulingOptions(**given))


def speculation_kinds(panel: str | None = None) -> dict[str, tuple[Any, Any]]:
    """Return the options of speculation, by name: the type of each, and the option."""
    kinds = {}
    for name, setting in SPECULATION_SETTINGS.items():
        words = setting.words.replace("`", "")
        shown = "" if setting.default in (NODEFAULT, None) else f"  [default: {setting.default}]"
        text = f"{words[0].upper()}{words[1:]}.{shown}"
        kinds[name] = (
            str | None,
            option(panel or SPECULATION, text, setting.metavar, offers=name),
        )
    return kinds


def speculation_group() -> OptionGroup:
    """Return these options, which make SpeculationSettings, or None."""
    return OptionGroup(speculation_kinds(), speculation_of)


def speculation_of(given: Mapping[str, Any]) -> SpeculationSettings | None:
    """Return what the options say of speculation; None if there are to be no drafts.

    Raises:
        BatchdecodeError: it makes no sense.
    """
    values = {name: given[name] for name in SPECULATION_SETTINGS if given.get(name) is not None}
    if not values:
        return None
    if "draft" not in values:
        raise BatchdecodeError(
            f"--{next(iter(values)).replace('_', '-')} has no effect without --draft"
        )
    if "draft_tree" in values:
        from batcher.speculation.settings import parse_tree  # noqa: PLC0415 - few runs draft

        parse_tree(values["draft_tree"])
    try:
        return msgspec.convert(values, SpeculationSettings, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("`$.")[2].rstrip("`")
        allowed, value = SPECULATION_SETTINGS[name].allowed, values[name]
        raise BatchdecodeError(
            f"--{name.replace('_', '-')} must be {allowed}, not {value}"
        ) from None


def _kind_of(setting: Setting, panel: str | None) -> tuple[Any, Any]:
    """Return the type of the option that is a setting, and the option."""
    kind: Any = setting.kind if setting.choices is None else Literal[tuple(setting.choices)]
    largest = MAX_COUNT if setting.kind is int and setting.largest is None else setting.largest
    limits: dict[str, Any] = {"min": setting.smallest, "max": largest, "show_default": True}
    return kind | None, option(
        panel or SCHEDULING,
        help_of(setting),
        setting.metavar,
        is_common=setting.is_common and panel is None,
        offers=setting.name,
        **limits,
    )


def help_of(setting: Setting, more: str = "", default: str | None = None) -> str:
    """Return what a setting does as help says it; default: that value, if not the usual words."""
    words = _LINK.sub(r"\1", setting.words)
    words = (words[0].upper() + words[1:]).replace("`", "")
    shown = setting.shown_default if default is None else default
    return f"{words}{more}." + (f"  [default: {shown}]" if shown else "")
