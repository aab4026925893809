"""`batchdecode plan`: the smallest setting, or the largest rate, that keeps a promise."""

import os
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ..config import model_settings
from ..help import as_command
from .arguments import (
    GRAMMAR_TIMEOUT,
    OUTPUT,
    ColorOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    SeedOption,
    refuse_nan,
)
from .axis_arguments import takes_axes
from .compare import QuietOption, RunConfigOption

if TYPE_CHECKING:
    from batcher.whatif.search import Searched

SEARCH = "Search"
EXAMPLES = """\b
Examples:
  batchdecode plan requests.jsonl --slo ttft=0.5,tpot=50ms --profile our.yaml
  batchdecode plan requests.jsonl --slo ttft=1 --search rate --batch 32 \\
    --kv-blocks 2587 --profile rtx4090_llama3.1-8b

\b
Exit codes: 0 found; 1 no setting meets the SLO; 2 bad input or usage.
"""


def plan(
    context: typer.Context,
    requests: InputArgument = None,
    *,
    slo: Annotated[
        str,
        typer.Option(
            metavar="LIMITS",
            help="What is promised: ttft=0.5,tpot=50ms,e2e=10,queue=1.",
            rich_help_panel=SEARCH,
        ),
    ],
    goodput: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Of the requests, how many it is to be kept for.",
            callback=refuse_nan,
            rich_help_panel=SEARCH,
        ),
    ] = 0.99,
    search: Annotated[
        Literal["batch", "kv-blocks", "max-batch-tokens", "rate"],
        typer.Option(
            metavar="WHAT",
            help="The smallest batch, kv-blocks or max-batch-tokens, or the largest rate.",
            rich_help_panel=SEARCH,
        ),
    ] = "batch",
    axes: dict[str, str],
    json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    model: ModelOption = "simulated",
    seed: SeedOption = None,
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT,
    config: RunConfigOption = None,
    color: ColorOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Find the smallest setting, or the largest rate, that meets an SLO; say what binds."""
    if requests is None and os.isatty(0):
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - heavy

    from ..whatif.plan import PlanOptions, plan_requests  # noqa: PLC0415 - as above
    from ..whatif.reading import RequestOptions, until_stopped  # noqa: PLC0415 - as above

    searched = search.replace("-", "_")
    origin = context.get_parameter_source(searched)
    if searched in axes and origin is not None and origin.name == "DEFAULT_MAP":
        del axes[searched]  # the file speaks of other commands, too
    options = PlanOptions(
        axes=axes,
        slo=parse_slo(slo),
        goodput=goodput,
        search=cast("Searched", searched),
        as_json=json,
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
    raise typer.Exit(until_stopped(lambda: plan_requests(source, options)))


COMMAND = as_command(takes_axes(plan, as_lists=False), epilog=EXAMPLES)
