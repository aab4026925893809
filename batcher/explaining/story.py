"""A request's story as a record: when it came and went, its slot spans, and what each step was for.

Rule: each step from its arrival to its end belongs to exactly one part, and the parts follow each
other without a gap, so their steps and seconds add up to those from arrival to end.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from operator import attrgetter
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.events import (
    ArriveEvent,
    BlockedReason,
    EndReason,
    FinishEvent,
    PreemptReason,
    RejectEvent,
    RetryEvent,
    RetryReason,
    SequenceName,
)
from batcher.explaining.reading import KeptRequests
from batcher.explaining.story_drafts import StoryDrafts
from batcher.result import ErrorInfo, LengthLimit
from batcher.trace.aging import aging_of, is_aged
from batcher.trace.records import (
    AdmissionRecord,
    BlockedSpan,
    RequestTimeline,
    SpanPreemption,
    is_follower,
)
from batcher.trace.timeline import Timeline

TIME_DIGITS = 9  # of seconds, after the point
_WAY = attrgetter("phase", "cause", "behind", "blocks")

Phase = Literal["wait", "prefill", "decode"]
Cause = Literal["", "slots", "queue", "prefill"] | BlockedReason

# How people are told of them, and of preemptions.
SHORT_CAUSES: Mapping[Cause, str] = {
    "slots": "for a slot",
    "queue": "for others before it in the queue",
    "kv": "for KV blocks",
    "tokens": "for tokens of the step",
    "preemption": "because the step preempted",
    "batch": "for the batch to end",
    "rate": "for its turn at the rate",
    "concurrency": "for the server to have less to do",
}
STANDSTILLS: Mapping[Cause, str] = {
    "tokens": "others used up the tokens",
    "prefill": "others computed their prompts",
}
GAVE_WAY: Mapping[PreemptReason, str] = {
    "kv": "which needed KV blocks",
    "priority": "whose priority is a smaller number",
    "deadline": "which would have missed its deadline",
}


class StoryPart(Struct, frozen=True, omit_defaults=True):
    """Steps [start, end) that went the same way.

    phase: "wait" for a slot; "prefill" up to and including the first token; then "decode".
    cause: of a wait, "slots" (too few were free), what blocked it or the one `behind` which it
    stood (see BlockedEvent), or "queue" (others before it needed more slots than were free).  Of a
    standstill in a slot, "tokens" (others used up what a step may compute) or "prefill" (the step
    computed prompts of others alone).  "" if it had its share.
    blocks: how many the one that was blocked needed.
    by: who had slots in the first of the steps, if it waited; a label for each slot.
    num_passed: how many were admitted before it meanwhile.
    """

    start: int
    end: int
    phase: Phase
    cause: Cause = ""
    behind: str | None = None
    blocks: int = 0
    by: tuple[str, ...] = ()
    num_passed: int = 0

    @property
    def num_steps(self) -> int:
        """How many steps these are."""
        return self.end - self.start


class Arrival(Struct, frozen=True, omit_defaults=True):
    """When a request came, and what it asked for; time in seconds.

    dropped_turns, dropped_tokens, default_limit: as in its event.
    """

    step: int
    time: float
    prompt_tokens: int
    max_tokens: int
    dropped_turns: int = 0
    dropped_tokens: int = 0
    default_limit: bool = False

    @classmethod
    def by(cls, event: ArriveEvent, finish: FinishEvent | None) -> "Arrival":
        """Return what `event` tells of it, and `finish` of a prompt that a server counts."""
        num_prompt = event.prompt_tokens
        if finish is not None and finish.prompt_tokens is not None:
            num_prompt = finish.prompt_tokens
        asked = num_prompt, event.max_tokens
        dropped = event.dropped_turns, event.dropped_tokens
        return cls(event.step, event.time, *asked, *dropped, event.default_limit)


class StoryRetry(Struct, frozen=True):
    """A server had to be asked again: in which step it failed, why, and the pause in seconds."""

    step: int
    reason: RetryReason
    delay: float

    @classmethod
    def by(cls, event: RetryEvent) -> "StoryRetry":
        """Return what `event` tells of it."""
        return cls(event.step, event.reason, event.delay)


class StorySpan(Struct, frozen=True, omit_defaults=True):
    """A slot span, over the steps [start, end).

    time: when it began, in seconds.  first_token: the step that was through with what it began
    with; None if none was.  cached, generated, cached_from: as in an AdmitEvent.
    drafts: None without any.
    is_remote: whether a server answered it; retries: how often it had to be asked again.
    aging: the time that it had waited for, so that it went first; None if it went by the policy.
    """

    slot: int
    start: int
    end: int
    time: float
    first_token: int | None
    cached: int = 0
    generated: int = 0
    drafts: StoryDrafts | None = None
    preemption: SpanPreemption | None = None
    is_remote: bool = False
    retries: tuple[StoryRetry, ...] = ()
    cached_from: SequenceName | None = None
    aging: float | None = None


class RequestEnd(Struct, frozen=True, omit_defaults=True):
    """How a sequence ended: `step` was its last, `time` is when that was over, in seconds.

    limit, error: as in its result.
    """

    step: int
    time: float
    reason: EndReason
    tokens: int
    limit: LengthLimit | None = None
    error: ErrorInfo | None = None

    @classmethod
    def by(cls, event: FinishEvent, time: float) -> "RequestEnd":
        """Return what `event` tells of it."""
        return cls(event.step, time, event.reason, event.tokens, event.limit, event.error)


class PhaseTotals(Struct, frozen=True):
    """How many steps, or seconds, went into each phase.

    wait: those before it first had a slot.  preempted: those in the queue after it had lost one.
    standstill: those in a slot in which it had no share of what the step computed.
    """

    wait: float
    preempted: float
    prefill: float
    decode: float
    standstill: float

    @property
    def sum(self) -> float:
        """All of them."""
        return self.wait + self.preempted + self.prefill + self.decode + self.standstill


class Story(Struct, frozen=True, omit_defaults=True):
    """All about one sample, or the beams of a request.

    arrived: None if it was aborted before.  ended: None if the events break off before.
    batch, kv_blocks: how many slots and blocks the run had; kv_blocks is None without a limit.
    worker: whose request it was, of several: they have a batch and blocks each.
    is_timed: whether a step may last another time than 1.0, so that times are seconds.
    """

    id: str
    index: int
    label: str
    num_rows: int
    batch: int
    kv_blocks: int | None
    arrived: Arrival | None
    parts: list[StoryPart]
    spans: list[StorySpan]
    ended: RequestEnd | None
    steps: PhaseTotals
    seconds: PhaseTotals
    worker: int | None = None
    is_timed: bool = False


class RequestStories(Struct, frozen=True):
    """What a trace tells of an id: the stories of its samples, and its lines that were invalid."""

    stories: list[Story]
    rejects: list[RejectEvent]


def answer_of(workers: Sequence[KeptRequests]) -> RequestStories:
    """Return the stories of all that was kept of each worker of a run."""
    answer = RequestStories([], [])
    for number, kept in enumerate(workers):
        stories = [story_of(kept.timeline, request) for request in kept.all]
        if len(workers) > 1:
            stories = [_of_worker(story, number) for story in stories]
        answer.stories.extend(stories)
        answer.rejects.extend(kept.rejects)
    return answer


def _of_worker(story: Story, worker: int) -> Story:
    """Return a story as one of a run of several workers, whose slots are numbered together."""
    first = worker * story.batch
    spans = [replace(span, slot=first + span.slot) for span in story.spans]
    return replace(story, worker=worker, spans=spans)


def story_of(timeline: Timeline, request: RequestTimeline) -> Story:
    """Return the story of `request`.

    Raises:
        InvariantError: the parts do not add up to the whole.
    """
    parts, arrive = explain(timeline, request), request.arrive
    if sum(part.num_steps for part in parts) != len(request.steps(timeline.num_steps)):
        raise InvariantError(f"the story of {request.label!r} leaves out a step")
    kv_blocks = timeline.run.scheduling.get("kv_blocks")
    return Story(
        id=request.id,
        index=request.index,
        label=request.label,
        num_rows=request.num_rows,
        batch=timeline.num_slots,
        kv_blocks=kv_blocks if isinstance(kv_blocks, int) else None,
        arrived=None if arrive is None else Arrival.by(arrive, request.finish),
        parts=parts,
        spans=[_span_of(timeline, request, admission) for admission in request.admissions],
        ended=_ending_of(timeline, request),
        steps=_totals(parts, [part.num_steps for part in parts]),
        seconds=_totals(parts, _seconds(timeline, request, parts)),
        is_timed=bool(timeline.run.step_time),
    )


def _span_of(timeline: Timeline, request: RequestTimeline, admission: AdmissionRecord) -> StorySpan:
    admit, preempt = admission.event, admission.preempt
    aging = aging_of(timeline.run)
    return StorySpan(
        admit.slot,
        admit.step,
        request.end(timeline.num_steps) if preempt is None else preempt.step,
        admit.time,
        admission.first_token,
        admit.cached,
        admit.generated,
        None if admission.drafts is None else StoryDrafts.of(admission.drafts),
        None if preempt is None else SpanPreemption.by(preempt),
        timeline.run.layout == "remote",
        tuple(StoryRetry.by(event) for event in admission.retries or ()),
        admit.cached_from,
        aging if aging is not None and is_aged(admit, request.arrive, aging) else None,
    )


def _ending_of(timeline: Timeline, request: RequestTimeline) -> RequestEnd | None:
    finish = request.finish
    if finish is None:
        return None
    time = timeline.figures.end_of(finish.step) if request.admission is not None else finish.time
    return RequestEnd.by(finish, time)


def _seconds(timeline: Timeline, request: RequestTimeline, parts: list[StoryPart]) -> list[float]:
    """Return how long each of `parts` lasted; the first begins with the arrival."""
    if not parts or request.arrive is None:
        return []
    figures = timeline.figures
    begins = [request.arrive.time, *(figures.start_of(part.start) for part in parts[1:])]
    ends = [*begins[1:], figures.end_of(parts[-1].end - 1)]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def _totals(parts: list[StoryPart], amounts: list[float] | list[int]) -> PhaseTotals:
    """Return the sums of `amounts`, one for each of `parts`."""
    sums: dict[str, float] = dict.fromkeys(PhaseTotals.__struct_fields__, 0)
    waiting = "wait"
    for part, amount in zip(parts, amounts, strict=True):
        if part.phase == "wait":
            sums[waiting] += amount
        else:
            waiting = "preempted"
            sums["standstill" if part.cause else part.phase] += amount
    return PhaseTotals(**{what: round(total, TIME_DIGITS) for what, total in sums.items()})


def explain(timeline: Timeline, request: RequestTimeline) -> list[StoryPart]:
    """Return the parts of `request`, from its arrival to its end."""
    steps = request.steps(timeline.num_steps)
    parts: list[StoryPart] = []
    for part in _smallest_parts(timeline, request, steps) if steps else ():
        if parts and _WAY(parts[-1]) == _WAY(part):
            parts[-1] = replace(parts[-1], end=part.end)
        else:
            parts.append(part)
    return _with_passed(timeline, parts)


def _smallest_parts(
    timeline: Timeline, request: RequestTimeline, steps: range
) -> Iterator[StoryPart]:
    """Yield all of `steps`, as parts in which nothing changes for the request."""
    admissions, all_blocked = iter(request.admissions), iter(timeline.blocked)
    admission, blocked = next(admissions, None), next(all_blocked, None)
    points = _turning_points(timeline, request, steps)
    for batch, labels in _cut(timeline.select_batches(steps), points):
        step = batch.start
        while admission is not None and admission.preempt and admission.preempt.step <= step:
            admission = next(admissions, None)
        while blocked is not None and blocked.end <= step:
            blocked = next(all_blocked, None)
        if admission is not None and admission.event.step <= step:
            yield _part_in_slot(timeline, request, admission, batch)
        else:
            is_blocked = blocked is not None and blocked.start <= step
            num_free = timeline.num_slots - len(labels)
            yield _wait(request, batch, labels, num_free, blocked if is_blocked else None)


def _turning_points(timeline: Timeline, request: RequestTimeline, steps: range) -> Iterator[int]:
    """Yield, ascending, the steps from which on something may be otherwise than before."""
    own = set[int]()
    for admission in request.admissions:
        own.add(admission.event.step)
        own.add(admission.event.step + 1)
        own.update(step for first in admission.chunks or () for step in (first, first + 1))
        if admission.first_token is not None:
            own.add(admission.first_token + 1)
        if admission.preempt is not None:
            own.add(admission.preempt.step)
    return merge(
        sorted(own),
        (step for span in timeline.blocked for step in (span.start, span.end)),
        timeline.figures.standstill_changes(steps),
    )


def _cut(
    batches: Iterator[tuple[range, tuple[str, ...]]], points: Iterator[int]
) -> Iterator[tuple[range, tuple[str, ...]]]:
    """Yield `batches`, cut at `points`."""
    point = next(points, None)
    for steps, labels in batches:
        start = steps.start
        while point is not None and point < steps.stop:
            if point > start:
                yield range(start, point), labels
                start = point
            point = next(points, None)
        yield range(start, steps.stop), labels


def _part_in_slot(
    timeline: Timeline, request: RequestTimeline, admission: AdmissionRecord, steps: range
) -> StoryPart:
    """Return the part that `steps` in a slot are."""
    start, stop = steps.start, steps.stop
    is_decode = admission.first_token is not None and start > admission.first_token
    if timeline.run.layout == "remote":  # no step of the server is known
        return StoryPart(start, stop, "decode" if is_decode else "prefill")
    if is_decode:
        is_standstill = timeline.figures.is_standstill(start)
        return StoryPart(start, stop, "decode", "prefill" if is_standstill else "")
    is_admitted = start == admission.event.step and computes_at_once(request, admission)
    if is_admitted or admission.has_chunk(start):
        return StoryPart(start, stop, "prefill")
    is_prefill_first = timeline.run.scheduling.get("prefill_order") == "prefill-first"
    return StoryPart(start, stop, "prefill", "prefill" if is_prefill_first else "tokens")


def computes_at_once(request: RequestTimeline, admission: AdmissionRecord) -> bool:
    """Return whether the step of an admission computed any of what the sequence began with."""
    if request.arrive is None:
        return True
    admit = admission.event
    num_known = request.arrive.prompt_tokens + admit.generated
    return num_known - admit.cached > admit.left


def _wait(
    request: RequestTimeline,
    steps: range,
    by: tuple[str, ...],
    num_free: int,
    blocked: BlockedSpan | None,
) -> StoryPart:
    """Return some steps of a wait as a part; while no slot is free, nothing else counts."""
    if num_free and blocked is not None:
        is_itself = (blocked.id, blocked.index) == (request.id, request.index)
        behind = None if is_itself else blocked.label
        return StoryPart(
            steps.start, steps.stop, "wait", blocked.reason, behind, blocked.blocks, by
        )
    cause: Cause = "slots" if num_free < request.num_rows else "queue"
    return StoryPart(steps.start, steps.stop, "wait", cause, by=by)


def _with_passed(timeline: Timeline, parts: list[StoryPart]) -> list[StoryPart]:
    """Return `parts`, the waits with how many were admitted meanwhile.

    What is admitted at the end of a wait, or after it, did not come before it.
    """
    waits = [part for part in parts if part.phase == "wait"]
    ends = [part.end for part in waits]
    num_passed = [0] * len(waits)
    for span in timeline.spans if waits else ():
        number = bisect_right(ends, span.start)
        if number < len(waits) and span.start >= waits[number].start and not is_follower(span):
            num_passed[number] += 1
    passed = iter(num_passed)
    return [
        replace(part, num_passed=next(passed)) if part.phase == "wait" else part for part in parts
    ]
