"""`batchdecode replay`: simulates the requests of a real run, and shows how far off that is."""

import os
from typing import Annotated

import typer

from ..help import as_command
from ..scheduling_options import TIME, SchedulingOptions, takes_scheduling
from .arguments import DECODING, INPUT, MAX_BATCH, OUTPUT

# It computes no token, a log has neither priorities nor deadlines, and its profile is no clock.
NOT_TAKEN = ("check", "preempt_for", "profile")

EXAMPLES = """\b
Examples:
  batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --meta meta.json
  batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --batch 256 \\
    --kv-blocks 2587 --max-batch-tokens 2048
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
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How long a step took: a profile, FILE.yaml, constant:SECONDS or "
            "roofline:MODEL:GPU.  Needed.",
            rich_help_panel=TIME,
        ),
    ] = None,
    meta: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON with the limits of the run, as vLLM calls them.  "
            "[default: *meta.json beside LOG]",
            show_default=False,
            rich_help_panel=INPUT,
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
            help="Requests that were run at once at most.",
            show_default=False,
            rich_help_panel=DECODING,
        ),
    ] = None,
    scheduling: SchedulingOptions,
    json: Annotated[
        bool, typer.Option("--json", help="The same for programs.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Simulate the requests of a real run, and show how far off that is."""
    if log is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from ..simulation.replay import ReplayOptions, show_replay  # noqa: PLC0415 - numpy

    show_replay(
        ReplayOptions(
            log=log, meta=meta, profile=profile, batch=batch, scheduling=scheduling, as_json=json
        )
    )


COMMAND = as_command(takes_scheduling(replay, without=NOT_TAKEN), epilog=EXAMPLES)
