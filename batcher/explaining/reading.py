"""Reads the events of a run and keeps what happened to the requests that are asked for.

Rule: of a run that breaks off, the last step that decides something may not be told to its end.
"""

from collections.abc import Iterable, Iterator
from typing import TypeGuard

from msgspec.structs import replace

from batcher.events import Decision, EndEvent, Event, FinishEvent, RejectEvent, RunEvent, StepsEvent
from batcher.trace.records import RequestTimeline, is_follower
from batcher.trace.timeline import Timeline
from batcher.trace.workers import ByWorker

MAX_IDS = 20_000


class KeptRequests:
    """The timeline of a run, and what happened to its requests, or to `request_id` alone.

    all: the sequences that wait on their own account, as they became known.
    is_known: whether there is a request that is wanted.  ids: of the first in the run.
    rejects: the lines that were no requests, of those that are wanted.
    """

    def __init__(self, request_id: str | None = None) -> None:
        self.timeline = Timeline()
        self.all: list[RequestTimeline] = []
        self.rejects: list[RejectEvent] = []
        self.is_known = False
        self.ids: set[str] = set()
        self._wanted = request_id

    def add(self, event: Event) -> None:
        """Take in the next event of the run."""
        found = self.timeline.add(event)
        if isinstance(event, RejectEvent):
            if self._wants(event.id):
                self.rejects.append(event)
        elif found is not None and found.first_event is event and not is_follower(found):
            self.all += [found] if self._wants(found.id) else []

    @property
    def longest(self) -> RequestTimeline | None:
        """The one that took the most time from its arrival to its end, the first of equal ones.

        None if there is none.  What has not ended by the end of the events counts up to there.
        """
        return max(self.all, key=self.seconds, default=None)

    def only(self, request_id: str) -> None:
        """Keep nothing but what is of this id."""
        self.all = [request for request in self.all if request.id == request_id]
        self.rejects = [reject for reject in self.rejects if reject.id == request_id]

    def seconds(self, request: RequestTimeline) -> float:
        """Return how long one took from its arrival to its end, or to that of the events."""
        steps = request.steps(self.timeline.num_steps)
        if not steps or request.arrive is None:
            return 0.0
        return self.timeline.figures.end_of(steps[-1]) - request.arrive.time

    def _wants(self, request_id: str) -> bool:
        if self._wanted is None or self._wanted == request_id:
            self.is_known = True
            return True
        if len(self.ids) < MAX_IDS:
            self.ids.add(request_id)
        return False


def read_requests(events: Iterable[Event], request_id: str | None = None) -> list[KeptRequests]:
    """Return what happened in each worker of a run, to all its requests or to one.

    There is one, most often.

    Raises:
        InvariantError, BatchdecodeError: see Timeline.from_events.
    """
    by_worker = ByWorker(lambda: KeptRequests(request_id))
    for event in events:
        by_worker.add(event)
    workers = by_worker.close()
    for kept in workers:
        kept.timeline.close()
        kept.timeline.check_integrity()
    return workers


class RunReader:
    """Reads a run step by step, and keeps its requests.

    until: how many of its steps are read, None for all.
    """

    def __init__(self, events: Iterable[Event], until: int | None = None) -> None:
        self._events = iter(events) if until is None else _before(events, until)
        self._until = until
        self._kept = KeptRequests()
        self._last_decision = 0
        self._has_end = False

    @property
    def breaks_off(self) -> int | None:
        """The step of the last decision of a run that was read and has no end, else None."""
        return None if self._has_end else self._last_decision

    def decisions(self) -> Iterator[tuple[int, list[Decision]]]:
        """Yield each step in which something was decided, with that."""
        step, found = 0, list[Decision]()
        for event in self._read():
            if not _is_decision(event):
                continue
            if event.step > step:
                if found:
                    yield step, found
                step, found = event.step, []
            found.append(_what_alone(event))
        if found:
            yield step, found

    def close(self) -> KeptRequests:
        """Read what is left, and return what happened."""
        for _ in self._read():
            pass
        timeline = self._kept.timeline
        if self._until is not None:
            timeline.go_on_to(self._until)
        timeline.close()
        timeline.check_integrity()
        return self._kept

    def _read(self) -> Iterator[Event]:
        for event in self._events:
            self._kept.add(event)
            if _is_decision(event):
                self._last_decision = max(self._last_decision, event.step)
            self._has_end |= isinstance(event, EndEvent)
            yield event


def _is_decision(event: Event) -> TypeGuard[Decision]:
    """Return whether it decided something; an end of what never had a slot is told late."""
    is_late = isinstance(event, FinishEvent) and event.slot is None
    return isinstance(event, Decision) and not is_late


def _what_alone(event: Decision) -> Decision:
    """Return what was decided, whenever that was and in whatever words it failed."""
    if isinstance(event, FinishEvent):
        return replace(event, time=0.0, error=None)
    return replace(event, time=0.0)


def _before(events: Iterable[Event], until: int) -> Iterator[Event]:
    """Yield what happened before step `until`, without the end of the run."""
    for event in events:
        if isinstance(event, RunEvent):
            yield event
        elif isinstance(event, StepsEvent):
            if event.step < until:
                columns = [(name, getattr(event, name)) for name in event.__struct_fields__[1:]]
                num_steps = until - event.step
                cut = {name: told[:num_steps] for name, told in columns if told is not None}
                yield replace(event, **cut)
        elif not isinstance(event, EndEvent) and event.step < until:
            yield event
