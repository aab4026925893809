"""`batchdecode check`: validates requests and shows what a run would have to do."""

import os
from typing import Annotated

import typer

from ..config import ENVIRONMENT, model_settings
from ..help import as_command
from .arguments import (
    GRAMMAR_TIMEOUT,
    OUTPUT,
    BatchOption,
    ColorOption,
    ConfigOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    SeedOption,
)


def check(
    context: typer.Context,
    requests: InputArgument = None,
    *,
    config: ConfigOption = None,
    batch: BatchOption = 8,
    model: ModelOption = "simulated",
    seed: SeedOption = None,
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT,
    json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    color: ColorOption = "auto",
) -> None:
    """Validate requests and show what a run would have to do; decode nothing."""
    if requests is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from ..options import RunOptions  # noqa: PLC0415 - heavy, as is all the next one imports
    from ..running.check import print_plan  # noqa: PLC0415 - as above

    options = RunOptions(
        input=requests,
        batch=batch,
        model=model,
        seed=seed,
        grammar_timeout=grammar_timeout,
        model_settings=model_settings(config, "simulated"),
        llm_settings=model_settings(config, "llm"),
        color=color,
    )
    print_plan(options, as_json=json)


COMMAND = as_command(check, context_settings=ENVIRONMENT)
