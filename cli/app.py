"""The command line as typer has it: `batchdecode`, and its commands below it."""

import sys
from typing import Annotated, Any

import typer
from typer._click.exceptions import NoArgsIsHelpError, UsageError
from typer.core import TyperGroup

import batcher
from batcher.errors import BatchdecodeError

from .commands import NAMES, command_of
from .help import HELP_NAMES
from .usage.helpful_command import names_of
from .usage.mistakes import describe, unknown_command
from .usage.page import Page


class _Commands(TyperGroup):
    """`batchdecode`: to start one of its commands, the others are not imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(NAMES)  # get_command has what they stand for
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - typer calls it so
        """Return the command of this name, None if there is none."""
        command = command_of(cmd_name)
        return None if command is None else command.parser

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command that `args` begin with, the command and what follows.

        Raises:
            BatchdecodeError: there is none of that name.
        """
        if args[0] not in NAMES and not ctx.resilient_parsing:
            raise BatchdecodeError(unknown_command(args[0], NAMES))
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return a page that says of each command what it does."""
        commands = [(name, command.summary) for name in NAMES if (command := command_of(name))]
        params: list[Any] = self.get_params(ctx)
        options = {names_of(param): param.help for param in params}
        page = Page([*dict(commands), *options])
        page.usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)))
        page.paragraph(self.help or "")
        page.definitions("Commands", commands)
        page.definitions("Options", options.items())
        page.paragraph(
            f"{ctx.command_path} COMMAND --help tells of a command, {ctx.command_path} help of "
            "everything else."
        )
        return str(page)


app = typer.Typer(
    name="batchdecode",
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_NAMES},
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


def carry_out() -> int:
    """Carry out the command line of this process, and return its exit status.

    Raises:
        BatchdecodeError: it is wrong, or what it asks for cannot be done.
    """
    try:
        status: int = app(prog_name="batchdecode", standalone_mode=False)
    except NoArgsIsHelpError as error:
        typer.echo(error.message, err=True)
        return 2
    except UsageError as error:
        raise BatchdecodeError(describe(error, sys.argv[1:])) from None
    return status
