"""`batchdecode profiles`: how long steps of real engines take, and what their hardware allows."""

from typing import Annotated

import typer

from ..help import as_command
from .arguments import OUTPUT


def profiles(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this: what --profile takes, or a file of profiles.",
        ),
    ] = None,
    *,
    json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """List profiles of step times with their error, and check them against their hardware."""
    from ..profiles import show_step_times  # noqa: PLC0415 - --help starts without it

    show_step_times(name, as_json=json)


COMMAND = as_command(profiles)
