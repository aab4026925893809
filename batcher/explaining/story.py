"""The story of a request as a record: arrival, waits, slots, what each step did, and the end.

Rule: each step from arrival to end belongs to exactly one part, and parts follow each other without
a gap.  So their steps and seconds add up to those from arrival to end.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec import Struct, convert
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedReason,
    EndEvent,
    EndReason,
    Event,
    FinishEvent,
    PreemptEvent,
    PreemptReason,
    PrefillEvent,
    ReceiveEvent,
    RejectEvent,
    RestartEvent,
    RetryReason,
    RunEvent,
    SequenceName,
    SpeculateReason,
)
from batcher.metrics.times import StepFeed, WholeStep
from batcher.result import ErrorInfo, LengthLimit, StopReason
from batcher.trace.run import (
    AdmissionRecord,
    RequestFold,
    RequestTimeline,
    SpanPreemption,
    aging_of,
    is_aged,
    is_follower,
)
from batcher.trace.timeline import Timeline, cut

# The phases of a request, in seconds of the clock: they follow each other without a gap from
# its arrival to the end of its last step.  Nothing is kept of requests that have ended.

PhaseName = Literal["queue", "prefill", "decode", "preempted"]


class RequestPhase(NamedTuple):
    """A phase from `start` to `end`, in seconds; slot: None while it waits."""

    name: PhaseName
    start: float
    end: float
    slot: int | None


class EndedSequence(NamedTuple):
    """A sample, or all beams of a request, that has ended.

    end: of its last step; first_token: the end of the step of its first token, or None; in seconds.
    cached: prefix-cache hits of its first admission.
    """

    arrive: ArriveEvent
    finish: FinishEvent
    end: float
    first_token: float | None
    cached: int
    phases: list[RequestPhase]

    def seconds_in(self, *names: PhaseName) -> float:
        return sum(phase.end - phase.start for phase in self.phases if phase.name in names)


class PhaseFollower:
    """Turns the events of a run into the phases of each sequence that ends."""

    def __init__(self) -> None:
        self._fold = RequestFold()
        self._run: RunEvent | None = None
        self._feed: StepFeed | None = None
        self._marks: dict[int, list[tuple[PhaseName, float, int | None]]] = {}
        self._first_tokens: dict[int, float] = {}
        self._decoding_next: list[tuple[int, int]] = []  # from the next step on, in which slot
        self._last_end = 0.0

    def take(self, event: Event) -> Iterator[EndedSequence]:
        """Add the next event; yield the sequences that have ended by now."""
        found = self._fold.take(event)
        if isinstance(event, RunEvent):
            self._run, self._feed = event, StepFeed(event)
            return
        if self._run is None or self._feed is None:
            raise InvariantError("there is no run event")
        if isinstance(event, RestartEvent):  # others do again what has not ended
            yield from self.close(event.step)
            for known in (self._marks, self._first_tokens, self._decoding_next):
                known.clear()
            self._feed = StepFeed(self._run)
            self._feed.start_at(event.step, event.time)
            return
        for step in self._feed.take(event, found):
            yield from self._step(step)
        if isinstance(event, EndEvent):
            yield from self.close(event.steps)

    def close(self, num_steps: int) -> Iterator[EndedSequence]:
        if self._feed is not None:
            for step in self._feed.catch_up(num_steps):
                yield from self._step(step)
            for event, found in self._feed.take_events():
                if isinstance(event, FinishEvent):
                    yield from self._finish(event, found, self._last_end)

    def _step(self, step: WholeStep) -> Iterator[EndedSequence]:
        for event, found in step.events:
            if isinstance(event, FinishEvent) and event.step < step.step:
                yield from self._finish(event, found, self._last_end)  # aborted between two steps
        for key, slot in self._decoding_next:
            if key in self._marks:
                self._marks[key].append(("decode", step.start, slot))
        self._decoding_next.clear()
        for event, found in step.events:
            if isinstance(event, FinishEvent) and event.step >= step.step:
                yield from self._finish(event, found, step.end)
            if found.arrive is None or is_follower(found):
                continue
            key = id(found)
            if isinstance(event, AdmitEvent):
                marks = self._marks.setdefault(key, [("queue", found.arrive.time, None)])
                marks.append(("prefill", step.start, event.slot))
            elif isinstance(event, PreemptEvent):
                self._marks[key].append(("preempted", step.start, None))
            if isinstance(event, AdmitEvent | PrefillEvent | ReceiveEvent) and any(
                admission.first_token == event.step for admission in found.admissions
            ):
                self._first_tokens.setdefault(key, step.end)
                self._decoding_next.append((key, event.slot))
        self._last_end = step.end

    def _finish(
        self, event: FinishEvent, found: RequestTimeline, end: float
    ) -> Iterator[EndedSequence]:
        marks, first_token = self._marks.pop(id(found), []), self._first_tokens.pop(id(found), None)
        if found.arrive is None or is_follower(found):
            return
        if found.admission is None:  # it ended while it waited
            end = max(event.time, found.arrive.time)
        marks = marks or [("queue", found.arrive.time, None)]
        ends = [*(start for _, start, _ in marks[1:]), end]
        phases = [
            RequestPhase(name, start, until, slot)
            for (name, start, slot), until in zip(marks, ends, strict=True)
            if until > start
        ]
        cached = found.admissions[0].event.cached if found.admissions else 0
        yield EndedSequence(found.arrive, event, end, first_token, cached, phases)


class DraftChange(Struct, frozen=True):
    """From the step after `step` on, each step has `tokens` drafts."""

    step: int
    tokens: int
    reason: SpeculateReason


class StoryDrafts(Struct, frozen=True, omit_defaults=True):
    """The drafts of a sequence during one stay in a slot.

    by_position: as in DraftCounts.  changes: how often the number of drafts changed; last_change:
    the last time.
    """

    steps: int
    drafted: int
    accepted: int
    by_position: list[tuple[int, int]]
    changes: int = 0
    last_change: DraftChange | None = None


MAX_IDS = 20_000


class KeptRequests:
    """The timeline of a run with all its requests, or with `request_id` alone.

    all: sequences with an arrival of their own, in order of their first event.  rejects: invalid
    lines.
    is_known: whether the requested id exists.  ids: the first other ids.
    """

    def __init__(self, request_id: str | None = None) -> None:
        self.timeline = Timeline()
        self.all: list[RequestTimeline] = []
        self.rejects: list[RejectEvent] = []
        self.is_known = False
        self.ids: set[str] = set()
        self._wanted = request_id

    def add(self, event: Event) -> None:
        found = self.timeline.add(event)
        if isinstance(event, RejectEvent):
            if self._wants(event.id):
                self.rejects.append(event)
        elif found is not None and found.first_event is event and not is_follower(found):
            self.all += [found] if self._wants(found.id) else []

    @property
    def longest(self) -> RequestTimeline | None:
        """The request that took longest, ended or not; the first of equals."""
        return max(self.all, key=self.seconds, default=None)

    @property
    def longest_wait(self) -> RequestTimeline | None:
        """The request that waited longest for its first slot; the first of equals."""
        return max(self.all, key=self._waited, default=None)

    def _waited(self, request: RequestTimeline) -> float:
        if request.arrive is None or not request.admissions:
            return self.seconds(request)
        return request.admissions[0].event.time - request.arrive.time

    def only(self, request_id: str) -> None:
        self.all = [request for request in self.all if request.id == request_id]
        self.rejects = [reject for reject in self.rejects if reject.id == request_id]

    def seconds(self, request: RequestTimeline) -> float:
        timeline = self.timeline.of_worker(request.worker)
        steps = request.steps(timeline.num_steps)
        if not steps or request.arrive is None:
            return 0.0
        return timeline.figures.end_of(steps[-1]) - request.arrive.time

    def _wants(self, request_id: str) -> bool:
        if self._wanted is None or self._wanted == request_id:
            self.is_known = True
            return True
        if len(self.ids) < MAX_IDS:
            self.ids.add(request_id)
        return False


def read_requests(events: Iterable[Event], request_id: str | None = None) -> KeptRequests:
    """Return the timeline of a run with its requests, or with those of one id; see from_events."""
    kept = KeptRequests(request_id)
    for event in events:
        kept.add(event)
    kept.timeline.close()
    kept.timeline.check_integrity()
    return kept


TIME_DIGITS = 9  # of seconds, after the point
_WAY = attrgetter("phase", "cause", "behind", "blocks")

Phase = Literal["wait", "prefill", "decode"]
Cause = Literal["", "slots", "queue", "prefill"] | BlockedReason

# How people are told of them, and of preemptions.
SHORT_CAUSES: Mapping[Cause, str] = {
    "slots": "for a slot",
    "queue": "for others before it in the queue",
    "kv": "for KV blocks",
    "tokens": "for the token budget",
    "preemption": "because the step preempted",
    "batch": "for the batch to end",
    "rate": "for the rate limit",
    "concurrency": "for an overloaded server",
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
    """Steps [start, end) in which the same thing happened.

    phase: "wait" for a slot; "prefill" up to and including the first token; then "decode".
    cause: of a wait: "slots" (too few were free), a BlockedReason with the blocked request in
    `behind` (None if it is the request itself), or "queue" (requests before it needed more slots
    than were free).  Of a standstill in a slot: "tokens" (other rows used up the budget) or
    "prefill" (the step only computed prompts of others).  "" if it made progress.
    blocks: KV blocks that the blocked request needed.
    by: the labels in the slots at the first of the steps, for a wait.
    num_passed: requests that were admitted before it meanwhile.
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
        return self.end - self.start


