"""What a deployment makes of a workload: one simulation, the numbers asked of it, and what binds.

Rule: the same workload and deployment give the same outcome, in whatever process.  The time from
the first arrival to the end is shared out among what was lacking, and the largest share binds;
docs/compare.md has the definition.
"""

from fractions import Fraction
from math import ceil, inf
from typing import Literal, get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.metrics.arrays import ServedTimes, goodput_of, latencies_of
from batcher.metrics.distributions import MICROSECONDS
from batcher.metrics.latencies import Latencies
from batcher.metrics.slo import Goodput, Slo
from batcher.scheduling.checks import check_settings
from batcher.simulation.result import SimulationResult, times_of
from batcher.simulation.sequence import SimulatedSequence
from batcher.simulation.simulator import simulate
from batcher.simulation.workload import Job, Workload
from batcher.timing.loading import step_time_of
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime
from batcher.whatif.deployments import Deployment
from batcher.whatif.draft_memory import beside_draft, draft_memory_of
from batcher.whatif.workers import OnPart

Constraint = Literal["slots", "kv", "tokens", "static", "compute", "arrivals"]

WORTH_DOUBLING = 0.1  # a doubled step that gains less is as good as none
NUM_DIGITS = 6

# What the simulator says kept the first of the queue out -> what there was too little of.
_LACKS: dict[str, Constraint] = {
    "slots": "slots",
    "kv": "kv",
    "preemption": "kv",
    "tokens": "tokens",
    "batch": "static",
}
_IS_ROOM = ("slots", "kv", "tokens")  # with more of them, steps would be larger


class Binding(Struct, frozen=True):
    """What binds, and how time is shared out.

    shares: of the time from the first arrival to the end, 1 together; of those above 0.
    doubling: by how much the tokens per second of the mean step would grow if it were twice as
    large, from 0 (its time doubles, too) to 1 (it takes no longer).
    """

    constraint: Constraint
    share: float
    shares: dict[Constraint, float]
    doubling: float


def binding_of(result: SimulationResult, step_time: StepTime) -> Binding:
    """Return what bound a simulated run whose steps took `step_time`."""
    if result.sequences and all(sequence.has_failed for sequence in result.sequences):
        return Binding("kv", 1.0, {"kv": 1.0}, 0.0)  # there is no time to share out
    ticks = dict.fromkeys(get_args(Constraint), 0)
    for reason, lacking in _LACKS.items():
        ticks[lacking] += result.totals.binding_ticks[reason]
    doubling = gain_of_doubling(result, step_time)
    if doubling < WORTH_DOUBLING:
        for room in _IS_ROOM:
            ticks["compute"] += ticks[room]
            ticks[room] = 0
    num_waiting_ticks = sum(ticks.values())
    admissions = [s.admitted_ticks for s in result.sequences if s.admitted is not None]
    drain = result.end_ticks - max(admissions, default=result.end_ticks)
    drain = min(drain, result.totals.binding_ticks["arrivals"])
    total = max(round(result.makespan * TICKS_PER_SECOND), num_waiting_ticks + drain)
    ticks["compute"] += drain
    ticks["arrivals"] = total - num_waiting_ticks - drain
    shares = {name: round(part / total, NUM_DIGITS) for name, part in ticks.items() if part}
    constraint: Constraint = max(ticks, key=lambda name: ticks[name]) if total else "arrivals"
    return Binding(constraint, shares.get(constraint, 0.0), shares, round(doubling, NUM_DIGITS))


