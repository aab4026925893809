"""The timelines of the workers of a run, and one of all their slots.

Rule: steps of equal number stand beside each other, whenever each of the workers made them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from msgspec.structs import replace

from batcher.events import Event, RunEvent
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.workers import ByWorker


class WorkersTimeline(Timeline):
    """What happened in a run of several workers, of which each has its own steps and clock.

    workers: what happened in each, as in a run of its own, whose slots begin with 0.
    A step begins when the first worker begins it, and ends when the last one has; what it computed
    and held is the sum.  Of `blocked` there may be as many at once as there are workers.
    """

    def __init__(self, run: RunEvent, workers: Sequence[Timeline]) -> None:
        """Merge the timelines of `workers`, which are closed, of the run that `run` began."""
        super().__init__()
        self._run = run
        self.workers = workers
        for worker, timeline in enumerate(workers):
            self._take(worker, timeline)
        self.restarts.sort(key=attrgetter("step"))
        if any(timeline.has_figures for timeline in workers):
            self._take_figures()

    def own_selections(self, selection: Selection) -> Iterator[tuple[int, Selection]]:
        """Yield each worker of which `selection` shows slots, with what it shows of it."""
        for worker in range(len(self.workers)):
            own = (slot - self._first(worker) for slot in selection.slots)
            shown = frozenset(slot for slot in own if 0 <= slot < self.run.batch)
            if shown or not selection.slots:
                start, stop, _ = slice(selection.start, selection.stop).indices(self.num_steps)
                ids = selection.request_ids
                yield worker, Selection(start=start, stop=stop, request_ids=ids, slots=shown)

    def check_integrity(self) -> None:
        """Make sure that the spans of each worker can have happened; see Timeline."""
        for timeline in self.workers:
            timeline.check_integrity()

    def _first(self, worker: int) -> int:
        """Return the number of the first slot of a worker."""
        return worker * self.run.batch

    def _take(self, worker: int, timeline: Timeline) -> None:
        """Take in what happened in a worker."""
        first = self._first(worker)
        self.go_on_to(timeline.num_steps)
        for span in timeline.spans:
            moved = replace(span, slot=first + span.slot, worker=worker)
            self.spans.add((moved.start, moved.slot), moved)
        for wait in timeline.waits:
            self.waits.add((wait.start, worker), wait)
        for end in timeline.wait_ends:
            self.wait_ends.add((end,), end)
        for blocked in timeline.blocked:
            self.blocked.add((blocked.start,), blocked)
        for drafts in timeline.drafts:
            slot = first + drafts.slot
            self.drafts.add((drafts.step, slot), replace(drafts, slot=slot))
        self.num_requests += timeline.num_requests
        self.num_outputs += timeline.num_outputs
        self.failures += timeline.failures
        self.restarts += [replace(restart, worker=worker) for restart in timeline.restarts]

    def _take_figures(self) -> None:
        """Take in the figures of the steps that any worker tells of."""
        merged, last = self.figures, 0.0
        for step in range(max(len(timeline.figures.ends) for timeline in self.workers)):
            told = [t.figures for t in self.workers if step < len(t.figures.ends)]
            last = max(last, *(figures.ends[step] for figures in told))
            merged.note_start(step, min(figures.start_of(step) for figures in told))
            merged.ends.append(last)
            for name in ("tokens", "decodes", "blocks"):
                total = sum(getattr(figures, name)[step] for figures in told)
                getattr(merged, name).append(total)


def workers_of(timeline: Timeline) -> Sequence[Timeline]:
    """Return the timelines of the workers of a run; of one, that is itself."""
    return timeline.workers if isinstance(timeline, WorkersTimeline) else [timeline]


def read_timeline(events: Iterable[Event], kind: Callable[[], Timeline] = Timeline) -> Timeline:
    """Return the timeline of a run, of whatever number of workers; `kind` makes that of each.

    Events that break off give the timeline up to there.

    Raises:
        InvariantError, BatchdecodeError: see Timeline.from_events.
    """
    by_worker = ByWorker(kind)
    for event in events:
        by_worker.add(event)
    run, workers = by_worker.run, by_worker.close()
    for timeline in workers:
        timeline.close()
    return workers[0] if run.workers == 1 else WorkersTimeline(run, workers)
