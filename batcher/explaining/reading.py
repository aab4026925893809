"""Reads the events of a run step by step, for what was decided in each.

Rule: of a run that breaks off, the last step that decides something may not be told to its end.
"""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from batcher.events import (
    AdmitEvent,
    BlockedEvent,
    EndEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    PrefillEvent,
    RunEvent,
    StepsEvent,
)
from batcher.explaining.lives import Life, Lives
from batcher.timeline import Timeline
from batcher.timeline.replay import Replay

Decision = AdmitEvent | PrefillEvent | PreemptEvent | BlockedEvent | FinishEvent


class RunReader:
    """Reads a run step by step; what is read is kept as its lives.

    until: how many of its steps are read, None for all.
    """

    def __init__(self, events: Iterable[Event], until: int | None = None) -> None:
        self._events = iter(events) if until is None else _before(events, until)
        self._until = until
        self._replay, self._lives = Replay(), Lives()
        self._timeline: Timeline | None = None
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
            if not isinstance(event, Decision) or is_no_decision(event):
                continue
            if event.step > step:
                if found:
                    yield step, found
                step, found = event.step, []
            found.append(replace(event, time=0.0))
        if found:
            yield step, found

    def close(self) -> tuple[Timeline, list[Life]]:
        """Read what is left, and return the timeline and the lives of the run."""
        for _ in self._read():
            pass
        if self._timeline is None:
            if self._until is not None:
                self._replay.go_on_to(self._until)
            self._timeline = Timeline(**self._replay.close()._asdict())
            self._timeline.check_integrity()
        return self._timeline, self._lives.all

    def _read(self) -> Iterator[Event]:
        for event in self._events:
            self._replay.add(event)
            self._lives.add(event)
            if isinstance(event, Decision) and not is_no_decision(event):
                self._last_decision = max(self._last_decision, event.step)
            self._has_end |= isinstance(event, EndEvent)
            yield event


def is_no_decision(event: Decision) -> bool:
    """Return whether it ended without ever having a slot, which is told late."""
    return isinstance(event, FinishEvent) and event.slot is None


def _before(events: Iterable[Event], until: int) -> Iterator[Event]:
    """Yield what happened before step `until`, without the end of the run."""
    for event in events:
        if isinstance(event, RunEvent):
            yield event
        elif isinstance(event, StepsEvent):
            if event.step < until:
                yield _shortened(event, until - event.step)
        elif not isinstance(event, EndEvent) and event.step < until:
            yield event


def _shortened(event: StepsEvent, num_steps: int) -> StepsEvent:
    """Return what `event` tells of its first `num_steps` steps."""
    columns = [name for name in event.__struct_fields__ if name != "step"]
    return replace(event, **{name: getattr(event, name)[:num_steps] for name in columns})
