"""`batchdecode trace`: shows what the batch did, from a trace or from requests."""

import sys
from typing import Annotated, ClassVar, Literal

import typer

from ..help import NestingCommand, as_command
from ..scheduling_options import SchedulingOptions, takes_scheduling
from .arguments import DISPLAY, OUTPUT, ForceOption, none_for_stdout
from .trace_arguments import (
    REQUESTS,
    RunBatch,
    RunConfig,
    RunGrammarTimeout,
    RunKeepGoing,
    RunModel,
    RunSeed,
    given,
)
from .trace_diff import diff
from .trace_why import why

SELECTION = "Only"


class TraceCommand(NestingCommand):
    """`trace`, and the commands below it."""

    subcommands: ClassVar = {
        "why": as_command(takes_scheduling(why, REQUESTS)),
        "diff": as_command(diff),
    }


def _names_of_subcommands(incomplete: str) -> list[str]:
    """Return what a shell may offer where INPUT can stand; it adds the files itself."""
    return [name for name in TraceCommand.subcommands if name.startswith(incomplete)]


def trace(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="A trace, or requests, which are run for it: a file, a .gz file, or - for stdin.",
            autocompletion=_names_of_subcommands,
        ),
    ] = None,
    *,
    view: Annotated[
        Literal["spans", "steps", "csv", "chrome", "gantt"] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="spans, steps, csv, chrome (for Perfetto) or gantt.  "
            "[default: gantt on a terminal, spans otherwise]",
            rich_help_panel=DISPLAY,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=40,
            metavar="N",
            help="Columns of the gantt.  [default: the terminal's]",
            show_default=False,
            rich_help_panel=DISPLAY,
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B",
            help="From step A up to, but not including, B; either may be left out.",
            rich_help_panel=SELECTION,
        ),
    ] = None,
    request: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Only this request; repeatable.", rich_help_panel=SELECTION
        ),
    ] = None,
    slot: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="This slot; repeatable.", rich_help_panel=SELECTION),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the view goes; .gz packs it.  [default: stdout]",
            callback=none_for_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: ForceOption = False,
    batch: RunBatch = None,
    model: RunModel = None,
    seed: RunSeed = None,
    grammar_timeout: RunGrammarTimeout = None,
    keep_going: RunKeepGoing = False,
    scheduling: SchedulingOptions,
    config: RunConfig = None,
) -> None:
    """Show which request held which slot at which step."""
    if source is None and sys.stdin.isatty():
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from ..tracing.show import TraceOptions, show_trace  # noqa: PLC0415 - heavy

    show_trace(
        TraceOptions(
            input=source,
            format=view,
            steps=steps,
            requests=tuple(request or ()),
            slots=tuple(slot or ()),
            width=width,
            output=output,
            force=force,
            run_options=given(
                config=config,
                batch=batch,
                model=model,
                seed=seed,
                grammar_timeout=grammar_timeout,
                keep_going=keep_going or None,
                **scheduling.given,
            ),
        )
    )


COMMAND = as_command(takes_scheduling(trace, REQUESTS), cls=TraceCommand)