def gain_of_doubling(result: SimulationResult, step_time: StepTime) -> float:
    """Return by how much a step twice as large as the mean one gives more tokens per second."""
    num_steps = result.totals.num_steps
    if not num_steps:
        return 0.0
    num_rows = max(1, round(result.totals.slot_steps / num_steps))
    num_tokens = max(num_rows, round(result.totals.computed_tokens / num_steps))
    totals = result.totals
    kv_read = round((sum(map(_kv_read, result.sequences)) - totals.unread_tokens) / num_steps)
    prefill_work = round(
        (sum(map(_prefill_work, result.sequences)) + totals.draft_work) / num_steps
    )
    once = step_time.ticks(num_tokens, num_rows, kv_read, prefill_work)
    twice = step_time.ticks(2 * num_tokens, 2 * num_rows, 2 * kv_read, 2 * prefill_work)
    if totals.draft_ticks:  # a draft costs a share of a step that only decodes
        decoding = step_time.ticks(num_rows, num_rows, kv_read, 0)
        making = totals.draft_ticks / num_steps
        doubled = step_time.ticks(2 * num_rows, 2 * num_rows, 2 * kv_read, 0)
        return 2 * (once + making) / (twice + making * doubled / decoding) - 1
    return 2 * once / twice - 1


def _kv_read(sequence: SimulatedSequence) -> int:
    """Return how many tokens before its own a sequence reads while it decodes."""
    if sequence.num_output_tokens < 1:
        return 0
    num_decoded = sequence.num_output_tokens - 1
    return num_decoded * sequence.num_prompt_tokens + num_decoded * (num_decoded - 1) // 2


def _prefill_work(sequence: SimulatedSequence) -> int:
    """Return the sum of P * (2 * context + P) over the chunks of a prompt, however it was cut."""
    if sequence.has_failed or sequence.job.max_tokens == 0:
        return 0
    return sequence.num_prompt_tokens**2 - sequence.num_cached_at_first**2


class DraftUse(Struct, frozen=True):
    """What became of drafts.

    acceptance: the share of those verified that were accepted.  tokens_per_step: of a row, in the
    steps in which it had some.  making: the share of the time of all steps in which they were made.
    """

    verified: int
    accepted: int
    acceptance: float
    tokens_per_step: float
    making: float


class Question(Struct, frozen=True):
    """What is to be served, what is promised, and for which share of the requests."""

    workload: Workload
    slo: Slo | None = None
    asked: float = 1.0


class Outcome(Struct, frozen=True, kw_only=True):
    """What a deployment comes to; latencies and goodput as docs/metrics.md defines them.

    served, failed: samples that came to their end, and that could never run.
    makespan: in seconds.  requests_per_s, tokens_per_s: served, and output tokens, over it.
    slots_used, kv_used, budget_used: shares over the steps, None without such a limit.
    prefix_hits: the share of prompt tokens found in blocks, None without a prefix cache.
    tails: for each limit of the SLO, what the asked share of samples does not exceed; None if
    fewer were served.
    drafts: None if none were verified.
    """

    served: int
    failed: int
    steps: int
    makespan: float
    requests_per_s: float
    tokens_per_s: float
    latencies: Latencies
    goodput: Goodput | None
    slots_used: float
    kv_used: float | None
    budget_used: float | None
    preemptions: int
    recomputed_tokens: int
    prefix_hits: float | None
    tails: dict[str, float | None]
    drafts: DraftUse | None
    binding: Binding


