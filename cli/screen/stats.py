"""What `run --stats` tells beside the summary: all numbers of a run, in tables of 80 columns.

Rule: nothing is computed here but shares; the words are ASCII, so any terminal shows them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from batcher.metrics.summary import RunSummary, Unit, WorkerSummary, unit_of
from batcher.metrics.times import Distribution, SecondsDistribution

from .cells import aligned, counted, duration, fill, number, percent
from .summary import idle_causes
from .timed_lines import BLOCKED_CAUSES, INDENT, WIDTH, latencies_in_steps

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes

_TITLE_WIDTH = 14
_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")


def render_stats(
    summary: RunSummary, times: "ConstraintTimes | None", *, is_timed: bool = True
) -> str:
    """Return the tables as lines of text.

    times: what constraints took, which is no number of the summary: it is of the wall.
    is_timed: as in RunPlan.
    """
    groups = {
        "finish reasons": _counts(summary.finish_reasons),
        "tokens": _tokens(summary),
        "slot-steps": _slots(summary),
        "positions": _positions(summary),
        "KV": _kv(summary),
        "prefix cache": _prefix_cache(summary),
        "preemptions": _preemptions(summary),
        "aging": [counted(summary.aged, "admission")] if summary.aged else [],
        "budget": _budget(summary),
        "steps blocked": _blocked(summary),
        "drafts": _drafts(summary),
        "constraints": _constraints(summary, times),
    }
    groups |= {
        f"worker {number}": _worker(worker) for number, worker in enumerate(summary.workers or ())
    }
    lines = [line for title, parts in groups.items() if parts for line in _row(title, parts)]
    lines += _distributions(summary, unit_of(summary, is_timed=is_timed))
    return "".join(f"{INDENT}{line}\n" for line in lines)


def _row(title: str, parts: Sequence[str]) -> list[str]:
    """Return `parts` behind a title, in as many lines as they need."""
    lines = fill(parts, "   ", WIDTH - len(INDENT) - _TITLE_WIDTH - 2)
    titles = [title, *[""] * (len(lines) - 1)]
    return [f"{t:<{_TITLE_WIDTH}}  {line}" for t, line in zip(titles, lines, strict=True)]


def _distributions(summary: RunSummary, unit: Unit) -> list[str]:
    """Return tables of how long requests took: latencies, where those are told, and in steps."""
    found = summary.latencies
    latencies: Mapping[str, SecondsDistribution | None] = {}
    if found is not None:
        latencies = {name: getattr(found, name) for name in found.__struct_fields__}
    steps = {} if latencies and unit == "steps" else latencies_in_steps(summary)
    return [*_table(unit, latencies), *_table("steps", steps)]


def _table(
    unit: str, rows: Mapping[str, SecondsDistribution | None] | Mapping[str, Distribution | None]
) -> list[str]:
    texts = [
        [name, *[number(getattr(row, column)) for column in _COLUMNS]]
        for name, row in rows.items()
        if row is not None
    ]
    if not texts:
        return []
    return aligned([[unit, *_COLUMNS], *texts], right=range(1, len(_COLUMNS) + 1))


def _counts(record: object) -> list[str]:
    """Return the numbers that are not 0 in a record of counts, each behind its name."""
    counts = {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]  # a Struct
    return [f"{name} {count:,}" for name, count in counts.items() if count]


def _tokens(summary: RunSummary) -> list[str]:
    return [
        f"prompt {summary.prompt_tokens:,}",
        f"generated {summary.generated_tokens:,}",
        f"longest output {summary.longest_output:,}",
        f"{number(summary.tokens_per_step)} a step",
    ]


def _slots(summary: RunSummary) -> list[str]:
    total = summary.busy_slot_steps + summary.idle_slot_steps
    idle = {cause: getattr(summary.idle, field) for field, cause in idle_causes(summary).items()}
    idle |= {
        f"blocked by {cause}": getattr(summary.idle, field)
        for field, cause in BLOCKED_CAUSES.items()
    }
    told = [f"idle {count:,} {cause}" for cause, count in idle.items() if count]
    busy = f"busy {summary.busy_slot_steps:,} ({percent(summary.busy_slot_steps, total)})"
    return [busy, *told] if total else []


def _positions(summary: RunSummary) -> list[str]:
    positions, done = summary.positions, summary.computed
    parts = [
        f"computed {positions.total:,}",
        f"padding {positions.padding:,} ({percent(positions.padding, positions.total)})",
    ]
    if done is not None:
        parts += [f"prefill {done.prefill_tokens:,}", f"decode {done.decode_tokens:,}"]
        parts.append(f"right padding would add {done.right_padding:,} to prefills")
        parts.append(f"left padding {done.left_padding:,} to decodes")
    return parts if positions.total else []


def _kv(summary: RunSummary) -> list[str]:
    kv = summary.kv
    if kv is None:
        return []
    parts = [f"blocks mean {number(kv.mean_blocks)}", f"max {kv.max_blocks:,}"]
    if kv.total is not None:
        parts.append(f"of {kv.total:,}")
    return [*parts, f"{counted(kv.block_size, 'token')} each"]


def _prefix_cache(summary: RunSummary) -> list[str]:
    cache = summary.prefix_cache
    if cache is None:
        return []
    found = f"found {cache.found:,} of {counted(cache.asked, 'token')}"
    parts = [f"{found} ({percent(cache.found, cache.asked)})"]
    if cache.asked_again:
        parts.append(f"after preemptions {cache.found_again:,} of {cache.asked_again:,}")
    return parts


def _preemptions(summary: RunSummary) -> list[str]:
    lost = summary.preemptions
    return (
        []
        if lost is None
        else [f"{lost.count:,}", f"recomputed {counted(lost.recomputed_tokens, 'token')}"]
    )


def _budget(summary: RunSummary) -> list[str]:
    budget = summary.budget
    if budget is None:
        return []
    used = f"{percent(budget.mean_share, 1)} of {counted(budget.max_batch_tokens, 'token')} a step"
    return [used, f"full in {counted(budget.full_steps, 'step')}"]


def _blocked(summary: RunSummary) -> list[str]:
    blocked = summary.blocked
    if blocked is None:
        return []
    steps = {cause: getattr(blocked, reason) for reason, cause in BLOCKED_CAUSES.items()}
    return [f"{cause} {count:,}" for cause, count in steps.items() if count]


def _drafts(summary: RunSummary) -> list[str]:
    found = summary.speculation
    if found is None:
        return []
    return [
        f"drafted {found.drafted:,}",
        f"accepted {found.accepted:,} ({percent(found.accepted, found.drafted)})",
        f"in {counted(found.steps, 'drafting step')}",
        f"{number(found.tokens_per_step)} tokens each",
        f"speedup {number(found.speedup.measured)}",
    ]


def _worker(worker: WorkerSummary) -> list[str]:
    return [
        counted(worker.requests, "request"),
        counted(worker.generated_tokens, "token"),
        counted(worker.steps, "step"),
        f"{percent(worker.busy_share, 1)} busy",
    ]


def _constraints(summary: RunSummary, times: "ConstraintTimes | None") -> list[str]:
    counts = summary.constraints
    if times is None or not (counts.compiled or counts.cache_hits):
        return []
    parts = [
        f"compiled {counts.compiled:,} in {duration(times.compile)}",
        f"longest {duration(times.longest_compile)}",
        f"reused {counts.cache_hits:,}",
    ]
    if times.num_masks:
        each = times.masks / times.num_masks * 1e6
        parts.append(f"{number(each)} us a token over {counted(times.num_masks, 'token')}")
    if summary.jumps:
        parts.append(f"forced {summary.jumped_tokens:,} in {counted(summary.jumps, 'jump')}")
    return parts
