"""`batchdecode workload`: makes a requests file, from a pattern or from a recorded trace."""

from dataclasses import dataclass
from typing import Any

from .. import shared
from ..help import OUTPUT, REQUIRED, argument, flag, option
from ..options import as_command

ARRIVALS, LENGTHS = "Arrivals", "Lengths: a number or a distribution"
SESSIONS = "Prefixes and sessions"
DISTRIBUTIONS = (
    "Distributions: N, constant:N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA, "
    "exponential:MEAN, pareto:MIN,ALPHA, and of lengths also zipf:ALPHA,MAX and empirical:FILE."
)
_FACTOR: dict[str, Any] = {"min": 1e-6, "max": 1e6}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The options of `batchdecode workload`, None where not given; see docs/workloads.md."""

    source: str = argument(
        "constant, poisson, gamma, bursty, closed; or a trace: azure, mooncake, vllm.",
        "SOURCE",
        REQUIRED,
        offers="source",
    )
    file: str | None = argument("The trace: a file or - for stdin.", "FILE")
    requests: int | None = option(
        ARRIVALS,
        "How many requests.  [default: 1000, of a trace all]",
        "N",
        "-n",
        min=1,
        is_common=True,
    )
    rate: float | None = option(
        ARRIVALS,
        "Mean rate: requests a second, with --turns sessions a second.  "
        "[default: 1, of a trace its own]",
        "R",
        **_FACTOR,
        is_common=True,
    )
    burstiness: float | None = option(
        ARRIVALS,
        "gamma: shape of the gaps; 1 is poisson, less is burstier.",
        "B",
        min=1e-3,
        max=1e6,
    )
    on: float | None = option(ARRIVALS, "bursty: length of a burst.", "SECONDS", **_FACTOR)
    off: float | None = option(ARRIVALS, "bursty: pause between bursts.", "SECONDS", min=0, max=1e6)
    users: int | None = option(
        ARRIVALS, "closed: users, each with one request at a time.", "N", min=1
    )
    scale: float | None = option(
        ARRIVALS, "Multiply the times of a trace; 0.5 is twice as fast.", "FACTOR", **_FACTOR
    )
    prompt_tokens: str | None = option(LENGTHS, "Of prompts.  [default: 1024]", "D", is_common=True)
    output_tokens: str | None = option(LENGTHS, "Of outputs.  [default: 128]", "D", is_common=True)
    max_prompt_tokens: int | None = option(LENGTHS, "Longest prompt drawn.", "N", min=1)
    max_output_tokens: int | None = option(LENGTHS, "Longest output drawn.", "N", min=1)
    shared_prefix: str | None = option(
        SESSIONS, "Begin prompts with N tokens, those of one of G groups.", "N[:G]", is_common=True
    )
    turns: str | None = option(SESSIONS, "Make sessions of so many turns.", "D", is_common=True)
    think_time: str | None = option(
        SESSIONS, "Seconds from an answer to the next turn.  [default: 0]", "D"
    )
    priority: str | None = option(
        SESSIONS, "Priorities, each with its share of the requests.", "N:SHARE,..."
    )
    seed: int | None = option(
        OUTPUT, "Seed of all that is drawn.  [default: 0]", "N", min=0, is_common=True
    )
    name: str | None = option(
        OUTPUT, "What ids begin with.  [default: r; a vLLM log has its own ids]", "TEXT"
    )
    output: str | None = shared.output("Where the requests go; .gz packs them.")
    force: bool = shared.force()
    quiet: bool = flag(OUTPUT, "No summary.", "-q")


def workload(options: WorkloadOptions) -> None:
    """Make a requests file: arrivals by a pattern or from a trace, and lengths."""
    from ..workloads.write import write_workload  # noqa: PLC0415 - heavy

    write_workload(options)


COMMAND = as_command(workload, WorkloadOptions, notes=(DISTRIBUTIONS,))
