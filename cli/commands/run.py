"""`batchdecode run`: decodes requests, streams the results and shows the batch at work."""

import os
import shlex
import sys
from typing import Annotated, Any, Literal

import typer

from ..config import ENVIRONMENT, model_settings
from ..help import GroupedCommand, as_command
from ..scheduling_options import SchedulingOptions, takes_scheduling
from .arguments import (
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

EXAMPLES = """\b
Examples:
  batchdecode run requests.jsonl -o results.jsonl
  zcat requests.jsonl.gz | batchdecode run -b 64 | jq -r .text
  batchdecode run requests.jsonl -o results.jsonl --resume

\b
Settings: a flag goes before the environment (BATCHDECODE_KEEP_ORDER=1, so for
every option), that before --config, and that before the default.

\b
Exit codes: 0 all is well; 1 a request failed, or the output cannot be
written; 2 bad input or usage; 130 Ctrl-C; 143 SIGTERM; 141 closed pipe.
"""


_SAID_ONCE = {"--force", "--retry-failed", "--resume=repair"}  # not again to go on


class RunCommand(GroupedCommand):
    """`run`, whose flag --resume may be given with how to go on: --resume=repair."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, in which that is two flags."""
        return super().parse_args(ctx, [part for arg in args for part in _as_flags(arg)])


def _as_flags(argument: str) -> list[str]:
    name, _, how = argument.partition("=")
    if name != "--resume" or not how:
        return [argument]
    if how != "repair":
        raise typer.BadParameter(f"{how}: it is --resume or --resume=repair")
    return ["--resume", "--repair"]


def run(
    context: typer.Context,
    requests: InputArgument = None,
    *,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Do not wait for the next line of a pipe: step on with what has come.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    config: ConfigOption = None,
    batch: BatchOption = 8,
    model: ModelOption = "simulated",
    seed: SeedOption = None,
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT,
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
    ] = None,
    scheduling: SchedulingOptions,
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
    ] = None,
    keep_order: Annotated[
        bool,
        typer.Option(
            "--keep-order",
            help="Results in the order of the requests, not in that of finishing.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run that --output has unfinished results of; --resume=repair: "
            "without lines that no run has written.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", hidden=True)] = False,  # see RunCommand
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="With --resume: decode again what has failed.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Overwrite earlier results, and files that hold something else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Before the results of a step, what each row has generated in it.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where every decision goes; with .gz compressed.",
            callback=refuse_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    summary_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the numbers of the run go, as JSON.",
            callback=refuse_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Count the requests that meet them: ttft=0.5,tpot=50ms,e2e=10,queue=1.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    timeseries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the run over time goes, as CSV; with .gz compressed.",
            callback=refuse_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
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
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Make a bad line an error result, and go on.",
            rich_help_panel=ERRORS,
        ),
    ] = False,
    max_errors: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Read no more after N failed requests; implies --keep-going.",
            rich_help_panel=ERRORS,
        ),
    ] = None,
    live: Annotated[
        Literal["auto", "always", "plain", "never"],
        typer.Option(
            metavar="WHEN",
            help="Show the batch at work: auto (on a terminal), always, plain (lines of words, "
            "no picture) or never.",
            rich_help_panel=DISPLAY,
        ),
    ] = "auto",
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
    ] = 0.0,
    color: ColorOption = "auto",
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="No live view and no summary: only problems.",
            rich_help_panel=DISPLAY,
        ),
    ] = False,
) -> None:
    """Decode requests; results go to stdout, one JSON object per line."""
    if requests is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from batcher.errors import BatchdecodeError  # noqa: PLC0415 - heavy, as are the others
    from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - heavy
    from batcher.raised import RaisedError  # noqa: PLC0415 - heavy

    from ..options import RunOptions  # noqa: PLC0415 - heavy
    from ..running.runner import run as run_requests  # noqa: PLC0415 - heavy
    from ..running.signals import Interrupted, StopSignals, die_of_closed_pipe  # noqa: PLC0415 - as above
    from ..running.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as above

    options = RunOptions(
        input=requests,
        batch=batch,
        model=model,
        seed=seed,
        grammar_timeout=grammar_timeout,
        model_settings=model_settings(config, "simulated"),
        llm_settings=model_settings(config, "llm"),
        call_timeout=call_timeout,
        scheduling=scheduling,
        output=output,
        trace=trace,
        summary_json=summary_json,
        slo=None if slo is None else parse_slo(slo),
        timeseries=timeseries,
        timeseries_interval=timeseries_interval,
        keep_order=keep_order,
        keep_going=keep_going,
        max_errors=max_errors,
        resume=resume,
        repair=repair,
        retry_failed=retry_failed,
        force=force,
        stream=stream,
        follow=follow,
        live=live,
        step_delay=step_delay,
        color=color,
        quiet=quiet,
    )
    with user_code_prints_to_stderr(), StopSignals() as stop:
        try:
            status = run_requests(options, stop, _continuing_command())
        except (Interrupted, KeyboardInterrupt):  # before the first step, or a second time
            status = stop.exit_status
        except RaisedError as error:
            if quiet:
                raise BatchdecodeError(str(error)) from None
            raise
        except BrokenPipeError:
            die_of_closed_pipe()
    raise typer.Exit(status)


def _continuing_command() -> str:
    """Return the command line that continues this run."""
    arguments = [argument for argument in sys.argv[1:] if argument not in _SAID_ONCE]
    return shlex.join(
        ["batchdecode", *arguments, *([] if "--resume" in arguments else ["--resume"])]
    )


COMMAND = as_command(
    takes_scheduling(run), cls=RunCommand, epilog=EXAMPLES, context_settings=ENVIRONMENT
)
