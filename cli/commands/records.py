"""Commands whose arguments and options are the fields of a record: each is named there alone."""

import os
from collections.abc import Callable, Collection
from inspect import Parameter, Signature
from typing import Any

import typer
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from ..config import model_settings
from ..scheduling_options import takes_scheduling

_SECTIONS = {"model_settings": "simulated", "llm_settings": "llm"}


def option(metavar: str, text: str, panel: str, *names: str, **more: Any) -> Any:
    """Return an option that takes a value; `text` says in help, under `panel`, what that does."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **more)


def flag(name: str, text: str, panel: str, *names: str) -> Any:
    """Return an option that takes no value; `text` says in help, under `panel`, what it does."""
    return typer.Option(name, *names, help=text, rich_help_panel=panel)


def takes_record(
    command: Callable[[typer.Context, Any], None],
    record: type[Struct],
    panel: str | None = None,
    without: Collection[str] = (),
) -> Callable[..., None]:
    """Return `command` as typer reads it, with a parameter for each field of a `record`.

    Its fields `model_settings` and `llm_settings` are what --config holds for the models, and for
    `scheduling` there are all options of that; panel, without: see `takes_scheduling`.
    """
    sections = {name: _SECTIONS[name] for name in record.__struct_fields__ if name in _SECTIONS}

    def with_options(context: typer.Context, **arguments: Any) -> None:
        for name, section in sections.items():
            arguments[name] = model_settings(arguments["config"], section)
        command(context, record(**arguments))

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in fields(record):
        if field.name not in sections:
            default = Parameter.empty if field.default is NODEFAULT else field.default
            parameters.append(
                Parameter(
                    field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type
                )
            )
    with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    with_options.__doc__ = command.__doc__
    with_options.__name__ = command.__name__
    is_scheduling = "scheduling" in record.__struct_fields__
    return takes_scheduling(with_options, panel, without) if is_scheduling else with_options


def help_without_input(context: typer.Context, path: str | None) -> None:
    """Show the help of a command, and end it, if it would wait for somebody to type its input."""
    if path is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
