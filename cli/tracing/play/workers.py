"""A recorded run of several workers, which is shown as one run of all slots.

Rule: steps of equal number are shown together, whenever each of the workers made them; of a step,
what the workers were told comes in the order of their numbers.
"""

from collections.abc import Iterable

from batcher.errors import InvariantError
from batcher.events import EndEvent, Event, RestartEvent, RunEvent
from batcher.timeline import Timeline
from batcher.timeline.fold import RequestFold
from batcher.timeline.merged import WorkersTimeline
from batcher.timeline.records import RequestTimeline
from batcher.timeline.sorted_records import SortedRecords
from batcher.timeline.workers import ByWorker

from ...screen.live.slots import WorkerPace
from ...screen.live.state import RunState
from .recording import Recording, ToldSteps

_Told = tuple[int, Event]


class WorkersRecording(Recording):
    """A recording whose events come as the workers told of them, and are sorted before all else.

    See Recording; `timeline` is that of all workers, once it is closed.
    """

    def __init__(self, run: RunEvent) -> None:
        super().__init__(run)
        self._folds = [RequestFold() for _ in range(run.workers)]
        folds = iter(self._folds)
        self._by_worker = ByWorker(lambda: Timeline(next(folds)))
        self._by_worker.add(run)
        self._told_to = [ToldSteps() for _ in range(run.workers)]
        self._sorted = SortedRecords[_Told](_Told)

    def add(self, event: Event) -> None:
        """Take in the next event; see Recording."""
        if isinstance(event, RunEvent) or event.worker is None:
            raise InvariantError("an event of no worker")
        if isinstance(event, RestartEvent) and event.worker < len(self._folds):
            self._lose(self._folds[event.worker])
        self._by_worker.add(event)
        self._sort(event.worker, self._told_to[event.worker].take(event))

    def close(self) -> None:
        """Take what was added for all there is; see Recording."""
        for worker, told in enumerate(self._told_to):
            self._sort(worker, told.rest())
        timelines = self._by_worker.close()
        for timeline in timelines:
            timeline.close()
        self.timeline = WorkersTimeline(self._by_worker.run, timelines)
        for step, event in self._sorted:
            self._take(event, step)
        self._sorted = SortedRecords[_Told](_Told)
        self._close_chapters()
        self._check()

    def state_before(self, chapter: int) -> RunState:
        """Return what the run was like when a chapter begins; see Recording.

        It says of each worker how far it comes; its slots are shown by the step of all.
        """
        state = super().state_before(chapter)
        if isinstance(self.timeline, WorkersTimeline):
            state.paces = [WorkerPace() for _ in self.timeline.workers]  # those of slots stay
            for pace, timeline in zip(state.paces, self.timeline.workers, strict=True):
                pace.step = max(timeline.num_steps - 1, 0)
        return state

    def _sort(self, worker: int, told: Iterable[_Told]) -> None:
        """Keep events of a worker for their turn."""
        for step, event in told:
            if not isinstance(event, EndEvent):
                self._sorted.add((step, worker), (step, event))

    def _fold(self, event: Event) -> RequestTimeline | None:
        return self._run.fold.take(event)


def open_recording(run: RunEvent) -> Recording:
    """Return what records a run that begins so.

    Raises:
        BatchdecodeError: there is no such batch.
    """
    return Recording(run) if run.workers == 1 else WorkersRecording(run)
