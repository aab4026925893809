"""How two runs differ of which one has several workers: their requests and totals.

Rule: each worker has steps and a clock of its own, and who is beside whom depends on how fast each
is: so schedules are not compared, and two runs are equal if every sample ended the same way.
"""

from collections.abc import Iterable
from typing import NamedTuple

from batcher.events import EndEvent, Event, RunEvent
from batcher.explaining.differences import (
    Agreement,
    RequestFigures,
    RunComparison,
    SampleChange,
    are_timed,
    differing_settings,
    figures_of,
    is_altered,
    ordered_changes,
    pair_requests,
    sums_of,
)
from batcher.explaining.story import KeptRequests
from batcher.trace.run import RequestTimeline
from batcher.trace.timeline import Timeline
from batcher.trace.workers import ByWorker


class _Run(NamedTuple):
    """A run that was read: its requests, and of each the timeline of its worker, by identity."""

    run: RunEvent
    workers: list[Timeline]
    requests: list[RequestTimeline]
    timelines: dict[int, Timeline]
    is_whole: bool

    def figures(self, request: RequestTimeline) -> RequestFigures:
        """Return how it went for `request`."""
        return figures_of(self.timelines[id(request)], request)


def compare_workers(events_a: Iterable[Event], events_b: Iterable[Event]) -> RunComparison:
    """Return how two runs differ, without their schedules.

    Raises:
        InvariantError, BatchdecodeError: see Timeline.from_events.
    """
    a, b = _read(events_a), _read(events_b)
    pairs, only_a, only_b = pair_requests(a.requests, b.requests)
    is_whole = a.is_whole and b.is_whole
    ended = [pair for pair in pairs if is_whole or all(map(_has_ended, pair))]
    changes, differing = list[SampleChange](), list[str]()
    for of_a, of_b in ended:
        change = SampleChange(of_a.id, of_a.index, a.figures(of_a), b.figures(of_b))
        if change.a != change.b:
            changes.append(change)
        if (change.a.outcome, change.a.tokens) != (change.b.outcome, change.b.tokens):
            differing.append(change.label)
    return RunComparison(
        settings=differing_settings(a.run, b.run),
        parting=None,
        involved=[],
        only_a=only_a if is_whole else [],  # the other one may not have read them yet
        only_b=only_b if is_whole else [],
        altered=[request.label for request, other in pairs if is_altered(request, other)],
        num_compared=len(ended),
        changes=ordered_changes(changes),
        totals_a=sums_of(a.workers, map(a.figures, a.requests)),
        totals_b=sums_of(b.workers, map(b.figures, b.requests)),
        agreement=Agreement(a.run.workers, b.run.workers, differing, a.is_whole, b.is_whole),
        is_timed=are_timed(a.run, b.run),
    )


def _read(events: Iterable[Event]) -> _Run:
    """Return what is there of a run, of whatever number of workers.

    Of a request that was lost with a worker and decoded again, that is all there is.
    """
    by_worker, begun, ended = ByWorker(KeptRequests), set[int](), set[int]()
    for event in events:
        by_worker.add(event)
        if not isinstance(event, RunEvent):  # one that came too late for all has no line
            (ended if isinstance(event, EndEvent) else begun).add(event.worker or 0)
    workers = by_worker.close()
    requests, timelines = list[RequestTimeline](), dict[int, Timeline]()
    for kept in workers:
        kept.timeline.close()
        kept.timeline.check_integrity()
        requests += kept.all
        timelines |= {id(request): kept.timeline for request in kept.all}
    run = by_worker.run
    found = _without_lost(requests)
    is_whole = bool(ended) and begun <= ended
    return _Run(run, [kept.timeline for kept in workers], found, timelines, is_whole)


def _without_lost(requests: list[RequestTimeline]) -> list[RequestTimeline]:
    """Return each sample once of the requests that were lost, as it ended, and all others."""
    lost = {request.id for request in requests if _is_lost(request)}
    if not lost:
        return requests
    last = dict[tuple[str, int], RequestTimeline]()
    for request in requests:
        if request.id in lost:
            key = request.id, request.index
            if key not in last or not _is_lost(request):
                last[key] = request
    others = [request for request in requests if request.id not in lost]
    return [*others, *last.values()]


def _has_ended(request: RequestTimeline) -> bool:
    return request.finish is not None and not _is_lost(request)


def _is_lost(request: RequestTimeline) -> bool:
    return request.finish is not None and request.finish.reason == "lost"
