"""The lines that report how a run went, and the tables of `run --stats`.

Nothing is computed here but shares.  Latencies have the same names and percentiles whether they are
in seconds or in steps.  Tables are ASCII, so any terminal shows them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from batcher.events import RestartReason
from batcher.metrics.summary import Summary, Unit, unit_of
from batcher.metrics.times import Distribution

from .terminal import (
    aligned,
    can_print,
    clock,
    counted,
    duration,
    fill,
    narrowed,
    number,
    percent,
    printable,
    whole_percent,
)

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes

WIDTH = 80
INDENT, GAP = "  ", "   "
MAX_SECONDS = 60
MAX_POSITIONS = 8  # of drafts
MAX_WORKERS = 8  # with a figure each
_MANY = 0.1  # of the outputs
_TITLE_WIDTH = 14
_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")
GREEN, YELLOW, RED, DIM, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
PER: Mapping[Unit, str] = {"seconds": "s", "steps": "step"}

BLOCKED_CAUSES = {
    "kv": "KV",
    "tokens": "budget",
    "preemption": "preemption",
    "batch": "batch",
    "rate": "the rate",
    "concurrency": "an overloaded server",
}
IDLE_CAUSES = {
    "tail": "tail drain",
    "arrivals": "waiting for arrivals",
    "empty_queue": "empty queue",
    "too_few": "too few free",
}
# Several workers are handed lines as they end some.
_IDLE_WORKERS = IDLE_CAUSES | {"too_few": "too few free or no line yet"}
RESTART_REASONS: Mapping[RestartReason, str] = {
    "killed": "killed",
    "exited": "left by itself",
    "lost": "not heard of any more",
}


class BytesPerToken(NamedTuple):
    """Bytes that the cache of a model takes for a token, if it says so, and of a draft model."""

    model: int | None
    draft: int


NOT_TOLD = BytesPerToken(None, 0)


class RunFiles(NamedTuple):
    """Paths of the files of a run, as the user named them; None for what is not in a file."""

    results: str | None = None
    trace: str | None = None
    report: str | None = None
    numbers: str | None = None
    timeseries: str | None = None
    metrics: str | None = None


class Marks(NamedTuple):
    """Marks of a run that went well, of one that did not, and of one that was broken off."""

    good: str
    bad: str
    stopped: str
    separator: str


UNICODE = Marks("✓", "✗", "■", " · ")
ASCII = Marks("*", "x", "!", ", ")


def marks_in(encoding: str) -> Marks:
    return UNICODE if can_print(encoding, "".join(UNICODE)) else ASCII


def render_summary(
    summary: Summary,
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

    is_complete: whether every request was read and has ended; num_unread: requests that were not
    read, if known.  columns: of the terminal, or None; names of files may be longer, to be copied.
    """
    marks = marks_in(encoding)
    mark, color = (marks.good, GREEN) if summary.ok or not summary.requests else (marks.bad, RED)
    if not is_complete:
        mark, color = marks.stopped, YELLOW
    time = f"{elapsed:.1f} s" if elapsed < MAX_SECONDS else clock(elapsed)
    lines = [f"{mark} {headline(summary, marks.separator, [time], num_unread)}"]
    in_steps = {name: times for name, times in _in_steps(summary).items() if times is not None}
    if summary.latencies is None and in_steps:
        *most, last = (f"{name} {_spread(times)}" for name, times in in_steps.items())
        lines += _filled([*most, f"{last}  (steps)"])
    lines += _filled([_idle(summary)])
    least, steps = summary.least_steps, summary.steps
    if least and not summary.unfinished and summary.computed is None:
        lines.append(
            f"{INDENT}no schedule needs fewer steps"
            if least == steps
            else f"{INDENT}any schedule needs at least {counted(least, 'step')}; "
            f"this one took {percent(steps - least, least)} more"
        )
    lines += timed_lines(summary, kv_bytes, unit_of(summary, is_timed=is_timed))
    if summary.cut_by_default > _MANY * summary.ok:
        outputs = f"{summary.cut_by_default:,} of {counted(summary.ok, 'output')}"
        lines.append(
            f"{INDENT}{outputs} reached the default limit and may be cut short: use --max-tokens N"
        )
    lines += _filled(_control(summary)) + _filled(_drafts(summary)) + _filled(_workers(summary))
    if columns is not None:
        lines = [part for line in lines for part in narrowed(line, columns)]
    lines += _filled(_files(summary, files), min(columns or WIDTH, WIDTH))
    if has_color:
        lines[0] = color + mark + RESET + lines[0][1:]
        lines[1:] = [f"{DIM}{line}{RESET}" for line in lines[1:]]
    return "".join(f"{line}\n" for line in lines)


