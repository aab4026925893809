"""`batchdecode draft diagnose`: shows why the drafts of a model are rejected."""

from dataclasses import dataclass
from typing import Annotated

from batcher.settings import GRAMMAR_TIMEOUT

from ..command import OUTPUT, command, flag, option
from ..options import Color, ConfigOfModel, GrammarTimeout, Input, ModelOptions

DRAFT = "Draft"
MAX_SAMPLE = 10_000


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ModelOptions):
    """The options of `batchdecode draft diagnose`; docs/speculation.md explains them."""

    input: Input = None
    config: ConfigOfModel = None
    grammar_timeout: GrammarTimeout = GRAMMAR_TIMEOUT
    draft: Annotated[
        str, option(DRAFT, "Draft model, named as for --model.", "NAME", complete="model")
    ]
    draft_fields: Annotated[
        str | None,
        option(
            DRAFT, 'Sampling fields that differ for the draft, such as {"temperature": 1}.', "JSON"
        ),
    ] = None
    sample: Annotated[
        int,
        option(DRAFT, "Number of requests to decode.", "N", min=1, max=MAX_SAMPLE, common=True),
    ] = 8
    tokens: Annotated[
        int,
        option(
            DRAFT,
            "Number of tokens to compare per request.",
            "N",
            min=1,
            max=MAX_SAMPLE,
            common=True,
        ),
    ] = 48
    json: Annotated[bool, flag(OUTPUT, "Print the diagnosis as JSON.", common=True)] = False
    color: Color = "auto"


def diagnose(options: DiagnoseOptions) -> None:
    """Show why the drafts of a model are rejected, position by position."""
    from ..draft import print_diagnosis  # noqa: PLC0415 - heavy
    from ..run.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as above

    with user_code_prints_to_stderr():
        print_diagnosis(options)


COMMANDS = {"draft diagnose": command(diagnose, DiagnoseOptions)}
