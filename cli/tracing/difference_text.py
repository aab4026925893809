"""How two runs differ in words: where they part and why, and a table of what came of it."""

from collections.abc import Iterator, Sequence

from batcher.events import AdmitEvent, FinishEvent, HoldEvent, PreemptEvent
from batcher.explaining.changes import Change, Course, RunTotals
from batcher.explaining.differences import Comparison, Decision, Involved, Parting, role_of
from batcher.explaining.story import Story
from batcher.timeline.stays import label_of
from cli.screen.cells import cell_width, counted, cut_middle
from cli.tracing.story_text import names, span_of, time_of, why_waiting

MAX_DECISIONS = 5
MAX_LABEL_CELLS = 24
_TOTALS = {
    "steps": "steps",
    "time": "seconds",
    "ended": "samples ended",
    "tokens": "tokens generated",
    "latency": "mean latency, seconds",
    "wait_steps": "mean wait, steps",
    "preemptions": "preemptions",
    "recomputed": "tokens preempted",
    "cached": "tokens found in the cache",
}


def describe(comparison: Comparison, name_a: str, name_b: str, max_rows: int) -> list[str]:
    """Return how run A differs from run B, with at most `max_rows` samples that changed."""
    lines = [f"A: {name_a}", f"B: {name_b}", *_settings(comparison), *_workloads(comparison)]
    if comparison.parting is None:
        decisions = "the same decisions in the same steps"
        return [*lines, f"schedules: equal, {decisions}", *_results(comparison, max_rows)]
    return [
        *lines,
        *_parting(comparison.parting),
        *_reasons(comparison.involved, comparison.parting.step),
        *_results(comparison, max_rows),
    ]


def _settings(comparison: Comparison) -> Iterator[str]:
    for setting in comparison.settings:
        yield f"{setting.name}: {_shown(setting.a)} in A, {_shown(setting.b)} in B"


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)


def _workloads(comparison: Comparison) -> Iterator[str]:
    """Yield how the workloads differ."""
    for letter, labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        if labels:
            yield f"only in {letter}: {names(labels)} ({counted(len(labels), 'sample')})"
    altered = comparison.altered
    if altered:
        what = "came at another time or asked for something else"
        yield f"not the same: {names(altered)} {what} ({counted(len(altered), 'sample')})"


def _parting(parting: Parting) -> Iterator[str]:
    """Yield where the runs part, and what each decides there."""
    times = f"{time_of(parting.time_a)} in A, {time_of(parting.time_b)} in B"
    yield f"the schedules part at step {parting.step:,} ({times}):"
    for letter, decisions in (("A", parting.only_a), ("B", parting.only_b)):
        for decision in decisions[:MAX_DECISIONS]:
            yield f"  {letter} {decided(decision)}"
        if len(decisions) > MAX_DECISIONS:
            yield f"  {letter} decides {len(decisions) - MAX_DECISIONS:,} things more"
        if not decisions:
            yield f"  {letter} decides nothing else"


def decided(decision: Decision) -> str:
    """Return what was decided, to follow the name of the run."""
    label = label_of(decision.id, decision.index, role_of(decision))
    match decision:
        case AdmitEvent():
            found = f", {decision.cached:,} tokens found in the cache" if decision.cached else ""
            left = f", {decision.left:,} left to compute" if decision.left else ""
            return f"admits {label} to slot {decision.slot} ({decision.reason}){found}{left}"
        case PreemptEvent():
            whom = label_of(decision.for_id, decision.for_index, "sample")
            lost = f"{counted(decision.tokens, 'token')} to compute again"
            return (
                f"preempts {label} in slot {decision.slot} for {whom} ({decision.reason}), {lost}"
            )
        case HoldEvent():
            needed = f", {counted(decision.blocks, 'block')} needed" if decision.blocks else ""
            return f"holds {label} back ({decision.reason}{needed})"
        case FinishEvent():
            tokens = counted(decision.tokens, "token")
            return f"ends {label} in slot {decision.slot} ({decision.reason}, {tokens})"
        case _:
            tokens = counted(decision.tokens, "token")
            return f"computes {tokens} of {label}, {decision.left:,} left"


def _reasons(involved: Sequence[Involved], step: int) -> Iterator[str]:
    """Yield what those the parting is about do there in each run, and why."""
    if involved:
        yield f"what these do in step {step:,}:"
    for one in involved:
        for letter, story in (("A", one.a), ("B", one.b)):
            yield f"  {one.label} in {letter} {_doing(story, step)}"


def _doing(story: Story | None, step: int) -> str:
    """Return what the sequence of `story` does in `step`, to follow its name."""
    if story is None:
        return "does not exist"
    part = next((part for part in story.parts if part.start <= step < part.end), None)
    if part is None:
        if story.ended is not None and story.ended.step < step:
            return f"has ended with step {story.ended.step:,} ({story.ended.reason})"
        return "has not arrived"
    steps = span_of(part.start, part.end)
    if part.phase == "wait":
        return f"waits {why_waiting(part, story)} ({steps})"
    what = "computes its prompt" if part.phase == "prefill" else "generates"
    slot = next(stay.slot for stay in story.stays if stay.start <= step < stay.end)
    still = ", standing still," if part.cause else ""
    return f"holds slot {slot}{still} and {what} ({steps})"


def _results(comparison: Comparison, max_rows: int) -> Iterator[str]:
    """Yield the tables."""
    changes, num_compared = comparison.changes, comparison.num_compared
    if changes:
        shown = changes[:max_rows]
        which = "" if len(shown) == len(changes) else f"; the {len(shown)} that changed most"
        yield f"{len(changes):,} of {counted(num_compared, 'sample')} went another way{which}:"
        yield from table(_change_rows(shown))
    yield "totals:"
    yield from table(_total_rows(comparison.totals_a, comparison.totals_b))


def _change_rows(changes: Sequence[Change]) -> Iterator[list[str]]:
    yield ["", "latency A", "B", "B - A", "wait A", "B", "preempted A", "B", "ended A", "B"]
    for change in changes:
        a, b = change.a, change.b
        has_both = a.latency is not None and b.latency is not None
        yield [
            cut_middle(change.label, MAX_LABEL_CELLS, "~"),
            _latency(a),
            _latency(b),
            f"{change.later:+,.3f}" if has_both else "-",
            f"{a.wait_steps:,}",
            f"{b.wait_steps:,}",
            f"{a.preemptions:,}",
            f"{b.preemptions:,}",
            a.outcome or "-",
            b.outcome or "-",
        ]


def _latency(course: Course) -> str:
    return "-" if course.latency is None else f"{course.latency:,.3f}"


def _total_rows(a: RunTotals, b: RunTotals) -> Iterator[list[str]]:
    yield ["", "A", "B", "B - A"]
    for field, title in _TOTALS.items():
        in_a, in_b = getattr(a, field), getattr(b, field)
        digits = 3 if isinstance(in_a, float) else 0
        yield [title, f"{in_a:,.{digits}f}", f"{in_b:,.{digits}f}", f"{in_b - in_a:+,.{digits}f}"]


def table(rows: Iterator[list[str]]) -> list[str]:
    """Return `rows` in columns: the first to the left, all others to the right."""
    cells = list(rows)
    widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *rest in cells:
        line = first + " " * (widths[0] - cell_width(first))
        for cell, width in zip(rest, widths[1:], strict=True):
            line += "  " + " " * (width - cell_width(cell)) + cell
        lines.append(f"  {line}".rstrip())
    return lines