def measure(
    question: Question, deployment: Deployment, on_part: OnPart = lambda _: None
) -> Outcome:
    """Return what `deployment` makes of the workload of `question`.

    on_part: called with the share of the samples that have ended, again and again.

    Raises:
        BatchdecodeError: its settings make no sense.
    """
    deployment = beside_draft(deployment)
    workload = at_rate(question.workload, deployment.rate)
    step_time = step_time_of(deployment.profile)
    num_jobs = len(workload.jobs)
    result = simulate(
        workload,
        deployment.batch,
        deployment.scheduling,
        step_time,
        lambda num_ended: on_part(num_ended / num_jobs),
        deployment.drafts,
    )
    totals, slo = result.totals, question.slo
    times = times_of(each for each in result.sequences if each.first_token is not None)
    num_failed = sum(sequence.has_failed for sequence in result.sequences)
    num_served, makespan = len(times.arrival), result.makespan
    num_tokens = int(times.num_tokens.sum())
    has_cache = deployment.scheduling.has_prefix_cache
    return Outcome(
        served=num_served,
        failed=num_failed,
        steps=totals.num_steps,
        makespan=round(makespan, NUM_DIGITS),
        requests_per_s=round(num_served / makespan, NUM_DIGITS) if makespan else 0.0,
        tokens_per_s=round(num_tokens / makespan, NUM_DIGITS) if makespan else 0.0,
        latencies=latencies_of(times),
        goodput=None if slo is None else goodput_of(slo, times, num_failed),
        slots_used=round(result.slot_utilisation, NUM_DIGITS),
        kv_used=_rounded(result.kv_utilisation),
        budget_used=_rounded(result.budget_utilisation),
        preemptions=totals.num_preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        prefix_hits=_rounded(result.hit_rate) if has_cache else None,
        tails={} if slo is None else _tails(slo, times, num_failed, question.asked),
        drafts=_draft_use(result),
        binding=binding_of(result, step_time),
    )


def _draft_use(result: SimulationResult) -> DraftUse | None:
    totals = result.totals
    if not totals.num_drafts:
        return None
    num_ticks = sum(totals.binding_ticks.values())
    return DraftUse(
        verified=totals.num_drafts,
        accepted=totals.num_accepted,
        acceptance=round(totals.num_accepted / totals.num_drafts, NUM_DIGITS),
        tokens_per_step=round(1 + totals.num_accepted / totals.num_draft_rows, NUM_DIGITS),
        making=round(totals.draft_ticks / num_ticks, NUM_DIGITS),
    )


def good_share(outcome: Outcome) -> float:
    """Return the share of the requests that met the SLO, as it is, not as it is shown."""
    goodput = outcome.goodput
    if goodput is None or not goodput.requests:
        return 0.0
    return goodput.good / goodput.requests


def score_of(question: Question, outcome: Outcome) -> tuple[float, float]:
    """Return the share of the requests that met the SLO, and how near the worst tail is to it."""
    limits = {} if question.slo is None else question.slo.limits
    excesses = [
        inf if (tail := outcome.tails[metric]) is None else tail / limit
        for metric, limit in limits.items()
    ]
    return good_share(outcome), -max(excesses, default=0.0)


def problem_of(deployment: Deployment) -> str | None:
    """Return why the settings of `deployment` make no sense, None if they do."""
    try:
        check_settings(deployment.batch, deployment.scheduling)
        memory = draft_memory_of(deployment)
    except BatchdecodeError as error:
        return str(error)
    if memory is not None and not memory.kv_blocks:
        return f"--draft-model {deployment.draft_model}: it leaves no KV block, with its weights"
    return None


def at_rate(workload: Workload, rate: float) -> Workload:
    """Return `workload` with requests that arrive `rate` times as fast.

    A deadline stays as long after its arrival as it was.
    """
    if rate == 1:
        return workload

    def moved(job: Job) -> Job:
        arrival = job.arrival_time / rate
        deadline = None if job.deadline is None else job.deadline - job.arrival_time + arrival
        return replace(job, arrival_time=arrival, deadline=deadline)

    return replace(workload, jobs=[moved(job) for job in workload.jobs])


def _tails(slo: Slo, times: ServedTimes, num_failed: int, asked: float) -> dict[str, float | None]:
    """Return for each limit the least time that the asked share of samples does not exceed."""
    num_served = len(times.arrival)
    rank = max(1, ceil(Fraction(str(asked)) * (num_served + num_failed)))
    tails: dict[str, float | None] = {}
    for metric in slo.limits:
        values = np.sort(times.values(metric))
        tails[metric] = int(values[rank - 1]) / MICROSECONDS if rank <= num_served else None
    return tails


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, NUM_DIGITS)