class Arrival(Struct, frozen=True, omit_defaults=True):
    """The arrival and the limits of a request; the fields are those of its event."""

    step: int
    time: float
    prompt_tokens: int
    max_tokens: int
    dropped_turns: int = 0
    dropped_tokens: int = 0
    default_limit: bool = False


class StoryRetry(Struct, frozen=True):
    """A failed attempt at a server: the step, the reason, and the pause in seconds."""

    step: int
    reason: RetryReason
    delay: float


class StorySpan(Struct, frozen=True, omit_defaults=True):
    """The steps [start, end) in a slot; time: the start in seconds.

    first_token: the step that completed its prefill, or None.  cached, generated, cached_from: as
    in an AdmitEvent.  is_remote: whether a server answered it; retries: failed attempts before.
    aging: the waiting time that put it first, or None if the policy did.
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
    """The end of a sequence; the fields are those of its event, but `time` is the end of `step`."""

    step: int
    time: float
    reason: EndReason
    tokens: int
    stop_reason: StopReason = None
    limit: LengthLimit | None = None
    error: ErrorInfo | None = None


class PhaseTotals(Struct, frozen=True):
    """The steps, or seconds, in each phase.

    wait: before its first slot.  preempted: in the queue after a preemption.
    standstill: in a slot without progress.
    """

    wait: float
    preempted: float
    prefill: float
    decode: float
    standstill: float

    @property
    def sum(self) -> float:
        return self.wait + self.preempted + self.prefill + self.decode + self.standstill


class Story(Struct, frozen=True, omit_defaults=True):
    """The story of one sample, or of the beams of a request.

    arrived: None if it was aborted before.  ended: None if the events break off before.  batch,
    kv_blocks: the slots and blocks of its run, or its worker; kv_blocks is None without a limit.
    is_timed: whether times are seconds; without it each step lasts 1.0.
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


