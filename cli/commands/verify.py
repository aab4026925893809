"""`batchdecode verify`: proves that outputs do not depend on the batch, or shows where they do."""

from typing import Annotated, Any

import typer
from msgspec import Struct

from batcher.settings import GRAMMAR_TIMEOUT

from ..help import INPUT, OUTPUT, option
from ..options import (
    ColorOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    as_command,
    config_option,
)

VERIFYING = "Verifying"
MAX_SETTINGS = 100_000


class VerifyOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode verify`; docs/cli.md says what each one means."""

    input: InputArgument = None
    config: Annotated[
        str | None,
        config_option(INPUT, "--model, and the settings of models", names={"model"}),
    ] = None
    model: ModelOption = "simulated"
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT
    settings: Annotated[
        int,
        option(
            VERIFYING, "Number of settings to decode everything with.", "N", min=1, max=MAX_SETTINGS
        ),
    ] = 64
    seed: Annotated[
        int, option(VERIFYING, "Seed of the settings and arrivals that are drawn.", "S")
    ] = 0
    only: Annotated[
        int | None,
        option(VERIFYING, "Try setting K alone.", "K", min=1, max=MAX_SETTINGS),
    ] = None
    json: Annotated[bool, option(OUTPUT, "Print the verdict as JSON.")] = False
    color: ColorOption = "auto"
    model_settings: dict[str, Any] = {}
    llm_settings: dict[str, Any] = {}


def verify(options: VerifyOptions) -> None:
    """Prove that outputs do not depend on the batch, or show the first difference.

    Exit status: 0 if they are the same under all settings, 1 if not, 2 for bad input.
    """
    from ..running.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as the next
    from ..verify import verify_requests  # noqa: PLC0415 - heavy

    with user_code_prints_to_stderr():
        status = verify_requests(options)
    raise typer.Exit(status)


COMMAND = as_command(verify, VerifyOptions)
