"""`batchdecode verify`: proves that outputs do not depend on the batch, or shows where they do."""

import os
from typing import Annotated

import typer

from ..config import model_settings, use_run_config
from ..help import as_command
from .arguments import (
    GRAMMAR_TIMEOUT,
    INPUT,
    OUTPUT,
    ColorOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
)

VERIFYING = "Verifying"
MAX_SETTINGS = 100_000


def _use_model_config(context: typer.Context, path: str | None) -> str | None:
    """Take from the file `path` only which model it is: its seed is that of another command."""
    use_run_config(context, path)
    defaults = context.default_map or {}
    context.default_map = {name: value for name, value in defaults.items() if name == "model"}
    return path


def verify(
    context: typer.Context,
    requests: InputArgument = None,
    *,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML: what it says of --model, and the settings of models.",
            is_eager=True,
            callback=_use_model_config,
            rich_help_panel=INPUT,
        ),
    ] = None,
    model: ModelOption = "simulated",
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT,
    settings: Annotated[
        int,
        typer.Option(
            "--settings",
            min=1,
            max=MAX_SETTINGS,
            metavar="N",
            help="Under how many settings to decode everything.",
            rich_help_panel=VERIFYING,
        ),
    ] = 64,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="S",
            help="Seed of the settings and arrivals that are drawn.",
            rich_help_panel=VERIFYING,
        ),
    ] = 0,
    only: Annotated[
        int | None,
        typer.Option(
            "--only",
            min=1,
            max=MAX_SETTINGS,
            metavar="K",
            help="Under setting K alone.",
            show_default=False,
            rich_help_panel=VERIFYING,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    color: ColorOption = "auto",
) -> None:
    """Prove that outputs do not depend on the batch, or show the first difference.

    Exit status: 0 if they are the same under all settings, 1 if not, 2 for bad input.
    """
    if requests is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from ..running.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as the next
    from ..verifying.verify import VerifyOptions, verify_requests  # noqa: PLC0415 - heavy

    options = VerifyOptions(
        input=requests,
        config=config,
        model=model,
        model_settings=model_settings(config, "simulated"),
        llm_settings=model_settings(config, "llm"),
        num_settings=settings,
        seed=seed,
        only=only,
        grammar_timeout=grammar_timeout,
        as_json=json,
        color=color,
    )
    with user_code_prints_to_stderr():
        status = verify_requests(options)
    raise typer.Exit(status)


COMMAND = as_command(verify)
