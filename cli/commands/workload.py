"""`batchdecode workload`: makes a requests file, from a pattern or from a recorded trace."""

from typing import Annotated

import typer

from ..help import as_command
from .arguments import OUTPUT, ForceOption, none_for_stdout

ARRIVALS, LENGTHS = "Arrivals", "Lengths: a number or a distribution"
SESSIONS = "Prefixes and sessions"
DISTRIBUTIONS = """
Distributions: N, constant:N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA,
exponential:MEAN, pareto:MIN,ALPHA, and of lengths also zipf:ALPHA,MAX and empirical:FILE.
"""


def workload(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="constant, poisson, gamma, bursty, closed; or a trace: azure, mooncake, vllm.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The trace: a file, a .gz file, or - for stdin."),
    ] = None,
    *,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            min=1,
            metavar="N",
            help="How many requests.  [default: 1000, of a trace all]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Mean rate: requests a second, with --turns sessions a second.  "
            "[default: 1, of a trace its own]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            metavar="B",
            help="gamma: shape of the gaps; 1 is poisson, less is burstier.",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    on: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="bursty: length of a burst.", rich_help_panel=ARRIVALS
        ),
    ] = None,
    off: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="bursty: pause between bursts.", rich_help_panel=ARRIVALS
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="closed: users, each with one request at a time.",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Multiply the times of a trace; 0.5 is twice as fast.",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(metavar="D", help="Of prompts.  [default: 1024]", rich_help_panel=LENGTHS),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(metavar="D", help="Of outputs.  [default: 128]", rich_help_panel=LENGTHS),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Longest prompt drawn.", rich_help_panel=LENGTHS),
    ] = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Longest output drawn.", rich_help_panel=LENGTHS),
    ] = None,
    shared_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="N[:G]",
            help="Begin prompts with N tokens, those of one of G groups.",
            rich_help_panel=SESSIONS,
        ),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(metavar="D", help="Make sessions of so many turns.", rich_help_panel=SESSIONS),
    ] = None,
    think_time: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="Seconds from an answer to the next turn.  [default: 0]",
            rich_help_panel=SESSIONS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Seed of all that is drawn.  [default: 0]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What ids begin with.  [default: r; a vLLM log has its own ids]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the requests go; .gz packs them.  [default: stdout]",
            callback=none_for_stdout,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: ForceOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No summary.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Make a requests file: arrivals by a pattern or from a trace, and lengths."""
    from ..workloads.options import WorkloadOptions  # noqa: PLC0415 - with the next one
    from ..workloads.write import write_workload  # noqa: PLC0415 - heavy

    options = WorkloadOptions(
        source=source,
        file=file,
        requests=requests,
        rate=rate,
        burstiness=burstiness,
        on=on,
        off=off,
        users=users,
        scale=scale,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        shared_prefix=shared_prefix,
        turns=turns,
        think_time=think_time,
        seed=seed,
        name=name,
        output=output,
        force=force,
        quiet=quiet,
    )
    write_workload(options)


COMMAND = as_command(workload, epilog=DISTRIBUTIONS)