def headline(summary: Summary, separator: str, more: Sequence[str], num_unread: int = 0) -> str:
    unread = f"{num_unread:,} not begun" if num_unread else ""
    if not summary.requests:
        return unread or "no requests"
    counts = {name: getattr(summary, name) for name in ("ok", "failed", "aborted", "unfinished")}
    results = "  ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    if summary.outputs != summary.requests:
        outputs = counted(summary.outputs, "output")
        results += f"  of {outputs} for {counted(summary.requests, 'request')}"
    if unread:
        results += f"  {unread}"
    workers = [counted(len(summary.workers), "worker")] if summary.workers else []
    run = [counted(summary.steps, "step"), *workers, counted(summary.batch, "slot")]
    if summary.steps:
        total = summary.busy_slot_steps + summary.idle_slot_steps
        run.append(f"{whole_percent(summary.busy_slot_steps / total)} busy")
    return f"{results}   {separator.join([*run, *more])}"


def idle_causes(summary: Summary) -> dict[str, str]:
    return _IDLE_WORKERS if summary.workers else IDLE_CAUSES


def timed_lines(
    summary: Summary, kv_bytes: BytesPerToken = NOT_TOLD, unit: Unit = "seconds"
) -> list[str]:
    latencies = _fields(summary.latencies)
    times = [f"{name} {_times_of(each, unit)}" for name, each in latencies.items() if each]
    groups = [times, _rates(summary, unit), _memory(summary, kv_bytes), _steps(summary)]
    return [line for parts in groups for line in _filled(parts)]


def _filled(parts: Sequence[str], width: int = WIDTH) -> list[str]:
    found = list(filter(None, parts))
    return [f"{INDENT}{line}" for line in fill(found, GAP, width - len(INDENT))] if found else []


def _fields(record: Any) -> dict[str, Any]:
    return {} if record is None else {n: getattr(record, n) for n in record.__struct_fields__}


def _in_steps(summary: Summary) -> dict[str, Distribution | None]:
    return {"queue": summary.wait, "ttft": summary.first_token, "e2e": summary.latency}


def _spread(distribution: Distribution) -> str:
    if distribution.count == 1:
        return f"{distribution.p50:,}"
    return f"p50 {distribution.p50:,} p99 {distribution.p99:,}"


def _times_of(times: Distribution, unit: Unit) -> str:
    scale, name = (1, "s") if times.p99 >= 1 or not times.p99 else (1000, "ms")
    if unit == "steps":
        scale, name = 1, "steps"
    if times.count == 1:
        return f"{number(times.p50 * scale)} {name}"
    return f"p50 {number(times.p50 * scale)} p99 {number(times.p99 * scale)} {name}"


def _idle(summary: Summary) -> str:
    total = summary.busy_slot_steps + summary.idle_slot_steps
    counts = {cause: summary.idle.get(f, 0) for f, cause in idle_causes(summary).items()}
    counts["blocked"] = sum(summary.idle.get(reason, 0) for reason in BLOCKED_CAUSES)
    causes = [f"{percent(count, total)} {cause}" for cause, count in counts.items() if count]
    if len(causes) < 2:  # noqa: PLR2004 - one is all of it
        return f"idle: {causes[0]}" if causes else ""
    return f"idle: {percent(summary.idle_slot_steps, total)} = {', '.join(causes)}"


def _rates(summary: Summary, unit: Unit) -> list[str]:
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
    goodput = summary.goodput
    if goodput is not None:
        limits = ", ".join(f"{name} {duration(limit)}" for name, limit in goodput.limits.items())
        what = "outputs" if limits else f"{counted(goodput.requests, 'output')} with a deadline"
        share = percent(goodput.good, goodput.requests)
        good = f"goodput {share} of {what} ({number(goodput.per_second)}/s)"
        parts += fill([good, f"within {limits}"] if limits else [good], " ", WIDTH - 2)
        if goodput.missed:
            missed = ", ".join(f"{count:,} {name}" for name, count in goodput.missed.items())
            parts.append(f"missed: {missed}")
    return parts


def _memory(summary: Summary, kv_bytes: BytesPerToken) -> list[str]:
    parts, kv, lost = [], summary.kv, summary.preemptions
    if kv is not None:
        used = f"{number(kv.mean_blocks)} blocks used, {kv.max_blocks:,} at most"
        if kv.mean_share is not None and kv.max_share is not None:
            used = f"{whole_percent(kv.mean_share)} used, {whole_percent(kv.max_share)} at most"
        parts.append(f"kv {used}")
        if kv_bytes.model is not None:
            for_drafts = f", {kv_bytes.draft:,} of them for drafts" if kv_bytes.draft else ""
            parts.append(f"{kv_bytes.model + kv_bytes.draft:,} bytes per token{for_drafts}")
    if lost is not None and lost.count:
        again = counted(lost.recomputed_tokens, "token")
        parts.append(f"{counted(lost.count, 'preemption')} recomputed {again}")
    if summary.prefix_cache is not None:
        parts.append(f"prefix hits {whole_percent(summary.prefix_cache.share)}")
    return parts


