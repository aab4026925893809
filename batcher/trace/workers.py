"""A run of several workers as ordinary runs, one for each: what a trace tells apart by `worker`.

Rule: a worker is a run of its own, with slots from 0, steps and a clock; in the trace of the whole
run, worker k has the slots from k times the batch size on.  Whoever reads events reads those of one
worker, and nothing but this file changes a slot from one numbering to the other.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import MAX_WORKERS, EndEvent, Event, RequestEvent, RunEvent

MAX_SLOTS = 2**20
"""More than any run has, those of all workers together."""


class EventReader(Protocol):
    """Whatever takes in the events of a run, one by one."""

    def add(self, event: Event, /) -> object:
        """Take in the next event."""


AnyReader = TypeVar("AnyReader", bound=EventReader)


class ByWorker(Generic[AnyReader]):
    """Hands the events of a run to readers, one for each worker; a usual run has one of them."""

    def __init__(self, make: Callable[[], AnyReader]) -> None:
        self._readers: list[AnyReader] = []
        self._run: RunEvent | None = None
        self._make = make

    @property
    def run(self) -> RunEvent:
        """What began it.

        Raises:
            InvariantError: nothing did.
        """
        if self._run is None:
            raise InvariantError("there is no run event")
        return self._run

    def close(self) -> list[AnyReader]:
        """Return the readers, by worker, when there are no more events.

        Raises:
            InvariantError: there were none.
        """
        if not self._readers:
            raise InvariantError("there is no run event")
        return self._readers

    def add(self, event: Event) -> None:
        """Hand on the next event, as the worker that it is of has it.

        Raises:
            InvariantError: it is of no worker that there is, or the reader refuses it.
            BatchdecodeError: there are more slots than a timeline can hold.
        """
        if isinstance(event, RunEvent):
            self._begin(event)
        elif len(self._readers) == 1 and event.worker is None:
            self._readers[0].add(event)
        else:
            worker, own = self._own(event)
            self._readers[worker].add(own)

    def _begin(self, event: RunEvent) -> None:
        """Make a reader for each worker."""
        if not 1 <= event.workers <= MAX_WORKERS:
            raise BatchdecodeError(f"{event.workers} workers; a run has 1 to {MAX_WORKERS}")
        if not 1 <= event.batch * event.workers <= MAX_SLOTS:
            raise BatchdecodeError(f"{_slots_of(event)}; a run has 1 to {MAX_SLOTS}")
        self._run = event
        self._readers = [self._make() for _ in range(event.workers)]
        for reader in self._readers:
            reader.add(replace(event, workers=1))

    def _own(self, event: RequestEvent | EndEvent) -> tuple[int, Event]:
        """Return the worker of an event of a run of several, and the event as it has it."""
        run, worker = self.run, event.worker
        if worker is None or not 0 <= worker < run.workers or run.workers == 1:
            whose = "no worker" if worker is None else f"worker {worker}"
            raise InvariantError(f"an event of {whose} in a run of {run.workers}")
        slot: int | None = getattr(event, "slot", None)
        if slot is None:
            return worker, replace(event, worker=None)
        own_slot = slot - worker * run.batch
        if not 0 <= own_slot < run.batch:
            raise InvariantError(f"slot {slot} is none of the {run.batch} of worker {worker}")
        return worker, replace(event, worker=None, slot=own_slot)


def event_of_worker(event: Event, worker: int, batch: int) -> Event:
    """Return an event of a worker with `batch` slots as the trace of the whole run has it."""
    slot: int | None = getattr(event, "slot", None)
    if slot is None:
        return replace(event, worker=worker)
    return replace(event, worker=worker, slot=worker * batch + slot)


def _slots_of(run: RunEvent) -> str:
    """Return how many slots there are, in words."""
    slots = f"a batch of {run.batch} slots"
    return slots if run.workers == 1 else f"{run.workers} workers with {slots} each"
