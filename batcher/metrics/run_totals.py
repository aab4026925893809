"""All that adds up of a run, and the summary that follows from it: of one engine, or of several.

Rule: the summary of several workers follows from the sum of their totals as that of a run from its
own; docs/summary.md says what steps, seconds and shares are then.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import msgspec
from msgspec import field
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.events import BlockedReason, RunEvent
from batcher.metrics.distributions import Histogram, SecondsHistogram
from batcher.metrics.latencies import Latencies
from batcher.metrics.positions import Positions
from batcher.metrics.resources import BlockedSteps, CacheUse, StepUse
from batcher.metrics.slo import GoodputCount, Slo
from batcher.metrics.slots import IdleCauses, SlotUse
from batcher.metrics.speculation import SpeculationTotals
from batcher.metrics.steps import is_untimed
from batcher.metrics.summary import (
    ConstraintCounts,
    FinishCounts,
    RunSummary,
    Throughput,
    WorkerSummary,
)
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.speculation.settings import Acceptance
from batcher.totals import Totals, decode_mapping
from batcher.trace.aging import aging_of


class TimedTotals(Totals):
    """What adds up of the times of a run.

    times: by what they are of, see Latencies.  end: of the last step, in seconds.
    num_aged: admissions that `--aging` decided.
    """

    LARGEST: ClassVar = frozenset({"end"})

    times: dict[str, SecondsHistogram]
    steps: StepUse = field(default_factory=StepUse)
    cache: CacheUse = field(default_factory=CacheUse)
    goodput: GoodputCount = field(default_factory=GoodputCount)
    end: float = 0.0
    num_aged: int = 0


class EndedTotals(Totals):
    """What is told of outputs that have ended beside the summary, of a run that is watched.

    prompts, outputs: how many tokens those have that ended.
    dropped: samples that were counted as ended and are no results, by why they had ended.
    """

    prompts: Histogram = field(default_factory=Histogram)
    outputs: Histogram = field(default_factory=Histogram)
    dropped: Counter[str] = field(default_factory=Counter)


class RunTotals(Totals, kw_only=True):
    """What adds up of a run, or of one of its workers; fields are named as in RunSummary.

    num_slots: of all workers.  num_steps: of the worker that took most.  longest_run: the most
    steps that a sequence took from its admission to its end.  num_cut: outputs that ended at a
    limit which their requests do not state.  busy: slot-steps with a sequence.
    idle: those without, by cause, without `tail`.  first_arrival: in seconds.  num_open: the
    requests of which no more than a part has ended.
    """

    LARGEST: ClassVar = frozenset({"num_steps", "longest_output", "longest_run"})
    LEAST: ClassVar = frozenset({"first_arrival"})

    num_slots: int
    num_steps: int = 0
    num_requests: int = 0
    num_rejected: int = 0
    num_unfinished: int = 0
    num_open: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    longest_output: int = 0
    longest_run: int = 0
    num_cut: int = 0
    busy: int = 0
    idle: dict[str, int] = field(default_factory=dict)
    num_positions: int = 0
    num_padding: int = 0
    num_jumps: int = 0
    num_jumped_tokens: int = 0
    num_forks: int = 0
    num_compiled: int = 0
    num_compiled_before: int = 0
    first_arrival: float | None = None
    wait: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    blocked_steps: Counter[str] | None = None
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    timed: TimedTotals | None = None
    ended: EndedTotals | None = None


encode_totals = msgspec.msgpack.Encoder().encode
decode_totals = msgspec.msgpack.Decoder(RunTotals, dec_hook=decode_mapping).decode


def summarize(totals: RunTotals, run: RunEvent | None, slo: Slo | None = None) -> RunSummary:
    """Return the numbers of a run that `run` began and that is measured by `slo`.

    Raises:
        BatchdecodeError: the run event has settings that there are not.
    """
    reasons, steps, slots = totals.finish_reasons, totals.num_steps, totals.num_slots
    num_ok = reasons["stop"] + reasons["length"]
    num_failed = reasons["error"] + totals.num_rejected
    busy, tokens = totals.busy, totals.generated_tokens
    num_idle = steps * slots - busy
    blocked = totals.blocked_steps
    speculation = None
    if run is not None:
        rule: Acceptance = (
            "leviathan" if run.speculation.get("acceptance") == "leviathan" else "exact"
        )
        speculation = totals.speculation.numbers(rule, totals.num_positions)
    return RunSummary(
        requests=totals.num_requests + totals.num_rejected,
        outputs=num_ok + num_failed + reasons["aborted"] + totals.num_unfinished,
        ok=num_ok,
        failed=num_failed,
        rejected=totals.num_rejected,
        aborted=reasons["aborted"],
        unfinished=totals.num_unfinished,
        finish_reasons=FinishCounts(
            reasons["stop"], reasons["length"], num_failed, reasons["aborted"]
        ),
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=tokens,
        longest_output=totals.longest_output,
        batch=slots,
        steps=steps,
        least_steps=_least_steps(totals, run),
        tokens_per_step=round(tokens / steps, 3) if steps else 0.0,
        busy_slot_steps=busy,
        idle_slot_steps=num_idle,
        busy_share=_busy_share(totals),
        idle=IdleCauses(tail=num_idle - sum(totals.idle.values()), **totals.idle),
        positions=Positions(total=totals.num_positions, padding=totals.num_padding),
        jumps=totals.num_jumps,
        jumped_tokens=totals.num_jumped_tokens,
        forks=totals.num_forks,
        constraints=ConstraintCounts(totals.num_compiled, totals.num_compiled_before),
        wait=totals.wait.distribution(),
        first_token=totals.first_token.distribution(),
        latency=totals.latency.distribution(),
        blocked=None
        if blocked is None
        else BlockedSteps(**{reason: blocked[reason] for reason in get_args(BlockedReason)}),
        speculation=speculation,
        cut_by_default=min(totals.num_cut, reasons["length"]),  # some of best_of are dropped
        **_timed_numbers(totals, run, slo),
    )


def summarize_workers(
    workers: Sequence[RunTotals], run: RunEvent, slo: Slo | None = None
) -> RunSummary:
    """Return the numbers of a run of several workers, by what each of them has done."""
    return replace(
        summarize(merged(workers), run, slo),
        workers=[
            WorkerSummary(
                requests=totals.num_requests,
                generated_tokens=totals.generated_tokens,
                steps=totals.num_steps,
                busy_share=_busy_share(totals),
            )
            for totals in workers
        ],
    )


def merged(workers: Sequence[RunTotals]) -> RunTotals:
    """Return what adds up of several workers, of one at least."""
    totals = workers[0].copy()
    for others in workers[1:]:
        totals.merge(others)
    return totals


def of_the_dead(totals: RunTotals) -> RunTotals:
    """Return what adds up of a worker that has died: what it had not ended, others do again."""
    done = totals.copy()
    done.num_requests -= done.num_open
    done.num_open = done.num_unfinished = 0
    return done


def in_turn(earlier: RunTotals, later: RunTotals) -> RunTotals:
    """Return what adds up of a worker that has died, and of the one that goes on in its place."""
    totals = earlier.copy()
    totals.merge(later)
    totals.num_slots = later.num_slots
    return totals


def nothing_done(run: RunEvent) -> RunTotals:
    """Return what adds up of a worker that has done nothing yet."""
    return RunTotals(num_slots=run.batch, idle=SlotUse().totals(0)[1])


def settings_of(run: RunEvent) -> SchedulingSettings:
    """Return the settings that a run event holds.

    Raises:
        BatchdecodeError: one of them has no such value.
    """
    if not run.scheduling:
        return DEFAULT_SCHEDULING
    try:
        return msgspec.convert(run.scheduling, SchedulingSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(f"the run event of the trace: scheduling: {error}") from error


def _busy_share(totals: RunTotals) -> float:
    num_slot_steps = totals.num_steps * totals.num_slots
    return round(totals.busy / num_slot_steps, 6) if num_slot_steps else 0.0


def _least_steps(totals: RunTotals, run: RunEvent | None) -> int:
    """Return what any schedule needs for these outputs."""
    busy, longest = totals.busy, totals.longest_run
    if run is not None and not is_untimed(run):
        # Slots are also held for what another schedule need not compute.
        num_beside = totals.num_jumped_tokens + totals.speculation.counts.num_accepted
        busy, longest = max(0, totals.generated_tokens - num_beside), 0
    return max(-(-busy // totals.num_slots), longest) if busy else 0


def _timed_numbers(totals: RunTotals, run: RunEvent | None, slo: Slo | None) -> dict[str, Any]:
    """Return the fields of the summary that say something of some runs alone."""
    timed = totals.timed
    if timed is None or run is None:
        return {}
    settings, is_plain = settings_of(run), is_untimed(run)
    makespan = timed.end - (totals.first_arrival or 0.0)
    numbers: dict[str, Any] = {"goodput": timed.goodput.goodput(slo, makespan)}
    if not is_plain or slo is not None:
        numbers["latencies"] = Latencies(
            **{name: times.distribution() for name, times in timed.times.items()}
        )
        if makespan > 0:
            num_ok = totals.finish_reasons["stop"] + totals.finish_reasons["length"]
            numbers["throughput"] = Throughput(
                makespan=round(makespan, 6),
                requests=round(num_ok / makespan, 6),
                prompt_tokens=round(totals.prompt_tokens / makespan, 3),
                output_tokens=round(totals.generated_tokens / makespan, 3),
            )
    if not is_plain:
        numbers |= {
            "kv": timed.steps.kv(settings),
            "budget": timed.steps.budget(settings),
            "computed": timed.steps.computed(),
        }
    if settings.has_prefix_cache:
        numbers["prefix_cache"] = timed.cache.prefix()
    if settings.kv_blocks is not None or settings.preempt_for is not None:
        numbers["preemptions"] = timed.cache.preemptions()
    if aging_of(run) is not None:
        numbers["aged"] = timed.num_aged
    return numbers
