"""Explain a request in words, a line for each event, and how two runs differ."""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
from batcher.explaining.differences import RunComparison, SampleChange, role_of
from batcher.explaining.story import (
    GAVE_WAY,
    SHORT_CAUSES,
    STANDSTILLS,
    Cause,
    Story,
    StoryDrafts,
    StoryPart,
    StorySpan,
    StoryWords,
)
from batcher.trace.run import label_of, label_of_name

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

# -- how two runs differ -------------------------------------------------------------------------

MAX_DECISIONS = 5
MAX_LABEL_CELLS = 24
_LEAST_WANTED = {"ended": 8, "preempted": 6, "wait": 4}  # where columns of changes begin
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


def describe(comparison: RunComparison, name_a: str, name_b: str) -> Iterator[str]:
    """Yield the differences between run A and run B, in sentences of any length."""
    yield from (f"A: {name_a}", f"B: {name_b}")
    # Two kinds of step time have no terms to compare.
    has_kinds = any(setting.name == "step_time.name" for setting in comparison.settings)
    for setting in comparison.settings:
        name = setting.name
        if has_kinds and name.startswith("step_time."):
            if name != "step_time.name":
                continue
            name = "step_time"
        a, b = ("not set" if value is None else value for value in (setting.a, setting.b))
        yield f"{name}: {a} in A, {b} in B"
    for letter, labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        if labels:
            yield f"only in {letter}: {names(labels)} ({counted(len(labels), 'output')})"
    if comparison.altered:
        what = "differ in arrival time or in their fields"
        number = counted(len(comparison.altered), "output")
        yield f"not the same: {names(comparison.altered)} {what} ({number})"
    breaks = {"A": comparison.breaks_off_a, "B": comparison.breaks_off_b}
    broken = {letter: step for letter, step in breaks.items() if step is not None}
    if broken:
        where = " and ".join(f"{letter} breaks off at step {at:,}" for letter, at in broken.items())
        yield f"{where}: only what came before step {min(broken.values()):,} is compared"
    parting = comparison.parting
    if parting is None:
        how_far = " up to there" if broken else ""
        yield f"schedules: equal{how_far}, the same decisions in the same steps"
        return
    times = ""
    if comparison.is_timed:
        times = f" ({time_of(parting.time_a)} in A, {time_of(parting.time_b)} in B)"
    yield f"the schedules diverge at step {parting.step:,}{times}:"
    for letter, decisions in (("A", parting.only_a), ("B", parting.only_b)):
        for decision in decisions[:MAX_DECISIONS]:
            yield f"  {letter} {decided(decision)}"
        if len(decisions) > MAX_DECISIONS:
            yield f"  {letter} makes {len(decisions) - MAX_DECISIONS:,} more decisions"
        if not decisions:
            yield f"  {letter} makes no other decision"
    if comparison.involved:
        yield f"these requests in step {parting.step:,}:"
    missing = "is not known yet" if broken else "does not exist"
    for one in comparison.involved:
        for letter, story in (("A", one.a), ("B", one.b)):
            doing = missing if story is None else _doing(story, parting.step)
            yield f"  {one.label} in {letter} {doing}"


def decided(decision: Decision) -> str:
    label = label_of(decision.id, decision.index, role_of(decision))
    match decision:
        case AdmitEvent():
            found = f", {decision.cached:,} tokens found in the cache" if decision.cached else ""
            if decision.cached_from is not None:
                found += f", from {label_of_name(decision.cached_from)}"
            left = f", {decision.left:,} left to compute" if decision.left else ""
            return f"admits {label} to slot {decision.slot} ({decision.reason}){found}{left}"
        case PreemptEvent():
            other = label_of(decision.for_id, decision.for_index, "sample")
            lost = f"{counted(decision.tokens, 'token')} to compute again"
            slot = f"slot {decision.slot}"
            return f"preempts {label} in {slot} for {other} ({decision.reason}), {lost}"
        case BlockedEvent():
            needed = f", {counted(decision.blocks, 'block')} needed" if decision.blocks else ""
            return f"blocks {label} ({decision.reason}{needed})"
        case DraftEvent():
            tokens = counted(decision.tokens, "token")
            drafts = f"a tree of {tokens}" if decision.parents else tokens
            return f"drafts {drafts} for {label} in slot {decision.slot}"
        case AcceptEvent():
            drafts = counted(decision.tokens, "draft")
            return f"accepts {drafts} of {label} in slot {decision.slot}"
        case SpeculateEvent():
            drafts = f"{counted(decision.tokens, 'draft')} a step"
            return f"plans {drafts} for {label} from then on ({decision.reason})"
        case FinishEvent():
            tokens = counted(decision.tokens, "token")
            return f"ends {label} in slot {decision.slot} ({decision.reason}, {tokens})"
        case _:
            tokens = counted(decision.tokens, "token")
            return f"computes {tokens} of {label}, {decision.left:,} left"


