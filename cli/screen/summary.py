"""The lines that a run ends with, and the tables of `run --stats`.

Nothing is computed here but shares.  Tables are ASCII, so any terminal shows them.
"""

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import to_builtins
from msgspec.structs import asdict

from batcher.events import RestartReason
from batcher.metrics.summary import Summary, Unit, numbers_of, unit_of
from batcher.metrics.times import Distribution

from .terminal import (
    FEW_SLOTS,
    HALF,
    MANY,
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
MAX_WORKERS = 8  # beyond, only the ones with the fewest and the most tokens have a line
_TITLE_WIDTH = 14
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
RESTART_REASONS: Mapping[RestartReason, str] = {
    "killed": "killed",
    "exited": "exited",
    "lost": "lost contact",
}


class BytesPerToken(NamedTuple):
    """KV cache bytes per token of a model, or None if unknown, and of its draft model."""

    model: int | None
    draft: int


NOT_TOLD = BytesPerToken(None, 0)


class RunFiles(NamedTuple):
    """The paths of a run's files as the user gave them, or None."""

    results: str | None = None
    trace: str | None = None
    report: str | None = None
    numbers: str | None = None
    timeseries: str | None = None
    metrics: str | None = None


class Marks(NamedTuple):
    """Symbols for a good, bad and stopped run, and the separator between values."""

    good: str
    bad: str
    stopped: str
    separator: str


UNICODE = Marks("✓", "✗", "■", " · ")
ASCII = Marks("*", "x", "!", ", ")


def marks_in(encoding: str) -> Marks:
    return UNICODE if can_print(encoding, "".join(UNICODE)) else ASCII


def idle_causes(summary: Summary) -> dict[str, str]:
    too_few = "too few free or no line yet" if summary.workers else "too few free"
    causes = {"tail": "tail drain", "arrivals": "waiting for arrivals"}
    return causes | {"empty_queue": "empty queue", "too_few": too_few}


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
    """Return the summary as lines of text.

    is_complete: whether every request was read and has ended.  num_unread: requests that were not
    read, if known.  elapsed: seconds.  encoding, columns: of the terminal; paths may be longer, so
    that they can be copied.
    """
    marks = marks_in(encoding)
    mark, color = (marks.good, GREEN) if summary.ok or not summary.requests else (marks.bad, RED)
    if not is_complete:
        mark, color = marks.stopped, YELLOW
    time = f"{elapsed:.1f} s" if elapsed < MAX_SECONDS else clock(elapsed)
    lines = [f"{mark} {headline(summary, marks.separator, [time], num_unread)}"]
    lines += summary_lines(summary, kv_bytes, unit_of(summary, is_timed=is_timed))
    if columns is not None:
        lines = [part for line in lines for part in narrowed(line, columns)]
    paths = {n: printable(path) for n, path in files._asdict().items() if path is not None}
    if (results := paths.pop("results", None)) is not None:
        results = f"{results} ({summary.outputs - summary.unfinished:,})"
    if (trace := paths.pop("trace", None)) is not None:
        trace = f"trace: batchdecode trace {quote(trace)}"
    parts = [results or "", trace or "", *(f"{name}: {path}" for name, path in paths.items())]
    lines += _filled(parts, min(columns or WIDTH, WIDTH))
    if has_color:
        lines[0] = color + mark + RESET + lines[0][1:]
        lines[1:] = [f"{DIM}{line}{RESET}" for line in lines[1:]]
    return "".join(f"{line}\n" for line in lines)


def headline(summary: Summary, separator: str, more: Sequence[str], num_unread: int = 0) -> str:
    unread = f"{num_unread:,} not begun" if num_unread else ""
    if not summary.requests:
        return unread or "no requests"
    results = "  ".join(_outcomes(summary))
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


def _outcomes(summary: Summary) -> list[str]:
    counts = {name: getattr(summary, name) for name in ("ok", "failed", "aborted", "unfinished")}
    return [f"{count:,} {name}" for name, count in counts.items() if count]


def key_numbers(summary: Summary, unit: Unit) -> dict[str, str]:
    """Return the numbers at the top of a page by their titles; empty ones are left out."""
    steps, tokens = f"{summary.steps:,}", f"{summary.generated_tokens:,}"
    slots = f"{summary.batch:,}"
    if summary.workers:
        slots += f" in {counted(len(summary.workers), 'worker')}"
    if (wall := summary.wall) is not None:
        steps += f" in {duration(wall.seconds)}"
        tokens += f", {number(wall.tokens_per_second)}/s"
    elif (rates := summary.throughput) is not None and unit == "seconds":
        steps += f" in {duration(rates.makespan)}"
        tokens += f", {number(rates.output_tokens)}/s"
    elif summary.steps:
        tokens += f", {number(summary.generated_tokens / summary.steps)}/step"
    if summary.unfinished and not summary.generated_tokens:  # those of unfinished do not count
        tokens = "0 in finished outputs"
    if summary.steps:
        busy = summary.busy_slot_steps
        slots += f", {whole_percent(busy / (busy + summary.idle_slot_steps))} busy"
    found = {"requests": ", ".join(_outcomes(summary)), "steps": steps, "slots": slots}
    found["tokens"] = tokens
    latencies = summary.latencies
    for name, in_steps in _in_steps(summary).items():
        times = in_steps if latencies is None else getattr(latencies, name)
        if times is not None:
            found[name] = _percentiles(times, "steps" if latencies is None else unit)
    found["idle"] = _idle_shares(summary)
    return {title: text for title, text in found.items() if text}


def advice(summary: Summary) -> str | None:
    """Return the oddest thing about a run, and what to do, in one line, or None."""
    outputs = counted(summary.outputs, "output")
    kinds = summary.errors or {}
    code = max(kinds, key=lambda code: kinds[code].count, default="")
    if kinds and (count := kinds[code].count) > max(1, MANY * summary.outputs):
        example = printable(kinds[code].example)
        return f"hint: {count:,} of {outputs} failed with {code}, for example {example}"
    if (num_cut := summary.cut_by_default) > MANY * summary.ok:
        cut = f"the default limit cut {num_cut:,} of {counted(summary.ok, 'output')}"
        return f"hint: {cut}: set max_tokens or --max-tokens"
    if summary.batch > max(FEW_SLOTS, summary.outputs) and summary.busy_share < HALF:
        slots = f"most of the {summary.batch:,} slots were empty"
        return f"hint: {slots}: use a smaller --batch for {outputs}"
    return None


def summary_lines(
    summary: Summary, kv_bytes: BytesPerToken = NOT_TOLD, unit: Unit = "seconds"
) -> list[str]:
    """Return the lines below the headline: each group of numbers starts a new one."""
    return [line for parts in _groups(summary, kv_bytes, unit) for line in _filled(parts)]


def _filled(parts: Sequence[str], width: int = WIDTH) -> list[str]:
    found = list(filter(None, parts))
    return [f"{INDENT}{line}" for line in fill(found, GAP, width - len(INDENT))] if found else []


def _groups(summary: Summary, kv_bytes: BytesPerToken, unit: Unit) -> Iterator[list[str]]:
    latencies, per = summary.latencies, PER[unit]
    times = _in_steps(summary) if latencies is None else {}
    in_steps = [f"{name} {_percentiles(found)}" for name, found in times.items() if found]
    yield [*in_steps[:-1], *(f"{last}  (steps)" for last in in_steps[-1:])]

    causes = _idle_shares(summary)
    yield [causes and f"idle: {causes}"]

    least, more = summary.least_steps, summary.steps - summary.least_steps
    if least and not summary.unfinished and summary.computed is None:
        needed = f"any schedule needs at least {counted(least, 'step')}"
        more_steps = f"{needed}; this one took {percent(more, least)} more"
        yield [more_steps if more else "no schedule needs fewer steps"]
    in_seconds = {} if latencies is None else asdict(latencies)
    yield [f"{name} {_percentiles(found, unit)}" for name, found in in_seconds.items() if found]

    parts = []
    # The tokens of unfinished outputs are not counted, so no rate follows from them alone.
    has_rates = bool(summary.generated_tokens or not summary.unfinished)
    if (rates := summary.throughput) is not None and has_rates:
        outputs, tokens = number(rates.requests), number(rates.output_tokens)
        parts.append(f"throughput {outputs} outputs/{per}, {tokens} output tokens/{per}")
    if (wall := summary.wall) is not None:
        rate = f", {number(wall.tokens_per_second)} output tokens/s" if has_rates else ""
        parts.append(f"wall clock {duration(wall.seconds)}{rate}")
    if (goodput := summary.goodput) is not None:
        limits = ", ".join(f"{name} {duration(limit)}" for name, limit in goodput.limits.items())
        what = "outputs" if limits else f"{counted(goodput.requests, 'output')} with a deadline"
        share = percent(goodput.good, goodput.requests)
        good = f"goodput {share} of {what} ({number(goodput.per_second)}/s)"
        parts += fill([good, f"within {limits}"] if limits else [good], " ", WIDTH - 2)
        missed = ", ".join(f"{count:,} {name}" for name, count in goodput.missed.items())
        parts.append(missed and f"missed: {missed}")
    yield parts

    parts = []
    if (kv := summary.kv) is not None:
        used = f"{number(kv.mean_blocks)} blocks used, {kv.max_blocks:,} at most"
        if kv.mean_share is not None and kv.max_share is not None:
            used = f"{whole_percent(kv.mean_share)} used, {whole_percent(kv.max_share)} at most"
        parts.append(f"kv {used}")
        if kv_bytes.model is not None:
            for_drafts = f", {kv_bytes.draft:,} of them for drafts" if kv_bytes.draft else ""
            parts.append(f"{kv_bytes.model + kv_bytes.draft:,} bytes per token{for_drafts}")
    if (lost := summary.preemptions) is not None and lost.count:
        again = counted(lost.recomputed_tokens, "token")
        parts.append(f"{counted(lost.count, 'preemption')} recomputed {again}")
    if summary.prefix_cache is not None:
        parts.append(f"prefix hits {whole_percent(summary.prefix_cache.share)}")
    yield parts

    parts = []
    if summary.aged:
        parts.append(f"{counted(summary.aged, 'admission')} forced by --aging")
    if (budget := summary.budget) is not None:
        full = counted(budget.full_steps, "step")
        parts.append(f"token budget {whole_percent(budget.mean_share)} used, full in {full}")
    blocked = (summary.blocked or {}).items()
    reasons = ", ".join(f"{BLOCKED_CAUSES[why]} {count:,}" for why, count in blocked if count)
    parts.append(reasons and f"steps blocked: {reasons}")
    positions, done = summary.positions, summary.computed
    if positions.total:
        share = percent(positions.padding, positions.total)
        padding = f"{positions.padding:,} padding ({share})" if positions.padding else "no padding"
        parts.append(f"computed {counted(positions.total, 'position')}, {padding}")
    if done is not None and done.right_padding and not positions.padding:
        share = percent(done.right_padding, done.prefill_tokens)
        parts.append(f"right padding would add {share} to prefills")
    yield parts

    parts, grammars = [], summary.constraints
    if grammars.compiled or grammars.cache_hits:
        parts.append(f"constraints: {grammars.compiled:,} compiled, {grammars.cache_hits:,} reused")
    if summary.jumps:
        tokens = counted(summary.jumped_tokens, "token")
        parts.append(f"{tokens} forced in {counted(summary.jumps, 'jump')}")
    if summary.forks:
        parts.append(f"beams: {counted(summary.forks, 'fork')}")
    yield parts

    if (drafts := summary.speculation) is not None:
        shares = [whole_percent(at.share) for at in drafts.by_position[:MAX_POSITIONS]]
        shares += ["..."] if len(drafts.by_position) > MAX_POSITIONS else []
        speedup, is_sampled = drafts.speedup, drafts.rule == "leviathan"
        gain = f"{number(speedup.measured)} (expected {number(speedup.expected)})"
        if speedup.in_time is not None:
            gain += f", {number(speedup.in_time)} in time"
        accepted = f"{percent(drafts.accepted, drafts.drafted)} of {drafts.drafted:,} accepted"
        changes = [f"{why} {count:,}" for why, count in drafts.changes.items() if count]
        parts = [
            f"drafts: {accepted}" + (" by leviathan" if is_sampled else ""),
            f"by position {' '.join(shares)}",
            f"{number(drafts.tokens_per_step)} tokens per drafting step",
            f"speedup {gain}",
            f"{percent(drafts.wasted, 1)} of positions wasted",
            f"number of drafts changed: {', '.join(changes)}" if changes else "",
        ]
        if is_sampled:
            parts.append(
                "outputs follow the model's distribution, but depend on drafts and schedule"
            )
        yield parts

    workers = summary.workers or []
    own = [
        f"{counted(worker.generated_tokens, 'token')} in {counted(worker.steps, 'step')}, "
        f"{whole_percent(worker.busy_share)} busy"
        for worker in workers
    ]
    if len(own) > MAX_WORKERS:
        least, *_, most = sorted(range(len(own)), key=lambda n: workers[n].generated_tokens)
        yield [f"fewest tokens: {own[least]}", f"most tokens: {own[most]}"]
    else:
        yield [f"w{number} {numbers}" for number, numbers in enumerate(own)]


def _idle_shares(summary: Summary) -> str:
    total = summary.busy_slot_steps + summary.idle_slot_steps
    counts = {text: summary.idle.get(cause, 0) for cause, text in idle_causes(summary).items()}
    counts["blocked"] = sum(summary.idle.get(cause, 0) for cause in BLOCKED_CAUSES)
    causes = [f"{percent(count, total)} {text}" for text, count in counts.items() if count]
    whole = f"{percent(summary.idle_slot_steps, total)} = " if len(causes) > 1 else ""
    return whole + ", ".join(causes)


def _in_steps(summary: Summary) -> dict[str, Distribution | None]:
    return {"queue": summary.wait, "ttft": summary.first_token, "e2e": summary.latency}


def _percentiles(times: Distribution, unit: Unit | None = None) -> str:
    scale, name = 1, f" {unit}" if unit else ""
    if unit == "seconds":
        scale, name = (1, " s") if times.p99 >= 1 or not times.p99 else (1000, " ms")
    p50, p99 = number(times.p50 * scale), number(times.p99 * scale)
    return f"{p50}{name}" if times.count == 1 else f"p50 {p50} p99 {p99}{name}"


def render_stats(
    summary: Summary, times: "ConstraintTimes | None", *, is_timed: bool = True
) -> str:
    """Return every number of the summary but zeros, as tables under its name in the JSON.

    times: wall clock times of constraints.
    """
    groups: dict[str, list[str]] = {}

    def add(group: str, numbers: Mapping[str, Any]) -> None:
        for path, value in numbers_of(numbers):
            *above, words = path.replace("_", " ").split(".")
            if words == "workers":
                for worker, own in enumerate(value):
                    add(f"worker {worker}", own)
            elif not isinstance(value, list | dict):
                text = value if isinstance(value, str) else number(value)
                if words.endswith(("share", "acceptance", "wasted")):
                    text = percent(value, 1)
                groups.setdefault([group, *above][-1], []).append(f"{words} {text}")

    numbers = to_builtins(summary)
    errors = numbers.pop("errors", {})
    add("run", numbers)
    add("errors", {code: kind["count"] for code, kind in errors.items()})
    if times is not None and "constraints" in groups:
        groups["constraints"] += [
            f"compile time {duration(times.compile)}",
            f"longest {duration(times.longest_compile)}",
        ]
        if times.num_masks:
            each = number(times.masks / times.num_masks * 1e6)
            groups["constraints"].append(f"{each} us per token for {times.num_masks:,} tokens")
    lines = []
    for title, parts in groups.items():
        filled = fill(parts, GAP, WIDTH - len(INDENT) - _TITLE_WIDTH - 2)
        titles = [title, *[""] * (len(filled) - 1)]
        lines += [f"{t:<{_TITLE_WIDTH}}  {line}" for t, line in zip(titles, filled, strict=True)]
    unit = unit_of(summary, is_timed=is_timed)
    in_seconds = {} if summary.latencies is None else asdict(summary.latencies)
    in_steps = {} if in_seconds and unit == "steps" else _in_steps(summary)
    columns = Distribution.__struct_fields__
    for title, found in ((unit, in_seconds), ("steps", in_steps)):
        rows = [
            [name, *(number(getattr(each, column)) for column in columns)]
            for name, each in found.items()
            if each is not None
        ]
        if rows:
            lines += aligned([[title, *columns], *rows], right=range(1, len(columns) + 1))
    return "".join(f"{INDENT}{line}\n" for line in lines)
