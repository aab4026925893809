"""`batchdecode draft`: what there is to know of a draft; below it, `draft diagnose`."""

from dataclasses import dataclass
from typing import Any

from batcher.errors import BatchdecodeError

from .. import shared
from ..config import OF_MODELS
from ..help import INPUT, OUTPUT, REQUIRED, flag, option
from ..options import as_command

DRAFT = "Draft"
MAX_SAMPLE = 10_000


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """`batchdecode draft` has no options of its own."""


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(shared.ModelOptions):
    """The options of `batchdecode draft diagnose`; docs/speculation.md says what they mean."""

    input: str | None = shared.requests()
    config: str | None = shared.config(
        INPUT, "--model, and the settings of models", names=OF_MODELS
    )
    model: str = shared.model()
    chat: bool = shared.chat()
    checkpoint: dict[str, Any] = shared.checkpoint_group().field
    grammar_timeout: float = shared.grammar_timeout()
    draft: str = option(
        DRAFT,
        "The model that drafts, as --model names one.",
        "NAME",
        default=REQUIRED,
        offers="model",
    )
    draft_fields: str | None = option(
        DRAFT, 'Sampling fields that it is given otherwise, such as {"temperature": 1}.', "JSON"
    )
    sample: int = option(
        DRAFT,
        "How many of the requests to decode.",
        "N",
        default=8,
        min=1,
        max=MAX_SAMPLE,
        is_common=True,
    )
    tokens: int = option(
        DRAFT,
        "How many tokens of each to look at.",
        "N",
        default=48,
        min=1,
        max=MAX_SAMPLE,
        is_common=True,
    )
    json: bool = flag(OUTPUT, "Print the diagnosis as JSON.", is_common=True)
    color: shared.Color = shared.color()


def draft(options: DraftOptions) -> None:  # noqa: ARG001 - there are none
    """Find out what there is to know of a draft."""
    raise BatchdecodeError("a command is missing: batchdecode draft diagnose")


def diagnose(options: DiagnoseOptions) -> None:
    """Say why the drafts of a model are not accepted: position by position, beside its target."""
    from ..draft import print_diagnosis  # noqa: PLC0415 - heavy
    from ..run.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as above

    with user_code_prints_to_stderr():
        print_diagnosis(options)


COMMAND = as_command(draft, DraftOptions, below={"diagnose": as_command(diagnose, DiagnoseOptions)})
