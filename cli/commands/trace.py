"""`batchdecode trace`: shows what the batch did, from a trace or from requests.

Below it, `trace why` tells what a request waited for and what became of it, and `trace diff` shows
where two runs of one workload part, and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from .. import shared
from ..help import DISPLAY, OUTPUT, REQUIRED, OptionGroup, argument, flag, option
from ..options import MAX_BATCH, as_command, scheduling_group

Format = Literal["spans", "steps", "csv", "chrome", "perfetto", "html", "svg", "gantt"]
SELECTION, PLAYER, REQUESTS = "Only", "Player", "If INPUT holds requests"
_INPUT_WORDS = "A trace, or requests, which are run for it: a file or - for stdin."


def _run_group() -> OptionGroup:
    """Return the options of running requests; what was given of them is an error for a trace."""
    slots = "Slots of the batch.  [default: 8]"
    limits: dict[str, Any] = {"min": 1, "max": MAX_BATCH, "show_default": True}
    config = shared.config(REQUESTS, "these options, and settings of models")
    return OptionGroup(
        {
            "batch": (int | None, option(REQUESTS, slots, "N", "-b", **limits)),
            "model": (
                str | None,
                option(REQUESTS, f"{shared.MODEL}  [default: simulated]", "NAME", offers="model"),
            ),
            "chat": (bool | None, option(REQUESTS, shared.CHAT)),
            **shared.checkpoint_group(REQUESTS).kinds,
            **shared.defaults_group(REQUESTS).kinds,
            "grammar_timeout": (float | None, shared.grammar_timeout(REQUESTS, None)),
            "keep_going": (bool | None, option(REQUESTS, "Show bad lines as rejected.")),
            **scheduling_group(REQUESTS).kinds,
            "config": (str | None, config),
        },
        # What a configuration file says goes together: the first to be an error is the file.
        read=lambda given: {name: given[name] for name in ("config", *given) if name in given},
    )


_RUN_GROUP = _run_group()
_speed = partial(
    option,
    PLAYER,
    "Steps a second, however long each took.  [default: 10]",
    "N",
    min=0.01,
    max=1e6,
)
_from_step = partial(option, PLAYER, "The step to begin with.", "STEP", "--from", min=0)


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of `batchdecode trace`; docs/cli.md says what each one means.

    run_options: those for running requests that were given; a trace has its own.
    preset: those of them that are no mistake for a trace, since the line does not say them.
    """

    input: str | None = argument(_INPUT_WORDS, "INPUT")
    format: Format | None = option(
        DISPLAY,
        "spans, steps, csv, chrome or perfetto (the same), html (for a browser), svg or gantt.  "
        "[default: gantt on a terminal, spans otherwise]",
        "FORMAT",
        is_common=True,
    )
    width: int | None = option(
        DISPLAY,
        "Columns of the gantt, or pixels of the svg.  [default: the terminal's, or 900]",
        "N",
        min=40,
    )
    axis: Literal["steps", "seconds"] | None = option(
        DISPLAY, "What the svg counts from left to right: steps or seconds.", "UNIT"
    )
    play: bool = flag(
        PLAYER, "Show it in this terminal, step by step; ? has the keys.", is_common=True
    )
    speed: float | None = _speed()
    from_step: int | None = _from_step()
    color: shared.Color = shared.color()
    steps: str | None = option(
        SELECTION,
        "From step A up to, but not including, B; either may be left out.",
        "A:B",
        is_common=True,
    )
    request: list[str] | None = option(
        SELECTION, "Only this request; repeatable.", "ID", is_common=True, offers="request_id"
    )
    slot: list[int] | None = option(SELECTION, "This slot; repeatable.", "N", is_common=True)
    output: str | None = shared.output("Where the view goes; .gz packs it.")
    force: bool = shared.force()
    run_options: Mapping[str, Any] = _RUN_GROUP.field
    preset: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class WhyOptions:
    """The options of `batchdecode trace why`; docs/cli.md says what each one means."""

    request_id: str | None = argument("The id of a request.", "ID", offers="request_id")
    input: str | None = argument(_INPUT_WORDS, "INPUT")
    longest: bool = flag(
        SELECTION, "Of the request that took longest, in place of an ID.", is_common=True
    )
    json: bool = flag(OUTPUT, "The story as JSON, for programs.", is_common=True)
    all: bool = flag(
        OUTPUT, "Tell of each wait and each span, however many there are.", is_common=True
    )
    run_options: Mapping[str, Any] = _RUN_GROUP.field
    preset: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """The options of `batchdecode trace diff`; docs/cli.md says what each one means."""

    a: str = argument("A trace, or requests, which are run: a file or - for stdin.", "A", REQUIRED)
    b: str = argument("Another one.", "B", REQUIRED)
    top: int = option(
        OUTPUT,
        "Of the outputs that went another way, show the N that changed most.",
        "N",
        default=10,
        min=0,
    )
    json: bool = flag(OUTPUT, "Everything as JSON, for programs.")
    html: bool = flag(OUTPUT, "A page for a browser, with both runs in step.")
    output: str | None = shared.output("Where the page goes; .gz packs it.")
    force: bool = shared.force()


def trace(options: TraceOptions) -> int:
    """Show which request held which slot at which step."""
    from .show import ViewOptions, show_trace  # noqa: PLC0415 - heavy

    return show_trace(ViewOptions(**vars(options)))


def why(options: WhyOptions) -> None:
    """Tell a request's story: what it waited for, was computed and ended with, step by step."""
    from .show import show_why  # noqa: PLC0415 - heavy

    show_why(
        options.request_id,
        options.input,
        longest=options.longest,
        json=options.json,
        all=options.all,
        run_options=options.run_options,
        preset=options.preset,
    )


def diff(options: DiffOptions) -> int:
    """Show where two runs of one workload part, why, and what came of it.

    Exit status: 0 if the schedules are equal, 1 if they differ, 2 for bad input.
    """
    from .show import show_diff  # noqa: PLC0415 - heavy

    return show_diff(
        options.a,
        options.b,
        top=options.top,
        json=options.json,
        html=options.html,
        output=options.output,
        force=options.force,
    )


COMMAND = as_command(
    trace,
    TraceOptions,
    below={"why": as_command(why, WhyOptions), "diff": as_command(diff, DiffOptions)},
)
