"""`batchdecode trace`: shows what the batch did, from a trace or from requests."""

import sys
from typing import Annotated, Literal

import typer

from cli.commands.arguments import DISPLAY, MAX_BATCH, OUTPUT, none_for_stdout
from cli.config import use_run_config

SELECTION, REQUESTS = "Only", "If INPUT holds requests"


def trace(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="A trace, or requests, which are run for it: a file, a .gz file, or - for stdin.",
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
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            "-b",
            min=1,
            max=MAX_BATCH,
            metavar="N",
            help="Slots of the batch.  [default: 8]",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="simulated, or package.module:name of a Python callable.  [default: simulated]",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Seed of the simulated model.  [default: 0]",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Show bad lines as rejected.", rich_help_panel=REQUESTS),
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="YAML: what it says of these options, and of the simulated model.",
            is_eager=True,
            callback=use_run_config,
            rich_help_panel=REQUESTS,
        ),
    ] = None,
) -> None:
    """Show which request held which slot at which step."""
    if source is None and sys.stdin.isatty():
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from cli.tracing.show import TraceOptions, show_trace  # noqa: PLC0415 - heavy

    choices = {
        "config": config,
        "batch": batch,
        "model": model,
        "seed": seed,
        "keep_going": keep_going or None,
    }
    show_trace(
        TraceOptions(
            input=source,
            format=view,
            steps=steps,
            requests=tuple(request or ()),
            slots=tuple(slot or ()),
            width=width,
            output=output,
            run_options={name: value for name, value in choices.items() if value is not None},
        )
    )
