"""`batchdecode replay`: simulates the requests of a real run, and shows how far off that is."""

import os
from typing import Annotated

import typer

from cli.commands.arguments import OUTPUT, BatchOption
from cli.scheduling_options import SchedulingOptions

EXAMPLES = """\b
Examples:
  batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --batch 256 \\
    --kv-blocks 2588 --max-batch-tokens 2048
"""


def replay(
    context: typer.Context,
    log: Annotated[
        str | None,
        typer.Argument(
            metavar="LOG",
            help="Requests of a vLLM run with their times: a file, a .gz file, or - for stdin.",
        ),
    ] = None,
    *,
    batch: BatchOption = 256,
    scheduling: SchedulingOptions,
    json: Annotated[
        bool, typer.Option("--json", help="The same for programs.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Simulate the requests of a real run, and show how far off that is."""
    if log is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from cli.simulation.replay import ReplayOptions, show_replay  # noqa: PLC0415 - numpy

    show_replay(ReplayOptions(log=log, batch=batch, scheduling=scheduling, as_json=json))
