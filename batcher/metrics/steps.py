"""Each step with its events, its start and its end, although a trace tells of them apart.

Rule: nothing is told of a step before it is known when it ended, and steps are told in their order.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, get_args

from batcher.errors import BatchdecodeError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    Event,
    FinishEvent,
    RunEvent,
    SequenceEvent,
    StepsEvent,
)
from batcher.settings import DEFAULT_SCHEDULING
from batcher.trace.records import RequestTimeline

UNTIMED_STEP_SECONDS = 1.0

EventOfRequest = tuple[SequenceEvent, RequestTimeline]
SEQUENCE_EVENTS = get_args(SequenceEvent)


class WholeStep(NamedTuple):
    """A step that is over.

    start, end: in seconds of the engine's clock.  decodes ... drafts: as in a StepsEvent; blocks
    and paddings are 0 in an untimed run.  events: those of this step, each with its
    sequence, and with a smaller `step` those that came too late: an abort between two steps.
    """

    step: int
    start: float
    end: float
    decodes: int
    prefills: int
    blocks: int
    prefill_padding: int
    decode_padding: int
    drafts: int
    events: list[EventOfRequest]


_COUNTS = WholeStep._fields[3:-2]  # which a StepsEvent has, too, as lists


class StepFeed(ABC):
    """Takes events one by one and gives back the steps that are whole."""

    def __init__(self) -> None:
        self._events: deque[EventOfRequest] = deque()  # of steps that are not over

    def take(self, event: Event, found: RequestTimeline | None) -> Iterator[WholeStep]:
        """Take in `event`, which tells of `found`; yield the steps that are known by it."""
        if isinstance(event, SEQUENCE_EVENTS) and found is not None:
            yield from self._told_by(event)
            self._events.append((event, found))
        elif isinstance(event, StepsEvent):
            yield from self._tell(event)
        elif isinstance(event, EndEvent):
            yield from self.catch_up(event.steps)

    @abstractmethod
    def go_on_from(self, step: int, time: float) -> None:
        """Let the first step be `step`, which starts at `time`; before there was any."""

    @abstractmethod
    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        """Yield the steps before `num_steps`, of which no more events come, if they are known."""

    @abstractmethod
    def _told_by(self, event: SequenceEvent) -> Iterator[WholeStep]:
        """Yield the steps that are over since `event` comes."""

    @abstractmethod
    def _tell(self, event: StepsEvent, /) -> Iterator[WholeStep]:
        """Take in what steps computed; yield those that are over by it."""

    def take_events(self, last_step: int | None = None) -> list[EventOfRequest]:
        """Return the events up to those of `last_step`, at the end of the run all; forget them."""
        events, taken = self._events, []
        while events and (last_step is None or events[0][0].step <= last_step):
            taken.append(events.popleft())
        return taken


def is_untimed(run: RunEvent) -> bool:
    """Return whether all steps last 1.0 and compute all there is, so none need be told of."""
    return not run.step_time and not run.scheduling and run.policy == DEFAULT_SCHEDULING.policy


def open_feed(run: RunEvent) -> StepFeed:
    """Return what puts the steps of the run together that begins with `run`."""
    return _UntimedFeed() if is_untimed(run) else _TimedFeed()


class _TimedFeed(StepFeed):
    """The steps of a run that tells of each of them, before or after their events.

    Of the last step that was told of there may be more events, until something later is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: deque[WholeStep] = deque()  # still without their events and starts
        self._end = 0.0  # of the step before

    def go_on_from(self, step: int, time: float) -> None:  # noqa: ARG002 - each is told of
        self._end = time

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        while self._told and self._told[0].step < num_steps:
            yield self._whole(self._told.popleft())

    def _told_by(self, event: SequenceEvent) -> Iterator[WholeStep]:
        return self.catch_up(event.step)

    def _tell(self, event: StepsEvent, /) -> Iterator[WholeStep]:
        self._told += _told_steps(event)
        return self.catch_up(event.step + len(event.ends) - 1)

    def _whole(self, told: WholeStep) -> WholeStep:
        """Return a step with its events, and the start that they tell."""
        events = self.take_events(told.step)
        # Or later than the step before, if the clock has jumped; someone is admitted then.
        admitted = (e.time for e, _ in events if type(e) is AdmitEvent and e.step == told.step)
        start = max(self._end, next(admitted, self._end))
        self._end = told.end
        return told._replace(start=start, events=events)


def _told_steps(told: StepsEvent) -> Iterator[WholeStep]:
    """Yield the steps of an event, as far as it tells of them.

    Raises:
        BatchdecodeError: its lists differ in length.
    """
    counts = [getattr(told, name) for name in _COUNTS]
    counts.append([0] * len(told.ends) if told.drafts is None else told.drafts)
    if {len(column) for column in counts} != {len(told.ends)}:
        raise BatchdecodeError(f"the steps event of step {told.step}: its lists differ in length")
    for step, (end, *of_step) in enumerate(zip(told.ends, *counts, strict=True), told.step):
        yield WholeStep._make((step, end, end, *of_step, []))


class _UntimedFeed(StepFeed):
    """The steps of a run that tells of none: each lasts 1.0, and all rows go on in it."""

    def __init__(self) -> None:
        super().__init__()
        self._step, self._start = 0, 0.0  # the first that is not told of
        self._num_rows = 0  # that go on in it

    def go_on_from(self, step: int, time: float) -> None:
        self._step, self._start = step, time

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        while self._step < num_steps:
            yield self._next_step()

    def _told_by(self, event: SequenceEvent) -> Iterator[WholeStep]:
        is_end = isinstance(event, FinishEvent)
        if isinstance(event, ArriveEvent) or (is_end and event.slot is None):
            return
        yield from self.catch_up(event.step)
        if event.step == self._step and not is_end:
            self._start = max(self._start, event.time)

    def _tell(self, _: StepsEvent, /) -> Iterator[WholeStep]:
        return iter(())

    def _next_step(self) -> WholeStep:
        """Return the step that is over, and go on to the next."""
        step, start = self._step, self._start
        events = self.take_events(step)
        num_prefills = num_admitted = num_gone = num_late = num_drafts = 0
        for event, found in events:
            if isinstance(event, AdmitEvent):
                num_admitted += 1
                num_prefills += 0 if found.arrive is None else found.arrive.prompt_tokens
            elif isinstance(event, DraftEvent):
                num_drafts += event.tokens
            elif isinstance(event, FinishEvent) and event.slot is not None:
                num_late += event.step < step
                num_gone += event.step >= step
        num_decodes = self._num_rows - num_late
        self._num_rows = num_decodes + num_admitted - num_gone
        self._step, self._start = step + 1, start + UNTIMED_STEP_SECONDS
        counts = (num_decodes, num_prefills + num_drafts, 0, 0, 0, num_drafts)
        return WholeStep(step, start, self._start, *counts, events)
