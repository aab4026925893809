"""Records what a timeline is made of as a run goes on: spans, waits and blocked steps.

Rule: what has ended is written to sorted records at once; only of requests whose samples may still
be dropped the last spans are kept.  A step whose time no event tells lasts as long as the one
before it, 1.0 if there is none.
"""

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import add
from typing import NamedTuple, get_args

from msgspec.structs import replace

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DraftEvent,
    DropEvent,
    EndEvent,
    EndReason,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    ReceiveEvent,
    RejectEvent,
    RestartEvent,
    RetryEvent,
    RollbackEvent,
    RunEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.trace.drafts import StepDrafts
from batcher.trace.records import (
    FAILURES,
    BlockedSpan,
    RequestTimeline,
    SlotSpan,
    SpanOutcome,
    Wait,
    is_follower,
    label_of,
)
from batcher.trace.run import RequestFold
from batcher.trace.sorted_records import SortedRecords
from batcher.trace.workers import MAX_SLOTS

_InSlot = (
    PrefillEvent
    | JumpEvent
    | ReceiveEvent
    | RetryEvent
    | DraftEvent
    | AcceptEvent
    | RollbackEvent
    | SpeculateEvent
    | ForkEvent
)
_IN_SLOT = get_args(_InSlot)
STEP_SECONDS = 1.0
MAX_STEPS = 2**28
"""More than any run takes."""


class StepFigures:
    """The figures of the steps 0, 1, ... up to where StepsEvents tell them: arrays by step.

    ends: when each ended, in seconds.  tokens: how many it computed.  decodes: how many of these
    were the next ones of rows that generate.  blocks: how many were held.  known_steps: those whose
    start events tell.
    """

    def __init__(self) -> None:
        self.ends = array("d")
        self.tokens, self.decodes, self.blocks = array("q"), array("q"), array("q")
        self.known_steps = array("q")
        self._known_starts = array("d")

    def note_start(self, step: int, time: float) -> None:
        """Take note of when `step`, no earlier than all that are known, began."""
        if not self.known_steps or step > self.known_steps[-1]:
            self.known_steps.append(step)
            self._known_starts.append(time)

    def starts(self) -> Iterator[tuple[int, float]]:
        """Yield each step whose start events tell, ascending, and when that was."""
        return zip(self.known_steps, self._known_starts, strict=True)

    def add(self, event: StepsEvent) -> None:
        """Take in the figures of the next steps.

        Raises:
            InvariantError: they are of other steps, not whole, or time goes back.
        """
        columns = (event.ends, event.decodes, event.prefills, event.rows, event.blocks)
        if event.step != len(self.ends):
            raise InvariantError(
                f"figures of the steps from {event.step} on follow those of {len(self.ends)} steps"
            )
        if len({len(column) for column in columns}) != 1:
            raise InvariantError(f"the figures of the steps from {event.step} on are not whole")
        times = [*self.ends[-1:], *event.ends]
        if times != sorted(times):
            raise InvariantError(f"time goes back in the steps from {event.step} on")
        try:
            self.tokens.extend(map(add, event.decodes, event.prefills))
            self.decodes.extend(event.decodes)
            self.blocks.extend(event.blocks)
        except OverflowError:
            raise InvariantError(
                f"no step can have the figures of the steps from {event.step} on"
            ) from None
        self.ends.extend(event.ends)

    def start_of(self, step: int) -> float:
        """Return when `step` began, or would have; in seconds."""
        number = bisect_right(self.known_steps, step) - 1
        known_step = self.known_steps[number] if number >= 0 else 0
        known_start = self._known_starts[number] if number >= 0 else 0.0
        if known_step == step or not step:
            return known_start
        if step <= len(self.ends):
            return self.ends[step - 1]
        if known_step < len(self.ends):
            known_step, known_start = len(self.ends), self.ends[-1]
        likely = known_start + (step - known_step) * self._usual_duration()
        return min([likely, *self._known_starts[number + 1 : number + 2]])

    def end_of(self, step: int) -> float:
        """Return when `step` ended; in seconds."""
        if step < len(self.ends):
            return self.ends[step]
        return min(self.start_of(step) + self._usual_duration(), self.start_of(step + 1))

    def end_before(self, step: int) -> float:
        """Return when the step before `step` ended: before it began, if the clock jumped there."""
        return self.end_of(step - 1) if step else self.start_of(step)

    def is_standstill(self, step: int) -> bool:
        """Return whether rows that generate had no token in `step`, which computed prompts."""
        return step < len(self.decodes) and not self.decodes[step]

    def standstill_changes(self, steps: range) -> Iterator[int]:
        """Yield those of `steps` from which on rows that generate stand still, or do no longer."""
        for step in range(max(steps.start, 1), min(steps.stop, len(self.decodes) + 1)):
            if self.is_standstill(step) != self.is_standstill(step - 1):
                yield step

    def _usual_duration(self) -> float:
        """Return how long the last step lasted that has figures, in seconds."""
        last = len(self.ends) - 1
        return self.ends[last] - self.start_of(last) if self.ends else STEP_SECONDS


