"""The options of `compare` and `plan` that say what a deployment is, each read as a text.

Rule: they have the names of batcher.whatif.deployments.AXES, which reads them; `compare` takes a
list of values where `plan` takes one.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from batcher.settings import SETTINGS, Setting

from ..scheduling_options import SCHEDULING, TIME, help_of
from .arguments import DECODING


def _of_setting(setting: Setting) -> tuple[str, str, str]:
    more = ", or none" if setting.takes_none else ""
    text = help_of(setting, more, default=setting.shown(setting.default))
    return setting.metavar, text, SCHEDULING


# Name -> what stands for a value, help, title.
AXIS_OPTIONS = {
    "batch": ("N", "Slots of the batch.  [default: 8]", DECODING),
    **{name: _of_setting(setting) for name, setting in SETTINGS.items()},
    "profile": (
        "NAME",
        "A profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  [default: constant:1]",
        TIME,
    ),
}


def takes_axes(command: Callable[..., None], *, as_lists: bool) -> Callable[..., None]:
    """Return `command` with these options where it has the parameter `axes`.

    It is handed those that were given, name -> text.  as_lists: whether help shows lists.
    """

    def with_options(**arguments: Any) -> None:
        axes = {name: arguments.pop(name) for name in AXIS_OPTIONS}
        given = {name: text for name, text in axes.items() if text is not None}
        command(**arguments, axes=given)

    own = signature(command)
    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        parameters += _parameters(as_lists) if parameter.name == "axes" else [parameter]
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    with_options.__doc__ = command.__doc__
    with_options.__name__ = command.__name__
    return with_options


def _parameters(as_lists: bool) -> list[Parameter]:  # noqa: FBT001 - takes_axes names it
    """Return a parameter for each of the options, as typer reads them."""
    parameters = []
    for name, (value, text, title) in AXIS_OPTIONS.items():
        names = [f"--{name.replace('_', '-')}", *(["-b"] if name == "batch" else [])]
        option = typer.Option(
            *names,
            metavar=f"{value},..." if as_lists else value,
            help=text,
            rich_help_panel=title,
        )
        kind = Annotated[str | None, option]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    return parameters
