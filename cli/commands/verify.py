"""`batchdecode verify`: proves that outputs do not depend on the batch, or shows where they do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import shared
from ..config import OF_MODELS
from ..help import INPUT, OUTPUT, flag, option
from ..options import as_command, speculation_group

if TYPE_CHECKING:
    from batcher.speculation.settings import SpeculationSettings

VERIFYING = "Verifying"
MAX_SETTINGS = 100_000


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(shared.ModelOptions):
    """The options of `batchdecode verify`; docs/cli.md says what each one means."""

    input: str | None = shared.requests()
    config: str | None = shared.config(
        INPUT, "--model, and the settings of models", names=OF_MODELS
    )
    model: str = shared.model()
    chat: bool = shared.chat()
    checkpoint: dict[str, Any] = shared.checkpoint_group().field
    grammar_timeout: float = shared.grammar_timeout()
    speculation: "SpeculationSettings | None" = speculation_group().field
    settings: int = option(
        VERIFYING,
        "Number of settings to decode everything with.",
        "N",
        default=64,
        min=1,
        max=MAX_SETTINGS,
        is_common=True,
    )
    seed: int = option(
        VERIFYING,
        "Seed of the settings and arrivals that are drawn.",
        "S",
        default=0,
        is_common=True,
    )
    only: int | None = option(
        VERIFYING, "Try setting K alone.", "K", min=1, max=MAX_SETTINGS, is_common=True
    )
    json: bool = flag(OUTPUT, "Print the verdict as JSON.", is_common=True)
    color: shared.Color = shared.color()


def verify(options: VerifyOptions) -> int:
    """Prove that outputs do not depend on the batch, or show the first difference.

    Exit status: 0 if they are the same under all settings, 1 if not, 2 for bad input.
    """
    from ..run.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as the next
    from ..verify import verify_requests  # noqa: PLC0415 - heavy

    with user_code_prints_to_stderr():
        return verify_requests(options)


COMMAND = as_command(verify, VerifyOptions)
