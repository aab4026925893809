"""Each step with its events, its start and its end, although a trace tells of them apart.

Rule: nothing is told of a step before it is known when it ended, and steps are told in their order.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from batcher.errors import BatchdecodeError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    EndEvent,
    Event,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RunEvent,
    StepsEvent,
)
from batcher.settings import DEFAULT_SCHEDULING
from batcher.timeline.records import SequenceKey, is_follower, key_of

PLAIN_STEP_SECONDS = 1.0

SequenceEvent = ArriveEvent | AdmitEvent | PrefillEvent | PreemptEvent | JumpEvent | FinishEvent
SEQUENCE_EVENTS = (ArriveEvent, AdmitEvent, PrefillEvent, PreemptEvent, JumpEvent, FinishEvent)


class WholeStep(NamedTuple):
    """A step that is over.

    start, end: in seconds of the engine's clock.  decodes ... decode_padding: as in a StepsEvent;
    blocks and paddings are 0 in a plain run.  events: those of sequences in this step and, with a
    smaller `step`, those that came too late for theirs: an abort between two steps.
    """

    step: int
    start: float
    end: float
    decodes: int
    prefills: int
    blocks: int
    prefill_padding: int
    decode_padding: int
    events: list[SequenceEvent]


class StepFeed(Protocol):
    """Takes events one by one and gives back the steps that are whole."""

    def take(self, event: Event) -> Iterator[WholeStep]:
        """Take in `event`; yield the steps that are known by it."""

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        """Yield the steps before `num_steps`, of which no more events come, if they are known."""

    def rest(self) -> list[SequenceEvent]:
        """Return the events that no step has taken, at the end of the run."""


def is_plain(run: RunEvent) -> bool:
    """Return whether all steps last 1.0 and compute all there is, so none need be told of."""
    return not run.step_time and not run.scheduling and run.policy == DEFAULT_SCHEDULING.policy


def open_feed(run: RunEvent) -> StepFeed:
    """Return what puts the steps of the run together that begins with `run`."""
    return _PlainFeed() if is_plain(run) else _TimedFeed()


def leader_key(
    event: AdmitEvent | PrefillEvent | PreemptEvent | FinishEvent,
) -> SequenceKey | None:
    """Return the key of a sequence, None if it came along with another one."""
    if event.index or event.role != "sample":
        return None if is_follower(event) else key_of(event.id, event.index, event.role)
    return event.id


class _Pending:
    """Events whose steps are not over, in their order."""

    def __init__(self) -> None:
        self._events: deque[SequenceEvent] = deque()

    def add(self, event: SequenceEvent) -> None:
        self._events.append(event)

    def take(self, last_step: int) -> list[SequenceEvent]:
        """Return the events up to those of `last_step`."""
        events, taken = self._events, []
        while events and events[0].step <= last_step:
            taken.append(events.popleft())
        return taken

    def take_all(self) -> list[SequenceEvent]:
        taken = list(self._events)
        self._events.clear()
        return taken


class _TimedFeed:
    """The steps of a run that tells of each of them, before or after their events.

    Of the last step that was told of there may be more events, until something later is told.
    """

    def __init__(self) -> None:
        self._pending = _Pending()
        self._told: deque[WholeStep] = deque()  # still without their events and starts
        self._end = 0.0  # of the step before

    def take(self, event: Event) -> Iterator[WholeStep]:
        if isinstance(event, SEQUENCE_EVENTS):
            yield from self.catch_up(event.step)
            self._pending.add(event)
        elif isinstance(event, StepsEvent):
            self._told += _told_steps(event)
            yield from self.catch_up(event.step + len(event.ends) - 1)
        elif isinstance(event, EndEvent):
            yield from self.catch_up(event.steps)

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        while self._told and self._told[0].step < num_steps:
            yield self._whole(self._told.popleft())

    def rest(self) -> list[SequenceEvent]:
        return self._pending.take_all()

    def _whole(self, told: WholeStep) -> WholeStep:
        """Return a step with its events, and the start that they tell."""
        events = self._pending.take(told.step)
        start = self._end  # or later, if the clock has jumped; someone is admitted then
        for event in events:
            if type(event) is AdmitEvent and event.step == told.step:
                start = max(start, event.time)
                break
        self._end = told.end
        return told._replace(start=start, events=events)


def _told_steps(told: StepsEvent) -> Iterator[WholeStep]:
    """Yield the steps of an event, as far as it tells of them.

    Raises:
        BatchdecodeError: its lists differ in length.
    """
    columns = (
        told.decodes,
        told.prefills,
        told.blocks,
        told.prefill_padding,
        told.decode_padding,
    )
    if {len(column) for column in columns} != {len(told.ends)}:
        raise BatchdecodeError(f"the steps event of step {told.step}: its lists differ in length")
    for step, (end, *counts) in enumerate(zip(told.ends, *columns, strict=True), told.step):
        decodes, prefills, blocks, right, left = counts
        yield WholeStep(step, end, end, decodes, prefills, blocks, right, left, [])


class _PlainFeed:
    """The steps of a run that tells of none: each lasts 1.0, and all rows go on in it."""

    def __init__(self) -> None:
        self._pending = _Pending()
        self._prompts: dict[SequenceKey, int] = {}  # prompt tokens of those who wait
        self._step, self._start = 0, 0.0  # the first that is not told of
        self._num_rows = 0  # that go on in it

    def take(self, event: Event) -> Iterator[WholeStep]:
        if isinstance(event, SEQUENCE_EVENTS):
            if not isinstance(event, ArriveEvent | FinishEvent):
                yield from self.catch_up(event.step)
                if event.step == self._step:
                    self._start = max(self._start, event.time)
            elif isinstance(event, FinishEvent) and event.slot is not None:
                yield from self.catch_up(event.step)
            self._pending.add(event)
        elif isinstance(event, EndEvent):
            yield from self.catch_up(event.steps)

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        while self._step < num_steps:
            yield self._next_step()

    def rest(self) -> list[SequenceEvent]:
        return self._pending.take_all()

    def _next_step(self) -> WholeStep:
        """Return the step that is over, and go on to the next."""
        step, start = self._step, self._start
        events = self._pending.take(step)
        num_prefills = num_admitted = num_gone = num_late = 0
        for event in events:
            if isinstance(event, ArriveEvent):
                self._prompts[key_of(event.id, event.index, "sample")] = event.prompt_tokens
            elif isinstance(event, AdmitEvent):
                num_admitted += 1
                key = leader_key(event)
                num_prefills += 0 if key is None else self._prompts.pop(key, 0)
            elif isinstance(event, FinishEvent):
                if event.slot is None:
                    self._prompts.pop(key_of(event.id, event.index, event.role), None)
                elif event.step < step:
                    num_late += 1
                else:
                    num_gone += 1
        num_decodes = self._num_rows - num_late
        self._num_rows = num_decodes + num_admitted - num_gone
        self._step, self._start = step + 1, start + PLAIN_STEP_SECONDS
        return WholeStep(step, start, self._start, num_decodes, num_prefills, 0, 0, 0, events)