class StoryWords(NamedTuple):
    """The functions that put into words: a story, the cause of a wait, and an invalid line."""

    story: Callable[[Story], list[str]]
    wait: Callable[[StoryPart, Story], str]
    reject: Callable[[RejectEvent], list[str]]


class RequestStories(Struct, frozen=True):
    """The stories of all samples of an id, and the invalid lines with this id."""

    stories: list[Story]
    rejects: list[RejectEvent]


def answer_of(kept: KeptRequests) -> RequestStories:
    return RequestStories([story_of(kept.timeline, one) for one in kept.all], kept.rejects)


def story_of(
    timeline: Timeline, request: RequestTimeline, parts: list[StoryPart] | None = None
) -> Story:
    """Return the story of `request`; parts: replaces the result of `explain`."""
    timeline = timeline.of_worker(request.worker)
    run, figures, num_steps = timeline.run, timeline.figures, timeline.num_steps
    arrive, finish = request.arrive, request.finish
    arrived = ended = None
    parts = explain(timeline, request) if parts is None else parts
    if sum(part.num_steps for part in parts) != len(request.steps(num_steps)):
        raise InvariantError(f"the story of {request.label!r} leaves out a step")
    if arrive is not None:
        arrived = convert(arrive, Arrival, from_attributes=True)
        if finish is not None and finish.prompt_tokens is not None:
            arrived = replace(arrived, prompt_tokens=finish.prompt_tokens)
    if finish is not None:
        time = finish.time if request.admission is None else figures.end_of(finish.step)
        ended = replace(convert(finish, RequestEnd, from_attributes=True), time=time)
    seconds: list[float] = []
    if parts and arrive is not None:  # the first begins with the arrival
        begins = [arrive.time, *(figures.start_of(part.start) for part in parts[1:])]
        ends = [*begins[1:], figures.end_of(parts[-1].end - 1)]
        seconds = [end - begin for begin, end in zip(begins, ends, strict=True)]
    aging, kv_blocks, spans = aging_of(run), run.scheduling.get("kv_blocks"), list[StorySpan]()
    for admission in request.admissions:
        admit, preempt, drafts = admission.event, admission.preempt, None
        if admission.drafts is not None:
            counts, change = admission.drafts.counts, admission.drafts.last_change
            drafts = StoryDrafts(
                counts.num_steps,
                counts.num_drafted,
                counts.num_accepted,
                counts.by_position(),
                admission.drafts.num_changes,
                None if change is None else convert(change, DraftChange, from_attributes=True),
            )
        span = StorySpan(
            admit.slot,
            admit.step,
            request.end(num_steps) if preempt is None else preempt.step,
            admit.time,
            admission.first_token,
            admit.cached,
            admit.generated,
            drafts,
            SpanPreemption.by(preempt),
            run.layout == "remote",
            tuple(
                convert(one, StoryRetry, from_attributes=True) for one in admission.retries or ()
            ),
            admit.cached_from,
            aging if aging is not None and is_aged(admit, arrive, aging) else None,
        )
        spans.append(span)
    return Story(
        id=request.id,
        index=request.index,
        label=request.label,
        num_rows=request.num_rows,
        batch=timeline.num_slots,
        kv_blocks=kv_blocks if isinstance(kv_blocks, int) else None,
        arrived=arrived,
        parts=parts,
        spans=spans,
        ended=ended,
        steps=_totals(parts, [part.num_steps for part in parts]),
        seconds=_totals(parts, seconds),
        worker=request.worker,
        is_timed=bool(run.step_time),
    )


