"""The arguments and options that more than one command has."""

import math
from typing import Annotated, Literal

import typer

from ..config import use_config

STDOUT = "-"
MAX_BATCH = 2**20  # as batcher.engine has it, which would load numpy
MAX_DELAY = 24 * 60 * 60
MIN_GRAMMAR_TIMEOUT, GRAMMAR_TIMEOUT = 0.1, 5.0  # as batcher.settings has it
MIN_INTERVAL = 1e-6  # seconds: times are known to a microsecond
INPUT, DECODING, OUTPUT, ERRORS, DISPLAY = "Input", "Decoding", "Output", "Errors", "Display"


def none_for_stdout(path: str | None) -> str | None:
    """Return `path`, None for what stands for stdout; the callback of --output."""
    return None if path == STDOUT else path


def refuse_stdout(path: str | None) -> str | None:
    """Return `path`, which is to be a file; the callback of what is written beside the results.

    Raises:
        typer.BadParameter: it stands for stdout.
    """
    if path == STDOUT:
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


InputArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="INPUT",
        help="Requests, one JSON object per line: a file, a .gz file, or - for stdin.",
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML: defaults for these options by their names, and under simulated: and llm: "
        "settings of models.",
        is_eager=True,
        callback=use_config,
        rich_help_panel=INPUT,
    ),
]
BatchOption = Annotated[
    int,
    typer.Option(
        "--batch",
        "-b",
        min=1,
        max=MAX_BATCH,
        metavar="N",
        help="Slots of the batch.",
        rich_help_panel=DECODING,
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="simulated, or package.module:name of a callable, Model or LLM.",
        rich_help_panel=DECODING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Seed of the simulated model.  [default: 0]", rich_help_panel=DECODING
    ),
]
GrammarTimeoutOption = Annotated[
    float,
    typer.Option(
        min=MIN_GRAMMAR_TIMEOUT,
        max=MAX_DELAY,
        metavar="SECONDS",
        help="Processor time that compiling a constraint may take.",
        callback=refuse_nan,
        rich_help_panel=DECODING,
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Overwrite a file that holds something.",
        rich_help_panel=OUTPUT,
    ),
]
ColorOption = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(
        metavar="WHEN",
        help="Use colors: auto (on a terminal), always or never.",
        rich_help_panel=DISPLAY,
    ),
]
