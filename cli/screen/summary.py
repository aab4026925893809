"""The few lines that tell a person how a run went."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batcher.events import RestartReason
from batcher.metrics.counts import Speculation
from batcher.metrics.summary import RunSummary, WorkerSummary, unit_of

from ..run.urls import shown
from .cells import counted, fill, narrowed, number, percent, printable, whole_percent
from .terminal import can_print
from .timed_lines import (
    BLOCKED_CAUSES,
    GAP,
    INDENT,
    NOT_TOLD,
    WIDTH,
    BytesPerToken,
    lines_in_steps,
    timed_lines,
)

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