def _totals(parts: list[StoryPart], amounts: list[float] | list[int]) -> PhaseTotals:
    """Return the sums by phase of `amounts`, one for each part; zeros without amounts."""
    sums: dict[str, float] = dict.fromkeys(PhaseTotals.__struct_fields__, 0)
    waiting = "wait"
    for part, amount in zip(parts, amounts, strict=bool(amounts)):
        if part.phase == "wait":
            sums[waiting] += amount
        else:
            waiting = "preempted"
            sums["standstill" if part.cause else part.phase] += amount
    return PhaseTotals(**{what: round(total, TIME_DIGITS) for what, total in sums.items()})


def explain(timeline: Timeline, request: RequestTimeline) -> list[StoryPart]:
    """Return the parts of `request`, from its arrival to its end, with the causes of its waits."""
    parts = outline(timeline, request, ())
    waits = [part for part in parts if part.phase == "wait"]
    if not waits:
        return list(_merged(parts))
    admitted, caused = admissions_of(timeline), _wait_parts(timeline, request, waits)
    held = (part for part in parts if part.phase != "wait")
    return [
        replace(part, num_passed=_num_in(admitted, part.start, part.end))
        if part.phase == "wait"
        else part
        for part in _merged(merge(held, caused, key=attrgetter("start")))
    ]


def admissions_of(timeline: Timeline) -> Sequence[int]:
    """Return the steps of all admissions in order, without followers."""
    return array("q", (span.start for span in timeline.spans if not is_follower(span)))


def _num_in(ascending: Sequence[int], start: int, end: int) -> int:
    return bisect_left(ascending, end) - bisect_left(ascending, start)


