"""The story of a request in words: a sentence for each thing that happened to it."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import astuple

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    BlockedEvent,
    Decision,
    DraftEvent,
    FinishEvent,
    PreemptEvent,
    RejectEvent,
    RetryReason,
    SpeculateEvent,
    SpeculateReason,
)
from batcher.explaining.differences import (
    Parting,
    RunComparison,
    RunFigures,
    SampleChange,
    role_of,
)
from batcher.explaining.story import (
    GAVE_WAY,
    SHORT_CAUSES,
    STANDSTILLS,
    Arrival,
    Cause,
    DraftChange,
    Story,
    StoryDrafts,
    StoryPart,
    StorySpan,
)
from batcher.trace.run import SpanPreemption, label_of, label_of_name

from ..screen.terminal import (
    aligned,
    cell_width,
    counted,
    cut_middle,
    duration,
    listed,
    number,
    whole_percent,
    wrapped,
)

# How two runs differ in words: where they part and why, and a table of what came of it.

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
    name, _, figure = field.partition(".")
    found = getattr(totals, name)
    return getattr(found, figure) if figure and found is not None else found


def _table(rows: Iterable[list[str]]) -> list[str]:
    cells = list(rows)
    return [f"  {line}" for line in aligned(cells, range(1, len(cells[0])))]


MAX_NAMES = 3
MAX_POSITIONS = 8  # of drafts


class Length(NamedTuple):
    """How many waits in a row, and slot spans, are told one by one before they are summed."""

    max_waits: int
    max_spans: int


SHORT, WHOLE = Length(6, 4), Length(sys.maxsize, sys.maxsize)


def tell_reject(reject: RejectEvent) -> list[str]:
    """Return what is to say of a line that was no request."""
    return [f"{reject.id}: no valid request ({reject.reason}), so it never joined the queue"]


def tell(story: Story, length: Length = SHORT) -> list[str]:
    """Return `story` as lines: a title, a sentence for each thing that happened, and the sums."""
    arrived = story.arrived
    if arrived is None:
        return [f"{story.label}: aborted before it arrived"]
    asked = f"{counted(arrived.prompt_tokens, 'prompt token')}, at most {arrived.max_tokens:,} more"
    asked += " by default" if arrived.default_limit else ""
    rows = f", {story.num_rows} slots at once" if story.num_rows > 1 else ""
    came = _when(story, arrived.step, arrived.time)
    lines = [
        f"arrived at step {arrived.step:,}{came}{_dropped(arrived)}",
        *_spans_and_waits(story, length),
        *_ending(story),
        _sums(story),
    ]
    return [f"{story.label}: {asked}{rows}", *(f"  {line}" for line in lines)]


def _dropped(arrived: Arrival) -> str:
    """Return which turns of its session it does not go on from."""
    if not arrived.dropped_turns:
        return ""
    number, tokens = arrived.dropped_turns, counted(arrived.dropped_tokens, "token")
    turns = "oldest turn" if number == 1 else f"{number:,} oldest turns"
    return f" without the {turns} of its session, {tokens}: the context had no room"


def names(labels: Sequence[str]) -> str:
    """Return some of `labels`, and how many more there are."""
    shown = list(labels[:MAX_NAMES])
    if len(labels) > MAX_NAMES:
        return f"{', '.join(shown[:-1])} and {len(labels) - MAX_NAMES + 1} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def span_of(start: int, end: int) -> str:
    """Return the steps [start, end) in words."""
    return f"step {start:,}" if end - start == 1 else f"steps {start:,}-{end - 1:,}"


def why_waiting(part: StoryPart, story: Story) -> str:
    """Return what a sequence waited for in `part`, to follow "waited 3 steps"; "" if not told."""
    if not part.cause:
        return ""
    if part.cause == "slots":
        wanted = "a slot" if story.num_rows == 1 else f"{story.num_rows} slots at once"
        verb = "was" if len(part.by) == 1 else "were"
        taken = f": {len(part.by)} of {story.batch} {verb} taken, by {names(part.by)}"
        return f"for {wanted}{taken if part.by else ''}"
    if part.cause == "queue":
        if story.worker is not None:  # whose queue holds what it will be handed, too
            return "in the queue: its worker had not been handed it, or slots were too few"
        return "in the queue: one before it needed more slots than were free"
    whose = "it" if part.behind is None else part.behind
    batch = f": {names(part.by)} held it up" if part.by else ""
    flight = f": {len(part.by)} in flight were enough" if part.by else ""
    reason = {
        "kv": f"for KV blocks: {whose} needed {_blocks(part, story)}",
        "tokens": f"for tokens of the step: none were left for {whose}",
        "preemption": "because the step preempted: it admits nobody",
        "batch": f"for the batch to end{batch}",
        "rate": f"for its turn at the rate: it was too soon for {whose}",
        "concurrency": f"for the server to have less to do{flight}",
    }[part.cause]
    return reason if part.behind is None else f"behind {part.behind} {reason}"


def _blocks(part: StoryPart, story: Story) -> str:
    total = "" if story.kv_blocks is None else f" of {story.kv_blocks:,}"
    holders = f", and {names(part.by)} held the others" if part.by else ""
    return f"{part.blocks:,}{total}{holders}"


def _spans_and_waits(story: Story, length: Length) -> Iterator[str]:
    """Yield what happened between its arrival and its end, in order."""
    spans = list(story.spans)
    previous: StorySpan | None = None
    if len(spans) > length.max_spans:
        first, *folded, last = spans
        yield from _waits(story, None, first.start, length)
        yield from _span(story, first, None)
        yield _rounds(story, folded, first.end)
        spans, previous = [last], folded[-1]
    for span in spans:
        yield from _waits(story, previous, span.start, length)
        yield from _span(story, span, previous)
        previous = span
    if previous is None or previous.preemption is not None:
        yield from _waits(story, previous, None, length)


def _rounds(story: Story, spans: Sequence[StorySpan], start: int) -> str:
    """Return the sums of `spans`, each ended by a preemption, with the waits from `start` on."""
    end = spans[-1].end
    parts = [part for part in story.parts if start <= part.start < end]
    waits = [part for part in parts if part.phase == "wait"]
    counts = Counter[str]()
    for part in parts:
        is_still = part.phase != "wait" and part.cause
        counts["standing still" if is_still else part.phase] += part.num_steps
    sums = [
        f"{counted(counts[phase], 'step')} {phase}"
        for phase in ("prefill", "decode", "standing still")
        if counts[phase]
    ]
    if waits:
        causes = _by_cause(waits)
        sums.insert(0, f"{counted(counts['wait'], 'step')} waiting{causes and f' ({causes})'}")
    drafts = [span.drafts for span in spans if span.drafts is not None]
    if drafts:
        accepted, drafted = sum(d.accepted for d in drafts), sum(d.drafted for d in drafts)
        sums.append(f"{accepted:,} of {counted(drafted, 'draft')} accepted")
    lost = sum(span.preemption.tokens for span in spans if span.preemption is not None)
    return (
        f"waited, was resumed and preempted again {len(spans):,} times: {', '.join(sums)}; "
        f"{counted(lost, 'token')} to compute again ({span_of(start, end)}; --all tells each)"
    )


def _waits(
    story: Story, previous: StorySpan | None, until: int | None, length: Length
) -> Iterator[str]:
    """Yield what it waited for after `previous`, up to step `until`."""
    start = 0 if previous is None else previous.end
    parts = [
        part
        for part in story.parts
        if part.phase == "wait" and part.start >= start and (until is None or part.end <= until)
    ]
    if len(parts) > length.max_waits:
        total = counted(sum(part.num_steps for part in parts), "step")
        yield f"waited {total}: {_by_cause(parts)} ({span_of(parts[0].start, parts[-1].end)})"
        return
    for part in parts:
        passed = f"; {counted(part.num_passed, 'other')} went before it" if part.num_passed else ""
        waited = f"waited {counted(part.num_steps, 'step')} {why_waiting(part, story)}".rstrip()
        yield f"{waited}{passed} ({span_of(part.start, part.end)})"


def _by_cause(parts: Sequence[StoryPart]) -> str:
    """Return the sums of waits, the cause that took most first."""
    sums: Counter[Cause] = Counter()
    heads: defaultdict[Cause, Counter[str]] = defaultdict(Counter)
    for part in parts:
        if part.cause:
            sums[part.cause] += part.num_steps
        if part.behind is not None:
            heads[part.cause][part.behind] += part.num_steps
    causes = []
    for cause, num_steps in sums.most_common():
        behind = [f"{label} for {number:,}" for label, number in heads[cause].most_common()]
        whom = f" (behind {names(behind)})" if behind else ""
        causes.append(f"{num_steps:,} {SHORT_CAUSES[cause]}{whom}")
    return ", ".join(causes)


def _span(story: Story, span: StorySpan, previous: StorySpan | None) -> Iterator[str]:
    """Yield what happened in one slot span."""
    verb = "admitted to" if previous is None else "resumed in"
    slots = f"slot {span.slot}" if story.num_rows == 1 else f"slot {span.slot} and others"
    slots += "" if story.worker is None else f" of worker {story.worker}"
    when = _when(story, span.start, span.time)
    yield f"{verb} {slots} at step {span.start:,}{when}{_aged(story, span)}{_found(story, span)}"
    if span.is_remote:
        yield from _asked(story, span)
        return
    prefill_end = span.end if span.first_token is None else span.first_token + 1
    what = "what it had" if span.generated else "its prompt"
    which = "next" if span.generated else "first"
    if span.first_token is None:
        what, came = f"a part of {what}", ""
    elif story.arrived is not None and story.arrived.max_tokens == 0:
        came = ""
    else:
        came = f"; the {which} token came with step {span.first_token:,}"
    yield f"computed {what} in {_taken(story, span.start, prefill_end)}{came}"
    if prefill_end < span.end:
        yield f"generated for {_taken(story, prefill_end, span.end)}"
    if span.drafts is not None:
        yield from _drafts(span.drafts)
    if span.preemption is not None:
        yield _preemption(story, span, span.preemption)


def _aged(story: Story, span: StorySpan) -> str:
    if span.aging is None:
        return ""
    how_long = duration(span.aging) if story.is_timed else f"{number(span.aging)} steps"
    return f", by --aging first whatever the policy: it had arrived {how_long} before, or more"


def _found(story: Story, span: StorySpan) -> str:
    """Return what a slot span found in the cache, and from whom, to follow its beginning."""
    if not span.cached:
        return ""
    known = (0 if story.arrived is None else story.arrived.prompt_tokens) + span.generated
    kind = "tokens" if span.generated else "prompt tokens"
    found = f"; {span.cached:,} of {known:,} {kind} were in the cache"
    if span.cached_from is None:
        return found
    label = label_of_name(span.cached_from)
    return f"{found}, its own" if label == story.label else f"{found}, from {label}"


def _asked(story: Story, span: StorySpan) -> Iterator[str]:
    """Yield what happened in a slot whose row a server answers."""
    if span.retries:
        reasons = Counter(retry.reason for retry in span.retries)
        why = ", ".join(f"{_WHY_RETRIED[reason]} {n:,}x" for reason, n in reasons.items())
        pause = time_of(sum(retry.delay for retry in span.retries))
        yield f"was asked for {counted(len(span.retries), 'more time')}: {why}; pauses of {pause}"
    if span.first_token is None:
        yield f"waited for the server for {_taken(story, span.start, span.end)}; no token came"
        return
    asked = _taken(story, span.start, span.first_token + 1)
    yield f"waited for the server for {asked}; the first token came with step {span.first_token:,}"
    if span.first_token + 1 < span.end:
        yield f"received its tokens for {_taken(story, span.first_token + 1, span.end)}"


_WHY_RETRIED: dict[RetryReason, str] = {
    "overload": "the server had too much to do",
    "connection": "the connection failed",
    "timeout": "nothing came for too long",
    "answer": "what came was no answer",
}


def _drafts(drafts: StoryDrafts) -> Iterator[str]:
    """Yield what drafts brought it, and why there were more of them, or fewer, in the end."""
    if drafts.steps:
        places = drafts.by_position[:MAX_POSITIONS]
        shares = " ".join(whole_percent(accepted / drafted) for drafted, accepted in places)
        more = " ..." if len(drafts.by_position) > MAX_POSITIONS else ""
        drafted, steps = counted(drafts.drafted, "draft"), counted(drafts.steps, "step")
        yield (
            f"had {drafts.accepted:,} of {drafted} accepted in {steps}, besides a token for each "
            f"step; by position {shares}{more}"
        )
    if drafts.last_change is not None:
        yield _change(drafts.last_change, drafts.changes)


_WHY_CHANGED: dict[SpeculateReason, str] = {
    "gain": "more were worth their time",
    "cost": "more were not worth their time",
    "failure": "what proposes them failed",
}


def _change(change: DraftChange, number: int) -> str:
    wanted = "no more drafts" if not change.tokens else f"{counted(change.tokens, 'draft')} a step"
    how_often = f", the last of {number:,} changes" if number > 1 else ""
    return f"{wanted} from step {change.step + 1:,} on: {_WHY_CHANGED[change.reason]}{how_often}"


def _preemption(story: Story, span: StorySpan, preemption: SpanPreemption) -> str:
    why = f"for {preemption.for_label}, {GAVE_WAY[preemption.reason]}"
    if (preemption.for_id, preemption.for_index) == (story.id, story.index):
        why = "as no KV block was left for it"
    lost = f"{counted(preemption.tokens, 'token')} to compute again"
    kept = f", none lost of {preemption.generated:,} generated" if preemption.generated else ""
    return f"preempted before step {span.end:,} {why}: {lost}{kept}"


def _taken(story: Story, start: int, end: int) -> str:
    """Return how many steps [start, end) are, and in how many it had no share, and why."""
    sums = Counter[Cause]()
    for part in story.parts:
        if part.phase != "wait" and start <= part.start < end:
            sums[part.cause] += part.num_steps
    found = [f"{sums[cause]:,} while {why}" for cause, why in STANDSTILLS.items() if sums[cause]]
    still = f", standing still for {' and '.join(found)}" if found else ""
    return f"{counted(end - start, 'step')} ({span_of(start, end)}{still})"


def _ending(story: Story) -> Iterator[str]:
    """Yield how it ended, and what went wrong."""
    ended = story.ended
    if ended is None:
        state = "it waits"
        if story.spans and story.spans[-1].preemption is None:
            state = f"it holds slot {story.spans[-1].slot}"
        yield f"the trace breaks off while {state}"
        return
    tokens = counted(ended.tokens, "token")
    if ended.reason == "lost":
        whose = "the worker" if story.worker is None else f"worker {story.worker}"
        made = f", {tokens}" if story.spans else ""
        yield f"lost with {whose}, which died{made}: it is decoded again from the beginning"
        return
    reason = ended.reason if ended.limit is None else f"{ended.reason} ({ended.limit})"
    when = _when(story, ended.step + 1, ended.time)
    yield (
        f"ended with step {ended.step:,}{when}: {reason}, {tokens}"
        if story.parts
        else f"ended where it arrived ({reason}), without a slot"
    )
    if ended.error is not None:
        yield f"{ended.error.code}: {ended.error.message}"


def _sums(story: Story) -> str:
    """Return what its time went into; in seconds, too, where they are not as many as steps."""
    names = ("waiting", "preempted", "prefill", "decode", "standing still")
    has_times = story.is_timed and story.seconds != story.steps
    parts = [
        f"{counted(int(number), 'step')} {what}{f' ({time_of(seconds)})' if has_times else ''}"
        for what, number, seconds in zip(
            names, astuple(story.steps), astuple(story.seconds), strict=True
        )
        if number
    ]
    of_what = f": {', '.join(parts)}" if parts else ""
    time = f", {time_of(story.seconds.sum)}" if story.is_timed else ""
    return f"in all {counted(int(story.steps.sum), 'step')}{time}{of_what}"


def _when(story: Story, num_steps: int, time: float) -> str:
    if story.is_timed:
        return f" ({time_of(time)})"
    return "" if time == num_steps else f" (time {time:,.10g})"


def time_of(seconds: float) -> str:
    """Return a time such that a thousandth of a second shows, if it is not a whole number."""
    digits = 1 if round(seconds, 1) == round(seconds, 6) else 3
    return f"{seconds:,.{digits}f} s"
