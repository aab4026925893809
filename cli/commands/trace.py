"""`batchdecode trace`: shows what the batch did, from a trace or from requests.

Below it, `trace why` tells what a request waited for and what became of it, and `trace diff` shows
where two runs of one workload part, and why.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import typer
from msgspec import Struct

from ..help import DISPLAY, OUTPUT, NestingCommand, OptionGroup, argument, option
from ..options import (
    MAX_BATCH,
    ForceOption,
    as_command,
    config_option,
    grammar_timeout_option,
    output_option,
    scheduling_group,
)

SELECTION, REQUESTS = "Only", "If INPUT holds requests"
_INPUT_WORDS = "A trace, or requests, which are run for it: a file, a .gz file, or - for stdin."


def _run_group() -> OptionGroup:
    """Return the options of running requests; what was given of them is an error for a trace."""

    def kind(of: Any, text: str, metavar: str, *flags: str, **more: Any) -> Any:
        return Annotated[of | None, option(REQUESTS, text, metavar, *flags, **more)]

    model = "simulated, or package.module:name of a Python callable.  [default: simulated]"
    slots = "Slots of the batch.  [default: 8]"
    config = "these options, and settings of the simulated model"
    return OptionGroup(
        {
            "batch": kind(int, slots, "N", "-b", min=1, max=MAX_BATCH, show_default=True),
            "model": kind(str, model, "NAME"),
            "seed": kind(int, "Seed of the simulated model.  [default: 0]", "N"),
            "grammar_timeout": Annotated[
                float | None, grammar_timeout_option(REQUESTS, "  [default: 5]")
            ],
            "keep_going": Annotated[bool | None, option(REQUESTS, "Show bad lines as rejected.")],
            **scheduling_group(REQUESTS).kinds,
            "config": Annotated[str | None, config_option(REQUESTS, config)],
        },
        # What a configuration file says goes together: the first to be an error is the file.
        read=lambda given: {name: given[name] for name in ("config", *given) if name in given},
    )


RunGroup = Annotated[Mapping[str, Any], _run_group()]


def _names_of_subcommands(incomplete: str) -> list[str]:
    """Return what a shell may offer where INPUT can stand; it adds the files itself."""
    return [name for name in ("why", "diff") if name.startswith(incomplete)]


class TraceOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode trace`; docs/cli.md says what each one means.

    run_options: those for running requests that were given; a trace has its own.
    """

    input: Annotated[
        str | None, argument(_INPUT_WORDS, "INPUT", autocompletion=_names_of_subcommands)
    ] = None
    format: Annotated[
        Literal["spans", "steps", "csv", "chrome", "gantt"] | None,
        option(
            DISPLAY,
            "spans, steps, csv, chrome (for Perfetto) or gantt.  "
            "[default: gantt on a terminal, spans otherwise]",
            "FORMAT",
        ),
    ] = None
    width: Annotated[
        int | None,
        option(DISPLAY, "Columns of the gantt.  [default: the terminal's]", "N", min=40),
    ] = None
    steps: Annotated[
        str | None,
        option(
            SELECTION,
            "From step A up to, but not including, B; either may be left out.",
            "A:B",
        ),
    ] = None
    request: Annotated[
        list[str] | None, option(SELECTION, "Only this request; repeatable.", "ID")
    ] = None
    slot: Annotated[list[int] | None, option(SELECTION, "This slot; repeatable.", "N")] = None
    output: Annotated[str | None, output_option("Where the view goes; .gz packs it.")] = None
    force: ForceOption = False
    run_options: RunGroup = {}


class WhyOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode trace why`; docs/cli.md says what each one means."""

    request_id: Annotated[str, argument("The id of a request.", "ID")]
    input: Annotated[str | None, argument(_INPUT_WORDS, "INPUT")] = None
    json: Annotated[bool, option(OUTPUT, "The story as JSON, for programs.")] = False
    all: Annotated[
        bool, option(OUTPUT, "Tell of each wait and each span, however many there are.")
    ] = False
    run_options: RunGroup = {}


class DiffOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode trace diff`; docs/cli.md says what each one means."""

    a: Annotated[
        str,
        argument("A trace, or requests, which are run: a file, a .gz file, or - for stdin.", "A"),
    ]
    b: Annotated[str, argument("Another one.", "B")]
    top: Annotated[
        int,
        option(
            OUTPUT,
            "Of the samples that went another way, show the N that changed most.",
            "N",
            min=0,
        ),
    ] = 10
    json: Annotated[bool, option(OUTPUT, "Everything as JSON, for programs.")] = False


def trace(options: TraceOptions) -> None:
    """Show which request held which slot at which step."""
    from ..tracing.show import show_trace  # noqa: PLC0415 - heavy

    show_trace(options)


def why(options: WhyOptions) -> None:
    """Tell a request's story: what it waited for, was computed and ended with, step by step."""
    from ..tracing.asking import show_why  # noqa: PLC0415 - heavy

    show_why(options)


def diff(options: DiffOptions) -> None:
    """Show where two runs of one workload part, why, and what came of it.

    Exit status: 0 if the schedules are equal, 1 if they differ, 2 for bad input.
    """
    from ..tracing.asking import show_diff  # noqa: PLC0415 - heavy

    raise typer.Exit(show_diff(options))


class TraceCommand(NestingCommand):
    """`trace`, and the commands below it."""

    subcommands: ClassVar = {
        "why": as_command(why, WhyOptions),
        "diff": as_command(diff, DiffOptions),
    }


COMMAND = as_command(trace, TraceOptions, cls=TraceCommand)