class _Finished(NamedTuple):
    """What a sample finished for, and its last span; None if it never held a slot."""

    reason: EndReason
    span: SlotSpan | None


class TimelineRecords:
    """All that happened in a run, as `run` began it, recorded event by event up to `close`.

    spans: by (start, slot).  waits: by start, and those that start together as they joined the
    queue.  wait_ends: ascending.  blocked: by start, and no two at once.  figures: of the steps.
    drafts: by (step, slot), of the steps that verified some.  restarts: of the worker that made the
    steps, where it was replaced; as they came.  num_requests, num_outputs: as in RunSummary, of
    those that are told of.  failures: how many sequences that waited on their own account came to
    which bad end.
    """

    def __init__(self, fold: RequestFold | None = None) -> None:
        """Begin with nothing; `fold`, for others to read as well, takes in what this does."""
        self.num_steps = 0
        self.spans = SortedRecords[SlotSpan](SlotSpan)
        self.waits = SortedRecords[Wait](Wait)
        self.wait_ends = SortedRecords[int](int)
        self.blocked = SortedRecords[BlockedSpan](BlockedSpan)
        self.drafts = SortedRecords[StepDrafts](StepDrafts)
        self.figures = StepFigures()
        self.num_requests = self.num_outputs = 0
        self.failures = Counter[EndReason]()
        self.restarts: list[RestartEvent] = []
        self._run: RunEvent | None = None
        self._last_step = -1  # of any event, whether it takes a slot or not
        self._fold = RequestFold() if fold is None else fold
        self._num_alive: Counter[str] = Counter()  # by id: those that wait or run
        self._finished: defaultdict[str, dict[int, _Finished]] = defaultdict(dict)
        self._over: list[str] = []  # the ids of which nothing waits or runs since this step
        self._verifying: list[StepDrafts] = []  # of the last step that has any

    @property
    def run(self) -> RunEvent:
        """What began it.

        Raises:
            InvariantError: nothing did.
        """
        if self._run is None:
            raise InvariantError("there is no run event")
        return self._run

    def add(self, event: Event) -> RequestTimeline | None:
        """Take in the next event, and return the sequence that it tells of, if it is of one.

        Raises:
            InvariantError: it contradicts those before it.
            BatchdecodeError: there are more slots or steps than a timeline can hold.
        """
        fold = self._fold
        blocked = fold.blocked
        if type(event) is ArriveEvent:  # no `match`: it takes longer, three times a request
            found: RequestTimeline | None = fold.arrive(event)
            self._num_alive[event.id] += 1
            self.num_requests += not event.index
        elif type(event) is AdmitEvent:
            self._note_step(event)
            found = fold.admit(event)
            self._admit(found, event)
        elif type(event) is FinishEvent:
            self._note_step(event)
            found = fold.finish(event)
            self._finish(found, event)
        else:
            found = self._add_rare(event)
        if blocked is not None and blocked is not fold.blocked:
            self._unblock(blocked, event)
        return found

    def go_on_to(self, num_steps: int) -> None:
        """Take note that the run has taken `num_steps` at least, if nothing else tells."""
        self.num_steps = max(self.num_steps, num_steps)

    def close(self) -> None:
        """End what has not ended where the events break off.

        Raises:
            InvariantError: the events do not begin with a run event.
        """
        end = self.num_steps
        if self._run is None:
            raise InvariantError("there is no run event")
        for found in self._fold.open:
            if found.admission is not None:
                self._add_span(found.slot_span(found.admission, end, None))
            else:
                self._add_wait(found, found.waits_from, end)
            self.num_outputs += not is_follower(found)
        self._settle(list(self._finished))
        if self._fold.blocked is not None:
            self._unblock(self._fold.blocked, None)
        self._add_drafts()
        self._fold = RequestFold()

    def add_sequence(self, found: RequestTimeline, *, is_dropped: bool) -> None:
        """Record the spans and waits of a sequence that was folded elsewhere, up to `num_steps`."""
        finish = found.finish
        is_first = not is_follower(found)
        self.num_requests += is_first and not found.index
        self.num_outputs += not is_dropped and (is_first if finish is None else _has_result(finish))
        for admission in found.admissions:
            end = self.num_steps
            outcome: SpanOutcome | None = None
            if admission.preempt is not None:
                end, outcome = admission.preempt.step, "preempted"
            elif finish is not None:
                end, outcome = finish.step + 1, finish.reason
            span = found.slot_span(admission, end, outcome)
            has_none = is_dropped and admission is found.admission
            self._add_span(replace(span, dropped=True) if has_none else span)
            self._add_wait(found, admission.waits_from, admission.event.step)
        if found.admission is None:
            end = self.num_steps if finish is None else finish.step
            self._add_wait(found, found.waits_from, end)
        if finish is not None and finish.reason in FAILURES and is_first:
            self.failures[finish.reason] += 1

    def _add_rare(self, event: Event) -> RequestTimeline | None:
        """Take in an event of a kind that is rare."""
        if isinstance(event, _IN_SLOT):
            self._note_step(event)
        elif isinstance(event, RestartEvent):
            self._restart(event)
        found = self._fold.take(event)
        match event:
            case PreemptEvent():
                self._preempt(found, event)
            case StepsEvent():
                self.figures.add(event)
            case DraftEvent():
                self._draft(found)
            case DropEvent():
                self._drop(event)
            case RejectEvent():
                self.num_requests += 1
                self.num_outputs += 1
                self.failures["error"] += 1
            case RunEvent():
                self._begin(event)
            case EndEvent():
                self._end(event)
        return found

    def _preempt(self, found: RequestTimeline | None, event: PreemptEvent) -> None:
        """Record the span that is over."""
        _check_step(event.step)
        self.figures.note_start(event.step, event.time)
        self.go_on_to(event.step)
        if found is not None:
            self._add_span(found.slot_span(found.admissions[-1], event.step, "preempted"))

    def _begin(self, event: RunEvent) -> None:
        """Take in what run it is."""
        if not 1 <= event.batch <= MAX_SLOTS:
            raise BatchdecodeError(f"a batch of {event.batch} slots; there are 1 to {MAX_SLOTS}")
        if event.workers != 1:
            raise InvariantError(f"{event.workers} workers, where there is room for one")
        self._run = event

    def _note_step(self, event: AdmitEvent | FinishEvent | _InSlot) -> None:
        """Note that the run has come as far as `event`."""
        _check_step(event.step)
        if event.step > self._last_step:
            self._last_step = event.step
            # What cannot be dropped any more: that is done in the step of the last end.
            self._settle([over for over in self._over if over not in self._num_alive])
            self._over.clear()
        if event.step >= self.num_steps and event.slot is not None:
            self.num_steps = event.step + 1

    def _admit(self, found: RequestTimeline, event: AdmitEvent) -> None:
        """Record the wait that is over."""
        before = self._finished.get(event.id, {}).pop(event.index, None)  # of the same name
        if before is not None:
            self._add_span(before.span)
        self.figures.note_start(event.step, event.time)
        self._add_wait(found, found.waits_from, event.step)
        if found.first_event is event and not is_follower(found):
            self._num_alive[event.id] += 1  # events that begin in the middle
            self.num_requests += not event.index

    def _finish(self, found: RequestTimeline, event: FinishEvent) -> None:
        """Record the last span of a sequence, of a sample when it is known not to be dropped."""
        span = None
        if found.admission is None:
            self._add_wait(found, found.waits_from, event.step)
        else:
            span = found.slot_span(found.admission, event.step + 1, event.reason)
        if event.role == "sample":
            self._finished[event.id][event.index] = _Finished(event.reason, span)
        else:
            self._add_span(span)
        self.num_outputs += _has_result(event)
        if is_follower(found):
            return
        if not found.index:  # what is lost comes again
            self.num_requests += (found.first_event is event) - (event.reason == "lost")
        if event.reason in FAILURES:
            self.failures[event.reason] += 1
        self._num_alive[event.id] -= 1
        if self._num_alive[event.id] <= 0:
            del self._num_alive[event.id]
            self._over.append(event.id)

    def _drop(self, event: DropEvent) -> None:
        """Note that a sample which has finished has no result."""
        label = label_of(event.id, event.index, "sample")
        finished = self._finished.get(event.id, {}).pop(event.index, None)
        if finished is None:
            raise InvariantError(f"{label!r} is dropped in step {event.step}, and has not finished")
        self.num_outputs -= 1
        reason, span = finished
        if event.reason != reason:
            raise InvariantError(
                f"{label!r} is dropped with the reason {event.reason!r}, not {reason!r}"
            )
        if span is not None:
            self._add_span(replace(span, dropped=True))

    def _restart(self, event: RestartEvent) -> None:
        """End all that has not ended where the worker was replaced."""
        _check_step(event.step)
        if event.step < self.num_steps:
            raise InvariantError(
                f"the worker is replaced before step {event.step}, and has made {self.num_steps}"
            )
        for end in self._fold.ends_at(event):
            self.add(end)
        self._settle(list(self._finished))
        self._over.clear()
        self._num_alive.clear()
        self.go_on_to(event.step)
        self._last_step = max(self._last_step, event.step - 1)
        self.restarts.append(event)

    def _draft(self, found: RequestTimeline | None) -> None:
        """Keep the drafts that a step verifies, until it is over."""
        drafts = None if found is None or found.admission is None else found.admission.drafts
        if drafts is None or drafts.latest is None:
            return
        if self._verifying and self._verifying[-1].step < drafts.latest.step:
            self._add_drafts()
        self._verifying.append(drafts.latest)

    def _add_drafts(self) -> None:
        """Record the drafts of a step that is over."""
        for drafts in self._verifying:
            self.drafts.add((drafts.step, drafts.slot), drafts)
        self._verifying.clear()

    def _settle(self, request_ids: list[str]) -> None:
        """Record the last spans of the samples of some requests."""
        for request_id in request_ids:
            for _, span in self._finished.pop(request_id, {}).values():
                self._add_span(span)

    def _end(self, event: EndEvent) -> None:
        """Take in the end of the run."""
        if any(found.admission is not None for found in self._fold.open):
            raise InvariantError("the run ends while requests hold slots")
        if not 0 <= event.steps <= self._last_step + 1:
            raise InvariantError(f"{event.steps} steps, but all was over by step {self._last_step}")
        self.num_steps = event.steps

    def _add_span(self, span: SlotSpan | None) -> None:
        if span is not None:
            self.spans.add((span.start, span.slot), span)

    def _add_wait(self, found: RequestTimeline, start: int, end: int) -> None:
        """Record that a sequence has waited from `start` to `end`, if it was on its own account."""
        if found.number and not is_follower(found) and start < end:
            self.waits.add((start, found.number), Wait(found.id, found.index, start, end))
            self.wait_ends.add((end,), end)

    def _unblock(self, blocked: BlockedEvent, event: Event | None) -> None:
        """Record that the first of the queue was not admitted up to `event`, or the end."""
        end = self.num_steps
        if isinstance(event, AdmitEvent | FinishEvent | BlockedEvent):
            end = event.step
        if blocked.step < end:
            start, reason = blocked.step, blocked.reason
            span = BlockedSpan(blocked.id, blocked.index, start, end, reason, blocked.blocks)
            self.blocked.add((start,), span)


def _has_result(event: FinishEvent) -> bool:
    """Return whether what has ended is an output, if it is not dropped."""
    return event.role != "negative" and event.reason not in {"unused", "lost"}


def _check_step(step: int) -> None:
    """Make sure that a timeline has room for `step`, or raise a BatchdecodeError."""
    if not 0 <= step < MAX_STEPS:
        raise BatchdecodeError(f"step {step}; a timeline has steps 0 to {MAX_STEPS - 1}")
