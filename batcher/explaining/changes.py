"""What came of the differences of two runs: for each request, and in all.

Rule: latency is from arrival to the end of the last step, wait is all steps in the queue.
"""

from collections import Counter

from msgspec import Struct

from batcher.timeline import Timeline
from batcher.timeline.records import label_of
from batcher.timeline.requests import RequestTimeline

NUM_DIGITS = 6  # of means and seconds, after the point


class RequestFigures(Struct, frozen=True):
    """How it went for one sample in one run; times are in seconds, None if it did not end.

    admitted: the step it was first admitted in.  recomputed: tokens it lost in preemptions.
    cached: tokens found in the cache.
    """

    admitted: int | None
    latency_steps: int | None
    latency: float | None
    wait_steps: int
    preemptions: int
    recomputed: int
    cached: int
    outcome: str | None
    tokens: int


class Change(Struct, frozen=True):
    """A sample that went another way in run B than in run A."""

    id: str
    index: int
    a: RequestFigures
    b: RequestFigures

    @property
    def label(self) -> str:
        """What it is called."""
        return label_of(self.id, self.index, "sample")

    @property
    def later(self) -> float:
        """By how many seconds it took longer in B; less than 0 if it was faster."""
        return (self.b.latency or 0.0) - (self.a.latency or 0.0)


class RunTotals(Struct, frozen=True):
    """The sums of a run; latency and wait are means over those that ended in a slot, in seconds."""

    steps: int
    time: float
    ended: int
    tokens: int
    latency: float
    wait_steps: float
    preemptions: int
    recomputed: int
    cached: int


def pair_requests(
    requests_a: list[RequestTimeline], requests_b: list[RequestTimeline]
) -> tuple[list[tuple[RequestTimeline, RequestTimeline]], list[str], list[str]]:
    """Return the requests that belong together, and the labels of those that are alone in A and B.

    An id that comes again belongs to the one that comes again.
    """
    named_a, named_b = _by_name(requests_a), _by_name(requests_b)
    pairs = [(request, named_b[name]) for name, request in named_a.items() if name in named_b]
    only_a = [request.label for name, request in named_a.items() if name not in named_b]
    only_b = [request.label for name, request in named_b.items() if name not in named_a]
    return pairs, only_a, only_b


def _by_name(requests: list[RequestTimeline]) -> dict[tuple[str, int, int], RequestTimeline]:
    """Return the requests by id, index and how often these came before."""
    seen: Counter[tuple[str, int]] = Counter()
    named: dict[tuple[str, int, int], RequestTimeline] = {}
    for request in requests:
        named[request.id, request.index, seen[request.id, request.index]] = request
        seen[request.id, request.index] += 1
    return named


def changes_of(
    timeline_a: Timeline, timeline_b: Timeline, pairs: list[tuple[RequestTimeline, RequestTimeline]]
) -> list[Change]:
    """Return the pairs that differ, the one whose latency changed most first."""
    changes = []
    for request_a, request_b in pairs:
        a, b = figures_of(timeline_a, request_a), figures_of(timeline_b, request_b)
        if a != b:
            changes.append(Change(request_a.id, request_a.index, a, b))
    return sorted(changes, key=_order)


def _order(change: Change) -> tuple[float, int, int]:
    a, b = change.a, change.b
    return (
        -abs(change.later),
        -abs(b.wait_steps - a.wait_steps),
        -abs(b.preemptions - a.preemptions),
    )


def figures_of(timeline: Timeline, request: RequestTimeline) -> RequestFigures:
    """Return how it went for `request`."""
    steps = request.steps(timeline.num_steps)
    admissions, end = request.admissions, request.end(timeline.num_steps)
    lost = [admission.preempt for admission in admissions if admission.preempt is not None]
    ends = [*(preempt.step for preempt in lost), end]
    in_slots = sum(
        until - admission.event.step for until, admission in zip(ends, admissions, strict=False)
    )
    has_ended = request.finish is not None and request.arrive is not None
    latency = None
    if has_ended and request.admission is not None and request.arrive is not None:
        latency = round(timeline.figures.end_of(steps.stop - 1) - request.arrive.time, NUM_DIGITS)
    return RequestFigures(
        admitted=admissions[0].event.step if admissions else None,
        latency_steps=len(steps) if has_ended else None,
        latency=latency,
        wait_steps=len(steps) - in_slots if steps else 0,
        preemptions=len(lost),
        recomputed=sum(preempt.tokens for preempt in lost),
        cached=sum(admission.event.cached for admission in admissions),
        outcome=None if request.finish is None else request.finish.reason,
        tokens=0 if request.finish is None else request.finish.tokens,
    )


def totals_of(timeline: Timeline, requests: list[RequestTimeline]) -> RunTotals:
    """Return the sums over all requests of a run."""
    figures = [figures_of(timeline, request) for request in requests]
    ended = [found for found in figures if found.latency is not None]
    num_ended = max(1, len(ended))
    last = timeline.num_steps - 1
    return RunTotals(
        steps=timeline.num_steps,
        time=round(timeline.figures.end_of(last), NUM_DIGITS) if last >= 0 else 0.0,
        ended=sum(found.outcome is not None for found in figures),
        tokens=sum(found.tokens for found in figures),
        latency=round(sum(found.latency or 0.0 for found in ended) / num_ended, NUM_DIGITS),
        wait_steps=round(sum(found.wait_steps for found in ended) / num_ended, NUM_DIGITS),
        preemptions=sum(found.preemptions for found in figures),
        recomputed=sum(found.recomputed for found in figures),
        cached=sum(found.cached for found in figures),
    )
