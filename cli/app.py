"""The command line as typer has it: `batchdecode`, and its commands below it."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import batcher

from .commands import NAMES, command_of


class _LazyGroup(TyperGroup):
    """`batchdecode`: to start one of its commands, the others are not imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(NAMES)  # get_command has what they stand for
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - typer calls it so
        """Return the command of this name, None if there is none."""
        command = command_of(cmd_name)
        return None if command is None else command.parser


app = typer.Typer(
    name="batchdecode",
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer passes it so
    if wanted:
        typer.echo(f"batchdecode {batcher.__version__}")
        raise typer.Exit


@app.callback()
def batchdecode(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Decode a JSONL file of requests with dynamic batching, and see every slot at every step."""
