"""`batchdecode verify`: proves that outputs do not depend on the batch, or shows where they do."""

from typing import Annotated, Any

import typer
from msgspec import Struct

from ..config import use_run_config
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
from .records import flag, help_without_input, option, takes_record

VERIFYING = "Verifying"
MAX_SETTINGS = 100_000


def _use_model_config(context: typer.Context, path: str | None) -> str | None:
    """Take from the file `path` only which model it is: its seed is that of another command."""
    use_run_config(context, path)
    defaults = context.default_map or {}
    context.default_map = {name: value for name, value in defaults.items() if name == "model"}
    return path


_CONFIG = option(
    "FILE",
    "YAML: what it says of --model, and the settings of models.",
    INPUT,
    "--config",
    is_eager=True,
    callback=_use_model_config,
)
_SETTINGS = option(
    "N", "Under how many settings to decode everything.", VERIFYING, min=1, max=MAX_SETTINGS
)
_ONLY = option(
    "K", "Under setting K alone.", VERIFYING, min=1, max=MAX_SETTINGS, show_default=False
)


class VerifyOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode verify`, and what --config holds for the models."""

    requests: InputArgument = None
    config: Annotated[str | None, _CONFIG] = None
    model: ModelOption = "simulated"
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT
    settings: Annotated[int, _SETTINGS] = 64
    seed: Annotated[
        int, option("S", "Seed of the settings and arrivals that are drawn.", VERIFYING)
    ] = 0
    only: Annotated[int | None, _ONLY] = None
    json: Annotated[bool, flag("--json", "Print the verdict as JSON.", OUTPUT)] = False
    color: ColorOption = "auto"
    model_settings: dict[str, Any] = {}
    llm_settings: dict[str, Any] = {}


def verify(context: typer.Context, options: VerifyOptions) -> None:
    """Prove that outputs do not depend on the batch, or show the first difference.

    Exit status: 0 if they are the same under all settings, 1 if not, 2 for bad input.
    """
    help_without_input(context, options.requests)
    from ..running.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as the next
    from ..verify import verify_requests  # noqa: PLC0415 - heavy

    with user_code_prints_to_stderr():
        status = verify_requests(options)
    raise typer.Exit(status)


COMMAND = as_command(takes_record(verify, VerifyOptions))
