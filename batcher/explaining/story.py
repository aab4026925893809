"""A request's story as a record: when it came and went, its slot spans, and what each step was for.

Rule: the steps and the seconds of all parts add up to those from arrival to end.
"""

from collections import Counter

from msgspec import Struct

from batcher.errors import InvariantError
from batcher.events import EndReason, RejectEvent
from batcher.explaining.parts import Part, explain
from batcher.explaining.reading import KeptRequests
from batcher.timeline import Timeline
from batcher.timeline.records import SpanPreemption
from batcher.timeline.requests import AdmissionRecord, RequestTimeline

TIME_DIGITS = 9  # of seconds, after the point


class Arrival(Struct, frozen=True):
    """When a request came, and what it asked for; time in seconds."""

    step: int
    time: float
    prompt_tokens: int
    max_tokens: int


class StorySpan(Struct, frozen=True, omit_defaults=True):
    """A slot span, over the steps [start, end).

    time: when it began, in seconds.  first_token: the step that was through with what it began
    with; None if none was.  cached, generated: as in an AdmitEvent.
    """

    slot: int
    start: int
    end: int
    time: float
    first_token: int | None
    cached: int = 0
    generated: int = 0
    preemption: SpanPreemption | None = None


class RequestEnd(Struct, frozen=True):
    """How a sequence ended: `step` was its last, `time` is when that was over, in seconds."""

    step: int
    time: float
    reason: EndReason
    tokens: int


class PhaseTotals(Struct, frozen=True):
    """How many steps, or seconds, went into each phase.

    standstill: those in a slot in which it had no share of what the step computed.
    """

    wait: float
    prefill: float
    decode: float
    standstill: float

    @property
    def sum(self) -> float:
        """All of them."""
        return self.wait + self.prefill + self.decode + self.standstill


class Story(Struct, frozen=True):
    """All about one sample, or the beams of a request.

    arrived: None if it was aborted before.  ended: None if the events break off before.
    batch, kv_blocks: how many slots and blocks the run had; kv_blocks is None without a limit.
    """

    id: str
    index: int
    label: str
    num_rows: int
    batch: int
    kv_blocks: int | None
    arrived: Arrival | None
    parts: list[Part]
    spans: list[StorySpan]
    ended: RequestEnd | None
    steps: PhaseTotals
    seconds: PhaseTotals


class RequestStories(Struct, frozen=True):
    """What a trace tells of an id: the stories of its samples, and its lines that were invalid."""

    stories: list[Story]
    rejects: list[RejectEvent]


def answer_of(kept: KeptRequests) -> RequestStories:
    """Return the stories of all that was kept."""
    return RequestStories([story_of(kept.timeline, request) for request in kept.all], kept.rejects)


def story_of(timeline: Timeline, request: RequestTimeline) -> Story:
    """Return the story of `request`.

    Raises:
        InvariantError: the parts do not add up to the whole.
    """
    parts = explain(timeline, request)
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
        arrived=_arrival_of(request),
        parts=parts,
        spans=[_span_of(timeline, request, admission) for admission in request.admissions],
        ended=_ending_of(timeline, request),
        steps=_totals(parts, [part.num_steps for part in parts]),
        seconds=_totals(parts, _seconds(timeline, request, parts)),
    )


def _arrival_of(request: RequestTimeline) -> Arrival | None:
    arrive = request.arrive
    if arrive is None:
        return None
    return Arrival(arrive.step, arrive.time, arrive.prompt_tokens, arrive.max_tokens)


def _span_of(timeline: Timeline, request: RequestTimeline, admission: AdmissionRecord) -> StorySpan:
    admit, preempt = admission.event, admission.preempt
    return StorySpan(
        admit.slot,
        admit.step,
        request.end(timeline.num_steps) if preempt is None else preempt.step,
        admit.time,
        admission.first_token,
        admit.cached,
        admit.generated,
        None if preempt is None else SpanPreemption.by(preempt),
    )


def _ending_of(timeline: Timeline, request: RequestTimeline) -> RequestEnd | None:
    finish = request.finish
    if finish is None:
        return None
    time = timeline.figures.end_of(finish.step) if request.admission is not None else finish.time
    return RequestEnd(finish.step, time, finish.reason, finish.tokens)


def _seconds(timeline: Timeline, request: RequestTimeline, parts: list[Part]) -> list[float]:
    """Return how long each of `parts` lasted; the first begins with the arrival."""
    if not parts or request.arrive is None:
        return []
    figures = timeline.figures
    begins = [request.arrive.time, *(figures.start_of(part.start) for part in parts[1:])]
    ends = [*begins[1:], figures.end_of(parts[-1].end - 1)]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def _totals(parts: list[Part], amounts: list[float] | list[int]) -> PhaseTotals:
    """Return the sums of `amounts`, one for each of `parts`."""
    sums: Counter[str] = Counter()
    for part, amount in zip(parts, amounts, strict=True):
        has_share = part.phase == "wait" or not part.cause
        sums[part.phase if has_share else "standstill"] += amount  # type: ignore[assignment]
    wait, prefill, decode, still = (
        round(sums[what], TIME_DIGITS) for what in ("wait", "prefill", "decode", "standstill")
    )
    return PhaseTotals(wait, prefill, decode, still)
