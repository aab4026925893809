"""What happened to each request from its arrival to its end, collected from the events of a run.

Rule: a life is that of a sequence which waits on its own account, with those it takes along.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    PrefillEvent,
    RejectEvent,
    Role,
)
from batcher.timeline import Timeline
from batcher.timeline.stays import is_follower, label_of

MAX_IDS = 20_000


@dataclass(slots=True)
class Visit:
    """A stay in a slot.

    computed_steps: those after the admission that computed what it began with.
    first_token: the step that was through with that; None if none was.
    preempt: what ended it, if a preemption did.
    """

    admit: AdmitEvent
    computed_steps: list[int]
    first_token: int | None
    preempt: PreemptEvent | None = None

    def computes_in(self, step: int) -> bool:
        """Return whether `step`, after the admission, computed some of what it began with."""
        place = bisect_left(self.computed_steps, step)
        return self.computed_steps[place : place + 1] == [step]


@dataclass(slots=True)
class Life:
    """A sample, or all beams of a request, on the way through a run.

    arrive: None if it was aborted before that.  finish: None if the events break off before.
    num_rows: how many slots it takes at once.
    """

    id: str
    index: int
    arrive: ArriveEvent | None = None
    visits: list[Visit] = field(default_factory=list)
    finish: FinishEvent | None = None
    num_rows: int = 1

    @property
    def label(self) -> str:
        """What it is called."""
        return label_of(self.id, self.index, "sample")

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot, or did when it ended."""
        return bool(self.visits) and self.visits[-1].preempt is None

    @property
    def num_preemptions(self) -> int:
        """How often it lost its slot."""
        return sum(visit.preempt is not None for visit in self.visits)

    def end(self, num_steps: int) -> int:
        """Return the step after its last one, of a run of `num_steps`."""
        if self.finish is None:
            return num_steps
        return min(self.finish.step + self.is_running, num_steps)

    def steps(self, num_steps: int) -> range:
        """Return the steps from its arrival to its end, of a run of `num_steps`."""
        return range(self.arrive.step, self.end(num_steps)) if self.arrive else range(0)


class Lives:
    """Collects the lives of a run, or of the request `request_id` alone.

    is_known: whether there is a request that is wanted.  ids: of the first in the run.
    rejects: the lines that were no requests, of those that are wanted.
    """

    def __init__(self, request_id: str | None = None) -> None:
        self.all: list[Life] = []
        self.rejects: list[RejectEvent] = []
        self.is_known = False
        self.ids: set[str] = set()
        self._wanted = request_id
        self._current: dict[tuple[str, int], Life] = {}

    def add(self, event: Event) -> None:
        """Take in the next event of the run."""
        match event:
            case ArriveEvent():
                if self._wants(event.id):
                    self._begin(event.id, event.index).arrive = event
            case RejectEvent():
                if self._wants(event.id):
                    self.rejects.append(event)
            case FinishEvent():
                if self._wants(event.id):
                    self._finish(event)
            case AdmitEvent() | PrefillEvent() | PreemptEvent() if self._wants(event.id):
                self._visit(event)
            case _:
                pass

    def _wants(self, request_id: str) -> bool:
        if self._wanted is None or self._wanted == request_id:
            self.is_known = True
            return True
        if len(self.ids) < MAX_IDS:
            self.ids.add(request_id)
        return False

    def _begin(self, request_id: str, index: int) -> Life:
        life = self._current[request_id, index] = Life(request_id, index)
        self.all.append(life)
        return life

    def _visit(self, event: AdmitEvent | PrefillEvent | PreemptEvent) -> None:
        """Take in what happened to a sequence in its slot, or to one that it takes along."""
        life = self._current.get((event.id, leader_index(event.index, event.role)))
        if life is None:  # events that break off at their beginning
            life = self._begin(event.id, leader_index(event.index, event.role))
        if is_follower(event):
            life.num_rows += isinstance(event, AdmitEvent) and len(life.visits) == 1
        elif isinstance(event, AdmitEvent):
            life.visits.append(Visit(event, [], None if event.left else event.step))
        elif isinstance(event, PreemptEvent):
            life.visits[-1].preempt = event
        else:
            visit = life.visits[-1]
            visit.computed_steps.append(event.step)
            if visit.first_token is None and not event.left:
                visit.first_token = event.step

    def _finish(self, event: FinishEvent) -> None:
        if is_follower(event):
            return
        life = self._current.pop((event.id, event.index), None)
        if life is None:
            life = self._begin(event.id, event.index)
            del self._current[event.id, event.index]
        life.finish = event


def leader_index(index: int, role: Role) -> int:
    """Return the index of the sequence that leads the one of this index and role."""
    return 0 if role == "beam" else index


def _collected(events: Iterable[Event], lives: Lives) -> Iterator[Event]:
    """Yield `events`, each after `lives` has taken it in."""
    for event in events:
        lives.add(event)
        yield event


def read_lives(events: Iterable[Event], request_id: str | None = None) -> tuple[Timeline, Lives]:
    """Return the timeline of a run, and its lives, or those of one request.

    Raises:
        InvariantError, BatchdecodeError: see Timeline.from_events.
    """
    lives = Lives(request_id)
    timeline = Timeline.from_events(_collected(events, lives))
    timeline.check_integrity()
    return timeline, lives
