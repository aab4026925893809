"""`batchdecode trace why`: tells what a request waited for and what became of it."""

import sys
from typing import Annotated

import typer

from ..scheduling_options import SchedulingOptions
from .arguments import OUTPUT
from .trace_arguments import (
    RunBatch,
    RunConfig,
    RunGrammarTimeout,
    RunKeepGoing,
    RunModel,
    RunSeed,
    TraceInput,
    given,
)


def why(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a request.")],
    source: TraceInput = None,
    *,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The story as JSON, for programs.", rich_help_panel=OUTPUT),
    ] = False,
    tells_all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Tell of each wait and each span, however many there are.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    batch: RunBatch = None,
    model: RunModel = None,
    seed: RunSeed = None,
    grammar_timeout: RunGrammarTimeout = None,
    keep_going: RunKeepGoing = False,
    scheduling: SchedulingOptions,
    config: RunConfig = None,
) -> None:
    """Tell a request's story: what it waited for, was computed and ended with, step by step."""
    if source is None and sys.stdin.isatty():
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from ..tracing.asking import WhyOptions, show_why  # noqa: PLC0415 - heavy

    show_why(
        WhyOptions(
            request_id=request_id,
            input=source,
            as_json=as_json,
            tells_all=tells_all,
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
