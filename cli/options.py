"""Commands of records, whose fields are the options; and the options that several commands have."""

import math
import os
from collections.abc import Callable
from copy import copy
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from .config import model_settings, use_config, use_run_config
from .help import DECODING, DISPLAY, INPUT, OUTPUT, GroupedCommand, OptionGroup, argument, option

OptionsT = TypeVar("OptionsT", bound=Struct)

_STDOUT = "-"
MAX_BATCH = 2**20  # as batcher.engine has it, which would load numpy
MAX_DELAY = 24 * 60 * 60
MIN_INTERVAL = 1e-6  # seconds: times are known to a microsecond
_SECTIONS = {"model_settings": "simulated", "llm_settings": "llm"}


def as_command(
    function: Callable[[OptionsT], None],
    record: type[OptionsT],
    *,
    cls: type[GroupedCommand] = GroupedCommand,
    epilog: str | None = None,
    context_settings: dict[str, Any] | None = None,
) -> Any:
    """Return `function` as a command whose arguments and options are the fields of `record`.

    Its `input` is stdin if it is left out; a person there is shown the help instead.
    model_settings, llm_settings: what the file of `config` holds for models, and no options.
    from_file: the names of the options that it has set.
    """
    parameters, groups = _parameters_of(record)
    names = record.__struct_fields__

    def carry_out(context: typer.Context, **given: Any) -> None:
        if "input" in names and given["input"] is None and os.isatty(0):
            typer.echo(context.get_help(), err=True)
            raise typer.Exit(2)
        if "from_file" in names:
            given["from_file"] = {name for name in given if _is_from_file(context, name)}
        for field, group in groups.items():
            values = {name: given.pop(name) for name in group.kinds}
            given[field] = group.read(
                {n: value for n, value in values.items() if value is not None}
            )
        for field, section in _SECTIONS.items():
            if field in names:
                given[field] = model_settings(given["config"], section)
        function(record(**given))

    carry_out.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    carry_out.__doc__, carry_out.__name__ = function.__doc__, function.__name__
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(cls=cls, epilog=epilog, context_settings=context_settings)(carry_out)
    return typer.main.get_command(alone)


def _parameters_of(record: type[Struct]) -> tuple[list[Parameter], dict[str, OptionGroup]]:
    """Return the fields of a record as typer reads them, and its groups by their field."""
    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    groups = {}
    for field in fields(record):
        (told,) = getattr(field.type, "__metadata__", (None,))
        kinds = {field.name: field.type}
        if isinstance(told, OptionGroup):
            groups[field.name], kinds = told, told.kinds
        default = None if field.name in groups else field.default
        for name, kind in kinds.items() if told is not None else ():
            parameters.append(
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if default is NODEFAULT else default,
                    annotation=_with_flag(name, kind),
                )
            )
    return parameters, groups


def _with_flag(name: str, annotated: Any) -> Any:
    """Return the type of a field such that an option has its name for a flag, or another one."""
    kind, info = get_args(annotated)
    flags = info.param_decls or ()
    if isinstance(info, typer.models.OptionInfo) and not any(f.startswith("--") for f in flags):
        info = copy(info)
        info.param_decls = (f"--{name.replace('_', '-')}", *flags)
    return Annotated[kind, info]


def _is_from_file(context: typer.Context, name: str) -> bool:
    origin = context.get_parameter_source(name)
    return origin is not None and origin.name == "DEFAULT_MAP"


# -- what options are checked by -------------------------------------------------------------------


def none_for_stdout(path: str | None) -> str | None:
    """Return `path`, None for what stands for stdout; the callback of --output."""
    return None if path == _STDOUT else path


def refuse_stdout(path: str | None) -> str | None:
    """Return `path`, which is to be a file; the callback of what is written beside the results.

    Raises:
        typer.BadParameter: it stands for stdout.
    """
    if path == _STDOUT:
        raise typer.BadParameter("stdout is for the results: give a file")
    return path


def refuse_nan(number: float | None) -> float | None:
    """Return `number`, which is to be one if it is given: no range excludes nan; a callback.

    Raises:
        typer.BadParameter: it is none.
    """
    if number is not None and math.isnan(number):
        raise typer.BadParameter("nan is not a number.")
    return number


# -- options of several commands -------------------------------------------------------------------


def config_option(panel: str, text: str, callback: Callable[..., Any] = use_run_config) -> Any:
    """Return what makes a field --config; `callback` takes from the file what the command uses."""
    return option(panel, f"YAML: {text}.", "FILE", is_eager=True, callback=callback)


def output_option(text: str) -> Any:
    """Return what makes a field --output."""
    text = f"{text}  [default: stdout]"
    return option(OUTPUT, text, "FILE", "-o", callback=none_for_stdout)


def grammar_timeout_option(panel: str, default: str = "") -> Any:
    """Return what makes a field --grammar-timeout; default: as help has it, if typer does not."""
    text = f"Processor time that compiling a constraint may take.{default}"
    least = 0.1  # as batcher.settings has it
    return option(panel, text, "SECONDS", min=least, max=MAX_DELAY, callback=refuse_nan)


InputArgument = Annotated[
    str | None,
    argument("Requests, one JSON object per line: a file, a .gz file, or - for stdin.", "INPUT"),
]
ConfigOption = Annotated[
    str | None,
    config_option(
        INPUT,
        "defaults for these options by their names, and under simulated: and llm: settings of "
        "models",
        use_config,
    ),
]
BatchOption = Annotated[
    int, option(DECODING, "Slots of the batch.", "N", "-b", min=1, max=MAX_BATCH)
]
ModelOption = Annotated[
    str, option(DECODING, "simulated, or package.module:name of a callable, Model or LLM.", "NAME")
]
SeedOption = Annotated[
    int | None, option(DECODING, "Seed of the simulated model.  [default: 0]", "N")
]
GrammarTimeoutOption = Annotated[float, grammar_timeout_option(DECODING)]
ForceOption = Annotated[bool, option(OUTPUT, "Overwrite a file that holds something.")]
ColorOption = Annotated[
    Literal["auto", "always", "never"],
    option(DISPLAY, "Use colors: auto (on a terminal), always or never.", "WHEN"),
]
SLO_WORDS = "Count the requests that meet them: ttft=0.5,tpot=50ms,e2e=10,queue=1."
