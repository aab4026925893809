"""The events of a run over a server, in the order in which they happened."""

from batcher.events import (
    AdmitEvent,
    AdmitReason,
    ArriveEvent,
    BlockedEvent,
    BlockedReason,
    ConcurrencyEvent,
    ConcurrencyReason,
    FinishEvent,
    ReceiveEvent,
    RequestEvent,
    RetryEvent,
    RetryReason,
    StepsEvent,
)
from batcher.remote.inputs import RemoteSequence
from batcher.result import Result
from batcher.scheduling.clock import WallClock
from batcher.scheduling.sequence import NO_SLOT

NUM_DIGITS = 6  # of seconds, after the point


class RemoteRecorder:
    """Turns what happens into events: of the step that begins, or of the one that has just ended.

    events: since they were last taken.
    """

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self.events: list[RequestEvent] = []
        self._blocked: tuple[str, int, BlockedReason] | None = None

    def take(self) -> list[RequestEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def arrived(self, row: RemoteSequence, step: int) -> None:
        """Record that a row joined the waiting queue, at its own time and step."""
        self.events.append(
            ArriveEvent(
                step,
                row.arrival_time,
                row.id,
                row.index,
                row.arrive_reason,
                row.num_prompt_tokens,
                row.max_tokens,
                row.deadline,
                default_limit=row.has_default_limit,
            )
        )

    def admitted(self, row: RemoteSequence, reason: AdmitReason) -> None:
        """Record that a row is sent, of whose prompt nothing is known to be computed."""
        step, now, num_left = self._clock.step, self._clock.now, max(row.num_prompt_tokens, 1)
        event = AdmitEvent(step, now, row.id, row.index, row.slot, reason, left=num_left)
        self.events.append(event)
        self._blocked = None

    def blocked(self, row: RemoteSequence, reason: BlockedReason) -> None:
        """Record why the first of the queue is not sent, unless the last reason was the same."""
        blocked = row.id, row.index, reason
        if blocked != self._blocked:
            self.events.append(BlockedEvent(self._clock.step, self._clock.now, *blocked))
        self._blocked = blocked

    def received(self, row: RemoteSequence, num_tokens: int) -> None:
        """Record how many tokens of a row have come in the step that has ended."""
        step, start = self._last_step()
        self.events.append(ReceiveEvent(step, start, row.id, row.index, row.slot, num_tokens))

    def failed(self, row: RemoteSequence, reason: RetryReason, attempt: int, delay: float) -> None:
        """Record that an attempt has failed in that step, and when there will be another one."""
        step, start = self._last_step()
        told = reason, attempt, round(delay, NUM_DIGITS)
        self.events.append(RetryEvent(step, start, row.id, row.index, row.slot, *told))

    def limited(self, limit: int, reason: ConcurrencyReason) -> None:
        """Record that another number of requests may be in flight since that step."""
        self.events.append(ConcurrencyEvent(*self._last_step(), limit, reason))

    def finished(self, row: RemoteSequence, result: Result, step: int) -> None:
        """Record that a row ended with `step`."""
        clock, usage = self._clock, result.usage
        self.events.append(
            FinishEvent(
                step,
                clock.now if step == clock.step else clock.start_of(step),
                row.id,
                row.index,
                None if row.slot == NO_SLOT else row.slot,
                result.finish_reason,
                result.stop_reason,
                usage.completion_tokens,
                prompt_tokens=usage.prompt_tokens or None,
                error=result.error,
            )
        )

    def stepped(self, num_tokens: int, num_rows: int) -> None:
        """Record, before its other events, when that step ended, its tokens and its rows."""
        step, none = self._clock.step - 1, [0]
        ends, columns = [self._clock.now], ([num_tokens], none, [num_rows], none, none, none)
        self.events.insert(0, StepsEvent(step, ends, *columns))

    def _last_step(self) -> tuple[int, float]:
        step = self._clock.step - 1
        return step, self._clock.start_of(step)
