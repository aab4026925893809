"""What a worker tells of its run beside the answers: events and numbers, as far as anybody asks."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from batcher.engine import DrivenEngine
from batcher.events import Event, FinishEvent, RestartEvent
from batcher.metrics.slo import Slo
from batcher.metrics.summary import EngineState, RunMetrics, WatchedMetrics, encode_totals, state_of
from batcher.trace.workers import event_of_worker

from ...screen.terminal import can_animate, is_pipe
from ..run_options import RunOptions
from ..stdout import stdout_descriptor

STATE_SECONDS = 1.0


class Wanted(NamedTuple):
    """What is to be told of a run; events, if they go anywhere, since they cost time.

    state: the numbers that Prometheus is told, too, and how things stand; every second at least.
    slo: what the numbers are measured by.
    """

    events: bool = False
    numbers: bool = False
    state: bool = False
    slo: Slo | None = None

    @classmethod
    def by(cls, options: RunOptions) -> "Wanted":
        """Return what the options ask for."""
        all_numbers = (options.summary_json, options.report)
        has_numbers = not options.quiet or any(each is not None for each in all_numbers)
        all_events = (options.trace, options.report, options.otel, options.timeseries)
        has_events = has_picture(options) or any(each is not None for each in all_events)
        return cls(has_events, has_numbers, options.is_exposed, options.limits)


def has_picture(options: RunOptions) -> bool:
    """Return whether the live view is shown."""
    if options.quiet or options.live in {"never", "plain"}:
        return False
    is_piped = options.output is None and is_pipe(stdout_descriptor())
    return options.live == "always" or (not is_piped and can_animate(2, os.environ))


class Telling:
    """Takes note of the events of a worker, and hands over what is wanted of them.

    restart: where the worker goes on, if it is in the place of one that has died.
    """

    def __init__(
        self, wanted: Wanted, engine: DrivenEngine, number: int, restart: RestartEvent | None
    ) -> None:
        self._engine, self._number = engine, number
        self._events: list[Event] | None = [] if wanted.events else None
        self._metrics, self._has_state = None, wanted.state
        self._told_at = float("-inf")
        if wanted.numbers or wanted.state:
            self._metrics = WatchedMetrics(wanted.slo) if wanted.state else RunMetrics(wanted.slo)
            self._metrics.observe([engine.run_event()])
            if restart is not None:
                self._metrics.go_on_from(restart)

    def note(self, events: Sequence[Event]) -> None:
        """Take note of what has happened."""
        if self._metrics is not None:
            self._metrics.observe(events)
        if self._events is not None:
            number, batch_size = self._number, self._engine.batch_size
            self._events += [event_of_worker(event, number, batch_size) for event in events]

    @property
    def has_events(self) -> bool:
        """Whether there are any since the last time."""
        return bool(self._events)

    def events(self) -> list[Event]:
        """Return those since the last time."""
        events = self._events or []
        if events:
            self._events = []
        return events

    @property
    def is_overdue(self) -> bool:
        """Whether nothing has been told of how things stand for a while."""
        return self._has_state and time.monotonic() - self._told_at > STATE_SECONDS

    def state(self) -> EngineState | None:
        """Return how the engine stands, if that is wanted."""
        if not self._has_state:
            return None
        self._told_at = time.monotonic()
        return state_of(self._engine)

    def totals(self, partial: Sequence[FinishEvent]) -> bytes:
        """Return the numbers so far; see decode_totals.

        partial: outputs that have ended of requests that have no answer.  They count as ended when
        it is there, since they are decoded again if the worker dies before that.
        """
        if self._metrics is None:
            return b""
        self._metrics.note_constraints(*self._engine.constraint_counts)
        totals = self._metrics.totals(self._engine.num_steps)
        if partial:
            totals.finish_reasons = totals.finish_reasons.copy()
            totals.finish_reasons.subtract(event.reason for event in partial)
            totals.generated_tokens -= sum(event.tokens for event in partial)
            totals.num_unfinished += len(partial)
            ended_first = {e.id for e in partial if not e.index and e.role == "sample"}
            totals.num_open += len(ended_first)
        return encode_totals(totals)