def _doing(story: Story, step: int) -> str:
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
    """Yield tables of changes: at most `max_rows` outputs, and the columns that fit `width`."""
    changes = comparison.changes
    if changes:
        shown = changes[:max_rows]
        which = "" if len(shown) == len(changes) else f"; the {len(shown)} that changed most"
        number = counted(comparison.num_compared, "output")
        yield f"{len(changes):,} of {number} changed{which}:"
        rows = [_CHANGE_TITLES, *map(_change_row, shown)]
        lines, without = _table(rows), list[str]()
        for name, place in _LEAST_WANTED.items():
            if width is None or max(map(cell_width, lines)) <= width:
                break
            rows = [row[:place] for row in rows]
            lines = _table(rows)
            without.insert(0, name)
        yield from lines
        if width is not None and without:
            left_out = f"  no room for {listed(without, 'and')}: use a pipe or --json"
            yield from wrapped(left_out, width)
    yield "totals:"
    a, b = comparison.totals_a, comparison.totals_b
    unit = "seconds" if comparison.is_timed else "steps"
    rows = [["", "A", "B", "B - A"]]
    for path, title in (_TOTALS | (_DRAFT_TOTALS if a.drafted or b.drafted else {})).items():
        name, _, figure = path.partition(".")
        found = [getattr(totals, name) for totals in (a, b)]
        if figure:
            found = [one and getattr(one, figure) for one in found]
        in_a, in_b = found
        digits = 3 if isinstance(in_a, float) else 0
        row = ["-" if number is None else f"{number:,.{digits}f}" for number in found]
        has_both = in_a is not None and in_b is not None
        row.append(f"{in_b - in_a:+,.{digits}f}" if has_both else "-")
        rows.append([title.format(unit=unit), *row])
    yield from _table(rows)


_CHANGE_TITLES = [
    "",
    *["latency A", "B", "B - A", "wait A", "B", "preempted A", "B", "ended A", "B"],
]


def _change_row(change: SampleChange) -> list[str]:
    a, b = change.a, change.b
    has_both = a.latency is not None and b.latency is not None
    return [
        cut_middle(change.label, MAX_LABEL_CELLS, "~"),
        *("-" if one.latency is None else f"{one.latency:,.3f}" for one in (a, b)),
        f"{change.later:+,.3f}" if has_both else "-",
        *(f"{one.wait_steps:,}" for one in (a, b)),
        *(f"{one.preemptions:,}" for one in (a, b)),
        *(one.outcome or "-" for one in (a, b)),
    ]


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, range(1, len(rows[0])))]


MAX_NAMES = 3
MAX_POSITIONS = 8  # of drafts


class Length(NamedTuple):
    """How many waits in a row, and slot spans, have lines of their own before they are summed."""

    max_waits: int
    max_spans: int


SHORT, WHOLE = Length(6, 4), Length(sys.maxsize, sys.maxsize)


def tell_reject(reject: RejectEvent) -> list[str]:
    return [f"{reject.id}: not a valid request ({reject.reason}), so it never joined the queue"]


def tell(story: Story, length: Length = SHORT, *, is_so_far: bool = False) -> list[str]:
    """Return a story in lines; is_so_far: the run goes on after its last step."""
    arrived = story.arrived
    if arrived is None:
        return [f"{story.label}: aborted before it arrived"]
    asked = f"{counted(arrived.prompt_tokens, 'prompt token')}, at most {arrived.max_tokens:,} more"
    asked += " by default" if arrived.default_limit else ""
    rows = f", {story.num_rows} slots at once" if story.num_rows > 1 else ""
    return [
        f"{story.label}: {asked}{rows}",
        *(f"  {line}" for line in _lines(story, length, is_so_far=is_so_far)),
    ]