def _steps(summary: Summary) -> list[str]:
    parts, budget, blocked = [], summary.budget, _blocked(summary)
    if summary.aged:
        parts.append(f"{counted(summary.aged, 'admission')} by --aging, whatever the policy")
    if budget is not None:
        full = counted(budget.full_steps, "step")
        parts.append(f"token budget {whole_percent(budget.mean_share)} used, full in {full}")
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


def _blocked(summary: Summary) -> list[str]:
    steps = summary.blocked or {}
    return [f"{BLOCKED_CAUSES[reason]} {count:,}" for reason, count in steps.items() if count]


def _control(summary: Summary) -> list[str]:
    compiled, cache_hits = summary.constraints.compiled, summary.constraints.cache_hits
    parts = []
    if compiled or cache_hits:
        parts.append(f"constraints: {compiled:,} compiled, {cache_hits:,} reused")
    if summary.jumps:
        tokens = counted(summary.jumped_tokens, "token")
        parts.append(f"{tokens} forced in {counted(summary.jumps, 'jump')}")
    if summary.forks:
        parts.append(f"beams: {counted(summary.forks, 'fork')}")
    return parts


def _drafts(summary: Summary) -> list[str]:
    found = summary.speculation
    if found is None:
        return []
    shares = [whole_percent(at.share) for at in found.by_position[:MAX_POSITIONS]]
    shares += ["..."] if len(found.by_position) > MAX_POSITIONS else []
    speedup = found.speedup
    times = f"{number(speedup.measured)} (expected {number(speedup.expected)})"
    if speedup.in_time is not None:
        times += f", {number(speedup.in_time)} in time"
    is_free = found.rule == "leviathan"
    changes = [f"{name} {count:,}" for name, count in found.changes.items() if count]
    return [
        f"drafts: {percent(found.accepted, found.drafted)} of {found.drafted:,} accepted"
        + (" by leviathan" if is_free else ""),
        f"by position {' '.join(shares)}",
        f"{number(found.tokens_per_step)} tokens per drafting step",
        f"speedup {times}",
        f"{percent(found.wasted, 1)} of positions wasted",
        f"number of drafts changed: {', '.join(changes)}" if changes else "",
        "outputs follow the model's distribution, but depend on drafts and schedule"
        if is_free
        else "",
    ]


def _workers(summary: Summary) -> list[str]:
    own = [
        f"{counted(worker.generated_tokens, 'token')} in {counted(worker.steps, 'step')}, "
        f"{whole_percent(worker.busy_share)} busy"
        for worker in summary.workers or ()
    ]
    if len(own) <= MAX_WORKERS:
        return [f"w{worker} {told}" for worker, told in enumerate(own)]
    tokens = [worker.generated_tokens for worker in summary.workers or ()]
    least, *_, most = sorted(range(len(own)), key=tokens.__getitem__)
    return [f"least of a worker: {own[least]}", f"most: {own[most]}"]


def _files(summary: Summary, files: RunFiles) -> list[str]:
    from shlex import quote  # noqa: PLC0415 - most runs that must start fast write no file

    paths = {n: printable(p) for n, p in files._asdict().items() if p is not None}
    results, trace = paths.pop("results", None), paths.pop("trace", None)
    return [
        f"{results} ({summary.outputs - summary.unfinished:,})" if results is not None else "",
        f"trace: batchdecode trace {quote(trace)}" if trace is not None else "",
        *(f"{name}: {path}" for name, path in paths.items()),
    ]


def render_stats(
    summary: Summary, times: "ConstraintTimes | None", *, is_timed: bool = True
) -> str:
    """Return the tables as lines of text; times: of constraints, on the wall."""
    groups = _stats(summary, times)
    lines = []
    for title, parts in groups.items():
        told = fill(list(filter(None, parts)), GAP, WIDTH - len(INDENT) - _TITLE_WIDTH - 2)
        titles = [title, *[""] * (len(told) - 1)]
        if any(parts):
            lines += [f"{t:<{_TITLE_WIDTH}}  {line}" for t, line in zip(titles, told, strict=True)]
    unit = unit_of(summary, is_timed=is_timed)
    latencies = _fields(summary.latencies)
    in_steps = {} if latencies and unit == "steps" else _in_steps(summary)
    for title, found in ((unit, latencies), ("steps", in_steps)):
        rows = [
            [name, *(number(getattr(each, column)) for column in _COLUMNS)]
            for name, each in found.items()
            if each is not None
        ]
        if rows:
            lines += aligned([[title, *_COLUMNS], *rows], right=range(1, len(_COLUMNS) + 1))
    return "".join(f"{INDENT}{line}\n" for line in lines)


