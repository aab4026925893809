"""How two runs differ in words: where they part and why, and a table of what came of it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    BlockedEvent,
    Decision,
    DraftEvent,
    FinishEvent,
    PreemptEvent,
    SpeculateEvent,
)
from batcher.explaining.differences import (
    Agreement,
    Parting,
    RunComparison,
    RunFigures,
    SampleChange,
    role_of,
)
from batcher.explaining.story import Story
from batcher.trace.run import label_of, label_of_name

from ..screen.terminal import aligned, cell_width, counted, cut_middle, listed, wrapped
from .story_text import names, span_of, time_of, why_waiting

MAX_DECISIONS = 5
MAX_LABEL_CELLS = 24
_LEAST_WANTED = {"ended": 8, "preempted": 6, "wait": 4}  # columns of changes: where they begin
_TOTALS = {
    "steps": "steps",
    "time": "time, {unit}",
    "ended": "outputs ended",
    "tokens": "tokens generated",
    **{
        f"{name}.{figure}": f"{figure} {name.upper()}, {{unit}}"
        for name in ("ttft", "tpot", "e2e")
        for figure in ("mean", "p99")
    },
    "wait_steps": "mean of all waits, steps",
    "preemptions": "preemptions",
    "recomputed": "tokens preempted",
    "cached": "tokens found in the cache",
}
_DRAFT_TOTALS = {"drafted": "tokens drafted", "accepted": "drafts accepted"}


def describe(comparison: RunComparison, name_a: str, name_b: str) -> list[str]:
    """Return how run A differs from run B, in sentences of any length."""
    lines = [f"A: {name_a}", f"B: {name_b}", *_settings(comparison), *_workloads(comparison)]
    lines += _breaks(comparison)
    if comparison.agreement is not None:
        return [*lines, *_agreement(comparison, comparison.agreement)]
    if comparison.parting is None:
        how_far = " up to there" if _is_broken(comparison) else ""
        return [*lines, f"schedules: equal{how_far}, the same decisions in the same steps"]
    parting = _parting(comparison.parting, is_timed=comparison.is_timed)
    return [*lines, *parting, *_reasons(comparison)]


def _settings(comparison: RunComparison) -> Iterator[str]:
    """Yield what is set differently; two kinds of step time have no terms to compare."""
    has_kinds = any(setting.name == "step_time.name" for setting in comparison.settings)
    for setting in comparison.settings:
        name = setting.name
        if has_kinds and name.startswith("step_time."):
            if name != "step_time.name":
                continue
            name = "step_time"
        a, b = ("not set" if value is None else value for value in (setting.a, setting.b))
        yield f"{name}: {a} in A, {b} in B"


def _workloads(comparison: RunComparison) -> Iterator[str]:
    """Yield how the workloads differ."""
    for letter, labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        if labels:
            yield f"only in {letter}: {names(labels)} ({counted(len(labels), 'output')})"
    altered = comparison.altered
    if altered:
        what = "came at another time or asked for something else"
        yield f"not the same: {names(altered)} {what} ({counted(len(altered), 'output')})"


def _is_broken(comparison: RunComparison) -> bool:
    return comparison.breaks_off_a is not None or comparison.breaks_off_b is not None


def _breaks(comparison: RunComparison) -> Iterator[str]:
    """Yield where a trace breaks off, and what that leaves to compare."""
    breaks = {"A": comparison.breaks_off_a, "B": comparison.breaks_off_b}
    found = {letter: step for letter, step in breaks.items() if step is not None}
    if found:
        where = " and ".join(f"{letter} breaks off at step {at:,}" for letter, at in found.items())
        yield f"{where}: only what came before step {min(found.values()):,} is compared"


def _agreement(comparison: RunComparison, agreement: Agreement) -> Iterator[str]:
    """Yield how far the results of runs agree of which one has several workers."""
    for letter, is_whole in (("A", agreement.is_whole_a), ("B", agreement.is_whole_b)):
        if not is_whole:
            yield f"{letter} breaks off: what has no end in both is not compared"
    yield "schedules: not compared, since each worker has steps and a clock of its own"
    outputs, differing = counted(comparison.num_compared, "output"), agreement.differing
    if differing:
        yield f"results: {len(differing):,} of {outputs} ended otherwise: {names(differing)}"
    elif comparison.is_equal:
        yield f"results: equal, {outputs} ended for the same reason with as many tokens"
    else:
        yield f"results: equal in {outputs} that are in both"


def _parting(parting: Parting, *, is_timed: bool) -> Iterator[str]:
    """Yield where the runs part, and what each decides there."""
    times = f" ({time_of(parting.time_a)} in A, {time_of(parting.time_b)} in B)" if is_timed else ""
    yield f"the schedules part at step {parting.step:,}{times}:"
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
            if decision.cached_from is not None:
                found += f", from {label_of_name(decision.cached_from)}"
            left = f", {decision.left:,} left to compute" if decision.left else ""
            return f"admits {label} to slot {decision.slot} ({decision.reason}){found}{left}"
        case PreemptEvent():
            whom = label_of(decision.for_id, decision.for_index, "sample")
            lost = f"{counted(decision.tokens, 'token')} to compute again"
            return (
                f"preempts {label} in slot {decision.slot} for {whom} ({decision.reason}), {lost}"
            )
        case BlockedEvent():
            needed = f", {counted(decision.blocks, 'block')} needed" if decision.blocks else ""
            return f"blocks {label} ({decision.reason}{needed})"
        case DraftEvent() | AcceptEvent() | SpeculateEvent():
            return _of_drafts(decision, label)
        case FinishEvent():
            tokens = counted(decision.tokens, "token")
            return f"ends {label} in slot {decision.slot} ({decision.reason}, {tokens})"
        case _:
            tokens = counted(decision.tokens, "token")
            return f"computes {tokens} of {label}, {decision.left:,} left"


def _of_drafts(decision: DraftEvent | AcceptEvent | SpeculateEvent, label: str) -> str:
    """Return what was decided about drafts, or what became of them."""
    match decision:
        case DraftEvent():
            tokens = counted(decision.tokens, "token")
            drafts = f"a tree of {tokens}" if decision.parents else tokens
            return f"drafts {drafts} for {label} in slot {decision.slot}"
        case AcceptEvent():
            drafts = counted(decision.tokens, "draft")
            return f"accepts {drafts} of {label} in slot {decision.slot}"
        case SpeculateEvent():
            drafts = f"{counted(decision.tokens, 'draft')} a step"
            return f"wants {drafts} for {label} from then on ({decision.reason})"


def _reasons(comparison: RunComparison) -> Iterator[str]:
    """Yield what those the parting is about do there in each run, and why."""
    if comparison.parting is None:
        return
    step = comparison.parting.step
    if comparison.involved:
        yield f"what these do in step {step:,}:"
    missing = "is not known yet" if _is_broken(comparison) else "does not exist"
    for one in comparison.involved:
        for letter, story in (("A", one.a), ("B", one.b)):
            doing = missing if story is None else _doing(story, step)
            yield f"  {one.label} in {letter} {doing}"


def _doing(story: Story, step: int) -> str:
    """Return what the sequence of `story` does in `step`, to follow its name."""
    part = next((part for part in story.parts if part.start <= step < part.end), None)
    if part is None:
        if story.ended is not None and story.ended.step < step:
            return f"has ended with step {story.ended.step:,} ({story.ended.reason})"
        return "has not arrived"
    steps = span_of(part.start, part.end)
    if part.phase == "wait":
        return f"waits {why_waiting(part, story)} ({steps})"
    what = "computes its prompt" if part.phase == "prefill" else "generates"
    slot = next(span.slot for span in story.spans if span.start <= step < span.end)
    still = ", standing still," if part.cause else ""
    return f"holds slot {slot}{still} and {what} ({steps})"


def results_of(comparison: RunComparison, max_rows: int, width: int | None = None) -> Iterator[str]:
    """Yield what came of it in tables, with at most `max_rows` outputs that changed.

    width: how many cells a line may have, None for any number; columns that have no room are left
    out.
    """
    changes, num_compared = comparison.changes, comparison.num_compared
    if changes:
        shown = changes[:max_rows]
        which = "" if len(shown) == len(changes) else f"; the {len(shown)} that changed most"
        yield f"{len(changes):,} of {counted(num_compared, 'output')} went another way{which}:"
        yield from _fitting(list(_change_rows(shown)), width)
    yield "totals:"
    unit = "seconds" if comparison.is_timed else "steps"
    yield from _table(_total_rows(comparison.totals_a, comparison.totals_b, unit))


def _fitting(rows: list[list[str]], width: int | None) -> Iterator[str]:
    """Yield the table of changes, without those of its last columns that have no room."""
    lines, without = _table(rows), list[str]()
    for name, place in _LEAST_WANTED.items():
        if width is None or max(map(cell_width, lines)) <= width:
            break
        rows = [row[:place] for row in rows]
        lines = _table(rows)
        without.insert(0, name)
    yield from lines
    if width is not None and without:
        yield from wrapped(f"  no room for {listed(without, 'and')}: a pipe and --json tell", width)


def _change_rows(changes: Sequence[SampleChange]) -> Iterator[list[str]]:
    yield ["", "latency A", "B", "B - A", "wait A", "B", "preempted A", "B", "ended A", "B"]
    for change in changes:
        a, b = change.a, change.b
        has_both = a.latency is not None and b.latency is not None
        yield [
            cut_middle(change.label, MAX_LABEL_CELLS, "~"),
            *("-" if one.latency is None else f"{one.latency:,.3f}" for one in (a, b)),
            f"{change.later:+,.3f}" if has_both else "-",
            *(f"{one.wait_steps:,}" for one in (a, b)),
            *(f"{one.preemptions:,}" for one in (a, b)),
            *(one.outcome or "-" for one in (a, b)),
        ]


def _total_rows(a: RunFigures, b: RunFigures, unit: str) -> Iterator[list[str]]:
    yield ["", "A", "B", "B - A"]
    has_drafts = a.drafted or b.drafted
    for field, title in (_TOTALS | (_DRAFT_TOTALS if has_drafts else {})).items():
        in_a, in_b = _figure(a, field), _figure(b, field)
        digits = 3 if isinstance(in_a, float) else 0
        figures = ["-" if found is None else f"{found:,.{digits}f}" for found in (in_a, in_b)]
        has_both = in_a is not None and in_b is not None
        yield [
            title.format(unit=unit),
            *figures,
            f"{in_b - in_a:+,.{digits}f}" if has_both else "-",
        ]


def _figure(totals: RunFigures, field: str) -> Any:
    """Return a number of `totals`, or of a distribution in it; None if there is none."""
    name, _, figure = field.partition(".")
    found = getattr(totals, name)
    return getattr(found, figure) if figure and found is not None else found


def _table(rows: Iterable[list[str]]) -> list[str]:
    """Return `rows` in columns: the first to the left, all others to the right."""
    cells = list(rows)
    return [f"  {line}" for line in aligned(cells, range(1, len(cells[0])))]
