"""`batchdecode check`: validates requests and shows what a run would have to do."""

from typing import Annotated, Any

from msgspec import Struct

from batcher.settings import GRAMMAR_TIMEOUT

from ..config import ENVIRONMENT
from ..help import OUTPUT, option
from ..options import (
    BatchOption,
    ColorOption,
    ConfigOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    SeedOption,
    as_command,
)


class CheckOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode check`; docs/cli.md says what each one means."""

    input: InputArgument = None
    config: ConfigOption = None
    batch: BatchOption = 8
    model: ModelOption = "simulated"
    seed: SeedOption = None
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT
    json: Annotated[bool, option(OUTPUT, "Print the plan as JSON.")] = False
    color: ColorOption = "auto"
    model_settings: dict[str, Any] = {}
    llm_settings: dict[str, Any] = {}


def check(options: CheckOptions) -> None:
    """Validate requests and show what a run would have to do; decode nothing."""
    from ..running.check import print_plan  # noqa: PLC0415 - heavy

    print_plan(options)


COMMAND = as_command(check, CheckOptions, context_settings=ENVIRONMENT)
