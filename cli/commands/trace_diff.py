"""`batchdecode trace diff`: shows where two runs of one workload part, and why."""

from typing import Annotated

import typer

from .arguments import OUTPUT


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A trace, or requests, which are run: a file, a .gz file, or - for stdin.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    top: Annotated[
        int,
        typer.Option(
            "--top",
            min=0,
            metavar="N",
            help="Of the samples that went another way, show the N that changed most.",
            rich_help_panel=OUTPUT,
        ),
    ] = 10,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Everything as JSON, for programs.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Show where two runs of one workload part, why, and what came of it.

    Exit status: 0 if the schedules are equal, 1 if they differ, 2 for bad input.
    """
    from ..tracing.asking import DiffOptions, show_diff  # noqa: PLC0415 - heavy

    raise typer.Exit(show_diff(DiffOptions(a=a, b=b, top=top, as_json=as_json)))
