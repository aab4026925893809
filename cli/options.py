"""What a run is asked to do, by flags, environment and configuration file together.

Rule: each option of `batchdecode run` is named here and nowhere else.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from msgspec import Struct

from .commands.arguments import (
    DECODING,
    DISPLAY,
    ERRORS,
    GRAMMAR_TIMEOUT,
    INPUT,
    MAX_DELAY,
    MIN_INTERVAL,
    OUTPUT,
    BatchOption,
    ColorOption,
    ConfigOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    SeedOption,
    none_for_stdout,
    refuse_nan,
    refuse_stdout,
)
from .scheduling_options import SchedulingOptions

if TYPE_CHECKING:
    from batcher.metrics.slo import Slo


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode run`, and what --config holds for the models.

    call_timeout: in seconds; goes before the one in llm_settings.
    """

    input: InputArgument = None
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Do not wait for the next line of a pipe: step on with what has come.",
            rich_help_panel=INPUT,
        ),
    ] = False
    config: ConfigOption = None
    batch: BatchOption = 8
    model: ModelOption = "simulated"
    seed: SeedOption = None
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT
    call_timeout: Annotated[
        float | None,
        typer.Option(
            min=MIN_INTERVAL,
            max=MAX_DELAY,
            metavar="SECONDS",
            help="After so long a row fails that an LLM gives no answer for.  [default: 120]",
            show_default=False,
            callback=refuse_nan,
            rich_help_panel=DECODING,
        ),
    ] = None
    scheduling: SchedulingOptions = SchedulingOptions()
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where results go; with .gz compressed.  [default: stdout]",
            callback=none_for_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None
    keep_order: Annotated[
        bool,
        typer.Option(
            "--keep-order",
            help="Results in the order of the requests, not in that of finishing.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run that --output has unfinished results of; --resume=repair: "
            "without lines that no run has written.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    repair: Annotated[bool, typer.Option("--repair", hidden=True)] = False  # see RunCommand
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="With --resume: decode again what has failed.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Overwrite earlier results, and files that hold something else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Before the results of a step, what each row has generated in it.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where every decision goes; with .gz compressed.",
            callback=refuse_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None
    summary_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the numbers of the run go, as JSON.",
            callback=refuse_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Count the requests that meet them: ttft=0.5,tpot=50ms,e2e=10,queue=1.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    timeseries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the run over time goes, as CSV; with .gz compressed.",
            callback=refuse_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None
    timeseries_interval: Annotated[
        float | None,
        typer.Option(
            min=MIN_INTERVAL,
            max=MAX_DELAY,
            metavar="SECONDS",
            help="Engine time of a row.  [default: 1, more in a long run]",
            show_default=False,
            callback=refuse_nan,
            rich_help_panel=OUTPUT,
        ),
    ] = None
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Make a bad line an error result, and go on.",
            rich_help_panel=ERRORS,
        ),
    ] = False
    max_errors: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Read no more after N failed requests; implies --keep-going.",
            rich_help_panel=ERRORS,
        ),
    ] = None
    live: Annotated[
        Literal["auto", "always", "plain", "never"],
        typer.Option(
            metavar="WHEN",
            help="Show the batch at work: auto (on a terminal), always, plain (lines of words, "
            "no picture) or never.",
            rich_help_panel=DISPLAY,
        ),
    ] = "auto"
    step_delay: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_DELAY,
            metavar="SECONDS",
            help="Wait after each step, and draw each one.",
            show_default=False,
            callback=refuse_nan,
            rich_help_panel=DISPLAY,
        ),
    ] = 0.0
    color: ColorOption = "auto"
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="No live view and no summary: only problems.",
            rich_help_panel=DISPLAY,
        ),
    ] = False
    model_settings: dict[str, Any] = {}
    llm_settings: dict[str, Any] = {}

    @property
    def limits(self) -> "Slo | None":
        """What --slo says.

        Raises:
            BatchdecodeError: that is no list of limits.
        """
        if self.slo is None:
            return None
        from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - few runs have some

        return parse_slo(self.slo)
