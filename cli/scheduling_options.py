"""The options that say how requests are scheduled and how long a step takes, of every command.

Rule: those of scheduling are the table of batcher.settings; a command that runs requests takes them
all at once.
"""

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from batcher.settings import DEFAULT_SCHEDULING, SETTINGS, SchedulingSettings, Setting

from .help import OptionGroup, option

if TYPE_CHECKING:
    from batcher.scheduling.clock import Clock
    from batcher.timing.step_time import StepTime

SCHEDULING, TIME = "Scheduling", "Time"
MAX_COUNT = 2**31 - 1
WALL = "wall"
NAMES = {*SETTINGS, "check", "profile"}

_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_CHECK = "Count all blocks after every step, and read every token again."
_PROFILE = (
    "How long a step takes: a profile, FILE.yaml, constant:SECONDS, roofline:MODEL:GPU, or wall.  "
    "[default: 1 second]"
)


class SchedulingOptions:
    """What was said of scheduling, of time and of checking.

    given: what was, by the names of the options.  values: the fields of SchedulingSettings in it.
    """

    def __init__(self, **options: Any) -> None:
        self.given = {name: value for name, value in options.items() if value is not None}
        self.check: bool | None = options.get("check")
        self.profile: str | None = options.get("profile")
        settings = [setting for setting in SETTINGS.values() if setting.name in self.given]
        self.values = {setting.name: setting.read(self.given[setting.name]) for setting in settings}

    @classmethod
    def take_from(cls, given: dict[str, Any]) -> Self:
        """Take what these options are out of `given`, by their names."""
        return cls(**{name: given.pop(name) for name in NAMES & given.keys()})

    @property
    def is_plain(self) -> bool:
        """Whether no option has changed who is admitted when, and what time it is then."""
        return self.profile is None and self.settings() == DEFAULT_SCHEDULING

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
        from batcher.timing.loading import step_time_of  # noqa: PLC0415 - with it comes yaml

        return step_time_of(self.profile)

    def clock(self, sleep: Callable[[float], object]) -> "Clock | None":
        """Return the clock on the wall if that is to be read; `sleep` waits for an arrival."""
        if self.profile != WALL:
            return None
        from batcher.scheduling.clock import WallClock  # noqa: PLC0415 - heavy

        return WallClock(sleep=sleep)


def scheduling_group(panel: str | None = None, without: Collection[str] = ()) -> OptionGroup:
    """Return these options, which make a SchedulingOptions.

    panel: the title they are listed under, if they are all to be under one.  without: the names of
    those that mean nothing to the command, or that it has itself.
    """
    kinds: dict[str, Any] = {
        "check": Annotated[bool | None, option(panel or SCHEDULING, _CHECK)],
        "profile": Annotated[str | None, option(panel or TIME, _PROFILE, "NAME")],
    }
    kinds = {name: _kind_of(setting, panel) for name, setting in SETTINGS.items()} | kinds
    kinds = {name: kind for name, kind in kinds.items() if name not in without}
    return OptionGroup(kinds, lambda given: SchedulingOptions(**given))


def _kind_of(setting: Setting, panel: str | None) -> Any:
    """Return the type of the option that is a setting."""
    kind: Any = setting.kind if setting.choices is None else Literal[tuple(setting.choices)]
    largest = MAX_COUNT if setting.kind is int and setting.largest is None else setting.largest
    limits = {"min": setting.smallest, "max": largest, "show_default": True}
    told = option(panel or SCHEDULING, help_of(setting), setting.metavar, **limits)
    return Annotated[kind | None, told]


def help_of(setting: Setting, more: str = "", default: str | None = None) -> str:
    """Return what a setting does as help says it; default: that value, if not the usual words."""
    words = _LINK.sub(r"\1", setting.words)
    words = (words[0].upper() + words[1:]).replace("`", "")
    shown = setting.shown_default if default is None else default
    return f"{words}{more}." + (f"  [default: {shown}]" if shown else "")
