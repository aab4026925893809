"""A command as typer has it, which parses its line, writes its help and completes it."""

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from .command import Command
from .command import Parameter as Declared
from .environment import PREFIX
from .help import HELP_NAMES, REQUIRED
from .usage.helpful_command import HelpfulCommand, NestingCommand
from .usage.values import worded

_PRESET = {"DEFAULT_MAP", "ENVIRONMENT"}  # as typer calls where a value is from


def typer_command(command: Command) -> Any:
    """Return `command` as one of typer's, and those below it."""

    def carry_out(context: typer.Context, **given: Any) -> None:
        if command.is_bare(given):
            typer.echo(context.get_help(), err=True)
            raise typer.Exit(2)
        origins = {name: context.get_parameter_source(name) for name in given}
        preset = {n for n, origin in origins.items() if origin and origin.name in _PRESET}
        raise typer.Exit(command.carry_out(given, preset))

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += map(_parameter, command.parameters)
    carry_out.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    function = command.function
    carry_out.__doc__, carry_out.__name__ = function.__doc__, function.__name__
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {
        "auto_envvar_prefix": PREFIX.rstrip("_"),
        "help_option_names": HELP_NAMES,
        "ignore_unknown_options": command.takes_dashes,
    }
    kind = NestingCommand if command.below else HelpfulCommand
    alone.command(cls=kind, context_settings=settings)(carry_out)
    made: Any = typer.main.get_command(alone)
    for param in made.params:
        param.type = worded(param.type)
    made.summary = command.summary
    made.common = frozenset(each.name for each in command.parameters if each.told.is_common)
    made.offers = {each.name: each.told.offers for each in command.parameters}
    made.examples, made.notes, made.respell = command.examples, command.notes, command.respell
    if command.below:
        made.subcommands = {name: below.parser for name, below in command.below.items()}
    return made


def _parameter(declared: Declared) -> Parameter:
    """Return a parameter as typer reads it; an option has its name for a flag, or another one."""
    told, name = declared.told, declared.name
    if told.is_argument:
        info = typer.Argument(**told.settings)
    else:
        info = typer.Option(**told.settings)
        info.param_decls = declared.flags
    default = Parameter.empty if declared.default is REQUIRED else declared.default
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[declared.kind, info]
    )
