"""`batchdecode compare`: one workload under all combinations of settings, in one table."""

import os
from typing import Annotated

import typer

from ..config import model_settings, use_run_config
from ..help import as_command
from .arguments import (
    GRAMMAR_TIMEOUT,
    INPUT,
    OUTPUT,
    ColorOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    SeedOption,
    refuse_nan,
)
from .axis_arguments import takes_axes

EXAMPLES = """\b
Examples:
  batchdecode compare requests.jsonl --batch 8,16,32 --policy fcfs,sjf
  batchdecode compare requests.jsonl --batch 16,32 --kv-blocks 1000,2587 \\
    --profile rtx4090_llama3.1-8b --slo ttft=0.5,tpot=50ms --sort goodput
"""

JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        max=4096,
        metavar="N",
        help="Processes.  [default: one for each core]",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress and no notes: only problems.", rich_help_panel=OUTPUT
    ),
]
RunConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML: defaults for --batch, --model and --seed, and the settings of models.",
        is_eager=True,
        callback=use_run_config,
        rich_help_panel=INPUT,
    ),
]


def compare(
    context: typer.Context,
    requests: InputArgument = None,
    *,
    axes: dict[str, str],
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Count the requests that meet them: ttft=0.5,tpot=50ms,e2e=10,queue=1.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    knee: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="The knee is where a doubled batch serves less than so much more.  [default: 0.1]",
            show_default=False,
            callback=refuse_nan,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Best first: throughput, requests, goodput, preemptions, hits, or ttft, tpot, "
            "e2e, queue with -p50 or -p99.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="A line of JSON for each cell.", rich_help_panel=OUTPUT),
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="The table as CSV.", rich_help_panel=OUTPUT)
    ] = False,
    jobs: JobsOption = None,
    model: ModelOption = "simulated",
    seed: SeedOption = None,
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT,
    config: RunConfigOption = None,
    color: ColorOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Serve requests under all combinations of settings, by lengths alone; print one table."""
    if requests is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - heavy

    from ..whatif.compare import CompareOptions, compare_requests  # noqa: PLC0415 - as above
    from ..whatif.reading import RequestOptions, until_stopped  # noqa: PLC0415 - as above

    options = CompareOptions(
        axes=axes,
        slo=None if slo is None else parse_slo(slo),
        knee=knee,
        sort=sort,
        form=_form(as_json=json, as_csv=csv),
        jobs=jobs,
        quiet=quiet,
    )
    source = RequestOptions(
        input=requests,
        model=model,
        seed=seed,
        grammar_timeout=grammar_timeout,
        model_settings=model_settings(config, "simulated"),
        llm_settings=model_settings(config, "llm"),
        color=color,
    )
    raise typer.Exit(until_stopped(lambda: compare_requests(source, options)))


def _form(*, as_json: bool, as_csv: bool) -> str:
    """Return in which form cells are printed.

    Raises:
        typer.BadParameter: two are asked for.
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other.")
    return "json" if as_json else "csv" if as_csv else "table"


COMMAND = as_command(takes_axes(compare, as_lists=True), epilog=EXAMPLES)
