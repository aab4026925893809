"""The options of `batchdecode trace` and its sub-commands that say how requests are run for it."""

from typing import Annotated, Any

import typer

from ..config import use_run_config
from .arguments import MAX_BATCH, MAX_DELAY, MIN_GRAMMAR_TIMEOUT, refuse_nan

REQUESTS = "If INPUT holds requests"

TraceInput = Annotated[
    str | None,
    typer.Argument(
        metavar="INPUT",
        help="A trace, or requests, which are run for it: a file, a .gz file, or - for stdin.",
    ),
]
RunBatch = Annotated[
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
]
RunModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="simulated, or package.module:name of a Python callable.  [default: simulated]",
        rich_help_panel=REQUESTS,
    ),
]
RunSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the simulated model.  [default: 0]",
        rich_help_panel=REQUESTS,
    ),
]
RunGrammarTimeout = Annotated[
    float | None,
    typer.Option(
        "--grammar-timeout",
        min=MIN_GRAMMAR_TIMEOUT,
        max=MAX_DELAY,
        metavar="SECONDS",
        help="Processor time that compiling a constraint may take.  [default: 5]",
        callback=refuse_nan,
        rich_help_panel=REQUESTS,
    ),
]
RunKeepGoing = Annotated[
    bool,
    typer.Option("--keep-going", help="Show bad lines as rejected.", rich_help_panel=REQUESTS),
]
RunConfig = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML: what it says of these options, and of the simulated model.",
        is_eager=True,
        callback=use_run_config,
        rich_help_panel=REQUESTS,
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """Return those of `options` that were given: a trace has its own, so they are errors there."""
    return {name: value for name, value in options.items() if value is not None}