def _lines(story: Story, length: Length, *, is_so_far: bool) -> Iterator[str]:
    arrived, ended = story.arrived, story.ended
    if arrived is None:
        return
    dropped = ""
    if arrived.dropped_turns:
        number, tokens = arrived.dropped_turns, counted(arrived.dropped_tokens, "token")
        turns = "oldest turn" if number == 1 else f"{number:,} oldest turns"
        dropped = f" without the {turns} of its session, {tokens}: the context had no room"
    yield f"arrived at step {arrived.step:,}{_when(story, arrived.step, arrived.time)}{dropped}"
    spans, previous = story.spans, None
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
    if ended is None:
        held = previous is not None and previous.preemption is None
        state = f"it holds slot {previous.slot}" if previous and held else "it waits"
        yield f"now {state}" if is_so_far else f"the trace breaks off while {state}"
    elif ended.reason == "lost":
        worker = "the worker" if story.worker is None else f"worker {story.worker}"
        made = f", {counted(ended.tokens, 'token')}" if story.spans else ""
        yield f"lost with {worker}, which died{made}: it is decoded again from the beginning"
    else:
        reason: str = ended.reason
        if ended.limit is not None:
            reason += f" ({ended.limit})"
        elif reason == "length" and ended.tokens == arrived.max_tokens:
            reason += f" (max_tokens {arrived.max_tokens:,})"
        elif isinstance(ended.stop_reason, int):
            reason += f" token {ended.stop_reason}"
        elif ended.stop_reason is not None:
            reason += f" {json.dumps(ended.stop_reason, ensure_ascii=False)}"
        when = _when(story, ended.step + 1, ended.time)
        tokens = counted(ended.tokens, "token")
        if story.parts:
            yield f"ended with step {ended.step:,}{when}: {reason}, {tokens}"
        else:
            yield f"ended on arrival ({reason}), without a slot"
        if ended.error is not None:
            yield f"{ended.error.code}: {ended.error.message}"
    phases = ("waiting", "preempted", "prefill", "decode", "standing still")
    has_times = story.is_timed and story.seconds != story.steps
    totals = zip(phases, astuple(story.steps), astuple(story.seconds), strict=True)
    parts = [
        f"{counted(int(steps), 'step')} {phase}{f' ({time_of(seconds)})' if has_times else ''}"
        for phase, steps, seconds in totals
        if steps
    ]
    of_what = f": {', '.join(parts)}" if parts else ""
    time = f", {time_of(story.seconds.sum)}" if story.is_timed else ""
    yield f"in all {counted(int(story.steps.sum), 'step')}{time}{of_what}"


def names(labels: Sequence[str]) -> str:
    if len(labels) > MAX_NAMES:
        labels = [*labels[: MAX_NAMES - 1], f"{len(labels) - MAX_NAMES + 1} more"]
    return listed(labels, "and")


def span_of(start: int, end: int) -> str:
    return f"step {start:,}" if end - start == 1 else f"steps {start:,}-{end - 1:,}"


def why_waiting(part: StoryPart, story: Story) -> str:
    """Return the reason for a wait, to follow "waited 3 steps", or "" if unknown."""
    if not part.cause:
        return ""
    if part.cause == "slots":
        wanted = "a slot" if story.num_rows == 1 else f"{story.num_rows} slots at once"
        verb = "was" if len(part.by) == 1 else "were"
        if not part.by:
            return f"for {wanted}"
        return f"for {wanted}: {len(part.by)} of {story.batch} {verb} taken, by {names(part.by)}"
    if part.cause == "queue":
        if story.worker is not None:  # its queue includes requests that it does not have yet
            return "in the queue: its worker had not been handed it, or slots were too few"
        return "in the queue: a request before it needed more slots than were free"
    head = "it" if part.behind is None else part.behind
    total = "" if story.kv_blocks is None else f" of {story.kv_blocks:,}"
    holders = f", and {names(part.by)} held the others" if part.by else ""
    batch = f": {names(part.by)} held it up" if part.by else ""
    flight = f": {len(part.by)} in flight were enough" if part.by else ""
    reason = {
        "kv": f"for KV blocks: {head} needed {part.blocks:,}{total}{holders}",
        "tokens": f"for the token budget: none was left for {head}",
        "preemption": "because a preemption paused admissions for that step",
        "batch": f"for the batch to end{batch}",
        "rate": f"for the rate limit: it was too soon for {head}",
        "concurrency": f"for an overloaded server{flight}",
    }[part.cause]
    return reason if part.behind is None else f"behind {part.behind} {reason}"


def _rounds(story: Story, spans: Sequence[StorySpan], start: int) -> str:
    """Return the sums of `spans`, all preempted, and of their waits from `start` on."""
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
        f"{counted(lost, 'token')} to compute again ({span_of(start, end)}; --all lists each)"
    )


def _waits(
    story: Story, previous: StorySpan | None, until: int | None, length: Length
) -> Iterator[str]:
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
        heads_text = f" (behind {names(behind)})" if behind else ""
        causes.append(f"{num_steps:,} {SHORT_CAUSES[cause]}{heads_text}")
    return ", ".join(causes)


