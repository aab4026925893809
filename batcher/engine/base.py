"""The part of an engine that a driver reads: the same for a model here and for a server."""

from itertools import chain
from typing import Any

from batcher.events import EndEvent, RequestEvent, SequenceName
from batcher.result import Result
from batcher.scheduling.clock import Clock
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.queue import WaitingQueue
from batcher.settings import SchedulingSettings

PEEKED = 2000  # characters, or tokens


class DrivenEngine:
    """A waiting queue, a running batch, a clock, and all unfinished requests."""

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
        self._latest_arrival = 0.0  # of any request
        self._events: list[RequestEvent] = []  # since the last step
        self._results: list[Result] = []  # since the last step
        self._reads_all, self._has_sessions = settings.sees_all, False

    def _join_arrivals(self) -> None:
        """Move arrived requests to the waiting queue; if idle, jump to the next arrival first."""
        raise NotImplementedError

    def _start_turns(self) -> None:
        """Start turns of sessions whose previous turn has ended."""

    @property
    def num_steps(self) -> int:
        """The number of steps taken, which is the index of the next one."""
        return self._clock.step

    @property
    def now(self) -> float:
        """The start time of the next step, in seconds of the engine's clock."""
        return self._clock.now

    @property
    def num_waiting(self) -> int:
        """The number of samples, or requests with beams, in the waiting queue."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """The number of occupied slots."""
        return self._batch.num_occupied

    @property
    def num_pending(self) -> int:
        """The number of known requests that have not joined the waiting queue yet."""
        return self._queue.num_pending

    @property
    def last_start(self) -> float:
        """The start time of the last step, or of the first one before any step."""
        return self._clock.start_of(max(self._clock.step - 1, 0))

    @property
    def has_work(self) -> bool:
        """Whether `step` still has something to do or to return."""
        return bool(self._num_open or self._events or self._results)

    @property
    def num_results(self) -> int:
        """The number of results that no step has returned yet."""
        return len(self._results)

    @property
    def wants_request(self) -> bool:
        """Whether the next step could use one more request.

        Arrivals join the waiting queue to find this out, and the clock of an idle engine jumps to
        them.  A driver that reads requests in order of arrival can stop reading while this is
        False: the next known request lies in the future, or all slots are taken and the policy is
        first come, first served.
        """
        if not self._num_open:  # a pending request may have failed
            return True
        queue, batch, clock = self._queue, self._batch, self._clock
        reads_all = self._reads_all or self._has_sessions  # turns arrive later than they are read
        if reads_all and self._latest_arrival <= clock.now:
            return True
        if queue.num_pending:
            self._join_arrivals()
        while queue.num_pending and not (queue.num_waiting or batch.num_occupied):
            self._start_turns()  # all arrived requests ended without a slot
            self._join_arrivals()
        if self._latest_arrival > clock.now:
            return False
        return reads_all or batch.num_free > queue.num_slots

    def next_waiting(self, num: int) -> list[SequenceName]:
        """Return the names of the first `num` sequences in the waiting queue."""
        return [waiting.name for waiting in self._queue.upcoming(num, self._clock.now)]

    def peek(
        self, request_id: str, index: int, num_tokens: int, limit: int = PEEKED
    ) -> tuple[str, str] | None:
        """Return the start of an output's prompt, and the end of its text.

        Each has at most `limit` characters.  num_tokens: how many tokens it has generated.  None
        if it has ended.
        """
        running = (row for first in self._batch.firsts for row in first.group)
        for row in chain(running, self._queue.waiting):
            if row.id == request_id and row.index == index and row.role != "negative":
                prompt, text = self._texts_of(row, num_tokens, limit)
                return prompt[:limit], text[-limit:]
        return None

    def _texts_of(self, row: Any, num_tokens: int, limit: int) -> tuple[str, str]:
        raise NotImplementedError

    def end_event(self) -> EndEvent:
        """Return the last event of this run's trace."""
        return EndEvent(self.num_steps, self.now, self.num_tokens, self._num_requests)
