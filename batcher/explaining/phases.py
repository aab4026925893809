"""The phases of each request as times, as soon as it has ended: queue, prefill, decode, preempted.

Rule: the phases of a story, in seconds of the engine's clock; they follow each other without a gap,
from the arrival to the end of the last step.  Nothing is kept of what has ended.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from batcher.errors import InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    EndEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    PrefillEvent,
    ReceiveEvent,
    RestartEvent,
    RunEvent,
)
from batcher.metrics.steps import StepFeed, WholeStep, open_feed
from batcher.trace.records import RequestTimeline, is_follower
from batcher.trace.run import RequestFold

PhaseName = Literal["queue", "prefill", "decode", "preempted"]


class RequestPhase(NamedTuple):
    """From `start` to `end`, in seconds; slot: None while it waits."""

    name: PhaseName
    start: float
    end: float
    slot: int | None


class EndedSequence(NamedTuple):
    """A sample, or all beams of a request, that has ended.

    end: of its last step; first_token: of the step that gave its first token, None if none did; in
    seconds.  cached: tokens found in the prefix cache when it was first admitted.
    """

    arrive: ArriveEvent
    finish: FinishEvent
    end: float
    first_token: float | None
    cached: int
    phases: list[RequestPhase]

    def seconds_in(self, *names: PhaseName) -> float:
        """Return how long the phases of these names took together."""
        return sum(phase.end - phase.start for phase in self.phases if phase.name in names)


class _Begun:
    """What is known of a sequence: its phases by their starts, and when its first token came."""

    def __init__(self, arrival: float) -> None:
        self.marks: list[tuple[PhaseName, float, int | None]] = [("queue", arrival, None)]
        self.first_token: float | None = None

    def phases(self, end: float) -> list[RequestPhase]:
        """Return those that took any time, of a sequence that ended at `end`."""
        ends = [start for _, start, _ in self.marks[1:]] + [end]
        return [
            RequestPhase(name, start, end, slot)
            for (name, start, slot), end in zip(self.marks, ends, strict=True)
            if end > start
        ]


class PhaseFollower:
    """Takes in the events of a run, and tells of each sequence when it has ended."""

    def __init__(self) -> None:
        self._fold = RequestFold()
        self._run: RunEvent | None = None
        self._feed: StepFeed | None = None
        self._begun: dict[int, _Begun] = {}  # by the identity of what the fold has of a sequence
        self._decoding_next: list[tuple[_Begun, int]] = []  # from the next step on, in which slot
        self._last_end = 0.0

    def take(self, event: Event) -> Iterator[EndedSequence]:
        """Take in the next event; yield what has ended by it, as far as that is known.

        Raises:
            InvariantError: the events do not begin with that of the run, or contradict each other.
        """
        found = self._fold.take(event)
        if isinstance(event, RunEvent):
            self._run, self._feed = event, open_feed(event)
            return
        if self._run is None or self._feed is None:
            raise InvariantError("there is no run event")
        if isinstance(event, RestartEvent):  # others do again what has not ended
            yield from self.close(event.step)
            self._begun.clear()
            self._decoding_next.clear()
            self._feed = open_feed(self._run)
            self._feed.go_on_from(event.step, event.time)
            return
        for step in self._feed.take(event, found):
            yield from self._step(step)
        if isinstance(event, EndEvent):
            yield from self.close(event.steps)

    def close(self, num_steps: int) -> Iterator[EndedSequence]:
        """Yield what has ended in a run of `num_steps`, which may be broken off."""
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
        for begun, slot in self._decoding_next:
            begun.marks.append(("decode", step.start, slot))
        self._decoding_next.clear()
        for event, found in step.events:
            if isinstance(event, FinishEvent):
                if event.step >= step.step:
                    yield from self._finish(event, found, step.end)
            elif found.arrive is not None and not is_follower(found):
                self._move(event, found, found.arrive, step)
        self._last_end = step.end

    def _move(
        self, event: object, found: RequestTimeline, arrive: ArriveEvent, step: WholeStep
    ) -> None:
        """Take in what begins a phase of a sequence, or lets one begin with the next step."""
        if isinstance(event, AdmitEvent):
            begun = self._begun.setdefault(id(found), _Begun(arrive.time))
            begun.marks.append(("prefill", step.start, event.slot))
        elif isinstance(event, PreemptEvent):
            self._begun[id(found)].marks.append(("preempted", step.start, None))
        if isinstance(event, AdmitEvent | PrefillEvent | ReceiveEvent) and any(
            admission.first_token == event.step for admission in found.admissions
        ):
            begun = self._begun[id(found)]
            if begun.first_token is None:
                begun.first_token = step.end
            self._decoding_next.append((begun, event.slot))

    def _finish(
        self, event: FinishEvent, found: RequestTimeline, end: float
    ) -> Iterator[EndedSequence]:
        begun = self._begun.pop(id(found), None)
        if found.arrive is None or is_follower(found):
            return
        if found.admission is None:  # it ended while it waited
            end = max(event.time, found.arrive.time)
        begun = begun or _Begun(found.arrive.time)
        cached = found.admissions[0].event.cached if found.admissions else 0
        phases = begun.phases(end)
        yield EndedSequence(found.arrive, event, end, begun.first_token, cached, phases)
