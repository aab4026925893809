"""The options that say how requests are scheduled and how long a step takes, of every command.

Rule: those of scheduling are the table of batcher.settings; a command that runs requests takes them
all at once.
"""

import re
from collections.abc import Callable, Collection, Iterator
from copy import copy
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import typer

from batcher.settings import DEFAULT_SCHEDULING, SETTINGS, SchedulingSettings, Setting

if TYPE_CHECKING:
    from batcher.scheduling.clock import Clock
    from batcher.timing.step_time import StepTime

SCHEDULING, TIME = "Scheduling", "Time"
MAX_COUNT = 2**31 - 1
WALL = "wall"
NAMES = {*SETTINGS, "check", "profile"}

_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_OTHERS = {
    "check": Annotated[
        bool | None,
        typer.Option(
            "--check",
            help="Count all blocks after every step, and read every token again.",
            rich_help_panel=SCHEDULING,
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How long a step takes: a profile, FILE.yaml, constant:SECONDS, "
            "roofline:MODEL:GPU, or wall.  [default: 1 second]",
            rich_help_panel=TIME,
        ),
    ],
}


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


def takes_scheduling(
    command: Callable[..., None], panel: str | None = None, without: Collection[str] = ()
) -> Callable[..., None]:
    """Return `command` with these options where it has the parameter `scheduling`.

    panel: the title they are listed under, if they are all to be under one.  without: the names of
    those that mean nothing to it, or that it has itself.
    """
    own = signature(command)
    names = NAMES - set(without)

    def with_options(**arguments: Any) -> None:
        scheduling = SchedulingOptions(**{name: arguments.pop(name) for name in names})
        command(**arguments, scheduling=scheduling)

    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        parameters += _parameters(panel, names) if parameter.name == "scheduling" else [parameter]
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    with_options.__doc__ = command.__doc__
    with_options.__name__ = command.__name__
    return with_options


def _parameters(panel: str | None, names: Collection[str]) -> Iterator[Parameter]:
    """Yield a parameter for each of the options with these names, as typer reads them."""
    kinds = {name: _option(setting) for name, setting in SETTINGS.items()} | _OTHERS
    for name in (name for name in kinds if name in names):
        kind, option = get_args(kinds[name])
        if panel is not None:
            option = copy(option)
            option.rich_help_panel = panel
        yield Parameter(
            name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
        )


def _option(setting: Setting) -> Any:
    """Return a setting as typer reads it."""
    kind: Any = setting.kind if setting.choices is None else Literal[tuple(setting.choices)]
    largest = MAX_COUNT if setting.kind is int and setting.largest is None else setting.largest
    option = typer.Option(
        min=setting.smallest,
        max=largest,
        metavar=setting.metavar,
        help=help_of(setting),
        rich_help_panel=SCHEDULING,
    )
    return Annotated[kind | None, option]


def help_of(setting: Setting, more: str = "", default: str | None = None) -> str:
    """Return what a setting does as help says it; default: that value, if not the usual words."""
    words = _LINK.sub(r"\1", setting.words)
    words = (words[0].upper() + words[1:]).replace("`", "")
    shown = setting.shown_default if default is None else default
    return f"{words}{more}." + (f"  [default: {shown}]" if shown else "")