def outline(
    timeline: Timeline, request: RequestTimeline, admitted: Sequence[int]
) -> list[StoryPart]:
    """Return the parts of `request` as `explain` does, but each wait is one part without a cause.

    `num_passed` of a wait is counted in `admitted` (see admissions_of).  The time does not depend
    on the number of requests in the run.
    """
    parts: list[StoryPart] = []
    steps = request.steps(timeline.num_steps)
    step = steps.start
    for admission in [*request.admissions, None] if steps else ():
        start = steps.stop if admission is None else admission.event.step
        if step < start:
            passed = _num_in(admitted, step, start)
            parts.append(StoryPart(step, start, "wait", num_passed=passed))
        if admission is None:
            break
        step = steps.stop if admission.preempt is None else admission.preempt.step
        points = iter(sorted(_points_of(admission)))
        if timeline.run.layout != "remote":  # no step of the server is known
            points = merge(points, timeline.figures.standstill_changes(range(start, step)))
        parts += _merged(
            _part_in_slot(timeline, request, admission, first, stop)
            for first, stop, _ in cut([(start, step, None)], points)
        )
    return parts


def waits_of(timeline: Timeline) -> Iterator[StoryPart]:
    """Yield the cause for which a new request of one row would wait in each step."""
    anyone = RequestTimeline("", 0, "sample")
    always = [StoryPart(0, timeline.num_steps, "wait")]
    return _merged(_wait_parts(timeline, anyone, always))


def _merged(parts: Iterable[StoryPart]) -> Iterator[StoryPart]:
    """Yield `parts`, with equal neighbours merged."""
    for _, alike in groupby(parts, key=_WAY):
        first, *rest = alike
        yield replace(first, end=rest[-1].end) if rest else first


def _wait_parts(
    timeline: Timeline, request: RequestTimeline, waits: Sequence[StoryPart]
) -> Iterator[StoryPart]:
    """Split `waits`, at least one, into parts with the same cause and slots."""
    all_blocked, remaining = iter(timeline.blocked), iter(waits)
    wait, blocked = next(remaining), next(all_blocked, None)
    steps = range(waits[0].start, waits[-1].end)
    points = merge(
        (step for each in waits for step in (each.start, each.end)),
        (step for span in timeline.blocked for step in (span.start, span.end)),
    )
    batches = ((start, stop, labels) for start, stop, labels, _ in timeline.batches(steps))
    last: StoryPart | None = None
    for start, stop, labels in cut(batches, points):
        if start >= wait.end:
            wait, last = next(remaining), None
        if start < wait.start:
            continue
        while blocked is not None and blocked.end <= start:
            blocked = next(all_blocked, None)
        num_free = timeline.num_slots - len(labels)
        if num_free and blocked is not None and blocked.start <= start:
            is_itself = (blocked.id, blocked.index) == (request.id, request.index)
            behind = None if is_itself else blocked.label
            part = StoryPart(start, stop, "wait", blocked.reason, behind, blocked.blocks)
        else:  # while no slot is free, nothing else counts
            cause: Cause = "slots" if num_free < request.num_rows else "queue"
            if cause == "queue" and timeline.run.layout == "remote":  # only the server knows
                cause = ""
            part = StoryPart(start, stop, "wait", cause)
        if last is None or _WAY(part) != _WAY(last):  # only the first of equal parts is kept
            part = replace(part, by=tuple(labels[slot] for slot in sorted(labels)))
        yield part
        last = part


def _points_of(admission: AdmissionRecord) -> Iterator[int]:
    """Yield the steps at which the activity of a sequence in its slot can change."""
    for first in (admission.event.step, *(admission.chunks or ())):
        yield from (first, first + 1)
    if admission.first_token is not None:
        yield admission.first_token + 1
    if admission.preempt is not None:
        yield admission.preempt.step


def _part_in_slot(
    timeline: Timeline, request: RequestTimeline, admission: AdmissionRecord, start: int, stop: int
) -> StoryPart:
    is_decode = admission.first_token is not None and start > admission.first_token
    if timeline.run.layout == "remote":  # no step of the server is known
        return StoryPart(start, stop, "decode" if is_decode else "prefill")
    if is_decode:
        is_standstill = timeline.figures.is_standstill(start)
        return StoryPart(start, stop, "decode", "prefill" if is_standstill else "")
    admit, arrive = admission.event, request.arrive
    is_admitted = start == admit.step and (  # and that step computed any of what it began with
        arrive is None or arrive.prompt_tokens + admit.generated - admit.cached > admit.left
    )
    if is_admitted or admission.has_chunk(start):
        return StoryPart(start, stop, "prefill")
    is_prefill_first = timeline.run.scheduling.get("prefill_order") == "prefill-first"
    return StoryPart(start, stop, "prefill", "prefill" if is_prefill_first else "tokens")
