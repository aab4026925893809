"""Goes through the events of a run to find every stay in a slot and in the queue.

Rule: events that contradict each other are refused where they do.
"""

from collections import Counter, defaultdict
from typing import NamedTuple, get_args

from msgspec.structs import replace

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DropEvent,
    EndEvent,
    EndReason,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RejectEvent,
    Role,
    RunEvent,
    StepsEvent,
)
from batcher.timeline.prefills import Prefills
from batcher.timeline.sorted_records import SortedRecords
from batcher.timeline.stays import (
    Fork,
    Hold,
    Outcome,
    SequenceKey,
    Span,
    Wait,
    is_follower,
    key_of,
    label_of,
    preemption_of,
)
from batcher.timeline.step_figures import StepFigures
from batcher.timeline.waiting_room import WaitingRoom

MAX_SLOTS = 2**20
MAX_STEPS = 2**28
"""More than any run takes."""


class Stays(NamedTuple):
    """All stays of a run.

    spans: by (start, slot).  waits: by start, and those that start together as they joined the
    queue.  wait_ends: ascending.  holds: by start, and no two at once.
    """

    run: RunEvent
    num_steps: int
    spans: SortedRecords[Span]
    waits: SortedRecords[Wait]
    wait_ends: SortedRecords[int]
    holds: SortedRecords[Hold]
    figures: StepFigures


class _Finished(NamedTuple):
    """What a sample finished for, and its span; None if it never held a slot."""

    reason: EndReason
    span: Span | None


