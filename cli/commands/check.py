"""`batchdecode check`: validates requests and shows what a run would do."""

from dataclasses import dataclass
from typing import Annotated

from ..command import OUTPUT, command, flag
from ..options import Color, Config, DecodingOptions, Input


@dataclass(frozen=True, kw_only=True)
class CheckOptions(DecodingOptions):
    """The options of `batchdecode check`; docs/cli.md has a table of them."""

    input: Input = None
    config: Config = None
    json: Annotated[bool, flag(OUTPUT, "Print the plan as JSON.", common=True)] = False
    color: Color = "auto"


def check(options: CheckOptions) -> None:
    """Validate requests and show what a run would do; decode nothing."""
    from ..run.check import print_plan  # noqa: PLC0415 - heavy

    print_plan(options)


COMMANDS = {"check": command(check, CheckOptions)}