def _stats(summary: Summary, times: "ConstraintTimes | None") -> dict[str, list[str]]:
    total = summary.busy_slot_steps + summary.idle_slot_steps
    causes = idle_causes(summary) | {r: f"blocked by {c}" for r, c in BLOCKED_CAUSES.items()}
    idle = {cause: summary.idle.get(name, 0) for name, cause in causes.items()}
    positions, done, lost = summary.positions, summary.computed, summary.preemptions
    groups = {
        "finish reasons": [
            f"{name} {count:,}" for name, count in summary.finish_reasons.items() if count
        ],
        "tokens": [
            f"prompt {summary.prompt_tokens:,}",
            f"generated {summary.generated_tokens:,}",
            f"longest output {summary.longest_output:,}",
            f"{number(summary.tokens_per_step)} a step",
        ],
        "slot-steps": [
            f"busy {summary.busy_slot_steps:,} ({percent(summary.busy_slot_steps, total)})",
            *(f"idle {count:,} {cause}" for cause, count in idle.items() if count),
        ]
        if total
        else [],
        "positions": [
            f"computed {positions.total:,}",
            f"padding {positions.padding:,} ({percent(positions.padding, positions.total)})",
        ]
        if positions.total
        else [],
    }
    if positions.total and done is not None:
        groups["positions"] += [
            f"prefill {done.prefill_tokens:,}",
            f"decode {done.decode_tokens:,}",
            f"right padding would add {done.right_padding:,} to prefills",
            f"left padding {done.left_padding:,} to decodes",
        ]
    if (kv := summary.kv) is not None:
        groups["KV"] = [
            f"blocks mean {number(kv.mean_blocks)}",
            f"max {kv.max_blocks:,}",
            "" if kv.total is None else f"of {kv.total:,}",
            f"{counted(kv.block_size, 'token')} each",
        ]
    if (cache := summary.prefix_cache) is not None:
        share = percent(cache.found, cache.asked)
        groups["prefix cache"] = [
            f"found {cache.found:,} of {counted(cache.asked, 'token')} ({share})",
            f"after preemptions {cache.found_again:,} of {cache.asked_again:,}"
            if cache.asked_again
            else "",
        ]
    if lost is not None:
        recomputed = f"recomputed {counted(lost.recomputed_tokens, 'token')}"
        groups["preemptions"] = [f"{lost.count:,}", recomputed]
    groups["aging"] = [counted(summary.aged, "admission")] if summary.aged else []
    if (budget := summary.budget) is not None:
        tokens = counted(budget.max_batch_tokens, "token")
        full = f"full in {counted(budget.full_steps, 'step')}"
        groups["budget"] = [f"{percent(budget.mean_share, 1)} of {tokens} a step", full]
    groups["steps blocked"] = _blocked(summary)
    if (found := summary.speculation) is not None:
        groups["drafts"] = [
            f"drafted {found.drafted:,}",
            f"accepted {found.accepted:,} ({percent(found.accepted, found.drafted)})",
            f"in {counted(found.steps, 'drafting step')}",
            f"{number(found.tokens_per_step)} tokens each",
            f"speedup {number(found.speedup.measured)}",
        ]
    counts = summary.constraints
    if times is not None and (counts.compiled or counts.cache_hits):
        each = times.masks / times.num_masks * 1e6 if times.num_masks else 0.0
        tokens = counted(times.num_masks, "token")
        jumps = counted(summary.jumps, "jump")
        groups["constraints"] = [
            f"compiled {counts.compiled:,} in {duration(times.compile)}",
            f"longest {duration(times.longest_compile)}",
            f"reused {counts.cache_hits:,}",
            f"{number(each)} us a token over {tokens}" if times.num_masks else "",
            f"forced {summary.jumped_tokens:,} in {jumps}" if summary.jumps else "",
        ]
    for worker, own in enumerate(summary.workers or ()):
        groups[f"worker {worker}"] = [
            counted(own.requests, "request"),
            counted(own.generated_tokens, "token"),
            counted(own.steps, "step"),
            f"{percent(own.busy_share, 1)} busy",
        ]
    return groups
