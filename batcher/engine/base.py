"""What a driver looks at: the same of an engine that decodes, and of one that asks a server."""

from typing import Any

from batcher.events import EndEvent, RequestEvent
from batcher.result import Result
from batcher.scheduling.clock import Clock
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.queue import WaitingQueue
from batcher.settings import SchedulingSettings


class DrivenEngine:
    """A queue, a batch and a clock, and the requests that have not ended."""

    def __init__(
        self,
        settings: SchedulingSettings,
        clock: Clock,
        queue: WaitingQueue[Any],
        batch: RunningBatch[Any],
    ) -> None:
        self.settings, self.batch_size = settings, len(batch.slots)
        self._clock, self._queue, self._batch = clock, queue, batch
        self.num_tokens = self._num_requests = 0
        self._num_open: dict[str, int] = {}  # outputs that have not ended, by the request's id
        self._latest_arrival = 0.0  # that a request has named
        self._events: list[RequestEvent] = []  # since the last step
        self._results: list[Result] = []  # as above
        self._reads_all, self._has_sessions = settings.sees_all, False

    def _join_arrivals(self) -> None:
        """Let what has arrived wait for a slot; if all is idle, jump to the next arrival."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Let turns of sessions begin, if those before them have ended."""

    @property
    def num_steps(self) -> int:
        """How many steps were taken; the index of the next one."""
        return self._clock.step

    @property
    def now(self) -> float:
        """When the next step starts, in seconds of the engine's clock."""
        return self._clock.now

    @property
    def num_waiting(self) -> int:
        """How many samples, or requests for beams, are in the waiting queue."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """How many slots are held."""
        return self._batch.num_occupied

    @property
    def num_pending(self) -> int:
        """How many are known that have not joined the waiting queue yet."""
        return self._queue.num_pending

    @property
    def last_start(self) -> float:
        """When the last step started, or the first one will, in seconds of the engine's clock."""
        return self._clock.start_of(max(self._clock.step - 1, 0))

    @property
    def has_work(self) -> bool:
        """Whether `step` still has something to do or to hand out."""
        return bool(self._num_open or self._events or self._results)

    @property
    def num_results(self) -> int:
        """How many results are there that no step has handed out."""
        return len(self._results)

    @property
    def wants_request(self) -> bool:
        """Whether the next step could make use of one more request.

        To know that, it lets arrivals join the waiting queue, and the clock of an idle engine jump
        to them.  A driver that reads requests in order of arrival needs no more of them while this
        is False: the next request it knows lies in the future or, first come being first served,
        the slots are taken.
        """
        if not self._num_open:  # what was to come in the future may have failed
            return True
        queue, batch, clock = self._queue, self._batch, self._clock
        reads_all = self._reads_all or self._has_sessions  # turns arrive later than they are read
        if reads_all and self._latest_arrival <= clock.now:
            return True
        if queue.num_pending:
            self._join_arrivals()
        while queue.num_pending and not (queue.num_waiting or batch.num_occupied):
            self._go_on()  # all that had arrived has ended without a slot
            self._join_arrivals()
        if self._latest_arrival > clock.now:
            return False
        return reads_all or batch.num_free > queue.num_slots

    @property
    def first_waiting(self) -> Any:
        """The sequence that is to be admitted first; None if none waits."""
        return self._queue.head(self._clock.now)

    def end_event(self) -> EndEvent:
        """Return the last line of this run's trace."""
        return EndEvent(self.num_steps, self.now, self.num_tokens, self._num_requests)
