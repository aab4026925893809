"""The lines of the summary on latencies, rates, and what was limited.

Latencies have the same names and percentiles whether they are told in seconds or in steps.
"""

from collections.abc import Mapping
from typing import NamedTuple

from batcher.metrics.slo import Goodput
from batcher.metrics.summary import RunSummary, Unit
from batcher.metrics.times import Distribution, SecondsDistribution

from .cells import counted, duration, fill, number, percent, whole_percent

WIDTH = 80
INDENT, GAP = "  ", "   "
PER: Mapping[Unit, str] = {"seconds": "s", "steps": "step"}

BLOCKED_CAUSES = {
    "kv": "KV",
    "tokens": "budget",
    "preemption": "preemption",
    "batch": "batch",
    "rate": "the rate",
    "concurrency": "an overloaded server",
}


class BytesPerToken(NamedTuple):
    """What the cache of a model takes for a token, if it says so, and that of a draft model."""

    model: int | None
    draft: int


NOT_TOLD = BytesPerToken(None, 0)


def lines_in_steps(summary: RunSummary) -> list[str]:
    """Return the latencies in steps, where `timed_lines` does not tell them."""
    if summary.latencies is not None:
        return []
    told = [
        f"{name} {_spread(times)}"
        for name, times in latencies_in_steps(summary).items()
        if times is not None
    ]
    if not told:
        return []
    parts = [*told[:-1], f"{told[-1]}  (steps)"]
    return [f"{INDENT}{line}" for line in fill(parts, GAP, WIDTH - 2)]


def latencies_in_steps(summary: RunSummary) -> dict[str, Distribution | None]:
    """Return those that are counted in steps, by the names that they have in seconds."""
    return {"queue": summary.wait, "ttft": summary.first_token, "e2e": summary.latency}


def _spread(distribution: Distribution) -> str:
    """Return the median and the tail; of one number, itself."""
    if distribution.count == 1:
        return f"{distribution.p50:,}"
    return f"p50 {distribution.p50:,} p99 {distribution.p99:,}"


def timed_lines(
    summary: RunSummary, kv_bytes: BytesPerToken = NOT_TOLD, unit: Unit = "seconds"
) -> list[str]:
    """Return the lines on what steps computed and, where they are not alike, how long they took."""
    memory = _memory(summary, kv_bytes)
    groups = [_latencies(summary, unit), _rates(summary, unit), memory, _steps(summary)]
    return [f"{INDENT}{line}" for parts in groups if parts for line in fill(parts, GAP, WIDTH - 2)]


def _latencies(summary: RunSummary, unit: Unit) -> list[str]:
    """Return how long requests took."""
    found = summary.latencies
    if found is None:
        return []
    named = {"queue": found.queue, "ttft": found.ttft, "tpot": found.tpot}
    named |= {"itl": found.itl, "e2e": found.e2e}
    return [
        f"{name} {_times_of(times, unit)}" for name, times in named.items() if times is not None
    ]


def _rates(summary: RunSummary, unit: Unit) -> list[str]:
    """Return what was done in a second or a step, and how much of it was good."""
    parts = []
    if summary.throughput is not None:
        rates, per = summary.throughput, PER[unit]
        parts.append(
            f"throughput {number(rates.requests)} outputs/{per}, "
            f"{number(rates.output_tokens)} output tokens/{per}"
        )
    if summary.wall is not None:
        rate = number(summary.wall.tokens_per_second)
        parts.append(f"wall clock {duration(summary.wall.seconds)}, {rate} output tokens/s")
    if summary.goodput is not None:
        parts += _goodput(summary.goodput)
    return parts


def _goodput(goodput: Goodput) -> list[str]:
    limits = ", ".join(f"{name} {duration(limit)}" for name, limit in goodput.limits.items())
    whom = "outputs" if limits else f"{counted(goodput.requests, 'output')} with a deadline"
    share = percent(goodput.good, goodput.requests)
    rate = f"goodput {share} of {whom} ({number(goodput.per_second)}/s)"
    parts = fill([rate, f"within {limits}"] if limits else [rate], " ", WIDTH - 2)
    if goodput.missed:
        missed = ", ".join(f"{count:,} {name}" for name, count in goodput.missed.items())
        parts.append(f"missed: {missed}")
    return parts


def _memory(summary: RunSummary, kv_bytes: BytesPerToken) -> list[str]:
    """Return how full the blocks were, and what that cost."""
    parts, kv = [], summary.kv
    if kv is not None:
        used = f"{number(kv.mean_blocks)} blocks used, {kv.max_blocks:,} at most"
        if kv.mean_share is not None and kv.max_share is not None:
            used = f"{whole_percent(kv.mean_share)} used, {whole_percent(kv.max_share)} at most"
        parts.append(f"kv {used}")
        if kv_bytes.model is not None:
            for_drafts = f", {kv_bytes.draft:,} of them for drafts" if kv_bytes.draft else ""
            parts.append(f"{kv_bytes.model + kv_bytes.draft:,} bytes per token{for_drafts}")
    lost = summary.preemptions
    if lost is not None and lost.count:
        again = counted(lost.recomputed_tokens, "token")
        parts.append(f"{counted(lost.count, 'preemption')} recomputed {again}")
    if summary.prefix_cache is not None:
        parts.append(f"prefix hits {whole_percent(summary.prefix_cache.share)}")
    return parts


def _steps(summary: RunSummary) -> list[str]:
    """Return whom age admitted, how full steps were, what blocked others and what is padding."""
    parts = []
    if summary.aged:
        parts.append(f"{counted(summary.aged, 'admission')} by --aging, whatever the policy")
    if summary.budget is not None:
        full = counted(summary.budget.full_steps, "step")
        parts.append(
            f"token budget {whole_percent(summary.budget.mean_share)} used, full in {full}"
        )
    if summary.blocked is not None:
        steps = {
            cause: getattr(summary.blocked, reason) for reason, cause in BLOCKED_CAUSES.items()
        }
        blocked = [f"{cause} {count:,}" for cause, count in steps.items() if count]
        if blocked:
            parts.append(f"steps blocked: {', '.join(blocked)}")
    positions, done = summary.positions, summary.computed
    if positions.total:
        share = percent(positions.padding, positions.total)
        padding = f"{positions.padding:,} padding ({share})" if positions.padding else "no padding"
        parts.append(f"computed {counted(positions.total, 'position')}, {padding}")
    if done is not None and done.right_padding and not positions.padding:
        more = percent(done.right_padding, done.prefill_tokens)
        parts.append(f"right padding would add {more} to prefills")
    return parts


def _times_of(times: SecondsDistribution, unit: Unit) -> str:
    """Return the median and the tail in the unit that suits the tail; of one number, itself."""
    scale, name = (1, "s") if times.p99 >= 1 or not times.p99 else (1000, "ms")
    if unit == "steps":
        scale, name = 1, "steps"
    if times.count == 1:
        return f"{number(times.p50 * scale)} {name}"
    return f"p50 {number(times.p50 * scale)} p99 {number(times.p99 * scale)} {name}"
