"""`batchdecode workload`: makes a requests file, from a pattern or from a recorded trace."""

from typing import Annotated

from msgspec import Struct

from ..help import OUTPUT, argument, option
from ..options import ForceOption, as_command, output_option

ARRIVALS, LENGTHS = "Arrivals", "Lengths: a number or a distribution"
SESSIONS = "Prefixes and sessions"
DISTRIBUTIONS = """
Distributions: N, constant:N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA,
exponential:MEAN, pareto:MIN,ALPHA, and of lengths also zipf:ALPHA,MAX and empirical:FILE.
"""


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode workload`, None where not given; see docs/workloads.md."""

    source: Annotated[
        str,
        argument(
            "constant, poisson, gamma, bursty, closed; or a trace: azure, mooncake, vllm.", "SOURCE"
        ),
    ]
    file: Annotated[
        str | None, argument("The trace: a file, a .gz file, or - for stdin.", "FILE")
    ] = None
    requests: Annotated[
        int | None,
        option(ARRIVALS, "How many requests.  [default: 1000, of a trace all]", "N", "-n", min=1),
    ] = None
    rate: Annotated[
        float | None,
        option(
            ARRIVALS,
            "Mean rate: requests a second, with --turns sessions a second.  "
            "[default: 1, of a trace its own]",
            "R",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        option(ARRIVALS, "gamma: shape of the gaps; 1 is poisson, less is burstier.", "B"),
    ] = None
    on: Annotated[float | None, option(ARRIVALS, "bursty: length of a burst.", "SECONDS")] = None
    off: Annotated[float | None, option(ARRIVALS, "bursty: pause between bursts.", "SECONDS")] = (
        None
    )
    users: Annotated[
        int | None, option(ARRIVALS, "closed: users, each with one request at a time.", "N", min=1)
    ] = None
    scale: Annotated[
        float | None,
        option(ARRIVALS, "Multiply the times of a trace; 0.5 is twice as fast.", "FACTOR"),
    ] = None
    prompt_tokens: Annotated[str | None, option(LENGTHS, "Of prompts.  [default: 1024]", "D")] = (
        None
    )
    output_tokens: Annotated[str | None, option(LENGTHS, "Of outputs.  [default: 128]", "D")] = None
    max_prompt_tokens: Annotated[
        int | None, option(LENGTHS, "Longest prompt drawn.", "N", min=1)
    ] = None
    max_output_tokens: Annotated[
        int | None, option(LENGTHS, "Longest output drawn.", "N", min=1)
    ] = None
    shared_prefix: Annotated[
        str | None,
        option(SESSIONS, "Begin prompts with N tokens, those of one of G groups.", "N[:G]"),
    ] = None
    turns: Annotated[str | None, option(SESSIONS, "Make sessions of so many turns.", "D")] = None
    think_time: Annotated[
        str | None, option(SESSIONS, "Seconds from an answer to the next turn.  [default: 0]", "D")
    ] = None
    seed: Annotated[
        int | None, option(OUTPUT, "Seed of all that is drawn.  [default: 0]", "N", min=0)
    ] = None
    name: Annotated[
        str | None,
        option(OUTPUT, "What ids begin with.  [default: r; a vLLM log has its own ids]", "TEXT"),
    ] = None
    output: Annotated[str | None, output_option("Where the requests go; .gz packs them.")] = None
    force: ForceOption = False
    quiet: Annotated[bool, option(OUTPUT, "No summary.", None, "-q")] = False


def workload(options: WorkloadOptions) -> None:
    """Make a requests file: arrivals by a pattern or from a trace, and lengths."""
    from ..workloads.write import write_workload  # noqa: PLC0415 - heavy

    write_workload(options)


COMMAND = as_command(workload, WorkloadOptions, epilog=DISTRIBUTIONS)