def _span(story: Story, span: StorySpan, previous: StorySpan | None) -> Iterator[str]:
    verb = "admitted to" if previous is None else "resumed in"
    slots = f"slot {span.slot}" if story.num_rows == 1 else f"slot {span.slot} and others"
    slots += "" if story.worker is None else f" of worker {story.worker}"
    aged = found = ""
    if span.aging is not None:
        how_long = duration(span.aging) if story.is_timed else f"{number(span.aging)} steps"
        aged = f", first by --aging: it had waited at least {how_long}"
    if span.cached:
        known = (0 if story.arrived is None else story.arrived.prompt_tokens) + span.generated
        kind = "tokens" if span.generated else "prompt tokens"
        found = f"; {span.cached:,} of {known:,} {kind} were in the cache"
        if span.cached_from is not None:
            label = label_of_name(span.cached_from)
            found += ", its own" if label == story.label else f", from {label}"
    when = _when(story, span.start, span.time)
    yield f"{verb} {slots} at step {span.start:,}{when}{aged}{found}"
    prefill_end = span.end if span.first_token is None else span.first_token + 1
    if span.is_remote:
        if span.retries:
            reasons = Counter(retry.reason for retry in span.retries)
            why = ", ".join(f"{_WHY_RETRIED[reason]} {n:,}x" for reason, n in reasons.items())
            pause = time_of(sum(retry.delay for retry in span.retries))
            more = counted(len(span.retries), "more time")
            yield f"was asked for {more}: {why}; pauses of {pause}"
        came = "no token came"
        if span.first_token is not None:
            came = f"the first token came with step {span.first_token:,}"
        yield f"waited for the server for {_taken(story, span.start, prefill_end)}; {came}"
        if prefill_end < span.end:
            yield f"received its tokens for {_taken(story, prefill_end, span.end)}"
        return
    what = "what it had" if span.generated else "its prompt"
    which = "next" if span.generated else "first"
    came = ""
    if span.first_token is None:
        what = f"a part of {what}"
    elif story.arrived is None or story.arrived.max_tokens:
        came = f"; the {which} token came with step {span.first_token:,}"
    yield f"computed {what} in {_taken(story, span.start, prefill_end)}{came}"
    if prefill_end < span.end:
        yield f"generated for {_taken(story, prefill_end, span.end)}"
    if span.drafts is not None:
        yield from _drafts(span.drafts)
    lost = span.preemption
    if lost is not None:
        why = f"for {lost.for_label}, {GAVE_WAY[lost.reason]}"
        if (lost.for_id, lost.for_index) == (story.id, story.index):
            why = "as no KV block was left for it"
        kept = f", none lost of {lost.generated:,} generated" if lost.generated else ""
        again = counted(lost.tokens, "token")
        yield f"preempted before step {span.end:,} {why}: {again} to compute again{kept}"


_WHY_RETRIED: dict[RetryReason, str] = {
    "overload": "the server was overloaded",
    "connection": "the connection failed",
    "timeout": "no data came in time",
    "answer": "the answer was invalid",
}
_WHY_CHANGED: dict[SpeculateReason, str] = {
    "gain": "more pay off",
    "cost": "more would not pay off",
    "failure": "the drafter failed",
}


def _drafts(drafts: StoryDrafts) -> Iterator[str]:
    if drafts.steps:
        places = drafts.by_position[:MAX_POSITIONS]
        shares = " ".join(whole_percent(accepted / drafted) for drafted, accepted in places)
        more = " ..." if len(drafts.by_position) > MAX_POSITIONS else ""
        drafted, steps = counted(drafts.drafted, "draft"), counted(drafts.steps, "step")
        yield (
            f"had {drafts.accepted:,} of {drafted} accepted in {steps}, besides a token for each "
            f"step; by position {shares}{more}"
        )
    change, times = drafts.last_change, drafts.changes
    if change is not None:
        wanted = f"{counted(change.tokens, 'draft')} a step" if change.tokens else "no more drafts"
        how_often = f", the last of {times:,} changes" if times > 1 else ""
        why = _WHY_CHANGED[change.reason]
        yield f"{wanted} from step {change.step + 1:,} on: {why}{how_often}"


def _taken(story: Story, start: int, end: int) -> str:
    """Return the number of steps in [start, end), and the number and causes of standstills."""
    sums = Counter[Cause]()
    for part in story.parts:
        if part.phase != "wait" and start <= part.start < end:
            sums[part.cause] += part.num_steps
    found = [f"{sums[cause]:,} while {why}" for cause, why in STANDSTILLS.items() if sums[cause]]
    still = f", standing still for {' and '.join(found)}" if found else ""
    return f"{counted(end - start, 'step')} ({span_of(start, end)}{still})"


def _when(story: Story, num_steps: int, time: float) -> str:
    if story.is_timed:
        return f" ({time_of(time)})"
    return "" if time == num_steps else f" (time {time:,.10g})"


def time_of(seconds: float) -> str:
    digits = 1 if round(seconds, 1) == round(seconds, 6) else 3
    return f"{seconds:,.{digits}f} s"


PAGE_WORDS = StoryWords(tell, why_waiting, tell_reject)
