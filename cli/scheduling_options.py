"""The options that say how requests are scheduled and how long a step takes, of every command.

Rule: they are named here and nowhere else; a command that runs requests takes them all at once.
"""

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import typer

if TYPE_CHECKING:
    from batcher.scheduling.clock import Clock
    from batcher.settings import SchedulingSettings
    from batcher.timing.step_time import StepTime

SCHEDULING, TIME = "Scheduling", "Time"
MAX_COUNT = 2**31 - 1
MAX_KV_BLOCKS, MAX_BLOCK_SIZE = 2**24, 2**20
MIN_AGING, MAX_AGING = 1e-6, 1e9  # seconds
WALL = "wall"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """The fields of SchedulingSettings, then those of time and of checking; None: not given."""

    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who is let in first: fcfs, priority, sjf, ljf, deadline, lpm, or "
            "module:function of your own.  [default: fcfs]",
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    aging: Annotated[
        float | None,
        typer.Option(
            min=MIN_AGING,
            max=MAX_AGING,
            metavar="SECONDS",
            help="Who has waited so long goes first.  [default: 300]",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    preempt_for: Annotated[
        Literal["priority", "deadline"] | None,
        typer.Option(
            metavar="WHAT",
            help="Who may not wait takes the place of one that runs: priority (a smaller one), or "
            "deadline (it would miss its own, and the other's is later).",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    batching: Annotated[
        Literal["continuous", "static"] | None,
        typer.Option(
            metavar="KIND",
            help="continuous, or static: slots are filled when all are empty.  "
            "[default: continuous]",
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            metavar="N",
            help="Tokens a step computes at most.",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    long_prefill_threshold: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            metavar="N",
            help="Prompt tokens of one request a step computes at most.",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    prefill_order: Annotated[
        Literal["decode-first", "prefill-first"] | None,
        typer.Option(
            metavar="ORDER",
            help="decode-first, or prefill-first: prompts in steps of their own.  "
            "[default: decode-first]",
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_KV_BLOCKS,
            metavar="N",
            help="Blocks of KV memory.  [default: no limit]",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BLOCK_SIZE,
            metavar="N",
            help="Tokens of a block.  [default: 16]",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    prefix_cache: Annotated[
        Literal["on", "off", "auto"] | None,
        typer.Option(
            metavar="WHEN",
            help="Find full blocks again by their tokens: on, off, or auto: on with --kv-blocks.  "
            "[default: auto]",
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    capacity: Annotated[
        Literal["watermark", "on-demand", "no-evict"] | None,
        typer.Option(
            metavar="KIND",
            help="How much room lets a request in: watermark, on-demand or no-evict.  "
            "[default: watermark]",
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    watermark: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SHARE",
            help="Of all blocks, what --capacity watermark keeps free: less than 1.  [default: 0]",
            show_default=False,
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    check: Annotated[
        bool | None,
        typer.Option(
            "--check",
            help="Count all blocks after every step, and read every token again.",
            rich_help_panel=SCHEDULING,
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How long a step takes: a profile, FILE.yaml, constant:SECONDS, "
            "roofline:MODEL:GPU, or wall.  [default: 1 second]",
            rich_help_panel=TIME,
        ),
    ] = None

    @classmethod
    def take_from(cls, given: dict[str, Any]) -> Self:
        """Take what these options are out of `given`, by their names."""
        return cls(**{name: given.pop(name) for name in NAMES & given.keys()})

    @property
    def given(self) -> dict[str, Any]:
        """Those that were given, by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def values(self) -> dict[str, Any]:
        """The fields of SchedulingSettings that were given, by their names."""
        from batcher.settings import PREFIX_CACHE, SchedulingSettings  # noqa: PLC0415 - heavy

        known = SchedulingSettings.__struct_fields__
        values = {name: value for name, value in self.given.items() if name in known}
        if self.prefix_cache is not None:
            values["prefix_cache"] = PREFIX_CACHE[self.prefix_cache]
        return values

    @property
    def is_plain(self) -> bool:
        """Whether no option has changed who is let in when, and what time it is then."""
        from batcher.settings import DEFAULT_SCHEDULING  # noqa: PLC0415 - heavy

        return self.profile is None and self.settings() == DEFAULT_SCHEDULING

    def settings(self) -> "SchedulingSettings":
        """Return what decides the schedule.

        Raises:
            BatchdecodeError: an option has no effect.
        """
        from batcher.scheduling.making import check_effects  # noqa: PLC0415 - heavy
        from batcher.settings import SchedulingSettings  # noqa: PLC0415 - heavy

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


NAMES = {field.name for field in fields(SchedulingOptions)}


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


def _parameters(panel: str | None, names: Collection[str]) -> list[Parameter]:
    """Return a parameter for each of the options with these names, as typer reads them."""
    parameters = []
    for field in fields(SchedulingOptions):
        if field.name not in names:
            continue
        kind, option = get_args(field.type)
        if panel is not None:
            option = copy(option)
            option.rich_help_panel = panel
        parameters.append(
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[kind, option],
            )
        )
    return parameters