class Replay:
    """Follows a run by its events; an id may come again once all that had it has ended."""

    def __init__(self) -> None:
        self._run: RunEvent | None = None
        self._num_steps = 0
        self._last_step = -1  # of any event, whether it takes a slot or not
        self._spans = SortedRecords[Span](Span)
        self._queue = WaitingRoom()
        self._preempted: set[SequenceKey] = set()  # those that have not come back
        self._prefills = Prefills()
        self._figures = StepFigures()
        self._admissions: dict[SequenceKey, AdmitEvent] = {}
        self._jumped: Counter[SequenceKey] = Counter()
        self._forks: defaultdict[SequenceKey, list[Fork]] = defaultdict(list)
        self._num_alive: Counter[str] = Counter()  # by id: those that wait or run
        self._finished: defaultdict[str, dict[int, _Finished]] = defaultdict(dict)
        self._over: list[str] = []  # the ids of which nothing waits or runs since this step

    def go_on_to(self, num_steps: int) -> None:
        """Take note that the run has taken `num_steps` at least, if nothing else tells."""
        self._num_steps = max(self._num_steps, num_steps)

    def close(self) -> Stays:
        """Return the stays; those that have not ended do where the events break off.

        Raises:
            InvariantError: the events do not begin with a run event.
        """
        if self._run is None:
            raise InvariantError("there is no run event")
        for key, admit in self._admissions.items():
            self._record(self._leave_slot(key, admit, self._num_steps, None))
        for request_id in list(self._finished):
            self._settle(request_id)
        queue = self._queue
        queue.close(self._num_steps)
        return Stays(
            self._run,
            self._num_steps,
            self._spans,
            queue.waits,
            queue.wait_ends,
            queue.holds,
            self._figures,
        )

    def add(self, event: Event) -> None:
        """Take in the next event.

        Raises:
            InvariantError: it contradicts those before it.
            BatchdecodeError: there are more slots or steps than a timeline can hold.
        """
        match event:
            case ArriveEvent():
                self._queue.join(event)
                self._num_alive[event.id] += 1
            case AdmitEvent():
                self._admit(event)
            case FinishEvent():
                self._finish(event)
            case StepsEvent():
                self._figures.add(event)
            case _:
                self._add_rare(event)

    def _add_rare(self, event: Event) -> None:
        """Take in an event of a kind that is rare."""
        match event:
            case PrefillEvent():
                self._note_step(event)
                key = key_of(event.id, event.index, event.role)
                self._prefills.add(event, self._admissions.get(key))
            case PreemptEvent():
                self._preempt(event)
            case BlockedEvent():
                self._queue.hold(event)
            case JumpEvent():
                self._jump(event)
            case ForkEvent():
                self._fork(event)
            case DropEvent():
                self._drop(event)
            case RunEvent():
                self._begin(event)
            case EndEvent():
                self._end(event)
            case RejectEvent():
                pass  # a bad line takes no slot

    def _begin(self, event: RunEvent) -> None:
        """Take in what run it is."""
        if not 1 <= event.batch <= MAX_SLOTS:
            raise BatchdecodeError(f"a batch of {event.batch} slots; there are 1 to {MAX_SLOTS}")
        self._run = event

    def _note_step(
        self, event: AdmitEvent | FinishEvent | JumpEvent | ForkEvent | PrefillEvent
    ) -> None:
        """Note that the run has come as far as `event`."""
        if not 0 <= event.step < MAX_STEPS:
            raise BatchdecodeError(f"step {event.step}; a timeline has steps 0 to {MAX_STEPS - 1}")
        if event.step > self._last_step:
            self._last_step = event.step
            self._settle_all()
        if event.step >= self._num_steps and event.slot is not None:
            self._num_steps = event.step + 1

    def _admit(self, event: AdmitEvent) -> None:
        """Move a sequence from the queue into its slot."""
        self._note_step(event)
        key = key_of(event.id, event.index, event.role)
        if key in self._admissions:
            raise InvariantError(
                f"{label_of(event.id, event.index, event.role)!r} "
                f"is admitted in step {event.step} while it runs"
            )
        if event.generated and key not in self._preempted:
            raise InvariantError(
                f"{label_of(event.id, event.index, event.role)!r} is admitted in step {event.step} "
                f"with {event.generated} tokens of its own, but was not preempted"
            )
        self._admissions[key] = event
        before = self._finished.get(event.id, {}).pop(event.index, None)  # of the same name
        if before is not None and before.span is not None:
            self._record(before.span)
        self._figures.note_start(event.step, event.time)
        if event.left:
            self._prefills.begin(key, event)
        if not self._queue.leave(key, event.step) and not is_follower(event):
            self._num_alive[event.id] += 1  # events that begin in the middle

    def _preempt(self, event: PreemptEvent) -> None:
        """Move a sequence from its slot back into the queue."""
        label = label_of(event.id, event.index, event.role)
        if not 0 <= event.step < MAX_STEPS:
            raise BatchdecodeError(f"step {event.step}; a timeline has steps 0 to {MAX_STEPS - 1}")
        key = key_of(event.id, event.index, event.role)
        admit = self._admissions.pop(key, None)
        if admit is None or admit.slot != event.slot or admit.role != event.role:
            raise InvariantError(
                f"{label!r} is preempted in slot {event.slot}, which it does not hold"
            )
        if event.step <= admit.step:
            raise InvariantError(
                f"{label!r} is preempted in step {event.step}, but was admitted in {admit.step}"
            )
        self._num_steps = max(self._num_steps, event.step)
        self._record(self._leave_slot(key, admit, event.step, "preempted", event))
        self._preempted.add(key)
        if not is_follower(event):
            self._queue.join(event)

    def _jump(self, event: JumpEvent) -> None:
        """Add the tokens that a constraint forced to those of the sequence."""
        self._note_step(event)
        key = self._running(event)
        if event.tokens < 1:
            raise InvariantError(f"{event.id!r} jumps over {event.tokens} tokens")
        self._jumped[key] += event.tokens
        self._prefills.jump(key)
        partner = key_of(event.id, event.index, "negative")
        if partner in self._admissions:
            self._prefills.jump(partner)

    def _fork(self, event: ForkEvent) -> None:
        """Note where a beam goes on from."""
        self._note_step(event)
        key = self._running(event)
        parent = self._admissions.get(key_of(event.id, event.parent, "beam"))
        if self._admissions[key].role != "beam" or parent is None or parent.role != "beam":
            raise InvariantError(
                f"{label_of(event.id, event.index, 'beam')!r} forks in step {event.step} from "
                f"{label_of(event.id, event.parent, 'beam')!r}; both have to be running beams"
            )
        self._forks[key].append(Fork(event.step, event.parent))

    def _drop(self, event: DropEvent) -> None:
        """Note that a sample which has finished has no result."""
        label = label_of(event.id, event.index, "sample")
        finished = self._finished.get(event.id, {}).pop(event.index, None)
        if finished is None:
            raise InvariantError(f"{label!r} is dropped in step {event.step}, and has not finished")
        reason, span = finished
        if event.reason != reason:
            raise InvariantError(
                f"{label!r} is dropped with the reason {event.reason!r}, not {reason!r}"
            )
        if span is not None:
            self._record(replace(span, dropped=True))

    def _running(self, event: JumpEvent | ForkEvent) -> SequenceKey:
        """Return the key of the sequence that `event` tells of.

        Raises:
            InvariantError: it does not hold the slot of `event` in that step.
        """
        for role in get_args(Role):
            key = key_of(event.id, event.index, role)
            admit = self._admissions.get(key)
            if admit is not None and admit.slot == event.slot and admit.step <= event.step:
                return key
        raise InvariantError(
            f"{label_of(event.id, event.index, 'sample')!r} does not run in slot {event.slot} "
            f"in step {event.step}"
        )

    def _finish(self, event: FinishEvent) -> None:
        """End the stay of a sequence, in its slot or in the queue."""
        self._note_step(event)
        key = key_of(event.id, event.index, event.role)
        is_preempted = key in self._preempted and key not in self._admissions
        if event.slot is None or is_preempted:
            self._preempted.discard(key)
            self._queue.leave(key, event.step)
            self._note_end(event, None)
            return
        admit = self._admissions.pop(key, None)
        if admit is None or admit.slot != event.slot or admit.role != event.role:
            label = label_of(event.id, event.index, event.role)
            raise InvariantError(f"{label!r} leaves slot {event.slot}, which it does not hold")
        if event.reason in {"stop", "length"} and self._prefills.has_begun(key):
            label = label_of(event.id, event.index, event.role)
            raise InvariantError(f"{label!r} ends ({event.reason}) before its prompt was computed")
        self._note_end(event, self._leave_slot(key, admit, event.step + 1, event.reason))

    def _note_end(self, event: FinishEvent, span: Span | None) -> None:
        """Record the last stay of a sequence, of a sample when it is known not to be dropped."""
        if event.role == "sample":
            self._finished[event.id][event.index] = _Finished(event.reason, span)
        elif span is not None:
            self._record(span)
        if is_follower(event):
            return
        self._num_alive[event.id] -= 1
        if self._num_alive[event.id] <= 0:
            del self._num_alive[event.id]
            self._over.append(event.id)

    def _settle_all(self) -> None:
        """Record what cannot be dropped any more: that is done in the step of the last end."""
        for request_id in self._over:
            if request_id not in self._num_alive:
                self._settle(request_id)
        self._over.clear()

    def _settle(self, request_id: str) -> None:
        """Record the last stays of the samples of a request."""
        for _, span in self._finished.pop(request_id, {}).values():
            if span is not None:
                self._record(span)

    def _record(self, span: Span) -> None:
        self._spans.add((span.start, span.slot), span)

    def _end(self, event: EndEvent) -> None:
        """Take in the end of the run."""
        if self._admissions:
            raise InvariantError("the run ends while requests hold slots")
        if not 0 <= event.steps <= self._last_step + 1:
            raise InvariantError(f"{event.steps} steps, but all was over by step {self._last_step}")
        self._num_steps = event.steps

    def _leave_slot(
        self,
        key: SequenceKey,
        admit: AdmitEvent,
        end: int,
        outcome: Outcome | None,
        preempt: PreemptEvent | None = None,
    ) -> Span:
        """Return the stay that began with `admit`; `preempt` is what ended it, if that did."""
        jumped = self._jumped.pop(key, 0) if self._jumped else 0
        forks = tuple(self._forks.pop(key, ())) if self._forks else ()
        span = Span(
            admit.slot,
            admit.id,
            admit.index,
            admit.step,
            end,
            outcome,
            admit.role,
            jumped,
            forks=forks,
            prefill=self._prefills.end(key, admit, end) if admit.left or jumped else 1,
            cached=admit.cached,
            generated=admit.generated,
            resumed=key in self._preempted,
            preemption=None if preempt is None else preemption_of(preempt),
        )
        self._preempted.discard(key)
        return span
