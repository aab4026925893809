"""What `run --stats` tells beside the summary: all numbers of a run, in tables of 80 columns.

Rule: nothing is computed here but shares; the words are ASCII, so any terminal shows them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from batcher.metrics.summary import RunSummary, Unit, WorkerSummary, unit_of
from batcher.metrics.times import Distribution

from .terminal import aligned, counted, duration, fill, number, percent

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes
from typing import NamedTuple

from batcher.events import RestartReason
from batcher.metrics.counts import Speculation
from batcher.metrics.slo import Goodput

from ..run.urls import shown
from .terminal import can_print, narrowed, printable, whole_percent

# The lines of the summary on latencies, rates, and what was limited.
#
# Latencies have the same names and percentiles whether they are told in seconds or in steps.

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


def _times_of(times: Distribution, unit: Unit) -> str:
    """Return the median and the tail in the unit that suits the tail; of one number, itself."""
    scale, name = (1, "s") if times.p99 >= 1 or not times.p99 else (1000, "ms")
    if unit == "steps":
        scale, name = 1, "steps"
    if times.count == 1:
        return f"{number(times.p50 * scale)} {name}"
    return f"p50 {number(times.p50 * scale)} p99 {number(times.p99 * scale)} {name}"


# The few lines that tell a person how a run went.

MAX_SECONDS = 60
MAX_POSITIONS = 8  # of drafts
MAX_WORKERS = 8  # with a figure each
_MANY = 0.1  # of the outputs
GREEN, YELLOW, RED, DIM, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[0m"

IDLE_CAUSES = {
    "tail": "tail drain",
    "arrivals": "waiting for arrivals",
    "empty_queue": "empty queue",
    "too_few": "too few free",
}

RESTART_REASONS: Mapping[RestartReason, str] = {
    "killed": "killed",
    "exited": "left by itself",
    "lost": "not heard of any more",
}
NO_LINE = (
    "too few free or no line yet"  # of several workers, which are handed lines as they end some
)


class RunFiles(NamedTuple):
    """Where a run left what it wrote, as the user named it; None for what is not in a file."""

    results: str | None = None
    trace: str | None = None
    report: str | None = None
    numbers: str | None = None
    timeseries: str | None = None
    metrics: str | None = None


class Marks(NamedTuple):
    """How an encoding says that all is well, that nothing is, and that the run was broken off."""

    good: str
    bad: str
    stopped: str
    separator: str


UNICODE = Marks("✓", "✗", "■", " · ")
ASCII = Marks("*", "x", "!", ", ")


def marks_in(encoding: str) -> Marks:
    """Return the marks that `encoding`, that of a terminal, can show."""
    return UNICODE if can_print(encoding, "".join(UNICODE)) else ASCII


def render_summary(
    summary: RunSummary,
    files: RunFiles,
    *,
    is_complete: bool,
    num_unread: int = 0,
    elapsed: float,
    encoding: str,
    has_color: bool,
    is_timed: bool = True,
    kv_bytes: BytesPerToken = NOT_TOLD,
    columns: int | None = None,
) -> str:
    """Return the summary as lines of text; `elapsed` is in seconds, `encoding` the terminal's.

    kv_bytes: what the cache takes.  is_timed: as in RunPlan.  columns: of the terminal, if it is
    one; names of files may be longer, so that they can be copied.
    is_complete: every request of the input was read and has come to its end.
    num_unread: requests that were not even read, as far as that is known.
    """
    marks = marks_in(encoding)
    mark, color = (marks.good, GREEN) if summary.ok or not summary.requests else (marks.bad, RED)
    if not is_complete:
        mark, color = marks.stopped, YELLOW
    lines = [
        f"{mark} {headline(summary, marks.separator, [_duration(elapsed)], num_unread)}",
        *lines_in_steps(summary),
        _idle(summary),
        _least_steps(summary),
        *timed_lines(summary, kv_bytes, unit_of(summary, is_timed=is_timed)),
        _cut(summary),
        *_control(summary),
        *_drafts(summary.speculation),
        *_workers(summary),
    ]
    shown = [line for line in lines if line]
    if columns is not None:
        shown = [part for line in shown for part in narrowed(line, columns)]
    shown += _files(summary, files, columns or WIDTH)
    if has_color:
        shown[0] = color + mark + RESET + shown[0][1:]
        shown[1:] = [f"{DIM}{line}{RESET}" for line in shown[1:]]
    return "".join(f"{line}\n" for line in shown)


def headline(summary: RunSummary, separator: str, more: Sequence[str], num_unread: int = 0) -> str:
    """Return how many outputs came to which end, how long the run was, and what is said of it."""
    unread = f"{num_unread:,} not begun" if num_unread else ""
    if not summary.requests:
        return unread or "no requests"
    counts = {
        "ok": summary.ok,
        "failed": summary.failed,
        "aborted": summary.aborted,
        "unfinished": summary.unfinished,
    }
    results = "  ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    if summary.outputs != summary.requests:
        outputs = counted(summary.outputs, "output")
        results += f"  of {outputs} for {counted(summary.requests, 'request')}"
    if unread:
        results += f"  {unread}"
    num_workers = len(summary.workers or ())
    workers = [counted(num_workers, "worker")] if num_workers else []
    run = [counted(summary.steps, "step"), *workers, counted(summary.batch, "slot")]
    if summary.steps:
        total = summary.busy_slot_steps + summary.idle_slot_steps
        run.append(f"{whole_percent(summary.busy_slot_steps / total)} busy")
    return f"{results}   {separator.join([*run, *more])}"


def idle_causes(summary: RunSummary) -> dict[str, str]:
    """Return what the causes of idle slots are called, by the fields that count them."""
    return IDLE_CAUSES | {"too_few": NO_LINE} if summary.workers else IDLE_CAUSES


def _idle(summary: RunSummary) -> str:
    """Return which share of the slot-steps went unused, and why."""
    total = summary.busy_slot_steps + summary.idle_slot_steps
    if not summary.idle_slot_steps:
        return ""
    causes = [
        f"{percent(getattr(summary.idle, field), total)} {cause}"
        for field, cause in idle_causes(summary).items()
        if getattr(summary.idle, field)
    ]
    blocked = sum(getattr(summary.idle, reason) for reason in BLOCKED_CAUSES)
    if blocked:
        causes.append(f"{percent(blocked, total)} blocked")
    if len(causes) == 1:
        return f"  idle: {causes[0]}"
    return f"  idle: {percent(summary.idle_slot_steps, total)} = {', '.join(causes)}"


def _least_steps(summary: RunSummary) -> str:
    """Return how far the run is from the shortest that these outputs allow."""
    least, steps = summary.least_steps, summary.steps
    if not least or summary.unfinished or summary.computed is not None:
        return ""
    if least == steps:
        return "  no schedule needs fewer steps"
    return (
        f"  any schedule needs at least {counted(least, 'step')}; "
        f"this one took {percent(steps - least, least)} more"
    )


def _cut(summary: RunSummary) -> str:
    """Return how many outputs a default limit has cut, if they are more than a tenth."""
    num_cut = summary.cut_by_default
    if num_cut <= _MANY * summary.ok:
        return ""
    outputs = f"{num_cut:,} of {counted(summary.ok, 'output')}"
    return f"  {outputs} reached the default limit and may be cut short: use --max-tokens N"


def _control(summary: RunSummary) -> list[str]:
    """Return lines of what constraints and beams did, where there were any."""
    compiled, cache_hits = summary.constraints.compiled, summary.constraints.cache_hits
    parts = []
    if compiled or cache_hits:
        parts.append(f"constraints: {compiled:,} compiled, {cache_hits:,} reused")
    if summary.jumps:
        tokens = counted(summary.jumped_tokens, "token")
        parts.append(f"{tokens} forced in {counted(summary.jumps, 'jump')}")
    if summary.forks:
        parts.append(f"beams: {counted(summary.forks, 'fork')}")
    return [f"  {line}" for line in fill(parts, "   ", WIDTH - 2)] if parts else []


def _drafts(found: Speculation | None) -> list[str]:
    """Return lines of what drafts brought, and what they cost, where there were any."""
    if found is None:
        return []
    accepted = percent(found.accepted, found.drafted)
    shares = [whole_percent(at.share) for at in found.by_position[:MAX_POSITIONS]]
    shares += ["..."] if len(found.by_position) > MAX_POSITIONS else []
    speedup = found.speedup
    times = f"{number(speedup.measured)} (expected {number(speedup.expected)})"
    if speedup.in_time is not None:
        times += f", {number(speedup.in_time)} in time"
    parts = [
        f"drafts: {accepted} of {found.drafted:,} accepted",
        f"by position {' '.join(shares)}",
        f"{number(found.tokens_per_step)} tokens per drafting step",
        f"speedup {times}",
        f"{percent(found.wasted, 1)} of positions wasted",
    ]
    changes = {name: getattr(found.changes, name) for name in found.changes.__struct_fields__}
    told = [f"{name} {count:,}" for name, count in changes.items() if count]
    parts += [f"number of drafts changed: {', '.join(told)}"] if told else []
    if found.rule == "leviathan":
        parts[0] += " by leviathan"
        parts.append("outputs follow the model's distribution, but depend on drafts and schedule")
    return [f"{INDENT}{line}" for line in fill(parts, GAP, WIDTH - 2)]


def _workers(summary: RunSummary) -> list[str]:
    """Return how much each worker did, or where they are many, the least and the most of them."""
    workers = summary.workers or []
    if len(workers) > MAX_WORKERS:
        least, *_, most = sorted(workers, key=lambda worker: worker.generated_tokens)
        parts = [f"least of a worker: {_work(least)}", f"most: {_work(most)}"]
    else:
        parts = [f"w{number} {_work(worker)}" for number, worker in enumerate(workers)]
    return [f"{INDENT}{line}" for line in fill(parts, GAP, WIDTH - 2)] if parts else []


def _work(worker: WorkerSummary) -> str:
    return (
        f"{counted(worker.generated_tokens, 'token')} in {counted(worker.steps, 'step')}, "
        f"{whole_percent(worker.busy_share)} busy"
    )


def _files(summary: RunSummary, files: RunFiles, columns: int) -> list[str]:
    """Return where the results and all else are, and how to look at the trace."""
    from shlex import quote  # noqa: PLC0415 - most runs that must start fast write no file

    files = RunFiles(*(path if path is None else shown(path) for path in files))
    parts = []
    if files.results is not None:
        parts.append(f"{printable(files.results)} ({summary.outputs - summary.unfinished:,})")
    if files.trace is not None:
        parts.append(f"trace: batchdecode trace {quote(printable(files.trace))}")
    others = {
        "report": files.report,
        "numbers": files.numbers,
        "timeseries": files.timeseries,
        "metrics": files.metrics,
    }
    parts += [f"{name}: {printable(path)}" for name, path in others.items() if path is not None]
    width = min(columns, WIDTH) - len(INDENT)
    return [f"{INDENT}{line}" for line in fill(parts, GAP, width)] if parts else []


def _duration(seconds: float) -> str:
    if seconds < MAX_SECONDS:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
        "drafts": _draft_counts(summary),
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
    latencies: Mapping[str, Distribution | None] = {}
    if found is not None:
        latencies = {name: getattr(found, name) for name in found.__struct_fields__}
    steps = {} if latencies and unit == "steps" else latencies_in_steps(summary)
    return [*_table(unit, latencies), *_table("steps", steps)]


def _table(unit: str, rows: Mapping[str, Distribution | None]) -> list[str]:
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


def _draft_counts(summary: RunSummary) -> list[str]:
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
