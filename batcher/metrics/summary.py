"""Every number of a run, as one record."""

from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.metrics.distributions import Distribution
from batcher.metrics.latencies import Latencies
from batcher.metrics.positions import Positions
from batcher.metrics.resources import (
    BlockedSteps,
    BudgetUse,
    Computed,
    KvUse,
    Preemptions,
    PrefixHits,
)
from batcher.metrics.slo import Goodput
from batcher.metrics.slots import IdleCauses
from batcher.metrics.speculation import Speculation

Unit = Literal["seconds", "steps"]


class FinishCounts(Struct, frozen=True):
    """How many results there are of each finish reason; rejected lines count as errors."""

    stop: int
    length: int
    error: int
    aborted: int


class ConstraintCounts(Struct, frozen=True):
    """How many grammars were compiled, and how often one was there already."""

    compiled: int
    cache_hits: int


class Throughput(Struct, frozen=True, kw_only=True):
    """What was done in a second of the engine's clock, on average.

    makespan: from the first arrival to the end of the last step, in seconds.  requests: outputs
    that ended by themselves.  prompt_tokens: of each request once.  output_tokens: generated.
    """

    makespan: float
    requests: float
    prompt_tokens: float
    output_tokens: float


class WallTime(Struct, frozen=True, kw_only=True):
    """How long a run took by the wall clock, and how many tokens it generated in a second."""

    seconds: float
    tokens_per_second: float


class WorkerSummary(Struct, frozen=True, kw_only=True):
    """What one of several workers did; busy_share: of its slot-steps, up to its own last step."""

    requests: int
    generated_tokens: int
    steps: int
    busy_share: float


class RunSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every number of a run; times are steps, shares are of 1 with six digits, means have three.

    outputs = ok + failed + aborted + unfinished: a request has one for each result it gets, or is
    one while its beams run.  `rejected` are those of the failed that were not valid requests.
    prompt_tokens: of each request once.  wait: steps from arrival to admission, 0 for a sample
    admitted in the step it arrived.  first_token, latency: steps from arrival up to and including
    the one that gave the first and the last token; latency is of ok ones that held a slot.  All
    beams of a request are one in these.  least_steps: what any schedule needs for these outputs,
    whenever they arrive.  jumps, jumped_tokens: how often a constraint forced tokens, and how many.

    The others are None, and not written, where they say nothing: latencies and throughput, in
    seconds, if a step may last another time than 1.0 or compute less than all there is, or an SLO
    is given; goodput for an SLO or deadlines; computed, kv, budget, prefix_cache, preemptions and
    blocked where there are such limits; speculation where there were drafts; aged, how many
    admissions `--aging` decided, under another policy than the default.  cut_by_default: how many
    outputs ended with `length` at a limit that their requests do not state.  wall: of a run of a
    real model, whose numbers differ from run to run.  workers: what each
    did, of several; docs/summary.md says what the numbers of several are together.
    """

    requests: int
    outputs: int
    ok: int
    failed: int
    rejected: int
    aborted: int
    unfinished: int
    finish_reasons: FinishCounts
    prompt_tokens: int
    generated_tokens: int
    longest_output: int
    batch: int
    steps: int
    least_steps: int
    tokens_per_step: float
    busy_slot_steps: int
    idle_slot_steps: int
    busy_share: float
    idle: IdleCauses
    positions: Positions
    jumps: int
    jumped_tokens: int
    forks: int
    constraints: ConstraintCounts
    wait: Distribution | None
    first_token: Distribution | None
    latency: Distribution | None
    latencies: Latencies | None = None
    throughput: Throughput | None = None
    goodput: Goodput | None = None
    kv: KvUse | None = None
    budget: BudgetUse | None = None
    prefix_cache: PrefixHits | None = None
    preemptions: Preemptions | None = None
    blocked: BlockedSteps | None = None
    computed: Computed | None = None
    speculation: Speculation | None = None
    aged: int | None = None
    cut_by_default: int = 0
    wall: WallTime | None = None
    workers: list[WorkerSummary] | None = None


def unit_of(summary: RunSummary, *, is_timed: bool) -> Unit:
    """Return what people call the unit of latencies: steps, where nobody gave a time.

    is_timed: whether a step may last another time than 1.0.
    """
    return "seconds" if is_timed or summary.goodput is not None else "steps"


def with_wall_clock(summary: RunSummary, seconds: float) -> RunSummary:
    """Return `summary` with the seconds that the run of a real model took."""
    rate = summary.generated_tokens / seconds if seconds else 0.0
    wall = WallTime(seconds=round(seconds, 3), tokens_per_second=round(rate, 3))
    return replace(summary, wall=wall)


def encode_summary(summary: RunSummary) -> bytes:
    """Return `summary` as indented JSON, newline included; equal runs give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
