"""`batchdecode workload`: makes a requests file, from a pattern or from a recorded trace."""

from typing import Annotated

import typer
from msgspec import Struct

from ..help import as_command
from .arguments import OUTPUT, ForceOption, none_for_stdout
from .records import flag, option, takes_record

ARRIVALS, LENGTHS = "Arrivals", "Lengths: a number or a distribution"
SESSIONS = "Prefixes and sessions"
DISTRIBUTIONS = """
Distributions: N, constant:N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA,
exponential:MEAN, pareto:MIN,ALPHA, and of lengths also zipf:ALPHA,MAX and empirical:FILE.
"""

_SOURCE = "constant, poisson, gamma, bursty, closed; or a trace: azure, mooncake, vllm."
_RATE = (
    "Mean rate: requests a second, with --turns sessions a second.  "
    "[default: 1, of a trace its own]"
)
_REQUESTS = "How many requests.  [default: 1000, of a trace all]"
_BURSTINESS = "gamma: shape of the gaps; 1 is poisson, less is burstier."
_USERS = "closed: users, each with one request at a time."
_SCALE = "Multiply the times of a trace; 0.5 is twice as fast."
_PREFIX = "Begin prompts with N tokens, those of one of G groups."
_THINK_TIME = "Seconds from an answer to the next turn.  [default: 0]"
_NAME = "What ids begin with.  [default: r; a vLLM log has its own ids]"
_OUTPUT = "Where the requests go; .gz packs them.  [default: stdout]"


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode workload`, None where not given; see docs/workloads.md."""

    source: Annotated[str, typer.Argument(metavar="SOURCE", help=_SOURCE)]
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The trace: a file, a .gz file, or - for stdin."),
    ] = None
    requests: Annotated[int | None, option("N", _REQUESTS, ARRIVALS, "--requests", "-n", min=1)] = (
        None
    )
    rate: Annotated[float | None, option("R", _RATE, ARRIVALS)] = None
    burstiness: Annotated[float | None, option("B", _BURSTINESS, ARRIVALS)] = None
    on: Annotated[float | None, option("SECONDS", "bursty: length of a burst.", ARRIVALS)] = None
    off: Annotated[float | None, option("SECONDS", "bursty: pause between bursts.", ARRIVALS)] = (
        None
    )
    users: Annotated[int | None, option("N", _USERS, ARRIVALS, min=1)] = None
    scale: Annotated[float | None, option("FACTOR", _SCALE, ARRIVALS)] = None
    prompt_tokens: Annotated[str | None, option("D", "Of prompts.  [default: 1024]", LENGTHS)] = (
        None
    )
    output_tokens: Annotated[str | None, option("D", "Of outputs.  [default: 128]", LENGTHS)] = None
    max_prompt_tokens: Annotated[
        int | None, option("N", "Longest prompt drawn.", LENGTHS, min=1)
    ] = None
    max_output_tokens: Annotated[
        int | None, option("N", "Longest output drawn.", LENGTHS, min=1)
    ] = None
    shared_prefix: Annotated[str | None, option("N[:G]", _PREFIX, SESSIONS)] = None
    turns: Annotated[str | None, option("D", "Make sessions of so many turns.", SESSIONS)] = None
    think_time: Annotated[str | None, option("D", _THINK_TIME, SESSIONS)] = None
    seed: Annotated[
        int | None, option("N", "Seed of all that is drawn.  [default: 0]", OUTPUT, min=0)
    ] = None
    name: Annotated[str | None, option("TEXT", _NAME, OUTPUT)] = None
    output: Annotated[
        str | None, option("FILE", _OUTPUT, OUTPUT, "--output", "-o", callback=none_for_stdout)
    ] = None
    force: ForceOption = False
    quiet: Annotated[bool, flag("--quiet", "No summary.", OUTPUT, "-q")] = False


def workload(_: typer.Context, options: WorkloadOptions) -> None:
    """Make a requests file: arrivals by a pattern or from a trace, and lengths."""
    from ..workloads.write import write_workload  # noqa: PLC0415 - heavy

    write_workload(options)


COMMAND = as_command(takes_record(workload, WorkloadOptions), epilog=DISTRIBUTIONS)
