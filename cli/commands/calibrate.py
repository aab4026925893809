"""`batchdecode calibrate`: fits a profile to a log of real times, and states its error."""

import os
from typing import Annotated, Any

import typer

from ..help import as_command
from ..scheduling_options import SchedulingOptions, takes_scheduling
from .arguments import OUTPUT, ForceOption, none_for_stdout

PROFILE, REQUESTS = "Profile", "For a log of requests"
MAX_COUNT = 2**31 - 1


def _count(metavar: str, text: str) -> Any:
    """Return an option that is a count, and is for logs of requests only."""
    return typer.Option(
        min=1,
        max=MAX_COUNT,
        metavar=metavar,
        help=text,
        show_default=False,
        rich_help_panel=REQUESTS,
    )


def calibrate(
    context: typer.Context,
    log: Annotated[
        str | None,
        typer.Argument(
            metavar="LOG",
            help="Steps, or requests, one JSON object per line: a file, a .gz file, or -.",
        ),
    ] = None,
    *,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the profile is called.  [default: the name of LOG]",
            show_default=False,
            rich_help_panel=PROFILE,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="GPU", help="The GPU it was measured on, to check it.", rich_help_panel=PROFILE
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The model that ran, to check it.", rich_help_panel=PROFILE
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="GPUs that shared it.  [default: 1, or that of --start]",
            show_default=False,
            rich_help_panel=PROFILE,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="What the search begins with.  [default: the roofline of --hardware, --model]",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    meta: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON with the limits of the run, as vLLM calls them.  "
            "[default: *meta.json beside LOG]",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    batch: Annotated[int | None, _count("N", "Requests that were run at once at most.")] = None,
    scheduling: SchedulingOptions,
    tries: Annotated[int | None, _count("N", "Simulations at most.  [default: 200]")] = None,
    holdout: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=0.99,
            metavar="SHARE",
            help="Requests, those that came last, to judge the fit by.",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the profile goes, as YAML.  [default: stdout]",
            callback=none_for_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Fit a profile to a log of real times, of steps or of requests, and state its error."""
    if log is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from ..calibrate import (  # noqa: PLC0415 - numpy
        Calibration,
        RunOfRequests,
        write_profile,
    )

    write_profile(
        Calibration(
            log=log,
            name=name,
            hardware=hardware,
            model=model,
            tensor_parallel=tensor_parallel,
            output=output,
            force=force,
            run=RunOfRequests(
                meta=meta,
                batch=batch,
                scheduling=scheduling,
                start=start,
                tries=tries,
                holdout=holdout,
            ),
        )
    )


COMMAND = as_command(takes_scheduling(calibrate, REQUESTS, without=("check", "profile")))
