"""`batchdecode check`: validates requests and shows what a run would have to do."""

from dataclasses import dataclass
from typing import Any

from .. import shared
from ..help import OUTPUT, flag
from ..options import as_command


@dataclass(frozen=True, kw_only=True)
class CheckOptions(shared.ModelOptions):
    """The options of `batchdecode check`; docs/cli.md says what each one means."""

    input: str | None = shared.requests()
    config: str | None = shared.all_config()
    batch: int = shared.batch()
    model: str = shared.model()
    chat: bool = shared.chat()
    checkpoint: dict[str, Any] = shared.checkpoint_group().field
    defaults: dict[str, Any] = shared.defaults_group().field
    grammar_timeout: float = shared.grammar_timeout()
    strict_constraints: bool = shared.strict_constraints()
    json: bool = flag(OUTPUT, "Print the plan as JSON.", is_common=True)
    color: shared.Color = shared.color()


def check(options: CheckOptions) -> None:
    """Validate requests and show what a run would have to do; decode nothing."""
    from ..run.check import print_plan  # noqa: PLC0415 - heavy

    print_plan(options)


COMMAND = as_command(check, CheckOptions)
