"""`batchdecode trace`: shows what the batch did, from a trace, a log or requests.

`trace why` explains one request; `trace diff` compares two runs of one workload.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batcher.settings import GRAMMAR_TIMEOUT

from ..command import DISPLAY, OUTPUT, REQUIRED, OptionGroup, argument, command, flag, option
from ..options import (
    CHAT,
    MAX_BATCH,
    MODEL,
    Color,
    checkpoint_group,
    color_option,
    config_option,
    defaults_group,
    force_flag,
    grammar_timeout_option,
    output_option,
    scheduling_group,
)

Format = Literal[
    "spans", "steps", "csv", "chrome", "perfetto", "html", "svg", "gantt", "summary", "summary-json"
]
SELECTION, PLAYER, REQUESTS = "Only", "Player", "If INPUT contains requests"
_INPUT_WORDS = "A trace, the log of another engine, or requests to run: a file or -."
_RUN = OptionGroup(
    {
        "batch": (
            int | None,
            option(REQUESTS, "Number of slots.  [default: 8]", "N", "-b", min=1, max=MAX_BATCH),
        ),
        "model": (
            str | None,
            option(REQUESTS, f"{MODEL}  [default: simulated]", "NAME", complete="model"),
        ),
        "chat": (bool | None, option(REQUESTS, CHAT)),
        **checkpoint_group(REQUESTS).kinds,
        **defaults_group(REQUESTS).kinds,
        "grammar_timeout": (
            float | None,
            grammar_timeout_option(REQUESTS, f"  [default: {GRAMMAR_TIMEOUT:g}]"),
        ),
        "keep_going": (bool | None, option(REQUESTS, "Show invalid lines as rejected.")),
        **scheduling_group(REQUESTS).kinds,
        "config": (str | None, config_option(REQUESTS, "these options, and settings of models")),
    },
    # What a configuration file says goes together: the first to be an error is the file.
    lambda given: {name: given[name] for name in ("config", *given) if name in given},
)
"""The options of running requests: those that were given, which are an error for a trace."""


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of `batchdecode trace`; docs/reference/cli.md has a table of them.

    run_options: the options given for running requests; a trace has its own settings.
    preset: those that are no mistake for a trace, since the command line does not set them.
    """

    input: str | None = argument(_INPUT_WORDS, "INPUT", "trace_input")
    format: Format | None = option(
        DISPLAY,
        "spans, steps, csv, chrome or perfetto (the same), html (for a browser), svg, gantt, "
        "summary or summary-json.  [default: gantt on a terminal, spans otherwise]",
        "FORMAT",
        common=True,
    )
    width: int | None = option(
        DISPLAY,
        "Columns of the gantt, or pixels of the svg.  [default: the terminal's, or 900]",
        "N",
        min=40,
    )
    play: bool = flag(
        PLAYER, "Play the run in this terminal, step by step; ? lists the keys.", common=True
    )
    speed: float | None = option(
        PLAYER,
        "Steps per second, regardless of their durations.  [default: 10]",
        "N",
        min=0.01,
        max=1e6,
    )
    from_step: int | None = option(PLAYER, "First step to play.", "STEP", "--from", min=0)
    color: Color = color_option()
    steps: str | None = option(
        SELECTION,
        "Steps from A up to but not including B; you can omit either.",
        "A:B",
        common=True,
    )
    request: list[str] | None = option(
        SELECTION, "Show only this request; repeatable.", "ID", common=True, complete="request_id"
    )
    slot: list[int] | None = option(SELECTION, "Show only this slot; repeatable.", "N", common=True)
    output: str | None = output_option("Write the view to FILE (gzipped if it ends in .gz).")
    force: bool = force_flag()
    open: bool = flag(OUTPUT, "Open the page of --format html in a browser.", common=True)
    run_options: Mapping[str, Any] = _RUN.as_field()
    preset: set[str] = field(default_factory=set)


def trace(options: TraceOptions) -> int:
    """Show which request held which slot at which step."""
    from .show import show_trace  # noqa: PLC0415 - heavy

    return show_trace(options)


@dataclass(frozen=True, kw_only=True)
class WhyOptions:
    """The options of `batchdecode trace why`; run_options, preset: as in TraceOptions."""

    request_id: str | None = argument("Id of a request.", "ID", "request_id")
    input: str | None = argument(_INPUT_WORDS, "INPUT")
    longest: bool = flag(
        SELECTION, "Explain the request that took longest, instead of ID.", common=True
    )
    longest_wait: bool = flag(
        SELECTION, "Explain the request that waited longest for a slot.", common=True
    )
    json: bool = flag(OUTPUT, "Print the story as JSON.", common=True)
    all: bool = flag(OUTPUT, "Show all waits and all spans.", common=True)
    run_options: Mapping[str, Any] = _RUN.as_field()
    preset: set[str]


def why(options: WhyOptions) -> None:
    """Explain one request: what it waited for, when it ran, how it finished."""
    from .show import show_why  # noqa: PLC0415 - heavy

    show_why(options)


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """The options of `batchdecode trace diff`."""

    a: str = argument(_INPUT_WORDS, "A", default=REQUIRED)
    b: str = argument("The run to compare with A, in one of the same forms.", "B", default=REQUIRED)
    top: int = option(OUTPUT, "Show the N outputs that changed most.", "N", min=0, default=10)
    json: bool = flag(OUTPUT, "Print everything as JSON.")
    html: bool = flag(OUTPUT, "Write an HTML page that shows both runs side by side.")
    output: str | None = output_option("Write the page to FILE (gzipped if it ends in .gz).")
    force: bool = force_flag()


def diff(options: DiffOptions) -> int:
    """Show where two runs of one workload differ, why, and the effect.

    Exit status: 0 if the schedules are equal, 1 if they differ, 2 for bad input.
    """
    from .show import show_diff  # noqa: PLC0415 - heavy

    return show_diff(options)


COMMANDS = {
    "trace": command(trace, TraceOptions),
    "trace why": command(why, WhyOptions),
    "trace diff": command(diff, DiffOptions),
}
