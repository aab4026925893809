"""The lines of the summary about seconds, and about what was limited."""

from math import floor

from batcher.metrics import Goodput, RunSummary, SecondsDistribution

from .cells import counted, fill

WIDTH = 80
INDENT, GAP = "  ", "   "
ROUNDING_ERROR = 1e-9
NUM_DIGITS = 3  # that count, of a number that is no whole one

HOLD_CAUSES = {
    "kv": "KV",
    "tokens": "budget",
    "preemption": "preemption",
    "batch": "batch",
}


def timed_lines(summary: RunSummary) -> list[str]:
    """Return the lines there are to say of a run, none of one whose steps are all alike."""
    groups = [_latencies(summary), _rates(summary), _memory(summary), _steps(summary)]
    return [f"{INDENT}{line}" for parts in groups if parts for line in fill(parts, GAP, WIDTH - 2)]


def _latencies(summary: RunSummary) -> list[str]:
    """Return how long requests took, in seconds."""
    found = summary.latencies
    if found is None:
        return []
    named = {"queue": found.queue, "ttft": found.ttft, "tpot": found.tpot}
    named |= {"itl": found.itl, "e2e": found.e2e}
    return [f"{name} {_spread(times)}" for name, times in named.items() if times is not None]


def _rates(summary: RunSummary) -> list[str]:
    """Return what was done in a second, and how much of it was good."""
    parts = []
    if summary.throughput is not None:
        rates = summary.throughput
        parts.append(
            f"throughput {number(rates.requests)} requests/s, "
            f"{number(rates.output_tokens)} output tokens/s"
        )
    if summary.goodput is not None:
        parts += _goodput(summary.goodput)
    return parts


def _goodput(goodput: Goodput) -> list[str]:
    limits = ", ".join(f"{name} {duration(limit)}" for name, limit in goodput.limits.items())
    within = f"within {limits}" if limits else "within their deadlines"
    share = percent(goodput.good, goodput.requests)
    rate = f"goodput {share} of requests ({number(goodput.per_second)}/s)"
    parts = fill([rate, within], " ", WIDTH - 2)
    if goodput.missed:
        missed = ", ".join(f"{count:,} {name}" for name, count in goodput.missed.items())
        parts.append(f"missed: {missed}")
    return parts


def _memory(summary: RunSummary) -> list[str]:
    """Return how full the blocks were, and what that cost."""
    parts, kv = [], summary.kv
    if kv is not None:
        used = f"{number(kv.mean_blocks)} blocks used, {kv.max_blocks:,} at most"
        if kv.mean_share is not None and kv.max_share is not None:
            used = f"{whole_percent(kv.mean_share)} used, {whole_percent(kv.max_share)} at most"
        parts.append(f"kv {used}")
    lost = summary.preemptions
    if lost is not None and lost.count:
        again = counted(lost.recomputed_tokens, "token")
        parts.append(f"{counted(lost.count, 'preemption')} recomputed {again}")
    if summary.prefix_cache is not None:
        parts.append(f"prefix hits {whole_percent(summary.prefix_cache.share)}")
    return parts


def _steps(summary: RunSummary) -> list[str]:
    """Return how full the steps were, what held others back, and what padding would cost."""
    parts = []
    if summary.budget is not None:
        full = counted(summary.budget.full_steps, "step")
        parts.append(
            f"token budget {whole_percent(summary.budget.mean_share)} used, full in {full}"
        )
    if summary.holds is not None:
        steps = {cause: getattr(summary.holds, reason) for reason, cause in HOLD_CAUSES.items()}
        held = [f"{cause} {count:,}" for cause, count in steps.items() if count]
        if held:
            parts.append(f"steps held back: {', '.join(held)}")
    done = summary.computed
    if done is not None and done.right_padding:
        more = percent(done.right_padding, done.prefill_tokens)
        parts.append(f"right padding would add {more} to prefills")
    return parts


def _spread(times: SecondsDistribution) -> str:
    """Return the median and the tail in the unit that suits the tail; of one number, itself."""
    scale, unit = (1, "s") if times.p99 >= 1 or not times.p99 else (1000, "ms")
    if times.count == 1:
        return f"{number(times.p50 * scale)} {unit}"
    return f"p50 {number(times.p50 * scale)} p99 {number(times.p99 * scale)} {unit}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `0.5 s`, `50 ms`."""
    return f"{number(seconds)} s" if seconds >= 0.1 else f"{number(seconds * 1000)} ms"  # noqa: PLR2004 - as people say it


def number(value: float) -> str:
    """Return a number with three digits that count, more if it is longer: 0.421, 12.3, 1,234."""
    whole_digits = len(str(int(value)))
    if whole_digits >= NUM_DIGITS:
        return f"{value:,.0f}"
    text = f"{value:.{NUM_DIGITS}g}" if value < 1 else f"{value:.{NUM_DIGITS - whole_digits}f}"
    if "e" in text:
        text = f"{value:.6f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(part: float, whole: float) -> str:
    """Return a share in per cent with one digit, rounded: 100 only for all, 0 only for nothing."""
    if not whole:
        return "0%"
    per_mille = part * 1000 / whole
    return "<0.1%" if 0 < per_mille < 1 else f"{_rounded(per_mille, 1000) / 10:.1f}%"


def whole_percent(share: float) -> str:
    """Return a share of 1 in whole per cent, rounded: 100 only for all, 0 only for nothing."""
    return "<1%" if 0 < share < 0.01 else f"{_rounded(share * 100, 100)}%"  # noqa: PLR2004 - a per cent


def _rounded(amount: float, everything: int) -> int:
    """Return the next whole number, a half up, but not `everything` for less."""
    nearest = floor(amount + 0.5 + ROUNDING_ERROR)
    is_less = amount + ROUNDING_ERROR < everything
    return min(nearest, everything - 1) if is_less else nearest
